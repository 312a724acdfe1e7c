"""Download published shards and their tokenizer from Hugging Face into the data folder.

    python data/cached_challenge_fineweb.py --variant sp4096                    # everything of that variant
    python data/cached_challenge_fineweb.py --variant sp1024 --train-shards 1   # a first look
    python data/cached_challenge_fineweb.py --variant sp4096 --list             # what the repository has
    python data/cached_challenge_fineweb.py --variant sp4096 --verify           # check what is here, refetch bad files

Running it again fetches only what is missing or damaged. Files arrive under .download/, are checked, and only then
renamed into place. A token for private repositories is taken from the environment by huggingface_hub; nothing here
reads or prints it.
"""

from __future__ import annotations

import argparse
import errno
import hashlib
import os
import random
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

import shards
from shards import DamagedFileError, DataError

DEFAULT_REPOSITORIES = {
    "sp1024": "willdepueoai/parameter-golf",
    "sp4096": "kevclark/parameter-golf",
    "sp8192": "kevclark/parameter-golf",
}
DEFAULT_REMOTE_ROOT, DEFAULT_REVISION = "datasets", "main"
REPOSITORY_VARIABLE, REMOTE_ROOT_VARIABLE = "MATCHED_FINEWEB_REPO_ID", "MATCHED_FINEWEB_REMOTE_ROOT_PREFIX"
MAX_ATTEMPTS, FIRST_WAIT_SECONDS, LONGEST_WAIT_SECONDS = 7, 1.0, 120.0
MAX_SHARDS = 100_000  # file numbers have six digits; a larger count in a manifest is nonsense
SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


# ---------------------------------------------------------------- where the data come from


@dataclass(frozen=True)
class Repository:
    """Place of the published data: a Hugging Face data set, a folder in it and a branch, tag or commit."""

    repo_id: str
    remote_root: str
    revision: str

    @classmethod
    def from_arguments(cls, args: argparse.Namespace, variant: str) -> Repository:
        """Options first, then the environment, then the variant's own default."""
        repo_id = args.repo_id or os.environ.get(REPOSITORY_VARIABLE) or DEFAULT_REPOSITORIES.get(variant)
        if not repo_id:
            raise DataError(
                f"no default repository has {variant}; known: {', '.join(DEFAULT_REPOSITORIES)}. "
                "Name one with --repo-id"
            )
        root = (
            args.remote_root
            if args.remote_root is not None
            else os.environ.get(REMOTE_ROOT_VARIABLE, DEFAULT_REMOTE_ROOT)
        )
        return cls(repo_id, root.strip("/"), args.revision)

    def remote_path(self, relative: str) -> str:
        return f"{self.remote_root}/{relative}" if self.remote_root else relative

    def __str__(self) -> str:
        return f"{self.repo_id} (folder {self.remote_root or '.'}, revision {self.revision})"


def add_repository_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repo-id", help=f"Hugging Face data set OWNER/NAME (or {REPOSITORY_VARIABLE}; default by variant)"
    )
    parser.add_argument(
        "--remote-root", help=f"folder inside it (or {REMOTE_ROOT_VARIABLE}; default {DEFAULT_REMOTE_ROOT})"
    )
    parser.add_argument("--revision", default=DEFAULT_REVISION, help="branch, tag or commit (default %(default)s)")


# ---------------------------------------------------------------- one file over the network


def hub_download(repository: Repository, remote: str, folder: Path, force: bool) -> Path:
    """One attempt to fetch a real file under folder; huggingface_hub resumes what an earlier attempt began."""
    try:
        from huggingface_hub import hf_hub_download
    except ImportError:
        raise DataError("huggingface_hub is not installed: pip install huggingface-hub") from None
    return Path(
        hf_hub_download(
            repository.repo_id,
            remote,
            repo_type="dataset",
            revision=repository.revision,
            local_dir=folder,
            force_download=force,
        )
    )


def status_of(error: BaseException) -> int | None:
    """HTTP status of an error or of what caused it: a 429 sometimes arrives dressed as a missing file."""
    for cause in (error, error.__cause__, error.__context__):
        status = getattr(getattr(cause, "response", None), "status_code", None)
        if status is not None:
            return int(status)
    return None


def check_worth_retrying(error: Exception, remote: str, repository: Repository) -> str:
    """A few words on an error that may pass by itself; raises for one that will not.

    An exception without a status, FileNotFoundError among them, is a broken connection to the client's mind.
    """
    status = status_of(error)
    if status in (401, 403, 404):
        raise DataError(f"{remote} is missing in {repository}, or needs a token in HF_TOKEN (HTTP {status})") from None
    if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES):
        raise error
    if status is None and isinstance(error, (ValueError, TypeError)) and not isinstance(error, FileNotFoundError):
        raise DataError(f"{remote} in {repository}: {error}") from None  # a bad name or setting
    return "throttled (HTTP 429)" if status == 429 else type(error).__name__


def wait_seconds(error: BaseException, attempt: int) -> float:
    """Retry-After when the server names it, else exponential back-off; with jitter, and bounded."""
    headers = getattr(getattr(error, "response", None), "headers", None) or {}
    named = str(headers.get("Retry-After", ""))
    base = float(named) if named.isdecimal() else FIRST_WAIT_SECONDS * 2**attempt
    return min(LONGEST_WAIT_SECONDS, base * random.uniform(1.0, 1.25))


def fetch(repository: Repository, remote: str, folder: Path, check: Callable[[Path], None]) -> Path:
    """Fetch a file under folder and check it, trying again on throttling, broken connections and damaged content."""
    force = False
    for attempt in range(MAX_ATTEMPTS):
        try:
            path = hub_download(repository, remote, folder, force)
            check(path)
            return path
        except DamagedFileError as error:
            force, problem, wait = True, str(error), wait_seconds(error, attempt)
        except Exception as error:  # noqa: BLE001 (the client's errors and its HTTP library's share no useful base)
            problem, wait = check_worth_retrying(error, remote, repository), wait_seconds(error, attempt)
        if attempt + 1 < MAX_ATTEMPTS:
            print(f"{remote}: {problem}; attempt {attempt + 2} of {MAX_ATTEMPTS} in {wait:.1f} s", flush=True)
            time.sleep(wait)
    raise DataError(
        f"{remote}: gave up after {MAX_ATTEMPTS} attempts, the last one: {problem}. It may exist; "
        "run the command again later"
    )


# ---------------------------------------------------------------- the manifest


def load_manifest(repository: Repository, data_dir: Path, is_enough: Callable[[dict], bool]) -> dict:
    """The manifest, from the cache when it is of the same repository, root and revision and says enough."""
    key = asdict(repository)
    name = hashlib.sha256(repr(sorted(key.items())).encode()).hexdigest()[:16]
    cache = data_dir / ".manifests" / f"{name}.json"
    if cache.exists():
        try:
            cached = shards.read_json(cache)
        except DataError:
            cached = {}
        if (
            {name: cached.get(name) for name in key} == key
            and isinstance(cached.get("manifest"), dict)
            and is_enough(cached["manifest"])
        ):
            return cached["manifest"]
    path = fetch(repository, repository.remote_path("manifest.json"), data_dir / ".download", lambda path: None)
    manifest = shards.read_json(path)
    path.unlink()
    cache.parent.mkdir(parents=True, exist_ok=True)
    shards.write_json(cache, {**key, "manifest": manifest})
    return manifest


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


def tokenizer_paths(manifest: dict, dataset: dict) -> dict[str, str | None]:
    """Checked relative paths of the variant's tokenizer files, with their sha256 where the manifest gives it."""
    tokenizer = entries(manifest, "tokenizers").get(str(dataset.get("tokenizer_name")))
    if tokenizer is None:
        raise DataError(
            f"manifest entry {dataset['name']}: tokenizer {dataset.get('tokenizer_name')!r} is not listed; "
            "report it to the publisher"
        )
    main = "model_path" if tokenizer.get("model_path") else "path"
    return {
        check_tokenizer_path(tokenizer[key]): tokenizer.get("sha256") if key == main else None
        for key in ("model_path", "vocab_path", "path")
        if tokenizer.get(key)
    }


def check_tokenizer_path(path: object) -> str:
    """A manifest comes from a stranger: only plain file names directly inside tokenizers/ are accepted."""
    parts = PurePosixPath(path).parts if isinstance(path, str) else ()
    if len(parts) != 2 or parts[0] != "tokenizers" or not SAFE_NAME.fullmatch(parts[1]):
        raise DataError(
            f"the manifest names the tokenizer file {path!r}; only tokenizers/NAME is allowed, so nothing was written"
        )
    return "/".join(parts)


# ---------------------------------------------------------------- files in the data folder


@dataclass(frozen=True)
class WantedFile:
    """A file to have at data_dir/relative; sha256 is None where the manifest gives none."""

    relative: str
    sha256: str | None
    is_shard: bool

    def check(self, path: Path, with_hash: bool = True) -> None:
        """DamagedFileError unless the file at path is whole."""
        if self.is_shard:
            shards.read_token_count(path)
        elif path.stat().st_size == 0:
            raise DamagedFileError(f"{path}: empty file; fetch it again")
        if with_hash and self.sha256 and (found := shards.sha256_file(path)) != self.sha256:
            raise DamagedFileError(f"{path}: sha256 {found}, but the manifest says {self.sha256}; fetch it again")


def wanted_files(manifest: dict, dataset: dict, train_shards: int | None) -> list[WantedFile]:
    """Tokenizer, validation and the first train_shards training shards (all when None), in the order of download."""
    listed = dataset.get("files") if isinstance(dataset.get("files"), list) else []
    hashes = {str(row.get("name")): row.get("sha256") for row in listed if isinstance(row, dict)}
    available = shard_count(dataset, "train")
    if train_shards is not None and train_shards > available:
        raise DataError(f"--train-shards {train_shards}, but {dataset['name']} has {available}; ask for that or fewer")
    counts = {"val": shard_count(dataset, "val"), "train": available if train_shards is None else train_shards}
    names = [shards.shard_name(split, index) for split, count in counts.items() for index in range(count)]
    tokenizers = [WantedFile(path, sha256, False) for path, sha256 in tokenizer_paths(manifest, dataset).items()]
    return tokenizers + [WantedFile(f"datasets/{dataset['name']}/{name}", hashes.get(name), True) for name in names]


def is_present(wanted: WantedFile, data_dir: Path, with_hash: bool) -> bool:
    """Whether a whole, real file is in place. Reports a damaged one; replaces a link by a copy of its target."""
    path = data_dir / wanted.relative
    if not path.exists():
        return False
    try:
        wanted.check(path, with_hash)
    except DamagedFileError as error:
        print(f"repairing {error}", flush=True)
        return False
    if path.is_symlink():
        temporary = path.with_name(path.name + ".part")
        shutil.copyfile(path, temporary)
        temporary.replace(path)
    return True


def ensure_file(wanted: WantedFile, repository: Repository, data_dir: Path, with_hash: bool) -> bool:
    """Have the file in place; True when it had to be fetched."""
    if is_present(wanted, data_dir, with_hash):
        return False
    target = data_dir / wanted.relative
    target.parent.mkdir(parents=True, exist_ok=True)
    fetch(repository, repository.remote_path(wanted.relative), data_dir / ".download", wanted.check).replace(target)
    return True


def check_totals(dataset: dict, data_dir: Path, train_shards: int) -> None:
    """A split that is here in full must have the manifest's token count: a short shard can agree with its header."""
    for split, here in (("val", shard_count(dataset, "val")), ("train", train_shards)):
        expected = dataset["stats"].get(f"tokens_{split}")
        if expected is None or here < shard_count(dataset, split):
            continue
        folder = data_dir / "datasets" / dataset["name"]
        found = sum(shards.read_token_count(folder / shards.shard_name(split, index)) for index in range(here))
        if found != expected:
            raise DataError(
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


def record(manifest: dict, dataset: dict, repository: Repository, data_dir: Path) -> None:
    """Add the variant to data_dir/manifest.json beside what is already there, with its origin."""
    tokenizer = entries(manifest, "tokenizers")[dataset["tokenizer_name"]]
    new = {**manifest, "datasets": [{**dataset, "downloaded_from": asdict(repository)}], "tokenizers": [tokenizer]}
    path = data_dir / "manifest.json"
    shards.write_json(path, shards.merge_manifest(path, new))


# ---------------------------------------------------------------- commands


def download_docs(data_dir: Path, repository: Repository) -> Path:
    """Fetch docs_selected.jsonl and its sidecar unless they are here; returns the path of the documents."""
    for name in (shards.SIDECAR_NAME, shards.DOCS_NAME):
        sha256 = (
            shards.read_json(data_dir / shards.SIDECAR_NAME).get("docs_sha256") if name == shards.DOCS_NAME else None
        )
        ensure_file(WantedFile(name, sha256, False), repository, data_dir, with_hash=False)
    return data_dir / shards.DOCS_NAME


def list_variants(manifest: dict, repository: Repository) -> None:
    print(f"{repository}:")
    for name, dataset in sorted(entries(manifest, "datasets").items()):
        stats = dataset.get("stats") if isinstance(dataset.get("stats"), dict) else {}
        numbers = ", ".join(
            f"{stats.get(f'files_{split}')} {split} shards ({stats.get(f'tokens_{split}')} tokens)"
            for split in ("train", "val")
        )
        print(f"  {name.removeprefix('fineweb10B_')}: {numbers}, tokenizer {dataset.get('tokenizer_name')}")


def download_variant(args: argparse.Namespace, repository: Repository) -> None:
    def is_enough(manifest: dict) -> bool:
        dataset = entries(manifest, "datasets").get(f"fineweb10B_{args.variant}")
        return dataset is not None and (args.train_shards or 0) <= shard_count(dataset, "train")

    manifest = load_manifest(repository, args.data_dir, is_enough)
    dataset = find_dataset(manifest, args.variant, repository)
    wanted = wanted_files(manifest, dataset, args.train_shards)
    fetched = 0
    for number, file in enumerate(wanted, 1):
        if ensure_file(file, repository, args.data_dir, args.verify):
            fetched += 1
            size = (args.data_dir / file.relative).stat().st_size
            print(f"[{number}/{len(wanted)}] {file.relative} {size / 1e6:,.1f} MB", flush=True)
    train_shards = shard_count(dataset, "train") if args.train_shards is None else args.train_shards
    check_totals(dataset, args.data_dir, train_shards)
    warn_about_extra_shards(dataset, args.data_dir)
    record(manifest, dataset, repository, args.data_dir)
    print(f"{args.variant}: {len(wanted)} files in place, {fetched} fetched, in {args.data_dir}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--variant", default="sp4096", help="spV or byte260, as far as the repository has it (default %(default)s)"
    )
    parser.add_argument("--train-shards", type=int, help="only the first N training shards (default: all)")
    parser.add_argument(
        "--with-docs", action="store_true", help=f"also fetch {shards.DOCS_NAME} (tens of GB) and its sidecar"
    )
    parser.add_argument("--list", action="store_true", help="print the variants of the repository and stop")
    parser.add_argument("--verify", action="store_true", help="also compare the sha256 of files that are already here")
    parser.add_argument(
        "--data-dir", type=Path, default=Path(__file__).resolve().parent, help="default: the folder of this script"
    )
    add_repository_arguments(parser)
    args = parser.parse_args()
    if not SAFE_NAME.fullmatch(args.variant):
        raise DataError(f"--variant {args.variant!r} is not a name such as sp4096")
    if args.train_shards is not None and args.train_shards < 0:
        raise DataError(f"--train-shards {args.train_shards} must not be negative; leave it out for all")
    return args


def main() -> None:
    args = parse_arguments()
    repository = Repository.from_arguments(args, args.variant)
    if args.list:
        list_variants(load_manifest(repository, args.data_dir, lambda manifest: False), repository)
    else:
        download_variant(args, repository)
        if args.with_docs:
            download_docs(args.data_dir, repository)
    shutil.rmtree(
        args.data_dir / ".download", ignore_errors=True
    )  # after success only: a next run resumes from what is left


if __name__ == "__main__":
    shards.run_cli(main)
