"""What the data scripts share: the shard format, the byte count of the metric, and careful file writing.

A shard is a header of 256 little-endian int32 (magic, version, token count), then the tokens as little-endian uint16,
nothing after.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import sentencepiece as spm

MAGIC, VERSION = 20240520, 1
HEADER_BYTES, TOKEN_BYTES = 256 * 4, 2
SPACE_MARKER = "\u2581"  # SentencePiece's visible space; an escape, so that no editor can mangle it
PAD_ID, BOS_ID, EOS_ID, UNK_ID = 0, 1, 2, 3
MAX_VOCAB_SIZE = 65_536  # ids are stored as uint16
OFFICIAL_VAL_DOCS = 50_000
MANIFEST_VERSION = "10B"
SIDECAR_SUFFIX = ".bytes"  # not .bin: a pattern for shards must not find the sidecars
DOCS_NAME = "docs_selected.jsonl"
SIDECAR_NAME = "docs_selected.source_manifest.json"


class DataError(ValueError):
    """A problem that the user can cause and mend; the command line prints its message alone and exits with its code."""

    exit_code = 2


class DamagedFileError(DataError):
    """A file whose content is not what it should be; fetching or building it again mends it."""


def run_cli(main: Callable[[], None]) -> None:
    """Run main(); a DataError or operating-system error becomes one line and an exit code, without a traceback."""
    try:
        main()
    except (DataError, OSError) as error:
        print(f"error: {str(error) or type(error).__name__}", file=sys.stderr)
        sys.exit(getattr(error, "exit_code", 2))
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(130)


# ---------------------------------------------------------------- shards


def shard_name(split: str, index: int) -> str:
    return f"fineweb_{split}_{index:06d}.bin"


def shard_header(token_count: int) -> bytes:
    header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
    header[:3] = MAGIC, VERSION, token_count
    return header.tobytes()


def read_token_count(path: Path) -> int:
    """Token count of a shard whose header and file size agree; DamagedFileError when they do not."""
    with path.open("rb") as file:
        header = file.read(HEADER_BYTES)
    if len(header) != HEADER_BYTES:
        raise DamagedFileError(
            f"{path}: {path.stat().st_size} bytes, but the header alone has {HEADER_BYTES}; "
            "fetch or build the file again"
        )
    magic, version, token_count = (int(value) for value in np.frombuffer(header, dtype="<i4")[:3])
    if (magic, version) != (MAGIC, VERSION):
        raise DamagedFileError(
            f"{path}: magic {magic} and version {version}, expected {MAGIC} and {VERSION}; this is no token "
            "shard; fetch or build it again"
        )
    expected, found = HEADER_BYTES + token_count * TOKEN_BYTES, path.stat().st_size
    if token_count < 0 or expected != found:
        raise DamagedFileError(
            f"{path}: {found} bytes, but its header promises {token_count} tokens = {expected} bytes; "
            "fetch or build it again"
        )
    return token_count


def read_tokens(path: Path) -> np.ndarray:
    """Tokens of one shard, (tokens,) uint16, mapped from the file rather than loaded."""
    token_count = read_token_count(path)
    if token_count == 0:  # an empty region cannot be mapped
        return np.zeros(0, dtype="<u2")
    return np.memmap(path, dtype="<u2", mode="r", offset=HEADER_BYTES, shape=(token_count,))


class ShardWriter:
    """Appends tokens to fineweb_{split}_{i:06d}.bin files of shard_tokens each; documents run on across files.

    With a sidecar_dtype, each shard gets a .bytes file beside it: the source bytes of every token, without a header.
    Call close() at the end. `files` then lists name, tokens and sha256 of each shard in order, `sidecars` the others.
    """

    def __init__(self, folder: Path, split: str, shard_tokens: int, sidecar_dtype: str | None = None) -> None:
        self.folder, self.split, self.shard_tokens, self.sidecar_dtype = folder, split, shard_tokens, sidecar_dtype
        self.files: list[dict] = []
        self.sidecars: list[dict] = []
        self._file = self._sidecar = None
        self._count = 0

    @property
    def tokens(self) -> int:
        return sum(entry["tokens"] for entry in self.files) + self._count

    def write(self, tokens: np.ndarray, token_bytes: np.ndarray | None = None) -> None:
        """Append tokens, (n,) uint16, and with a sidecar the source bytes of each, (n,)."""
        while len(tokens):
            if self._file is None:
                self._open()
            room = self.shard_tokens - self._count
            data = np.ascontiguousarray(tokens[:room], dtype="<u2").tobytes()
            self._file.write(data)
            self._digest.update(data)
            if self._sidecar:
                self._sidecar.write(token_bytes[:room].astype(self.sidecar_dtype).tobytes())
                token_bytes = token_bytes[room:]
            self._count += len(data) // TOKEN_BYTES
            tokens = tokens[room:]
            if self._count == self.shard_tokens:
                self.close()

    def _open(self) -> None:
        path = self.folder / shard_name(self.split, len(self.files))
        self._file, self._digest = path.open("wb"), hashlib.sha256(shard_header(self.shard_tokens))
        self._file.write(shard_header(self.shard_tokens))  # close() corrects a last, shorter shard
        if self.sidecar_dtype:
            self._sidecar = path.with_suffix(SIDECAR_SUFFIX).open("wb")

    def close(self) -> None:
        if self._file is None:
            return
        path, count = Path(self._file.name), self._count
        self._file.seek(0)
        self._file.write(shard_header(count))
        self._file.close()
        sha256 = self._digest.hexdigest() if count == self.shard_tokens else sha256_file(path)
        self.files.append({"name": path.name, "tokens": count, "sha256": sha256})
        if self._sidecar:
            self._sidecar.close()
            side = path.with_suffix(SIDECAR_SUFFIX)
            self.sidecars.append({"name": side.name, "bytes": side.stat().st_size, "sha256": sha256_file(side)})
        self._file, self._sidecar, self._count = None, None, 0


# ---------------------------------------------------------------- bytes of a token, as the metric counts them


@dataclass(frozen=True)
class ByteTables:
    """Per-token tables of one tokenizer, each (vocab_size,).

    base_bytes: uint16, UTF-8 bytes without one leading space marker; byte pieces 1; control, unknown and unused ones 0.
    has_leading_space: bool, the piece starts with the marker: one more byte unless the token before is a boundary.
    is_boundary: bool, control, unknown and unused pieces.
    """

    base_bytes: np.ndarray
    has_leading_space: np.ndarray
    is_boundary: np.ndarray


def sentencepiece_byte_tables(tokenizer: spm.SentencePieceProcessor) -> ByteTables:
    size = tokenizer.get_piece_size()
    base = np.zeros(size, dtype=np.uint16)
    leading, boundary = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
    for token in range(size):
        if tokenizer.is_control(token) or tokenizer.is_unknown(token) or tokenizer.is_unused(token):
            boundary[token] = True
        elif tokenizer.is_byte(token):
            base[token] = 1
        else:
            piece = tokenizer.id_to_piece(token)
            leading[token] = piece.startswith(SPACE_MARKER)
            base[token] = len(piece.removeprefix(SPACE_MARKER).encode("utf-8"))
    return ByteTables(base, leading, boundary)


def surface_bytes(tokenizer: spm.SentencePieceProcessor) -> np.ndarray:
    """UTF-8 bytes of each piece as it stands in the text, spaces included, (vocab_size,) int64; control pieces 0."""
    tables = sentencepiece_byte_tables(tokenizer)
    pieces = [tokenizer.id_to_piece(token) for token in range(len(tables.base_bytes))]
    inner = [piece[1:].count(SPACE_MARKER) * (len(SPACE_MARKER.encode("utf-8")) - 1) for piece in pieces]
    return tables.base_bytes.astype(np.int64) + tables.has_leading_space - np.array(inner, dtype=np.int64)


def pure_byte_tables(vocab_size: int = 260) -> ByteTables:
    """Tables of the byte tokenizer: four special ids, then one id for each byte."""
    boundary = np.arange(vocab_size) < 4
    return ByteTables((~boundary).astype(np.uint16), np.zeros(vocab_size, dtype=bool), boundary)


def count_bytes(tokens: np.ndarray, tables: ByteTables) -> int:
    """Bytes of tokens[1:] given the token before each; tokens: (n,) ids, of which the first should be BOS."""
    previous, target = tokens[:-1], tokens[1:]
    full = (tables.base_bytes + tables.has_leading_space)[target].sum(dtype=np.int64)
    after_boundary = target[np.flatnonzero(tables.is_boundary[previous])]  # few: their space is not counted
    return int(full - tables.has_leading_space[after_boundary].sum())


def check_tokenizer(
    tokenizer: spm.SentencePieceProcessor, vocab_size: int, source: str, byte_files: bool = False
) -> None:
    """DataError unless the model has vocab_size pieces, the recipe's special ids, every byte and a lone space marker.

    Without a piece for every byte, a character that no piece holds becomes unknown and counts no bytes at all.
    Without the lone marker a space falls back to three byte pieces, and bits per byte looks a fifth better than it is.
    So it does with a marker inside a piece, where the metric counts 3 bytes, unless `byte_files` replace its count.
    """
    size = tokenizer.get_piece_size()
    if size != vocab_size:
        raise DataError(
            f"{source}: the tokenizer has {size} pieces, not the {vocab_size} asked for; ask for vocab_size {size}"
        )
    special = (tokenizer.pad_id(), tokenizer.bos_id(), tokenizer.eos_id(), tokenizer.unk_id())
    if special != (PAD_ID, BOS_ID, EOS_ID, UNK_ID):
        raise DataError(
            f"{source}: pad/bos/eos/unk ids are {special}, the recipe needs {(PAD_ID, BOS_ID, EOS_ID, UNK_ID)}; "
            "train it with data/download_hf_docs_and_tokenize.py"
        )
    if (count := sum(map(tokenizer.is_byte, range(size)))) != 256:
        raise DataError(
            f"{source}: the tokenizer has {count} byte pieces, not 256, so the bytes of rare characters would not be "
            "counted; train it with byte_fallback"
        )
    marker = tokenizer.piece_to_id(SPACE_MARKER)
    if tokenizer.is_unknown(marker):
        raise DataError(
            f"{source}: the tokenizer has no piece for a lone space (U+2581), so the bytes of spaces would be "
            "counted wrongly; train it on text that has spaces"
        )
    pieces = (tokenizer.id_to_piece(token) for token in range(size))
    if not byte_files and (inner := next((piece for piece in pieces if SPACE_MARKER in piece[1:]), None)):
        raise DataError(
            f"{source}: piece {inner!a} has a space that is not its first character, which the metric would count as 3 "
            "bytes; train it with spaces in front of pieces only"
        )


# ---------------------------------------------------------------- files


@contextlib.contextmanager
def locked(path: Path, busy: str) -> Iterator[None]:
    """Hold a lock file; DataError with `busy` while another process has it. It ends with its process, however."""
    try:
        import fcntl
    except ImportError:  # Windows: no such lock
        yield
        return
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DataError(busy) from None
        except OSError:
            pass  # a network file system without locks
        yield


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def read_json(path: Path) -> dict:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(f"{path}: no such file; give another path, or build or fetch it") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not valid JSON ({error}); remove it or write it again") from None
    if not isinstance(value, dict):
        raise DataError(f"{path}: expected a JSON object, found {type(value).__name__}; remove it or write it again")
    return value


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path to write, renamed in the end, so that a reader never sees half a file; removed on failure."""
    temporary = path.with_name(path.name + ".part")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, value: dict) -> None:
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=True) + "\n", encoding="utf-8")


def read_manifest(path: Path) -> dict:
    """A manifest whose datasets and tokenizers are lists of objects with a name; DataError when they are not."""
    manifest = read_json(path)
    for key in ("datasets", "tokenizers"):
        rows = manifest.setdefault(key, [])
        is_good = isinstance(rows, list) and all(isinstance(row, dict) for row in rows)
        if not is_good or not all(isinstance(row.get("name"), str) for row in rows):
            raise DataError(f"{path}: {key} is {rows!r:.80}, not a list of objects with a name; mend or remove it")
    return manifest


def merge_manifest(path: Path, new: dict) -> dict:
    """`new` plus the datasets and tokenizers that the manifest at path lists under other names.

    So one data folder can hold several variants. Each dataset entry names its own documents; the fields above are the
    newest export's. DataError where a kept dataset would lose its tokenizer to another of the same name.
    """
    old = read_manifest(path) if path.exists() else {"datasets": [], "tokenizers": []}
    merged = dict(new)
    for key in ("datasets", "tokenizers"):
        names = {entry["name"] for entry in new[key]}
        kept = [entry for entry in old[key] if entry["name"] not in names]
        merged[key] = sorted(kept + new[key], key=lambda entry: entry["name"])
    new_paths = {entry["name"]: tokenizer_path(entry) for entry in new["tokenizers"]}
    old_paths = {entry["name"]: tokenizer_path(entry) for entry in old["tokenizers"]}
    in_use = [entry.get("tokenizer_name") for entry in merged["datasets"] if entry not in new["datasets"]]
    for name, new_path in new_paths.items():
        if name in in_use and old_paths.get(name, new_path) != new_path:
            raise DataError(
                f"{path}: tokenizer {name!r} is {old_paths[name]} there, and {new_path} here; give one of them "
                "another name, or use another folder"
            )
    return merged


def tokenizer_path(entry: dict) -> object:
    return entry.get("model_path") or entry.get("path")
