"""From documents to tokenizer, shards and manifest.

    python data/download_hf_docs_and_tokenize.py --docs-jsonl data/sample/docs_selected.jsonl \\
        --tokenizer-config data/tokenizer_specs_sample.json --output-root data/sample
    python data/download_hf_docs_and_tokenize.py --output-root data     # documents from Hugging Face, tokenizer sp4096

Input: one JSON object {"text": ...} a line, plain, .gz or .xz, with a sidecar manifest beside it. Output under
--output-root: tokenizers/, datasets/fineweb10B_{variant}/fineweb_{train,val}_*.bin and manifest.json. The first
docs_val documents are the validation split, all others training. Work happens in a staging folder that replaces the
old data only when everything is done.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import itertools
import json
import lzma
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import cached_challenge_fineweb as hub
import numpy as np
import shards
from shards import DataError

if TYPE_CHECKING:
    import sentencepiece as spm

FOLDER = Path(__file__).resolve().parent
DEFAULT_SHARD_TOKENS = 100_000_000
BATCH_BYTES, BATCH_DOCS = 8 << 20, 8192  # what is held in memory at once, unless one document is larger
TRAINER_THREADS = 2  # fixed, because the model file records it and must not depend on the machine
MIN_TRAINED_SHARE = 0.95
TRAINER_MEMORY_FACTOR = 5  # peak memory of tokenizer training per byte of text, measured on 9 and 74 MB
RESERVED_CHARACTERS = {"\0": " ", "\u2585": " "}  # SentencePiece would drop every line that holds U+2585
COMPLETE_MARK = "COMPLETE"
RECIPE_SETTINGS = {
    "model_type": "bpe",
    "byte_fallback": True,
    "character_coverage": 0.999,
    "add_dummy_prefix": False,
    "split_digits": True,
    "normalization_rule_name": "nmt_nfkc",
    "max_sentence_length": 4192,
    "hard_vocab_limit": False,
    "pad_id": shards.PAD_ID,
    "bos_id": shards.BOS_ID,
    "eos_id": shards.EOS_ID,
    "unk_id": shards.UNK_ID,
    "num_threads": TRAINER_THREADS,
    "minloglevel": 2,
}
OVERRIDABLE = {
    "character_coverage",
    "split_digits",
    "normalization_rule_name",
    "max_sentence_length",
    "max_sentencepiece_length",
    "split_by_number",
    "split_by_unicode_script",
}


# ---------------------------------------------------------------- tokenizer specs


@dataclass(frozen=True)
class TokenizerSpec:
    """One tokenizer to build; `trainer` overrides single SentencePiece settings, `reuse` names a finished model."""

    name: str
    kind: str
    vocab_size: int
    train_docs: int = 5_000_000
    trainer: dict = field(default_factory=dict)
    reuse: Path | None = None

    def __post_init__(self) -> None:
        if self.kind not in ("sentencepiece", "byte"):
            raise DataError(f"tokenizer {self.name}: kind {self.kind!r} is not one of 'sentencepiece', 'byte'")
        if type(self.vocab_size) is not int or not 1 <= self.vocab_size <= shards.MAX_VOCAB_SIZE:
            raise DataError(
                f"tokenizer {self.name}: vocab_size {self.vocab_size} must be from 1 to {shards.MAX_VOCAB_SIZE} "
                "(ids are uint16)"
            )
        if self.kind == "byte" and self.vocab_size != 260:
            raise DataError(
                f"tokenizer {self.name}: vocab_size {self.vocab_size}, but the byte tokenizer has 260 (4 special "
                "ids and 256 bytes)"
            )
        if type(self.train_docs) is not int or self.train_docs < 1:
            raise DataError(
                f"tokenizer {self.name}: train_docs {self.train_docs} must be a positive number of documents"
            )
        if not isinstance(self.trainer, dict) or (unknown := sorted(set(self.trainer) - OVERRIDABLE)):
            raise DataError(
                f"tokenizer {self.name}: trainer settings {self.trainer and unknown} cannot be overridden; "
                f"allowed: {sorted(OVERRIDABLE)}"
            )

    @property
    def variant(self) -> str:
        return "byte260" if self.kind == "byte" else f"sp{self.vocab_size}"

    @property
    def dataset_name(self) -> str:
        return f"fineweb10B_{self.variant}"

    @property
    def file_stem(self) -> str:
        return "fineweb_pure_byte_260" if self.kind == "byte" else f"fineweb_{self.vocab_size}_bpe"


def load_specs(path: Path, reuse: list[str], byte260: bool) -> list[TokenizerSpec]:
    """Specs of the JSON file at path, with --reuse-sp-model and --byte260 applied."""
    entries = shards.read_json(path).get("tokenizers")
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise DataError(f'{path}: expected {{"tokenizers": [{{"name": ..., "kind": ..., "vocab_size": ...}}, ...]}}')
    models = dict(parse_reuse(item) for item in reuse)
    specs = [make_spec(entry, models, path) for entry in entries]
    if byte260 and not any(spec.kind == "byte" for spec in specs):
        specs.append(TokenizerSpec("pure_byte_260", "byte", 260))
    if missing := sorted(set(models) - {spec.vocab_size for spec in specs if spec.reuse}):
        raise DataError(
            f"--reuse-sp-model {missing[0]}: {path} has no SentencePiece tokenizer of that size; "
            f"it has {[s.name for s in specs]}"
        )
    variants = [spec.variant for spec in specs]
    if not specs or len(set(variants)) < len(variants):
        raise DataError(f"{path}: variants {variants}; list at least one tokenizer and each variant once")
    return specs


def make_spec(entry: dict, models: dict[int, Path], path: Path) -> TokenizerSpec:
    try:
        spec = TokenizerSpec(**entry)
    except TypeError as error:
        raise DataError(
            f"{path}: tokenizer {entry.get('name')!r}: {error}".replace("TokenizerSpec.__init__() ", "")
        ) from None
    if spec.kind == "sentencepiece" and spec.vocab_size in models:
        return TokenizerSpec(**{**entry, "reuse": models[spec.vocab_size]})
    return spec


def parse_reuse(item: str) -> tuple[int, Path]:
    size, _, path = item.partition("=")
    if not size.isdecimal() or not Path(path).is_file():
        raise DataError(
            f"--reuse-sp-model {item!r}: expected VOCAB=PATH with the path of an existing .model file, as in "
            "4096=my.model"
        )
    return int(size), Path(path)


# ---------------------------------------------------------------- documents


def open_lines(path: Path) -> BinaryIO:
    """Open a .jsonl, .jsonl.gz or .jsonl.xz file for reading its uncompressed bytes line by line."""
    if not path.is_file():
        raise DataError(
            f"{path}: no such file; "
            "make one with data/sample_docs.py, or leave out --docs-jsonl to download the documents"
        )
    opener = {".gz": gzip.open, ".xz": lzma.open}.get(path.suffix, open)
    return opener(path, "rb")


def iterate_texts(path: Path) -> Iterator[str]:
    """The text of each document in file order."""
    with open_lines(path) as file:
        for number, line in enumerate(file, 1):
            try:
                text = json.loads(line)["text"]
                text.encode("utf-8")  # a lone surrogate has no bytes that could be scored
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise DataError(
                    f'{path}, line {number}: expected a JSON object {{"text": "..."}} of valid Unicode ({error!r})'
                ) from None
            yield text


@dataclass(frozen=True)
class Documents:
    """What one pass over the document file found, before anything expensive starts."""

    path: Path
    num_docs: int
    docs_val: int
    docs_sha256: str
    splits: dict  # per split: first_doc, last_doc (both inclusive, from 0) and sha256 of those lines
    lines_bytes: list[int]  # cumulative bytes of the lines up to each of the asked-for document counts
    unofficial_split: bool
    sidecar: dict


def find_sidecar(docs: Path, given: Path | None) -> Path | None:
    """Path of the sidecar manifest: the given one, else NAME.source_manifest.json beside the documents if it exists."""
    if given:
        return given
    stem = docs.name.removesuffix(docs.suffix) if docs.suffix in (".gz", ".xz") else docs.name
    path = docs.with_name(stem.removesuffix(".jsonl") + ".source_manifest.json")
    return path if path.exists() else None


def read_sidecar(path: Path | None) -> dict:
    """Checked content of a sidecar; an empty dict, with a warning, when there is none."""
    if path is None:
        print(
            "warning: no sidecar manifest beside the documents, so their number and sha256 cannot be checked",
            flush=True,
        )
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
            "drop --val-docs, or add --unofficial-split, which the manifest records"
        )
    return requested, True


def scan_documents(path: Path, docs_val: int, unofficial: bool, sidecar: dict, marks: list[int]) -> Documents:
    """Hash and count all documents, compare with the sidecar; `marks` are document counts whose bytes are wanted."""
    whole, parts = hashlib.sha256(), {"val": hashlib.sha256(), "train": hashlib.sha256()}
    count, total, bytes_at = 0, 0, dict.fromkeys(marks)
    with open_lines(path) as file:
        for line in file:
            whole.update(line)
            parts["val" if count < docs_val else "train"].update(line)
            count, total = count + 1, total + len(line)
            if count in bytes_at:
                bytes_at[count] = total
    check_against_sidecar(path, count, whole.hexdigest(), sidecar)
    if not 0 < docs_val < count:
        raise DataError(
            f"{path}: {count} documents cannot give {docs_val} for validation and at least one for training; "
            "give more documents"
        )
    ranges = {"val": (0, docs_val - 1), "train": (docs_val, count - 1)}
    splits = {
        name: {"first_doc": a, "last_doc": b, "sha256": parts[name].hexdigest()} for name, (a, b) in ranges.items()
    }
    lines_bytes = [total if bytes_at[mark] is None else bytes_at[mark] for mark in marks]
    return Documents(path, count, docs_val, whole.hexdigest(), splits, lines_bytes, unofficial, sidecar)


def check_against_sidecar(path: Path, num_docs: int, sha256: str, sidecar: dict) -> None:
    for key, found in (("num_docs", num_docs), ("docs_sha256", sha256)):
        if sidecar and sidecar[key] != found:
            raise DataError(
                f"{path}: {key} is {found}, but the sidecar says {sidecar[key]}; "
                "the file is damaged or not the sidecar's: get both again"
            )


# ---------------------------------------------------------------- tokenizer training


def cut_text(text: str, limit_bytes: int) -> Iterator[str]:
    """Pieces of at most limit_bytes UTF-8 bytes that join to the text, cut after a newline or space where one is near.

    SentencePiece silently drops longer lines. The word after a cut loses its leading space: one word in about 700.
    """
    data, start = text.encode("utf-8"), 0
    while len(data) - start > limit_bytes:
        low, end = start + limit_bytes // 2, start + limit_bytes
        cut = max(data.rfind(b"\n", low, end), -1) + 1 or data.rfind(b" ", low, end) + 1
        if not cut:
            cut = end
            while data[cut] & 0xC0 == 0x80:  # inside a character
                cut -= 1
        yield data[start:cut].decode("utf-8")
        start = cut
    yield data[start:].decode("utf-8")


class TrainingLines:
    """Iterates over the lines for the tokenizer trainer and counts the bytes of text that came in and that went out."""

    def __init__(self, texts: Iterable[str], limit_bytes: int) -> None:
        self.texts, self.limit_bytes = texts, limit_bytes
        self.text_bytes = self.used_bytes = 0

    def __iter__(self) -> Iterator[str]:
        table = str.maketrans(RESERVED_CHARACTERS)
        for text in self.texts:
            stripped = text.strip()
            self.text_bytes += len(stripped.encode("utf-8"))
            for line in cut_text(stripped.translate(table), self.limit_bytes):
                if line.strip():
                    self.used_bytes += len(line.encode("utf-8"))
                    yield line

    def check_share(self, name: str) -> float:
        share = self.used_bytes / max(1, self.text_bytes)
        if share < MIN_TRAINED_SHARE:
            raise DataError(
                f"tokenizer {name}: only {share:.1%} of the text was usable for training, less than "
                f"{MIN_TRAINED_SHARE:.0%}; clean the documents"
            )
        return share


def available_memory_bytes() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None  # not Linux


def check_memory(spec: TokenizerSpec, text_bytes: int, force: bool) -> None:
    """Print what training will need, refuse when that is more than there is: the trainer holds all text in memory."""
    need, available = TRAINER_MEMORY_FACTOR * text_bytes + (100 << 20), available_memory_bytes()
    print(f"{spec.name}: training on {text_bytes / 1e6:,.1f} MB, about {need / 1e9:.1f} GB of memory", flush=True)
    if available is not None and need > available and not force:
        raise DataError(
            f"tokenizer {spec.name} needs about {need / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are available; "
            "lower train_docs in the spec, or use --reuse-sp-model, or --force-memory to try anyway"
        )


def train_sentencepiece(spec: TokenizerSpec, texts: Iterable[str]) -> bytes:
    """A model trained on the texts, the same bytes on every run: nothing about paths or the machine goes into it."""
    import sentencepiece as spm

    settings = {**RECIPE_SETTINGS, **spec.trainer}
    lines = TrainingLines(texts, int(settings["max_sentence_length"]))
    model = io.BytesIO()
    try:
        spm.SentencePieceTrainer.train(
            sentence_iterator=iter(lines), model_writer=model, vocab_size=spec.vocab_size, **settings
        )
    except (RuntimeError, OSError) as error:
        raise DataError(
            f"tokenizer {spec.name}: SentencePiece could not train {spec.vocab_size} pieces: {error}"
        ) from None
    share = lines.check_share(spec.name)
    check_vocabulary_reached(spec, spm.SentencePieceProcessor(model_proto=model.getvalue()).get_piece_size())
    print(f"{spec.name}: trained on {share:.2%} of {lines.text_bytes:,} bytes", flush=True)
    return model.getvalue()


def check_vocabulary_reached(spec: TokenizerSpec, pieces: int) -> None:
    if pieces != spec.vocab_size:
        raise DataError(
            f"tokenizer {spec.name}: vocab_size {spec.vocab_size} is more than these documents give; "
            f"the largest possible is {pieces}. "
            "Ask for that or less, or give more documents"
        )


def build_tokenizer(
    spec: TokenizerSpec, documents: Documents, text_bytes: int, folder: Path, force_memory: bool
) -> dict:
    """Write the tokenizer's files into folder; returns its manifest entry."""
    entry = {
        "name": spec.name,
        "kind": spec.kind,
        "vocab_size": spec.vocab_size,
        "bos_id": shards.BOS_ID,
        "eos_id": shards.EOS_ID,
    }
    if spec.kind == "byte":
        path = folder / f"{spec.file_stem}.json"
        shards.write_json(path, {**entry, "pad_id": shards.PAD_ID, "unk_id": shards.UNK_ID, "byte_offset": 4})
        return {**entry, "path": f"tokenizers/{path.name}", "sha256": shards.sha256_file(path)}
    import sentencepiece as spm

    if spec.reuse:
        model = spec.reuse.read_bytes()
    else:
        check_memory(spec, text_bytes, force_memory)
        model = train_sentencepiece(spec, itertools.islice(iterate_texts(documents.path), spec.train_docs))
    tokenizer = load_model(model, str(spec.reuse or spec.name))
    shards.check_tokenizer(tokenizer, spec.vocab_size, str(spec.reuse or spec.name))
    model_path, vocab_path = folder / f"{spec.file_stem}.model", folder / f"{spec.file_stem}.vocab"
    model_path.write_bytes(model)
    vocab = "".join(f"{tokenizer.id_to_piece(i)}\t{tokenizer.get_score(i):g}\n" for i in range(spec.vocab_size))
    vocab_path.write_text(vocab, encoding="utf-8", newline="\n")
    entry |= {"model_path": f"tokenizers/{model_path.name}", "vocab_path": f"tokenizers/{vocab_path.name}"}
    return {
        **entry,
        "sha256": hashlib.sha256(model).hexdigest(),
        "reused": bool(spec.reuse),
        "sentencepiece_version": spm.__version__,
    }


def load_model(model: bytes, source: str) -> spm.SentencePieceProcessor:
    import sentencepiece as spm

    try:
        return spm.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise DataError(f"{source}: not a SentencePiece model ({error})") from None


# ---------------------------------------------------------------- export


class SentencePieceEncoder:
    """Texts to tokens with a SentencePiece model; the threads share the texts of a batch, the order stays."""

    def __init__(self, model_path: Path, workers: int) -> None:
        self.tokenizer, self.workers = load_model(model_path.read_bytes(), str(model_path)), workers
        self.tables = shards.sentencepiece_byte_tables(self.tokenizer)

    def encode(self, texts: list[str]) -> np.ndarray:
        """Tokens of the texts one after the other, (n,) uint16, each behind a BOS."""
        rows = self.tokenizer.encode(texts, num_threads=self.workers)
        return np.concatenate([np.array([shards.BOS_ID, *ids], dtype=np.uint16) for ids in rows])


class ByteEncoder:
    """Texts to tokens of the byte tokenizer: each UTF-8 byte plus the four special ids."""

    def __init__(self) -> None:
        self.tables = shards.pure_byte_tables()

    def encode(self, texts: list[str]) -> np.ndarray:
        bos = np.array([shards.BOS_ID], dtype=np.uint16)
        rows = ((bos, np.frombuffer(text.encode("utf-8"), dtype=np.uint8).astype(np.uint16) + 4) for text in texts)
        return np.concatenate([part for row in rows for part in row])


def batches(texts: Iterable[str]) -> Iterator[list[str]]:
    """Group texts so that a batch keeps all cores busy and memory small."""
    batch, size = [], 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= BATCH_BYTES or len(batch) >= BATCH_DOCS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def export_split(
    split: str, texts: Iterable[str], encoder, folder: Path, shard_tokens: int, bar
) -> tuple[dict, list[dict]]:
    """Write one split's shards; returns its stats and its file list."""
    writer, docs, normalised, source = shards.ShardWriter(folder, split, shard_tokens), 0, 0, 0
    for batch in batches(texts):
        tokens = encoder.encode(batch)
        writer.write(tokens)
        docs += len(batch)
        normalised += shards.count_bytes(tokens, encoder.tables)
        source += sum(len(text.encode("utf-8")) for text in batch)
        bar.update(len(batch))
    tokens = writer.tokens
    writer.close()
    stats = {f"docs_{split}": docs, f"files_{split}": len(writer.files), f"tokens_{split}": tokens}
    return {**stats, f"bytes_{split}_normalised": normalised, f"bytes_{split}_source": source}, writer.files


def export_dataset(spec: TokenizerSpec, documents: Documents, staging: Path, shard_tokens: int, workers: int) -> dict:
    """Write both splits of one variant into the staging folder; returns its manifest entry."""
    from tqdm import tqdm

    folder = staging / "datasets" / spec.dataset_name
    folder.mkdir(parents=True)
    encoder = (
        ByteEncoder()
        if spec.kind == "byte"
        else SentencePieceEncoder(staging / f"tokenizers/{spec.file_stem}.model", workers)
    )
    texts, stats, files = iterate_texts(documents.path), {}, []
    with tqdm(total=documents.num_docs, desc=spec.variant, unit="doc", disable=None) as bar:
        for split, part in (("val", itertools.islice(texts, documents.docs_val)), ("train", texts)):
            split_stats, split_files = export_split(split, part, encoder, folder, shard_tokens, bar)
            stats |= split_stats
            files += split_files
    print(
        f"{spec.variant}: {stats['tokens_train']:,} train and {stats['tokens_val']:,} validation tokens; "
        "validation bytes: "
        f"{stats['bytes_val_normalised']:,} as scored (normalised text), {stats['bytes_val_source']:,} in the source",
        flush=True,
    )
    return {
        "name": spec.dataset_name,
        "tokenizer_name": spec.name,
        "path": f"datasets/{spec.dataset_name}",
        "vocab_size": spec.vocab_size,
        "docs_sha256": documents.docs_sha256,
        "unofficial_split": documents.unofficial_split,
        "splits": documents.splits,
        "stats": stats,
        "files": files,
    }


def make_manifest(
    documents: Documents, specs: list[TokenizerSpec], tokenizers: list[dict], datasets: list[dict], shard_tokens: int
) -> dict:
    return {
        "version": shards.MANIFEST_VERSION,
        "num_docs": documents.num_docs,
        "num_val_docs": documents.docs_val,
        "shuffle_seed": documents.sidecar.get("shuffle_seed"),
        "shard_size": shard_tokens,
        "append_eos": False,
        "unofficial_split": documents.unofficial_split,
        "docs_meta": {**documents.sidecar, "num_docs": documents.num_docs, "docs_sha256": documents.docs_sha256},
        "tokenizer_specs": [
            {
                "name": spec.name,
                "kind": spec.kind,
                "vocab_size": spec.vocab_size,
                "train_docs": spec.train_docs,
                "trainer": spec.trainer,
            }
            for spec in specs
        ],
        "tokenizers": tokenizers,
        "datasets": datasets,
    }


# ---------------------------------------------------------------- staging


def swap_in(staging: Path, root: Path) -> None:
    """Move a complete staging folder into place, the manifest last. Safe to run again after an interruption."""
    old = root / ".staging-old"
    for source in sorted((staging / "datasets").glob("*")):
        target = root / "datasets" / source.name
        target.parent.mkdir(exist_ok=True)
        if target.exists() or target.is_symlink():
            shutil.rmtree(old, ignore_errors=True)
            target.rename(old)
        source.rename(target)
    (root / "tokenizers").mkdir(exist_ok=True)
    for source in sorted((staging / "tokenizers").glob("*")):
        source.replace(root / "tokenizers" / source.name)
    if (staging / "manifest.json").exists():
        (staging / "manifest.json").replace(root / "manifest.json")
    shutil.rmtree(staging)
    if old.is_symlink():
        old.unlink()
    shutil.rmtree(old, ignore_errors=True)


def open_staging(root: Path) -> Path:
    """An empty staging folder under root, after finishing or throwing away what an interrupted run left there."""
    staging = root / ".staging"
    if (staging / COMPLETE_MARK).exists():
        swap_in(staging, root)
    shutil.rmtree(staging, ignore_errors=True)
    (staging / "tokenizers").mkdir(parents=True)
    return staging


def build(args: argparse.Namespace, specs: list[TokenizerSpec], documents: Documents) -> None:
    staging = open_staging(args.output_root)
    try:
        tokenizers = [
            build_tokenizer(spec, documents, text_bytes, staging / "tokenizers", args.force_memory)
            for spec, text_bytes in zip(specs, documents.lines_bytes, strict=True)
        ]
        datasets = [export_dataset(spec, documents, staging, args.shard_tokens, args.workers) for spec in specs]
        manifest = make_manifest(documents, specs, tokenizers, datasets, args.shard_tokens)
        merged = shards.merge_manifest(args.output_root / "manifest.json", manifest)
        shards.write_json(staging / "manifest.json", merged)
        (staging / COMPLETE_MARK).touch()
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    swap_in(staging, args.output_root)


# ---------------------------------------------------------------- command line


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--docs-jsonl", type=Path, help="documents, .jsonl, .jsonl.gz or .jsonl.xz; without it they are downloaded"
    )
    parser.add_argument(
        "--docs-manifest", type=Path, help="sidecar manifest (default: NAME.source_manifest.json beside the documents)"
    )
    parser.add_argument(
        "--output-root", type=Path, default=FOLDER, help="data folder to write (default: the folder of this script)"
    )
    parser.add_argument(
        "--tokenizer-config", type=Path, default=FOLDER / "tokenizer_specs.json", help="JSON file of tokenizer specs"
    )
    parser.add_argument(
        "--reuse-sp-model", action="append", default=[], metavar="V=PATH", help="take this model for vocabulary V"
    )
    parser.add_argument("--byte260", action="store_true", help="also export the byte tokenizer's variant")
    parser.add_argument("--val-docs", type=int, help="must equal the sidecar's docs_val, unless --unofficial-split")
    parser.add_argument(
        "--unofficial-split", action="store_true", help="allow another --val-docs; the manifest records it"
    )
    parser.add_argument(
        "--shard-tokens", type=int, default=DEFAULT_SHARD_TOKENS, help="tokens per shard (default %(default)s)"
    )
    parser.add_argument(
        "--workers", type=int, default=os.cpu_count() or 1, help="tokenising threads (default: all cores)"
    )
    parser.add_argument(
        "--force-memory", action="store_true", help="train even when the estimate exceeds the free memory"
    )
    hub.add_repository_arguments(parser)
    args = parser.parse_args()
    for name in ("shard_tokens", "workers"):
        if getattr(args, name) < 1:
            raise DataError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.shard_tokens >= 2**31:
        raise DataError(f"--shard-tokens {args.shard_tokens} must be below 2^31, the shard header's limit")
    return args


def main() -> None:
    args = parse_arguments()
    specs = load_specs(args.tokenizer_config, args.reuse_sp_model, args.byte260)
    args.output_root.mkdir(parents=True, exist_ok=True)
    path = args.docs_jsonl or hub.download_docs(args.output_root, hub.Repository.from_arguments(args, "sp1024"))
    open_lines(path).close()  # a missing file is reported before anything about its sidecar
    sidecar = read_sidecar(find_sidecar(path, args.docs_manifest))
    docs_val, unofficial = choose_val_docs(args.val_docs, sidecar, args.unofficial_split)
    documents = scan_documents(path, docs_val, unofficial, sidecar, [spec.train_docs for spec in specs])
    print(
        f"{path}: {documents.num_docs:,} documents, the first {docs_val:,} for validation"
        + " (unofficial split)" * unofficial,
        flush=True,
    )
    build(args, specs, documents)
    print(f"{args.output_root / 'manifest.json'}: {', '.join(spec.variant for spec in specs)} ready", flush=True)


if __name__ == "__main__":
    shards.run_cli(main)
