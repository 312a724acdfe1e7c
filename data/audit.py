"""Count everything in a data folder again and compare it with the manifest and with published totals.

    python data/audit.py data
    python data/audit.py data --variant sp4096 --docs-jsonl docs_selected.jsonl.xz

From shards and tokenizer come documents (marks of a beginning), tokens and scored bytes; the documents, when given, add
source bytes, hashes of the splits and a second, independent count of scored bytes. Exit code 1 when anything differs.
"""

from __future__ import annotations

import argparse
import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import caseops
import documents
import numpy as np
import shards
import tokenizer_build
from shards import DataError

CHUNK_TOKENS = 1 << 22
EVALUATED_LENGTH = 2048  # the challenge scores whole sequences of this length
CANONICAL_TOKENS = {"sp4096": 45_508_608, "sp8192": 40_540_160}  # evaluated tokens of the published validation splits
CANONICAL_BYTES, BYTES_TOLERANCE = 151_078_222, 10_000  # whole split as scored; from published losses, hence "about"
TOTALS = ("docs", "tokens", "normalised", "source")
LABELS = {"docs": "documents", "tokens": "tokens", "normalised": "scored bytes", "source": "source bytes"}


class MismatchError(DataError):
    exit_code = 1


@dataclass
class Audit:
    """Counts of one data set by (split, total), from each place that knows them, and what is wrong besides."""

    name: str
    manifest: dict = field(default_factory=dict)
    shards: dict = field(default_factory=dict)
    documents: dict = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    is_partial: bool = False  # --train-shards: what is said of the whole train split is no yardstick for its shards

    def check(self, is_good: bool, problem: str) -> None:
        if not is_good:
            self.problems.append(f"{self.name}: {problem}")


def checked(value: Any, kind: type, what: str) -> Any:
    """A value of the manifest, an empty one for null. DataError when it is of another kind."""
    if value is not None and type(value) is not kind:
        raise DataError(f"the manifest's {what} is {value!r:.80}, not of type {kind.__name__}; fetch or build it again")
    return kind() if value is None else value


@dataclass(frozen=True)
class Tokenizer:
    """What the audit needs of a tokenizer: scored bytes of tokens or of a text, by the rule of the metric."""

    vocab_size: int
    count: Callable[[np.ndarray], int]
    token_bytes: Callable[[np.ndarray], np.ndarray] | None
    normalize: Callable[[str], str]


def open_tokenizer(root: Path, entry: dict, audit: Audit) -> Tokenizer:
    """The tokenizer of a manifest entry, its file's hash checked."""
    path = root / str(entry.get("model_path") or entry.get("path"))
    if not path.is_file():
        raise DataError(f"{path}: no such file; fetch or build the variant again")
    if entry.get("sha256"):
        audit.check(shards.sha256_file(path) == entry["sha256"], f"{path.name} is not the manifest's (sha256)")
    if not entry.get("model_path"):
        tables = shards.pure_byte_tables()
        return Tokenizer(260, lambda tokens: shards.count_bytes(tokens, tables), None, lambda text: text)
    model = tokenizer_build.load_model(path.read_bytes(), str(path))
    size, transform = model.get_piece_size(), checked(entry.get("transform"), dict, "transform")
    shards.check_tokenizer(model, size, str(path), byte_files=bool(transform))
    if transform:
        rule = tokenizer_build.RECIPE_SETTINGS["normalization_rule_name"]
        if (transform.get("name"), transform.get("normalization")) != ("caseops", rule):
            raise DataError(f"{path}: transform {transform} is not 'caseops' with {rule!r}; fetch or build it again")
        tokenizer_build.check_caseops_model(model, str(path))
        case_tables, prepare = caseops.token_tables(model), tokenizer_build.Preparation(rule)

        def token_bytes(tokens: np.ndarray) -> np.ndarray:
            return caseops.token_bytes(tokens, case_tables)

        return Tokenizer(size, lambda tokens: int(token_bytes(tokens).sum()), token_bytes, prepare.normalize)
    tables = shards.sentencepiece_byte_tables(model)
    return Tokenizer(
        size,
        lambda tokens: shards.count_bytes(tokens, tables),
        None,
        lambda text: model.normalize(text).replace(shards.SPACE_MARKER, " "),
    )


# ---------------------------------------------------------------- from the shards


def whole_documents(paths: list[Path], sidecar_dtype: str | None) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Tokens of the shards joined, in parts that end with a document, each with its part of the sidecar."""
    rest = rest_bytes = None
    for path in paths:
        tokens = shards.read_tokens(path)
        sizes = np.fromfile(path.with_suffix(shards.SIDECAR_SUFFIX), sidecar_dtype) if sidecar_dtype else None
        if sizes is not None and len(sizes) != len(tokens):
            raise DataError(f"{path}: {len(tokens)} tokens, but the sidecar has {len(sizes)}; build both again")
        for start in range(0, len(tokens), CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            joined = tokens[part] if rest is None else np.concatenate([rest, tokens[part]])
            joined_bytes = None
            if sizes is not None:
                joined_bytes = sizes[part] if rest_bytes is None else np.concatenate([rest_bytes, sizes[part]])
            begins = np.flatnonzero(joined == shards.BOS_ID)
            cut = begins[-1] if len(begins) else 0
            if cut:
                yield joined[:cut], None if joined_bytes is None else joined_bytes[:cut]
            rest, rest_bytes = joined[cut:], None if joined_bytes is None else joined_bytes[cut:]
    if rest is not None:
        yield rest, rest_bytes


def audit_split(audit: Audit, folder: Path, split: str, tokenizer: Tokenizer, dtype: str | None) -> None:
    paths = sorted(folder.glob(f"fineweb_{split}_*.bin"))
    names = [shards.shard_name(split, index) for index in range(len(paths))]
    audit.check([path.name for path in paths] == names, f"{split} shards are not numbered 0 to {len(paths) - 1}")
    docs = tokens = normalised = 0
    for part, sizes in whole_documents(paths, dtype):
        if not tokens:
            audit.check(part[0] == shards.BOS_ID, f"{split} starts with id {part[0]}, not with {shards.BOS_ID}")
        if (largest := int(part.max())) >= tokenizer.vocab_size:
            raise MismatchError(
                f"{folder}: {split} holds id {largest}, but the tokenizer ends at {tokenizer.vocab_size - 1}; "
                "shards and tokenizer do not belong together: fetch or build both again"
            )
        docs += int((part == shards.BOS_ID).sum())
        tokens += len(part)
        normalised += tokenizer.count(part)
        if sizes is not None:
            same = tokenizer.token_bytes is not None and np.array_equal(sizes, tokenizer.token_bytes(part))
            audit.check(same, f"{split} sidecar disagrees with the tokens")
    audit.shards |= {(split, "docs"): docs, (split, "tokens"): tokens, (split, "normalised"): normalised}
    audit.shards[split, "files"] = len(paths)


def audit_files(audit: Audit, folder: Path, files: list) -> None:
    """Compare the sha256 of every file that the manifest lists."""
    for row in files:
        entry = checked(row, dict, "entry of a file")
        path = folder / Path(checked(entry.get("name"), str, "name of a file")).name
        if not path.is_file():
            audit.check(audit.is_partial and "_train_" in path.name, f"{path.name} is missing")
        elif entry.get("sha256"):
            audit.check(shards.sha256_file(path) == entry["sha256"], f"{path.name} is not the manifest's (sha256)")


# ---------------------------------------------------------------- from the documents


def audit_documents(audit: Audit, source: documents.Source, splits: dict, docs_val: int, tokenizer: Tokenizer) -> None:
    """Count the documents of both splits and their bytes, and compare their hashes with the manifest's."""
    digests = {split: hashlib.sha256() for split in ("val", "train")}
    counts = {(split, total): 0 for split in digests for total in ("docs", "normalised", "source")}
    for block in source.blocks(docs_val):
        digests[block.split].update(block.lines)
        texts = source.parse(block)
        scored = (tokenizer.normalize(text.decode("utf-8")) for text in texts)
        counts[block.split, "docs"] += block.docs
        counts[block.split, "source"] += sum(map(len, texts))
        is_byte = tokenizer.vocab_size == 260
        counts[block.split, "normalised"] += sum(
            len(text.encode("utf-8")) - (text.startswith(" ") and not is_byte) for text in scored
        )
    audit.documents = counts
    for split, digest in digests.items():
        if expected := splits[split].get("sha256"):
            audit.check(digest.hexdigest() == expected, f"{source.name} has another {split} split (sha256)")


# ---------------------------------------------------------------- one data set


def read_totals(stats: dict) -> dict[tuple[str, str], int]:
    keys = {"docs": "docs_{}", "tokens": "tokens_{}", "files": "files_{}"}
    keys |= {"normalised": "bytes_{}_normalised", "source": "bytes_{}_source"}
    named = {(split, total): key.format(split) for split in ("val", "train") for total, key in keys.items()}
    return {place: checked(stats[key], int, key) for place, key in named.items() if stats.get(key) is not None}


def audit_dataset(root: Path, dataset: dict, tokenizers: dict, source: documents.Source | None) -> Audit:
    audit = Audit(dataset["name"], manifest=read_totals(checked(dataset.get("stats"), dict, "stats")))
    if not re.fullmatch(r"\w[\w.-]*", audit.name):
        raise DataError(f"{audit.name!a}: not the name of a folder in datasets/; fetch or build the manifest again")
    folder = root / "datasets" / audit.name
    entry = tokenizers.get(checked(dataset.get("tokenizer_name"), str, "tokenizer_name"))
    if entry is None:
        raise DataError(f"{audit.name}: the manifest lists no tokenizer {dataset.get('tokenizer_name')!r}")
    tokenizer = open_tokenizer(root, entry, audit)
    here, listed = len(list(folder.glob("fineweb_train_*.bin"))), audit.manifest.get(("train", "files"), 0)
    audit.is_partial = here < listed and "downloaded_from" in dataset
    if audit.is_partial:
        print(f"{audit.name}: {here} of {listed} train shards are here, so their totals are counted, not compared")
    dtype, splits = sidecar_dtype(dataset), checked(dataset.get("splits"), dict, "splits")
    splits = {split: checked(splits.get(split), dict, f"{split} split") for split in ("val", "train")}
    audit_ranges(audit, splits)
    audit_files(audit, folder, [row for key in ("files", "sidecars") for row in checked(dataset.get(key), list, key)])
    for split in ("val", "train"):
        audit_split(audit, folder, split, tokenizer, dtype if split == "val" else None)
    if source:
        docs_val = audit.manifest.get(("val", "docs"), shards.OFFICIAL_VAL_DOCS)
        audit_documents(audit, source, splits, docs_val, tokenizer)
    return audit


def sidecar_dtype(dataset: dict) -> str | None:
    dtype = checked(dataset.get("bytes_sidecar"), dict, "bytes_sidecar").get("dtype")
    if dtype not in (None, "uint8", "uint16"):
        raise DataError(f"the manifest's bytes_sidecar is of {dtype!r:.80}, not uint8 or uint16; build it again")
    return dtype


def audit_ranges(audit: Audit, splits: dict) -> None:
    ranges = [splits[split].get(end) for split in ("val", "train") for end in ("first_doc", "last_doc")]
    if all(isinstance(end, int) for end in ranges):
        a, b, c, d = ranges
        audit.check(b < c or d < a, f"val documents {a} to {b} and train documents {c} to {d} overlap")


def canonical_line(audit: Audit, dataset: dict) -> str:
    """Comparison with the published validation split, as far as it says anything about this one."""
    variant, docs = audit.name.removeprefix("fineweb10B_"), audit.shards["val", "docs"]
    is_published = "splits" not in dataset  # our exports have them
    if docs != shards.OFFICIAL_VAL_DOCS:
        audit.check(not is_published, f"{docs:,} validation documents, the published split has 50,000")
        return f"matches canonical: no, not the challenge's validation split ({docs:,} documents, not 50,000)"
    verdicts = []
    if variant != "byte260":
        same = abs(audit.shards["val", "normalised"] - CANONICAL_BYTES) <= BYTES_TOLERANCE
        verdicts.append(f"{'yes' if same else 'no'} (about {CANONICAL_BYTES:,} scored bytes)")
        audit.check(same, f"scored bytes of val are not about {CANONICAL_BYTES:,}")
    if variant in CANONICAL_TOKENS and is_published:  # an own tokenizer has its own number of tokens
        expected = CANONICAL_TOKENS[variant]
        found = (audit.shards["val", "tokens"] - 1) // EVALUATED_LENGTH * EVALUATED_LENGTH
        verdicts.append(f"{'yes' if found == expected else 'no'} ({found:,} evaluated tokens of {expected:,})")
        audit.check(found == expected, f"{found:,} evaluated tokens, the published split has {expected:,}")
    return f"matches canonical: {', '.join(verdicts) or 'nothing known of this variant'}"


def print_audit(audit: Audit, dataset: dict) -> None:
    note = " UNOFFICIAL SPLIT" if dataset.get("unofficial_split") else ""
    print(f"\n{audit.name} (tokenizer {dataset.get('tokenizer_name')}){note}")
    print(f"  {'split':<6}{'total':<13}{'manifest':>18}{'shards':>18}{'documents':>18}  agree")
    for split in ("val", "train"):
        for total in ("files", *TOTALS):
            found = [place.get((split, total)) for place in (audit.manifest, audit.shards, audit.documents)]
            is_part = audit.is_partial and split == "train"
            known = {value for value in (found[::2] if is_part else found) if value is not None}
            audit.check(len(known) <= 1, f"{split} {LABELS.get(total, total)} differ: {sorted(known)}")
            verdict = "NO" if len(known) > 1 else "part" if is_part else "yes"
            cells = "".join(f"{'-' if value is None else f'{value:,}':>18}" for value in found)
            print(f"  {split:<6}{LABELS.get(total, total):<13}{cells}  {verdict}")
    print(f"  {canonical_line(audit, dataset)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="data folder, with manifest.json")
    parser.add_argument("--variant", help="only this one, such as sp4096 (default: all in the manifest)")
    inputs = parser.add_mutually_exclusive_group()
    inputs.add_argument("--docs-jsonl", type=Path, help="the documents, .jsonl, .gz, .xz or .zst")
    inputs.add_argument("--docs-parquet", nargs="+", metavar="PATH", help="the documents, as parquet")
    args = parser.parse_args()
    manifest = shards.read_manifest(args.folder / "manifest.json")
    source = documents.find_parquet(args.docs_parquet) if args.docs_parquet else None
    source = documents.find_jsonl(args.docs_jsonl) if args.docs_jsonl else source
    tokenizers = {entry["name"]: entry for entry in manifest["tokenizers"]}
    wanted = manifest["datasets"]
    if args.variant:
        wanted = [dataset for dataset in wanted if dataset["name"] == f"fineweb10B_{args.variant}"]
    if not wanted:
        raise DataError(f"{args.folder}: the manifest lists no variant {args.variant or ''}; nothing to audit")
    problems = []
    for dataset in wanted:
        audit = audit_dataset(args.folder, dataset, tokenizers, source)
        print_audit(audit, dataset)
        problems += audit.problems
    if problems:
        raise MismatchError("; ".join(problems) + "\nfetch or build the data again, and compare no score until then")
    print("\naudit: everything agrees")


if __name__ == "__main__":
    shards.run_cli(main)
