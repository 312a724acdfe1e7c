"""Upload an export (shards, tokenizers, manifest) to a Hugging Face data set, for cached_challenge_fineweb.py to fetch.

    HF_TOKEN=... python data/publish.py OWNER/NAME --data-dir data                    # every variant in the manifest
    HF_TOKEN=... python data/publish.py OWNER/NAME --data-dir data --variant sp4096   # this one
    python data/publish.py OWNER/NAME --data-dir data --dry-run                       # all checks, nothing sent

Every file is checked against the manifest (size, header, sha256, token totals) before the first byte is sent, and the
repository's list of files is compared with them at the end. The manifest goes last, so that nobody downloads half a
set; variants that the repository has already stay in it. Run an interrupted upload again: it continues.

Exit codes: as cached_challenge_fineweb.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import cached_challenge_fineweb as downloader
import shards
from hub_files import (
    DEFAULT_REMOTE_ROOT,
    Hub,
    MissingError,
    NetworkError,
    Repository,
    RetryError,
    WantedFile,
    access_token,
    check_worth_retrying,
    endpoint,
    import_client,
)
from safe_files import inside, only_one, scratch, write_json_inside
from shards import DataError

# ---------------------------------------------------------------- what to publish


@dataclass(frozen=True)
class Publication:
    """Manifest entries (with a sha256 for every file) and the files that they promise, all checked."""

    manifest: dict
    files: list[WantedFile]


def choose_datasets(manifest: dict, variants: list[str] | None, source: Path) -> list[dict]:
    """The manifest's entries of these variants, all when None; DataError when one is not there."""
    here = downloader.entries(manifest, "datasets")
    names = [f"fineweb10B_{variant}" for variant in dict.fromkeys(variants)] if variants else sorted(here)
    unknown = [name.removeprefix("fineweb10B_") for name in names if name not in here]
    if unknown or not names:
        has = ", ".join(sorted(name.removeprefix("fineweb10B_") for name in here))
        raise DataError(f"{source} has no variant {', '.join(unknown) or 'at all'}; it has: {has or 'none'}")
    return [here[name] for name in names]


def check_file(wanted: WantedFile, data_dir: Path) -> WantedFile:
    """The file with its real size and sha256; DataError unless it is here and whole."""
    path = data_dir / wanted.relative
    if not path.is_file():
        raise DataError(f"{path} is missing, but the manifest promises it; download or export the variant in full")
    wanted.check(path, with_hash=False)
    sha256 = shards.sha256_file(path)
    if wanted.sha256 not in (None, sha256):
        raise DataError(f"{path}: sha256 {sha256}, but the manifest says {wanted.sha256}; export or download it again")
    return replace(wanted, size=path.stat().st_size, sha256=sha256)


def add_hashes(dataset: dict, files: list[WantedFile], data_dir: Path) -> dict:
    """The manifest entry with a row (name, tokens, sha256) for every shard, where it had none."""
    if dataset.get("files"):
        return dataset
    rows = [
        {
            "name": Path(file.relative).name,
            "tokens": shards.read_token_count(data_dir / file.relative),
            "sha256": file.sha256,
        }
        for file in files
        if file.relative.endswith(".bin")
    ]
    return {**dataset, "files": rows}


def prepare(data_dir: Path, variants: list[str] | None) -> Publication:
    """Check all that the manifest promises of the variants; DataError names the first thing that is not so."""
    source = data_dir / "manifest.json"
    manifest = shards.read_json(source)
    datasets, tokenizers, files = [], {}, {}
    for dataset in choose_datasets(manifest, variants, source):
        wanted = downloader.wanted_files(downloader.Snapshot("", manifest, {}), dataset, None)
        checked = [check_file(file, data_dir) for file in wanted]
        downloader.check_totals(dataset, data_dir, downloader.shard_count(dataset, "train"))
        downloader.warn_about_extra_shards(dataset, data_dir)
        datasets.append(add_hashes(dataset, checked, data_dir))
        tokenizer = downloader.find_tokenizer(manifest, dataset)
        tokenizers[tokenizer["name"]] = tokenizer
        files |= {file.relative: file for file in checked}
        size = sum(file.size for file in checked)
        print(
            f"{dataset['name'].removeprefix('fineweb10B_')}: {len(checked)} files, {size / 1e6:,.1f} MB, all as "
            "the manifest says",
            flush=True,
        )
    return Publication(
        {**manifest, "datasets": datasets, "tokenizers": list(tokenizers.values())}, list(files.values())
    )


# ---------------------------------------------------------------- the upload


def merge_with_remote(manifest: dict, hub: Hub, data_dir: Path) -> dict:
    """The manifest plus the other variants that the repository publishes under the same root."""
    part = scratch(data_dir, "remote_manifest.json")
    part.unlink(missing_ok=True)
    try:
        hub.fetch(WantedFile("manifest.json", check_more=shards.read_json), part)
    except MissingError:
        return manifest
    kept = sorted(
        set(downloader.entries(shards.read_json(part), "datasets")) - {row["name"] for row in manifest["datasets"]}
    )
    if kept:
        print(f"the repository keeps {', '.join(kept)}", flush=True)
    merged = shards.merge_manifest(part, manifest)
    part.unlink()
    return merged


def stage(publication: Publication, repository: Repository, data_dir: Path) -> Path:
    """A folder laid out as the repository will be, of hard links (copies across devices), without the manifest."""
    folder = data_dir / ".publish" / repository.repo_id.replace("/", "--")
    wanted = {repository.remote_path(file.relative): data_dir / file.relative for file in publication.files}
    for remote, source in wanted.items():
        target = inside(data_dir, f"{folder.relative_to(data_dir)}/{remote}")
        if target.exists() and target.samefile(source):
            continue
        target.unlink(missing_ok=True)
        try:
            os.link(source.resolve(), target)
        except OSError:  # another device, or a file system without hard links
            shutil.copyfile(source, target)
    for path in folder.rglob("*"):
        relative = path.relative_to(folder)
        if relative.parts[0] != ".cache" and not path.is_dir() and relative.as_posix() not in wanted:
            path.unlink()  # of an earlier, other publication
    return folder


def upload(publication: Publication, repository: Repository, data_dir: Path, private: bool) -> None:
    """Send the files, then the manifest. Interrupted uploads continue: what the repository has is not sent again."""
    api = import_client().HfApi(endpoint(), token=access_token())
    place = {"repo_id": repository.repo_id, "repo_type": "dataset"}
    folder = stage(publication, repository, data_dir)
    write_json_inside(data_dir, ".publish/manifest.json", publication.manifest)
    try:
        api.create_repo(**place, private=private or None, exist_ok=True)
        if hasattr(api, "upload_large_folder"):  # from huggingface_hub 2 on, upload_folder does the same
            api.upload_large_folder(**place, folder_path=folder, private=private or None)
        else:
            api.upload_folder(**place, folder_path=folder, commit_message="Shards and tokenizers")
        manifest, remote = data_dir / ".publish" / "manifest.json", repository.remote_path("manifest.json")
        api.upload_file(**place, path_or_fileobj=manifest, path_in_repo=remote, commit_message="Manifest")
    except Exception as error:  # noqa: BLE001 (the client's errors and its HTTP library's share no useful base)
        try:
            check_worth_retrying(error, f"the upload to {repository.repo_id}")
        except RetryError as problem:
            raise NetworkError(f"the upload to {repository.repo_id} stopped: {problem}; run it again") from None


def check_published(publication: Publication, hub: Hub) -> None:
    """DataError unless the repository lists every file with the right size and, where it says so, sha256."""
    listed = downloader.list_files(hub)
    for file in publication.files:
        row = listed.get(file.relative) or {}
        if row.get("size") != file.size or row.get("sha256") not in (None, file.sha256):
            raise DataError(
                f"{file.relative} has {file.size} bytes and sha256 {file.sha256} here, but the repository lists "
                f"{row.get('size')} and {row.get('sha256')}; run the upload again"
            )


# ---------------------------------------------------------------- command


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("repo_id", metavar="REPO_ID", help="Hugging Face data set OWNER/NAME; made when it does not exist")
    add("--data-dir", type=Path, default=Path(__file__).resolve().parent, help="default: the folder of this script")
    add("--variant", action="append", help="publish this variant; may be repeated (default: all in the manifest)")
    add("--remote-root", default=DEFAULT_REMOTE_ROOT, help="folder in the repository (default %(default)s)")
    add("--private", action="store_true", help="make a new repository private")
    add("--dry-run", action="store_true", help="check and count everything, send nothing")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    repository = Repository(args.repo_id, args.remote_root.strip("/"), "main")
    if not args.dry_run and not access_token():
        raise DataError("uploading needs a token with write access in HF_TOKEN; --dry-run does without")
    publication = prepare(args.data_dir, args.variant)
    size = sum(file.size for file in publication.files)
    if args.dry_run:
        print(
            f"dry run: {len(publication.files)} files, {size / 1e6:,.1f} MB would go to {repository}; nothing was sent"
        )
        return
    with only_one(args.data_dir):
        hub = Hub(repository)
        publication = replace(publication, manifest=merge_with_remote(publication.manifest, hub, args.data_dir))
        upload(publication, repository, args.data_dir, args.private)
        check_published(publication, Hub(repository))
        shutil.rmtree(args.data_dir / ".publish", ignore_errors=True)
    print(f"published {len(publication.files)} files, {size / 1e6:,.1f} MB, in {repository}; sizes and hashes agree")


if __name__ == "__main__":
    shards.run_cli(main)
