"""Documents: reading them from any of the formats, and the guard of the official split.

Whatever the format, documents travel as blocks of JSON lines, {"text": ...} each: large enough that no core waits,
small enough that memory stays bounded. Parquet rows become such lines too, so all counts and hashes mean the same.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import importlib
import io
import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import shards
from shards import DataError

BLOCK_BYTES = 1 << 20
ZST_READ_BYTES = 1 << 14  # at a time: what they unpack to is in memory at once
COMPRESSED = (".gz", ".xz", ".zst")
DAMAGE = ("EOFError", "LZMAError", "BadGzipFile", "error", "ZstdError")  # by name: some classes may not be installed
PARQUET_ROWS = 1024
PARQUET_COLUMN = "text"
PARQUET_KINDS = ("string", "large_string", "dictionary<values=string", "dictionary<values=large_string")


class Block(NamedTuple):
    """Some whole lines of one split; first_doc is the number, from 0, of the document in the first of them."""

    split: str
    first_doc: int
    docs: int
    lines: bytes


@dataclass(frozen=True)
class Source:
    """The files that hold the documents, in order: one .jsonl file, perhaps compressed, or parquet files."""

    name: str
    paths: tuple[Path, ...]

    def line_blocks(self) -> Iterator[bytes]:
        for path in self.paths:
            yield from parquet_blocks(path) if path.suffix == ".parquet" else jsonl_blocks(path)

    def blocks(self, docs_val: int) -> Iterator[Block]:
        """All documents in order; a block never holds documents of both splits."""
        first = 0
        for lines in self.line_blocks():
            docs = count_lines(lines)
            head = min(max(0, docs_val - first), docs)
            cut = len(lines) if head == docs else offset_of_line(lines, head)
            if head:
                yield Block("val", first, head, lines[:cut])
            if head < docs:
                yield Block("train", first + head, docs - head, lines[cut:])
            first += docs

    def texts(self) -> Iterator[str]:
        """The text of each document in order."""
        for block in self.blocks(0):
            yield from (raw.decode("utf-8") for raw in self.parse(block))

    def parse(self, block: Block) -> list[bytes]:
        """The texts of a block as UTF-8. DataError naming the first line that holds none."""
        return parse_lines(block, self.name)


def parse_lines(block: Block, name: str) -> list[bytes]:
    texts = []
    for number, line in enumerate(block.lines.removesuffix(b"\n").split(b"\n"), block.first_doc + 1):
        try:
            texts.append(json.loads(line)["text"].encode("utf-8"))  # a lone surrogate has no bytes to be scored
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"  # not its repr, which may hold the whole document
            raise DataError(
                f'{name}, line {number}: expected a JSON object {{"text": "..."}} of valid Unicode ({problem})'
            ) from None
    return texts


def count_lines(lines: bytes) -> int:
    return lines.count(b"\n") + (not lines.endswith(b"\n"))


def offset_of_line(lines: bytes, number: int) -> int:
    """Offset at which the line with this number, from 0, begins."""
    offset = 0
    for _ in range(number):
        offset = lines.index(b"\n", offset) + 1
    return offset


# ---------------------------------------------------------------- formats


def optional_module(name: str, package: str, purpose: str):
    """An optional dependency; DataError with the command that installs it when it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise DataError(f"{purpose} needs a package that is not installed: pip install {package}") from None


class ZstReader(io.RawIOBase):
    """The frames of a .zst file, one after the other. zstandard's own reader takes a file cut short for a whole one."""

    def __init__(self, path: Path, decompressor: Any) -> None:
        self.file, self.decompressor = path.open("rb"), decompressor
        self.frame, self.packed, self.text = None, b"", b""

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self.file.close()
        super().close()

    def readinto(self, buffer: memoryview) -> int:
        while not self.text and (packed := self.packed or self.file.read(ZST_READ_BYTES)):
            self.frame = self.frame or self.decompressor.decompressobj()
            self.text, self.packed = self.frame.decompress(packed), self.frame.unused_data
            self.frame = None if self.frame.eof else self.frame
        if not self.text and self.frame:
            raise EOFError("its last frame has no end")
        part, self.text = self.text[: len(buffer)], self.text[len(buffer) :]
        buffer[: len(part)] = part
        return len(part)


def open_zst(path: Path) -> BinaryIO:
    try:
        from compression import zstd  # the standard library's, from Python 3.14 on
    except ImportError:
        zstandard = optional_module("zstandard", "zstandard", f"{path}: reading .zst")
        return io.BufferedReader(ZstReader(path, zstandard.ZstdDecompressor()), BLOCK_BYTES)
    return zstd.open(path, "rb")


def open_lines(path: Path) -> BinaryIO:
    """Open a .jsonl, .jsonl.gz, .jsonl.xz or .jsonl.zst file for reading its uncompressed bytes."""
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; make one with data/sample_docs.py, or leave out --docs-jsonl for a download"
        )
    openers = {".gz": gzip.open, ".xz": lzma.open, ".zst": lambda path, mode: open_zst(path)}
    return openers.get(path.suffix, open)(path, "rb")


def jsonl_blocks(path: Path) -> Iterator[bytes]:
    with open_lines(path) as file:
        try:
            while block := file.read(BLOCK_BYTES):
                if not block.endswith(b"\n"):
                    block += file.readline()
                yield block
        except Exception as error:
            if type(error).__name__ not in DAMAGE:
                raise
            raise DataError(f"{path}: damaged or cut short ({error}); get it again") from None


def parquet_blocks(path: Path) -> Iterator[bytes]:
    parquet = optional_module("pyarrow.parquet", "pyarrow", f"{path}: reading parquet")
    try:
        with parquet.ParquetFile(path) as file:
            kinds = [str(field.type) for field in file.schema_arrow if field.name == PARQUET_COLUMN]
            if len(kinds) != 1 or not kinds[0].startswith(PARQUET_KINDS):
                names = [f"{field.name} ({field.type})" for field in file.schema_arrow]
                raise DataError(f"expected one column {PARQUET_COLUMN!r} of strings, found {', '.join(names)}")
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[PARQUET_COLUMN]):
                rows = ({"text": text} for text in batch.column(0).to_pylist())
                if lines := b"".join(json.dumps(row, ensure_ascii=False).encode("utf-8") + b"\n" for row in rows):
                    yield lines
    except ValueError as error:  # pyarrow's own errors among them
        raise DataError(f"{path}: {error}; give other files") from None


def find_parquet(patterns: list[str]) -> Source:
    """The parquet files of folders, files or globs, each sorted by name, in the order given."""
    paths: dict[Path, Path] = {}  # by absolute path: no file comes twice
    for pattern in patterns:
        given = Path(pattern)
        found = [given] if given.is_file() else map(Path, glob.glob(pattern, recursive=True))
        found = given.rglob("*.parquet") if given.is_dir() else found
        matches = sorted(path for path in found if path.suffix == ".parquet" and path.is_file())
        if not matches:
            raise DataError(f"--docs-parquet {pattern}: no .parquet file there; give a folder, a file or a quoted glob")
        for path in matches:
            paths.setdefault(path.parent.resolve() / path.name, path)
    optional_module("pyarrow.parquet", "pyarrow", "--docs-parquet")
    return Source(" ".join(patterns), tuple(paths.values()))


def find_jsonl(path: Path) -> Source:
    open_lines(path).close()  # a missing file or package is reported before anything else
    return Source(str(path), (path,))


# ---------------------------------------------------------------- the sidecar and the split


@dataclass(frozen=True)
class Documents:
    """What one pass over the documents found, before anything expensive starts."""

    source: Source
    num_docs: int
    docs_val: int
    docs_sha256: str
    splits: dict  # per split: first_doc, last_doc (both inclusive, from 0) and sha256 of those lines
    lines_bytes: int
    unofficial_split: bool
    sidecar: dict


def find_sidecar(source: Source, given: Path | None) -> Path | None:
    """Path of the sidecar manifest: the given one, else NAME.source_manifest.json beside the documents if it exists."""
    if given:
        return given
    docs = source.paths[0]
    stem = docs.name.removesuffix(docs.suffix) if docs.suffix in COMPRESSED else docs.name
    path = docs.with_name(stem.removesuffix(".jsonl") + ".source_manifest.json")
    return path if path.exists() else None


def read_sidecar(path: Path | None) -> dict:
    """Checked content of a sidecar; an empty dict, with a warning, when there is none."""
    if path is None:
        print("warning: no sidecar manifest beside the documents: number and sha256 cannot be checked", flush=True)
        return {}
    sidecar = shards.read_json(path)
    for key, kind in (("num_docs", int), ("docs_val", int), ("docs_sha256", str)):
        if type(sidecar.get(key)) is not kind:
            raise DataError(
                f"{path}: {key} is {sidecar.get(key)!r}, expected {kind.__name__}; "
                "take the sidecar that belongs to the documents"
            )
    return sidecar


def choose_val_docs(requested: int | None, sidecar: dict, allow_unofficial: bool) -> tuple[int, bool]:
    """Number of validation documents, and whether the split is unofficial.

    Not a free choice: a smaller number puts documents that are scored into the training split.
    """
    official = sidecar.get("docs_val", shards.OFFICIAL_VAL_DOCS)
    if requested is None or requested == official:
        return official, False
    if not allow_unofficial:
        source = "the sidecar says" if sidecar else "without a sidecar the challenge's number holds:"
        raise DataError(
            f"--val-docs {requested}, but {source} {official}; "
            "drop --val-docs, or add --unofficial-split, which the manifest and every log repeat"
        )
    return requested, True


def scan_documents(source: Source, docs_val: int, unofficial: bool, sidecar: dict) -> Documents:
    """Hash and count all documents, compare with the sidecar, and work out the ranges of the splits."""
    whole, parts = hashlib.sha256(), {"val": hashlib.sha256(), "train": hashlib.sha256()}
    count = size = 0
    for block in source.blocks(docs_val):
        whole.update(block.lines)
        parts[block.split].update(block.lines)
        count, size = count + block.docs, size + len(block.lines)
    check_against_sidecar(source.name, count, whole.hexdigest(), sidecar)
    if not 0 < docs_val < count:
        raise DataError(
            f"{source.name}: {count} documents cannot give {docs_val} for validation and at least one for training; "
            "give more documents"
        )
    ranges = {"val": (0, docs_val - 1), "train": (docs_val, count - 1)}
    splits = {
        name: {"first_doc": first, "last_doc": last, "sha256": parts[name].hexdigest()}
        for name, (first, last) in ranges.items()
    }
    return Documents(source, count, docs_val, whole.hexdigest(), splits, size, unofficial, sidecar)


def check_against_sidecar(name: str, num_docs: int, sha256: str, sidecar: dict) -> None:
    for key, found in (("num_docs", num_docs), ("docs_sha256", sha256)):
        if sidecar and sidecar[key] != found:
            raise DataError(
                f"{name}: {key} is {found}, but the sidecar says {sidecar[key]}; "
                "the file is damaged or not the sidecar's: get both again"
            )
