"""From documents to tokenizer, shards and manifest.

    python data/download_hf_docs_and_tokenize.py --docs-jsonl data/sample/docs_selected.jsonl \\
        --tokenizer-config data/tokenizer_specs_sample.json --output-root data/sample
    python data/download_hf_docs_and_tokenize.py --output-root data     # documents from Hugging Face, tokenizer sp4096

Input: one JSON object {"text": ...} a line, plain, .gz, .xz or .zst, with a sidecar manifest beside it; or parquet.
Output under --output-root: tokenizers/, datasets/fineweb10B_{variant}/fineweb_{train,val}_*.bin and manifest.json. The
first docs_val documents are the validation split, all others training. Work happens in a staging folder that replaces
the old data only when everything is done.
"""

from __future__ import annotations

import argparse
import os
import shutil
from contextlib import AbstractContextManager
from pathlib import Path

import documents
import export
import hub_files
import shards
import tokenizer_build
from documents import Documents
from shards import DataError
from tokenizer_build import TokenizerSpec

FOLDER = Path(__file__).resolve().parent
DEFAULT_SHARD_TOKENS = 100_000_000
COMPLETE_MARK, LOCK_NAME = "COMPLETE", ".export.lock"


# ---------------------------------------------------------------- the output folder


def locked(root: Path) -> AbstractContextManager[None]:
    """Keep other exports out of the folder."""
    busy = f"{root}: another export is writing here; wait until it is done, or give another --output-root"
    return shards.locked(root / LOCK_NAME, busy)


def check_places(root: Path) -> None:
    """DataError unless what is finished can be moved into the folder in one step: within one disk, into folders."""
    for place in (root / "datasets", root / "tokenizers"):
        if os.path.lexists(place) and not place.is_dir():  # a link to nothing among them
            raise DataError(f"{place} is a file where a folder belongs; remove it, or give another --output-root")
        if place.exists() and place.stat().st_dev != root.stat().st_dev:
            raise DataError(
                f"{place} is on another disk than {root}, and finished data are moved in, not copied; give an "
                "--output-root that is on that disk itself"
            )


def swap_in(staging: Path, root: Path) -> None:
    """Move a complete staging folder into place. Safe to run again after an interruption.

    Whenever it is cut off, a data set is there in whole with its own tokenizer and manifest, or is not there at all.
    The manifest is merged here and not before, since a download may have added to it in the meantime.
    """
    manifest = shards.merge_manifest(root / "manifest.json", shards.read_manifest(staging / "manifest.json"))
    fresh = sorted((staging / "datasets").glob("*"))
    for name in ("datasets", "tokenizers"):
        (root / name).mkdir(exist_ok=True)
    for source in fresh:
        move_away(root / "datasets" / source.name, staging / "old" / source.name)
    for source in sorted((staging / "tokenizers").glob("*")):
        source.replace(root / "tokenizers" / source.name)
    shards.write_json(root / "manifest.json", manifest)
    for source in fresh:
        source.rename(root / "datasets" / source.name)
    (staging / COMPLETE_MARK).unlink()
    shutil.rmtree(staging)


def move_away(target: Path, old: Path) -> None:
    if target.is_symlink():
        target.unlink()
    elif target.exists():
        old.parent.mkdir(exist_ok=True)
        target.rename(old)


def recover(root: Path) -> Path:
    """Finish the swap, or throw away the work, of an export that was interrupted; returns the staging folder's path."""
    staging = root / ".staging"
    if (staging / COMPLETE_MARK).exists():
        print(f"{root}: finishing the export that was interrupted", flush=True)
        swap_in(staging, root)
    shutil.rmtree(staging, ignore_errors=True)
    return staging


def check_manifest(path: Path, specs: list[TokenizerSpec]) -> None:
    """DataError when the new entries could not be added to the manifest at path: better now than at the end."""
    tokenizers = [{"name": spec.name, "path": spec.path} for spec in specs]
    shards.merge_manifest(path, {"tokenizers": tokenizers, "datasets": [{"name": spec.dataset_name} for spec in specs]})


def build(args: argparse.Namespace, specs: list[TokenizerSpec], found: Documents, staging: Path) -> dict:
    """Everything into the staging folder, then into place; returns the new manifest."""

    def make_engine(plan: export.Plan):
        return export.make_engine(plan, args.engine, args.workers, args.ray_address)

    (staging / "tokenizers").mkdir(parents=True)
    try:
        tokenizers = [
            tokenizer_build.build_tokenizer(spec, found, staging / "tokenizers", args.force_memory) for spec in specs
        ]
        datasets = [export.export_dataset(spec, found, staging, args.shard_tokens, make_engine) for spec in specs]
        manifest = make_manifest(found, specs, tokenizers, datasets, args.shard_tokens)
        shards.write_json(staging / "manifest.json", manifest)
        (staging / COMPLETE_MARK).touch()
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise
    swap_in(staging, args.output_root)
    return manifest


def make_manifest(
    found: Documents, specs: list[TokenizerSpec], tokenizers: list[dict], datasets: list[dict], shard_tokens: int
) -> dict:
    return {
        "version": shards.MANIFEST_VERSION,
        "num_docs": found.num_docs,
        "num_val_docs": found.docs_val,
        "shuffle_seed": found.sidecar.get("shuffle_seed"),
        "shard_size": shard_tokens,
        "append_eos": False,
        "unofficial_split": found.unofficial_split,
        "docs_meta": {**found.sidecar, "num_docs": found.num_docs, "docs_sha256": found.docs_sha256},
        "tokenizer_specs": [spec.as_manifest() for spec in specs],
        "tokenizers": tokenizers,
        "datasets": datasets,
    }


def print_summary(dataset: dict) -> None:
    for split in ("train", "val"):
        stats = {name: dataset["stats"][f"{name}_{split}"] for name in ("docs", "tokens")}
        sizes = {name: dataset["stats"][f"bytes_{split}_{name}"] for name in ("normalised", "source")}
        print(
            f"{dataset['name']} {split}: {stats['docs']:,} documents, {stats['tokens']:,} tokens, "
            f"{sizes['normalised']:,} bytes as scored (normalised text), {sizes['source']:,} source bytes",
            flush=True,
        )


# ---------------------------------------------------------------- command line


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    inputs = parser.add_mutually_exclusive_group()
    inputs.add_argument("--docs-jsonl", type=Path, help="documents: .jsonl, .gz, .xz or .zst; left out: a download")
    inputs.add_argument("--docs-parquet", nargs="+", metavar="PATH", help="parquet folders, files or globs, in order")
    add("--docs-manifest", type=Path, help="sidecar (default: NAME.source_manifest.json beside the documents)")
    add("--output-root", type=Path, default=FOLDER, help="data folder to write (default: the folder of this script)")
    add("--tokenizer-config", type=Path, default=FOLDER / "tokenizer_specs.json", help="JSON file of tokenizer specs")
    add("--reuse-sp-model", action="append", default=[], metavar="V=PATH", help="take this model for size or variant V")
    byte = parser.add_mutually_exclusive_group()
    byte.add_argument("--byte260", action="store_true", help="also export the byte tokenizer's variant")
    byte.add_argument("--skip-byte", action="store_true", help="leave out byte tokenizers that the specs list")
    add("--val-docs", type=int, help="must equal the sidecar's docs_val, unless --unofficial-split")
    add("--unofficial-split", action="store_true", help="allow another --val-docs; manifest and logs repeat it")
    add("--shard-tokens", type=int, default=DEFAULT_SHARD_TOKENS, help="tokens per shard (default %(default)s)")
    add("--engine", choices=("local", "ray"), default="local", help="where to tokenise (default %(default)s)")
    add("--workers", type=int, default=os.cpu_count() or 1, help="tokenising processes (default: all cores)")
    add("--ray-address", help="cluster for --engine ray, as host:port or auto (default: start one here)")
    add("--force-memory", action="store_true", help="train even when the estimate exceeds the free memory")
    add_repository_arguments(parser)
    args = parser.parse_args()
    check_arguments(args)
    return args


def check_arguments(args: argparse.Namespace) -> None:
    for name in ("shard_tokens", "workers"):
        if getattr(args, name) < 1:
            raise DataError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.shard_tokens >= 2**31:
        raise DataError(f"--shard-tokens {args.shard_tokens} must be below 2^31, the shard header's limit")
    if args.engine == "ray":
        documents.optional_module("ray", "ray", "--engine ray")  # before hours of tokenizer training
    if args.ray_address and args.engine != "ray":
        raise DataError(f"--ray-address {args.ray_address} needs --engine ray")
    if args.unofficial_split and args.val_docs is None:
        raise DataError("--unofficial-split needs --val-docs, the number of validation documents")
    place = {"--repo-id": args.repo_id, "--remote-root": args.remote_root, "--revision": args.revision}
    given = [name for name, value in place.items() if value not in (None, hub_files.DEFAULT_REVISION)]
    if given and (args.docs_jsonl or args.docs_parquet):
        raise DataError(f"{given[0]} is for a download, but the documents are given; leave one of them out")


def add_repository_arguments(parser: argparse.ArgumentParser) -> None:
    """As of the downloader, but the documents have one default repository and not one by variant."""
    hub, add = hub_files, parser.add_argument
    default = hub.DEFAULT_REPOSITORIES["sp1024"]
    add("--repo-id", help=f"where to download documents (or {hub.REPOSITORY_VARIABLE}; default {default})")
    add("--remote-root", help=f"folder inside it (or {hub.REMOTE_ROOT_VARIABLE}; default {hub.DEFAULT_REMOTE_ROOT})")
    add("--revision", default=hub.DEFAULT_REVISION, help="branch, tag or commit (default %(default)s)")


def find_documents(args: argparse.Namespace) -> documents.Source:
    if args.docs_parquet:
        return documents.find_parquet(args.docs_parquet)
    if args.docs_jsonl:
        return documents.find_jsonl(args.docs_jsonl)
    import cached_challenge_fineweb as hub

    repository = hub.Repository.from_arguments(args, "sp1024")
    with hub.only_one(args.output_root):
        return documents.find_jsonl(hub.download_docs(args.output_root, repository))


def main() -> None:
    args = parse_arguments()
    specs = tokenizer_build.load_specs(args.tokenizer_config, args.reuse_sp_model, args.byte260, args.skip_byte)
    args.output_root.mkdir(parents=True, exist_ok=True)
    with locked(args.output_root):
        check_places(args.output_root)
        staging = recover(args.output_root)
        check_manifest(args.output_root / "manifest.json", specs)
        source = find_documents(args)
        sidecar = documents.read_sidecar(documents.find_sidecar(source, args.docs_manifest))
        docs_val, unofficial = documents.choose_val_docs(args.val_docs, sidecar, args.unofficial_split)
        found = documents.scan_documents(source, docs_val, unofficial, sidecar)
        note = " (unofficial split)" * unofficial
        print(f"{source.name}: {found.num_docs:,} documents, the first {docs_val:,} for validation{note}", flush=True)
        for dataset in build(args, specs, found, staging)["datasets"]:
            print_summary(dataset)
    print(f"{args.output_root / 'manifest.json'}: {', '.join(spec.variant for spec in specs)} ready{note}", flush=True)


if __name__ == "__main__":
    shards.run_cli(main)
