"""Places in a data folder that downloads may write to: nothing outside it, whatever links lie there already."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import shards
from shards import DataError


def inside(data_dir: Path, relative: str) -> Path:
    """data_dir/relative with its folder made; DataError when links lead that folder out of data_dir."""
    root, path = data_dir.resolve(), data_dir / relative
    folder = path.parent.resolve()
    if folder != root and root not in folder.parents:
        raise DataError(
            f"{path.parent} is a link to {folder}, outside {root}, where nothing may be written; remove the link, or "
            "choose that place with --data-dir"
        )
    folder.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise DataError(f"{path} is a folder where a file belongs; remove it")
    return path


def scratch(data_dir: Path, relative: str) -> Path:
    """A place under .download/ for a file on its way; never a link that someone left there."""
    path = inside(data_dir, f".download/{relative}")
    if path.is_symlink():
        path.unlink()
    return path


def move(source: Path, target: Path) -> None:
    """Rename a checked file into place; DataError when that is another disk, where no rename leads."""
    try:
        source.replace(target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        raise DataError(
            f"{target.parent} is on another disk than {source.parent}, so that nothing can be renamed into it; unmount "
            "it, or choose a folder on that disk with --data-dir"
        ) from None


def write_json_inside(data_dir: Path, relative: str, value: dict) -> None:
    """Write JSON and rename it into place, following no link."""
    name = PurePosixPath(relative).name
    temporary, _ = scratch(data_dir, name), scratch(data_dir, f"{name}.part")
    target = inside(data_dir, relative)
    shards.write_json(temporary, value)
    move(temporary, target)


@contextlib.contextmanager
def only_one(data_dir: Path) -> Iterator[None]:
    """Hold the folder's lock, so that two downloads never write to the same half-fetched file."""
    lock = scratch(data_dir, "lock")
    with shards.locked(lock, f"another download is at work in {data_dir}; wait for it, or end it first"):
        yield
        lock.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # half-fetched files of another download stay, for it to continue
            lock.parent.rmdir()
