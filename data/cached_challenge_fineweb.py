"""Download published shards and their tokenizer from Hugging Face into the data folder.

    python data/cached_challenge_fineweb.py --variant sp4096                    # everything of that variant
    python data/cached_challenge_fineweb.py --variant sp1024 --train-shards 1   # a first look
    python data/cached_challenge_fineweb.py --variant sp4096 --list             # what the repository has
    python data/cached_challenge_fineweb.py --variant sp4096 --verify           # hash what is here, refetch bad files

Running it again fetches only what is missing, damaged or of another origin, and continues half-fetched files where they
end. Files arrive under .download/, are checked (size, shard header, sha256) and only then renamed into place. The token
for private repositories is the one in HF_TOKEN; it is never printed.

Exit codes: 0 everything asked for is in place; 1 the network failed too often, so run the same command again;
2 the request, the repository, a file or the disk is at fault, as the message says; 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import re
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath

import shards
from hub_files import (
    DEFAULT_STALL_SECONDS,
    DEFAULT_WORKERS,
    Hub,
    MissingError,
    Repository,
    WantedFile,
    add_repository_arguments,
)
from safe_files import inside, move, only_one, scratch, write_json_inside
from shards import DamagedFileError, DataError

MAX_SHARDS = 100_000  # file numbers have six digits; a larger count in a manifest is nonsense
ORIGIN_NAME = ".origin.json"  # in the folder of the data set, so that it goes where the shards go
ASIDE = ".other"  # no pattern for shards finds such names
SPARE_DISK_BYTES = 50_000_000
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
COMMIT = re.compile(r"[0-9a-f]{40}")
SHA256 = re.compile(r"[0-9a-f]{64}")


# ---------------------------------------------------------------- the manifest and the repository's file list


@dataclass(frozen=True)
class Snapshot:
    """What a repository held at one commit: its manifest, and {"size", "sha256"} of files by path under the root."""

    commit: str
    manifest: dict
    files: dict[str, dict]


def cache_path(repository: Repository) -> str:
    key = hashlib.sha256(repr(sorted(asdict(repository).items())).encode()).hexdigest()[:16]
    return f".manifests/{key}.json"


def read_cache(repository: Repository, data_dir: Path) -> Snapshot | None:
    """The cached snapshot when it is of the same repository, root and revision; None when there is none, or junk."""
    try:
        cached = shards.read_json(data_dir / cache_path(repository))
        snapshot = Snapshot(*(cached.get(name) for name in ("commit", "manifest", "files")))
    except (DataError, OSError):
        return None
    same = all(cached.get(name) == value for name, value in asdict(repository).items())
    whole = (type(snapshot.commit), type(snapshot.manifest), type(snapshot.files)) == (str, dict, dict)
    return snapshot if same and whole else None


def fetch_snapshot(hub: Hub, data_dir: Path) -> Snapshot:
    """Manifest and file list of the repository as they are now, stored in the cache."""
    part = scratch(data_dir, "manifest.json")
    part.unlink(missing_ok=True)
    hub.commit = hub.repository.revision  # not the commit of a snapshot that turned out to be too old
    try:
        hub.fetch(WantedFile("manifest.json", check_more=shards.read_json), part)
    except MissingError as error:
        raise MissingError(f"{error}{what_is_there(hub)}") from None
    manifest = shards.read_json(part)
    part.unlink()
    snapshot = Snapshot(hub.commit, manifest, list_files(hub))
    place = {**asdict(hub.repository), "commit": snapshot.commit}
    write_json_inside(data_dir, cache_path(hub.repository), {**place, "manifest": manifest, "files": snapshot.files})
    return snapshot


def what_is_there(hub: Hub) -> str:
    """The names at the top of the repository, as the end of an error message; empty when they are not to be had."""
    try:
        names = [entry.path for entry in hub.tree("", recursive=False)]
    except DataError:
        return ""
    return f"; at its top the repository has: {', '.join(names[:10]) or 'nothing'}. Choose a --remote-root"


def list_files(hub: Hub) -> dict[str, dict]:
    """Size and, for large files, sha256 of every file under the root, in one call (a page per 1,000 files)."""
    files, prefix = {}, hub.repository.remote_path("")
    try:
        listed = hub.tree(hub.repository.remote_root)
    except MissingError as error:  # a mirror without this part of the hub
        print(f"note: {error}; so sizes and hashes come from the manifest alone", flush=True)
        return {}
    for entry in listed:
        size, lfs = getattr(entry, "size", None), getattr(entry, "lfs", None)
        if type(size) is int and entry.path.startswith(prefix):
            files[entry.path.removeprefix(prefix)] = {"size": size, "sha256": lfs.sha256 if lfs else None}
    return files


def by_snapshot(work: Callable[[Snapshot], None], hub: Hub, data_dir: Path) -> None:
    """work(snapshot), by the cached snapshot first; when that does not work out, by the repository's present one."""
    cached = read_cache(hub.repository, data_dir)
    if cached is None:
        return work(fetch_snapshot(hub, data_dir))
    hub.commit = cached.commit
    try:
        return work(cached)
    except DataError as error:
        if error.exit_code != 2:
            raise
        newer = fetch_snapshot(hub, data_dir)
        if newer == cached:
            raise
        print(f"{error}\nthe cached manifest is out of date; trying again with the present one", flush=True)
    return work(newer)


def entries(manifest: dict, key: str) -> dict[str, dict]:
    """Manifest entries by name, leaving out malformed ones."""
    found = manifest.get(key)
    rows = found if isinstance(found, list) else []
    return {row["name"]: row for row in rows if isinstance(row, dict) and isinstance(row.get("name"), str)}


def find_dataset(manifest: dict, variant: str, repository: Repository) -> dict:
    datasets = entries(manifest, "datasets")
    if f"fineweb10B_{variant}" not in datasets:
        names = sorted(name.removeprefix("fineweb10B_") for name in datasets)
        raise DataError(
            f"{repository} has no variant {variant}; it has: {', '.join(names) or 'none'}. "
            "Choose one, or another --repo-id"
        )
    return datasets[f"fineweb10B_{variant}"]


def shard_count(dataset: dict, split: str) -> int:
    stats = dataset.get("stats")
    count = stats.get(f"files_{split}") if isinstance(stats, dict) else None
    if type(count) is not int or not 0 <= count <= MAX_SHARDS:
        raise DataError(
            f"manifest entry {dataset['name']}: files_{split} is {count!r}, expected a number of shards; "
            "report it to the publisher"
        )
    return count


def find_tokenizer(manifest: dict, dataset: dict) -> dict:
    tokenizer = entries(manifest, "tokenizers").get(str(dataset.get("tokenizer_name")))
    if tokenizer is None:
        raise DataError(
            f"manifest entry {dataset['name']}: tokenizer {dataset.get('tokenizer_name')!r} is not listed; "
            "report it to the publisher"
        )
    return tokenizer


def tokenizer_paths(tokenizer: dict) -> dict[str, str | None]:
    """Checked relative paths of a tokenizer's files, with the sha256 of the main one where the manifest gives it."""
    main = "model_path" if tokenizer.get("model_path") else "path"
    keys = sorted(key for key in tokenizer if key == "path" or (isinstance(key, str) and key.endswith("_path")))
    return {
        check_tokenizer_path(tokenizer[key]): tokenizer.get("sha256") if key == main else None
        for key in keys
        if tokenizer[key]
    }


def check_tokenizer_path(path: object) -> str:
    """A manifest comes from a stranger: only plain file names directly inside tokenizers/ are accepted."""
    parts = PurePosixPath(path).parts if isinstance(path, str) else ()
    if len(parts) != 2 or parts[0] != "tokenizers" or not SAFE_NAME.fullmatch(parts[1]):
        raise DataError(
            f"the manifest names the tokenizer file {path!r}; only tokenizers/NAME is allowed, so nothing was written"
        )
    return "/".join(parts)


# ---------------------------------------------------------------- what to have


def wanted_files(snapshot: Snapshot, dataset: dict, train_shards: int | None) -> list[WantedFile]:
    """Tokenizer, validation and the first train_shards training shards (all when None), in the order of download."""
    paths = hashes_by_path(snapshot.manifest, dataset, train_shards)
    return [describe_file(snapshot, path, sha256) for path, sha256 in paths.items()]


def hashes_by_path(manifest: dict, dataset: dict, train_shards: int | None) -> dict[str, object]:
    """sha256 (unchecked, or None) by path of what wanted_files describes."""
    hashes, sidecars = listed_hashes(dataset, "files"), listed_hashes(dataset, "sidecars")
    available = shard_count(dataset, "train")
    if train_shards is not None and train_shards > available:
        raise DataError(f"--train-shards {train_shards}, but {dataset['name']} has {available}; ask for that or fewer")
    counts = {"val": shard_count(dataset, "val"), "train": available if train_shards is None else train_shards}
    names = [shards.shard_name(split, index) for split, count in counts.items() for index in range(count)]
    paths = tokenizer_paths(find_tokenizer(manifest, dataset))
    for name in names:
        paths[f"datasets/{dataset['name']}/{name}"] = hashes.get(name)
        if (beside := name.removesuffix(".bin") + shards.SIDECAR_SUFFIX) in sidecars:
            paths[f"datasets/{dataset['name']}/{beside}"] = sidecars[beside]
    return paths


def listed_hashes(dataset: dict, key: str) -> dict[str, object]:
    """sha256 (unchecked, or None) by file name, from the manifest's rows on shards or on their sidecars."""
    rows = dataset.get(key) if isinstance(dataset.get(key), list) else []
    return {str(row.get("name")): row.get("sha256") for row in rows if isinstance(row, dict)}


def describe_file(snapshot: Snapshot, relative: str, sha256: object) -> WantedFile:
    """The file with what manifest and file list say of it; DataError when the list shows that it is not there."""
    if sha256 is not None and not (isinstance(sha256, str) and SHA256.fullmatch(sha256)):
        raise DataError(f"the manifest gives {relative} the sha256 {sha256!r}; report it to the publisher")
    row = snapshot.files.get(relative) or {}
    if snapshot.files and not row:
        folder = relative.rpartition("/")[0]
        there = sorted(path.rpartition("/")[2] for path in snapshot.files if path.rpartition("/")[0] == folder)
        names = ", ".join(there if len(there) < 8 else [*there[:3], "...", *there[-3:]])
        there = f"{folder or 'its root'} has: {names or 'nothing'}"
        raise MissingError(f"{relative} is missing in the repository; {there}. Choose from these, or report it")
    check_more = shards.read_token_count if relative.endswith(".bin") else None
    return WantedFile(relative, row.get("size"), sha256 or row.get("sha256"), check_more)


def is_present(wanted: WantedFile, data_dir: Path, with_hash: bool) -> bool:
    """Whether a whole, real file is in place. Reports a damaged one; replaces a link by a copy of its target."""
    path = inside(data_dir, wanted.relative)
    if not path.exists():
        return False
    try:
        wanted.check(path, with_hash)
    except DamagedFileError as error:
        print(f"repairing {error}", flush=True)
        return False
    if path.is_symlink():
        temporary = scratch(data_dir, f"{path.name}.copy")
        shutil.copyfile(path, temporary)
        move(temporary, path)
    return True


def part_path(wanted: WantedFile, hub: Hub, data_dir: Path) -> Path:
    """Where the file arrives. The name holds its origin: a partial file is continued only with its own bytes."""
    origin = repr((asdict(hub.repository), hub.commit, wanted.relative, wanted.size, wanted.sha256))
    key = hashlib.sha256(origin.encode()).hexdigest()[:12]
    return scratch(data_dir, f"{part_stem(wanted)}.{key}.part")


def part_stem(wanted: WantedFile) -> str:
    return wanted.relative.replace("/", "--")


def remove_parts(wanted: list[WantedFile], data_dir: Path) -> None:
    """Remove partial files of these, which are in place now: older versions' and the xet client's. Others' stay."""
    for file in wanted:
        for left in (data_dir / ".download").glob(f"{part_stem(file)}.*.part*"):
            shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()


def check_space(missing: list[WantedFile], hub: Hub, data_dir: Path) -> tuple[int, int]:
    """Bytes to have and bytes of them in partial files; DataError when the disk cannot take the rest."""
    total = sum(file.size or 0 for file in missing)
    parts = [part_path(file, hub, data_dir) for file in missing]
    done = sum(path.stat().st_size for path in parts if path.exists())
    free = shutil.disk_usage(data_dir).free
    if total - done + SPARE_DISK_BYTES > free:
        raise DataError(
            f"{data_dir}: {free / 1e9:.2f} GB are free, but {(total - done) / 1e9:.2f} GB are to be fetched and "
            f"{SPARE_DISK_BYTES / 1e9:.2f} GB kept free; make room, ask for fewer --train-shards, or use --data-dir"
        )
    return total, done


def find_missing(wanted: list[WantedFile], hub: Hub, data_dir: Path, with_hash: bool) -> list[WantedFile]:
    with ThreadPoolExecutor(hub.workers) as pool:
        present = list(pool.map(lambda file: is_present(file, data_dir, with_hash), wanted))
    return [file for file, there in zip(wanted, present) if not there]


def ensure_files(wanted: list[WantedFile], hub: Hub, data_dir: Path, with_hash: bool) -> int:
    """Have all files in place; returns how many had to be fetched."""
    missing = find_missing(wanted, hub, data_dir, with_hash)
    if missing:
        fetch_all(missing, hub, data_dir)
    remove_parts(wanted, data_dir)
    return len(missing)


def fetch_all(missing: list[WantedFile], hub: Hub, data_dir: Path) -> None:
    """Fetch files, several at a time."""
    for file in missing:
        if file.sha256 is None and not COMMIT.fullmatch(hub.commit):  # no telling whether the server has the same still
            part_path(file, hub, data_dir).unlink(missing_ok=True)
    hub.progress.start(*check_space(missing, hub, data_dir))

    def ensure(file: WantedFile) -> None:
        part = part_path(file, hub, data_dir)
        hub.fetch(file, part)
        move(part, inside(data_dir, file.relative))

    try:
        hub.run_all(ensure, missing)
    finally:
        hub.progress.close()


# ---------------------------------------------------------------- where a data set comes from


def check_not_own(dataset: dict, data_dir: Path) -> None:
    """DataError when an export made here has this name or this tokenizer: it is not ours to overwrite.

    A row that equals the repository's is of an older download, which noted no origin.
    """
    path = data_dir / "manifest.json"
    here = entries(shards.read_json(path), "datasets") if path.exists() else {}
    for name, row in here.items():
        same = name == dataset["name"] or row.get("tokenizer_name") == dataset.get("tokenizer_name")
        if same and "downloaded_from" not in row and row != dataset:
            raise DataError(
                f"{path}: {name} was exported here, and {dataset['name']} would overwrite files of it; choose another "
                "folder with --data-dir, or remove this manifest if they are not yours"
            )


def origin_of(hub: Hub) -> dict:
    return {**asdict(hub.repository), "commit": hub.commit}


def settle_origin(snapshot: Snapshot, dataset: dict, hub: Hub, data_dir: Path) -> None:
    """Note the origin of the data set before its first file comes; what is here from elsewhere steps aside.

    Sets of other origins have files of the same sizes, so without the note only a hash tells whose file it is.
    """
    note = f"datasets/{dataset['name']}/{ORIGIN_NAME}"
    with contextlib.suppress(DataError, OSError):
        if shards.read_json(data_dir / note) == origin_of(hub):
            return
    paths = hashes_by_path(snapshot.manifest, dataset, None)
    here = [describe_file(snapshot, path, paths[path]) for path in paths if (data_dir / path).exists()]
    hashed = [file for file in here if file.sha256]
    others = find_missing(hashed, hub, data_dir, True) + [file for file in here if not file.sha256]
    for path in [inside(data_dir, file.relative) for file in others]:
        path.replace(path.with_name(path.name + ASIDE))
    if others:
        print(
            f"{len(others)} of {len(here)} files here are not known to be of {hub.repository}: renamed to *{ASIDE}; "
            "delete them when nobody needs them",
            flush=True,
        )
    write_json_inside(data_dir, note, origin_of(hub))


# ---------------------------------------------------------------- checks of the whole


def check_totals(dataset: dict, data_dir: Path, train_shards: int) -> None:
    """A split that is here in full must have the manifest's token count: a short shard can agree with its header."""
    for split, here in (("val", shard_count(dataset, "val")), ("train", train_shards)):
        expected = dataset["stats"].get(f"tokens_{split}")
        if expected is None or here < shard_count(dataset, split):
            continue
        folder = data_dir / "datasets" / dataset["name"]
        found = sum(shards.read_token_count(folder / shards.shard_name(split, index)) for index in range(here))
        if found != expected:
            raise DamagedFileError(
                f"{folder}: {found} {split} tokens, but the manifest says {expected}; "
                "remove the folder and download again"
            )


def warn_about_extra_shards(dataset: dict, data_dir: Path) -> None:
    for split in ("val", "train"):
        present = {path.name for path in (data_dir / "datasets" / dataset["name"]).glob(f"fineweb_{split}_*.bin")}
        if extra := sorted(present - {shards.shard_name(split, index) for index in range(shard_count(dataset, split))}):
            print(
                f"warning: {len(extra)} {split} shards are not in the manifest and would be read too, first "
                f"{extra[0]}; remove them",
                flush=True,
            )


def record(manifest: dict, dataset: dict, hub: Hub, data_dir: Path) -> None:
    """Add the variant to data_dir/manifest.json beside what is already there, with its origin."""
    new = {
        **manifest,
        "datasets": [{**dataset, "downloaded_from": origin_of(hub)}],
        "tokenizers": [find_tokenizer(manifest, dataset)],
    }
    write_json_inside(data_dir, "manifest.json", shards.merge_manifest(data_dir / "manifest.json", new))


# ---------------------------------------------------------------- commands


def download_docs(data_dir: Path, repository: Repository, hub: Hub | None = None, verify: bool = False) -> Path:
    """Fetch docs_selected.jsonl and its sidecar unless they are here; returns the path of the documents."""
    hub = hub or Hub(repository)
    data_dir.mkdir(parents=True, exist_ok=True)
    by_snapshot(lambda snapshot: have_docs(snapshot, hub, data_dir, verify), hub, data_dir)
    return data_dir / shards.DOCS_NAME


def have_docs(snapshot: Snapshot, hub: Hub, data_dir: Path, verify: bool) -> None:
    documents = describe_file(snapshot, shards.DOCS_NAME, None)
    sidecar = replace(describe_file(snapshot, shards.SIDECAR_NAME, None), check_more=shards.read_json)
    check_not_other_docs(documents, hub, data_dir)
    ensure_files([sidecar], hub, data_dir, verify)
    sha256 = shards.read_json(data_dir / shards.SIDECAR_NAME).get("docs_sha256")
    ensure_files([describe_file(snapshot, shards.DOCS_NAME, sha256)], hub, data_dir, verify)


def check_not_other_docs(documents: WantedFile, hub: Hub, data_dir: Path) -> None:
    """DataError when other documents are here, by sidecar, or without one by size: they may be the user's own."""
    path, said = data_dir / shards.DOCS_NAME, None
    with contextlib.suppress(DataError):
        said = shards.read_json(data_dir / shards.SIDECAR_NAME).get("docs_sha256")
    others = said != documents.sha256
    if not (said and documents.sha256):
        others = path.exists() and documents.size not in (None, path.stat().st_size)
    if others:
        raise DataError(
            f"{path} or its sidecar is of other documents than those of {hub.repository}; choose another folder, or "
            "remove both files"
        )


def list_variants(manifest: dict, repository: Repository) -> None:
    print(f"{repository}:")
    for name, dataset in sorted(entries(manifest, "datasets").items()):
        stats = dataset.get("stats") if isinstance(dataset.get("stats"), dict) else {}
        numbers = ", ".join(
            f"{stats.get(f'files_{split}')} {split} shards ({stats.get(f'tokens_{split}')} tokens)"
            for split in ("train", "val")
        )
        print(f"  {name.removeprefix('fineweb10B_')}: {numbers}, tokenizer {dataset.get('tokenizer_name')}")


def have_variant(args: argparse.Namespace, hub: Hub, snapshot: Snapshot) -> None:
    """Everything of the variant in place, counted and recorded."""
    dataset = find_dataset(snapshot.manifest, args.variant, hub.repository)
    wanted = wanted_files(snapshot, dataset, args.train_shards)
    check_not_own(dataset, args.data_dir)
    settle_origin(snapshot, dataset, hub, args.data_dir)
    fetched = ensure_files(wanted, hub, args.data_dir, args.verify)
    train_shards = shard_count(dataset, "train") if args.train_shards is None else args.train_shards
    check_totals(dataset, args.data_dir, train_shards)
    warn_about_extra_shards(dataset, args.data_dir)
    record(snapshot.manifest, dataset, hub, args.data_dir)
    print(f"{args.variant}: {len(wanted)} files in place, {fetched} fetched, in {args.data_dir}")


def download_variant(args: argparse.Namespace, hub: Hub) -> None:
    by_snapshot(lambda snapshot: have_variant(args, hub, snapshot), hub, args.data_dir)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--variant", default="sp4096", help="spV or byte260, as far as the repository has it (default %(default)s)")
    add("--train-shards", type=int, help="only the first N training shards (default: all)")
    add("--with-docs", action="store_true", help=f"also fetch {shards.DOCS_NAME} (tens of GB) and its sidecar")
    add("--list", action="store_true", help="print the variants of the repository and stop")
    add("--verify", action="store_true", help="also compare the sha256 of files that are already here")
    add("--data-dir", type=Path, default=Path(__file__).resolve().parent, help="default: the folder of this script")
    add("--workers", type=int, default=DEFAULT_WORKERS, help="files fetched at a time (default %(default)s)")
    add(
        "--stall-seconds",
        type=float,
        default=DEFAULT_STALL_SECONDS,
        help="try again when so long hardly anything arrives (default %(default)s)",
    )
    add(
        "--transport",
        choices=("plain", "xet"),
        default="plain",
        help="plain: HTTP, resumable. xet: huggingface_hub's own client, faster where hf_xet works, but it restarts "
        "a file that was interrupted, and --stall-seconds is only a hint to it (default %(default)s)",
    )
    add_repository_arguments(parser)
    args = parser.parse_args()
    check_arguments(args)
    return args


def check_arguments(args: argparse.Namespace) -> None:
    if not SAFE_NAME.fullmatch(args.variant):
        raise DataError(f"--variant {args.variant!r} is not a name such as sp4096")
    if args.train_shards is not None and args.train_shards < 0:
        raise DataError(f"--train-shards {args.train_shards} must not be negative; leave it out for all")
    if not 1 <= args.workers <= 64:
        raise DataError(f"--workers {args.workers} must be from 1 to 64; more only bring throttling")
    if not 0 < args.stall_seconds < float("inf"):
        raise DataError(f"--stall-seconds {args.stall_seconds} must be a positive number of seconds")


def main() -> None:
    args = parse_arguments()
    hub = Hub(Repository.from_arguments(args, args.variant), args.workers, args.stall_seconds, args.transport)
    args.data_dir.mkdir(parents=True, exist_ok=True)
    with only_one(args.data_dir):
        if args.list:
            list_variants(fetch_snapshot(hub, args.data_dir).manifest, hub.repository)
        else:
            download_variant(args, hub)
            if args.with_docs:
                download_docs(args.data_dir, hub.repository, hub, args.verify)


if __name__ == "__main__":
    shards.run_cli(main)
