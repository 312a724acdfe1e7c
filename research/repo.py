"""Git, as the loop needs it: commits that differ in the script alone, made without touching index or working tree; one
ref for each tried commit; worktrees in which the runs happen; and the one place that writes to the user's tree."""
from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from research.store import FOLDER, RESULTS, State

QUIET = ("-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false")  # the user's hooks are for the user's commits
START_BYTES = 100 * 2**20  # a first commit of more is refused: most likely data that .gitignore does not name


def git(root: Path, *arguments: str, data: bytes | None = None, **environment: str) -> str:
    """Standard output without its last line end. Raises ValueError with git's message."""
    done = subprocess.run(["git", *QUIET, *arguments], cwd=root, input=data, capture_output=True, check=False,
                          env={**os.environ, **environment})
    if done.returncode:
        message = done.stderr.decode("utf-8", "replace").strip().replace("\n", "; ")
        raise ValueError(f"git {' '.join(arguments[:3])}: {message or f'exit status {done.returncode}'}")
    return done.stdout.decode("utf-8", "replace").removesuffix("\n")


def find_root() -> Path:
    return Path(git(Path.cwd(), "rev-parse", "--show-toplevel"))


def identity(root: Path) -> dict[str, str]:
    """Names for commits on a machine where git knows none."""
    with contextlib.suppress(ValueError):
        git(root, "var", "GIT_COMMITTER_IDENT")
        return {}
    return {f"GIT_{role}_{kind}": value for role in ("AUTHOR", "COMMITTER")
            for kind, value in (("NAME", "research"), ("EMAIL", "research@localhost"))}


# -- start -------------------------------------------------------------------------------------------------------------

def exclude_own_files(root: Path) -> None:
    """In .git/info/exclude, so that the user's .gitignore stays as it is."""
    path = root / git(root, "rev-parse", "--git-path", "info/exclude")
    path.parent.mkdir(parents=True, exist_ok=True)
    old = path.read_text(encoding="utf-8") if path.exists() else ""
    names = ("results.tsv", "progress.png", f"{FOLDER}/")
    lines = [f"/{name}" for name in names if f"/{name}" not in old.split("\n")]
    if lines:
        path.write_text(old + "\n" * (not old.endswith("\n") and bool(old)) + "\n".join(lines) + "\n", encoding="utf-8")


def first_commit(root: Path) -> None:
    """Commits every file that is not ignored, in a repository fresh from `git init`."""
    names = git(root, "ls-files", "-z", "--others", "--exclude-standard").split("\0")
    size = sum((root / name).lstat().st_size for name in names if name)
    if size > START_BYTES:
        raise ValueError(f"the first commit would hold {size} bytes, at most {START_BYTES} are taken; name data in "
                         ".gitignore, or commit by hand")
    git(root, "add", "--all")
    git(root, "commit", "--quiet", "--no-verify", "-m", "Start of the research", **identity(root))


def changed_files(root: Path, *against: str) -> list[str]:
    """Tracked files that differ from a commit (by default HEAD), in index or tree."""
    return [name for name in git(root, "diff", "--name-only", "-z", *(against or ("HEAD",))).split("\0") if name]


class Repo:
    """The repository of one session."""

    def __init__(self, root: Path, state: State) -> None:
        self.root, self.script, self.branch = root, state.script, state.branch
        self.ref_folder = f"refs/research/{state.tag}"

    def git(self, *arguments: str, **options) -> str:
        return git(self.root, *arguments, **options)

    # -- commits and refs ----------------------------------------------------------------------------------------------

    def tip(self) -> str:
        return self.git("rev-parse", "--verify", f"refs/heads/{self.branch}")

    def blob(self, commit: str) -> str:
        return self.git("rev-parse", f"{commit}:{self.script}")

    def source(self, commit: str) -> bytes:
        return subprocess.run(["git", "cat-file", "blob", f"{commit}:{self.script}"], cwd=self.root,
                              capture_output=True, check=True).stdout

    def commit_script(self, base: str, source: bytes, message: str) -> str:
        """A commit on `base` with another script; no branch, index or file changes."""
        blob = self.git("hash-object", "-w", "--stdin", data=source)
        mode = self.git("ls-tree", base, "--", self.script).split()[0]
        with tempfile.TemporaryDirectory(dir=self.root / FOLDER) as folder:
            index = {"GIT_INDEX_FILE": f"{folder}/index"}
            self.git("read-tree", base, **index)
            self.git("update-index", "--cacheinfo", f"{mode},{blob},{self.script}", **index)
            tree = self.git("write-tree", **index)
        return self.git("commit-tree", tree, "-p", base, data=message.encode(), **identity(self.root))

    def remember(self, number: int, commit: str) -> None:
        self.git("update-ref", f"{self.ref_folder}/{number:04d}", commit, "")

    def tried(self) -> dict[int, str]:
        """Commit of each experiment, by number."""
        lines = self.git("for-each-ref", "--format=%(refname) %(objectname)", self.ref_folder).split("\n")
        return {int(name.rsplit("/", 1)[1]): commit for name, commit in (line.split() for line in lines if line)}

    def short(self, commit: str) -> str:
        return self.git("rev-parse", "--short=7", commit)

    def same_script(self, source: bytes) -> int | None:
        """Number of the first experiment with exactly this script."""
        tried = self.tried()
        asked = "\n".join(f"{commit}:{self.script}" for commit in tried.values()).encode()
        blobs = [line.split()[0] for line in self.git("cat-file", "--batch-check", data=asked).split("\n") if line]
        wanted = self.git("hash-object", "--stdin", data=source)
        return next((number for number, blob in zip(tried, blobs) if blob == wanted), None)

    def merged(self, ours: str, base: str, theirs: str) -> bytes | None:
        """The script with the changes from `base` to `theirs` made in `ours` too; None when they conflict."""
        with tempfile.TemporaryDirectory(dir=self.root / FOLDER) as folder:
            paths = [Path(folder) / name for name in ("ours", "base", "theirs")]
            for path, commit in zip(paths, (ours, base, theirs)):
                path.write_bytes(self.source(commit))
            done = subprocess.run(["git", "merge-file", "-p", *map(str, paths)], capture_output=True, check=False)
        return done.stdout if done.returncode == 0 else None

    # -- the user's tree -----------------------------------------------------------------------------------------------

    def tree_blob(self) -> str | None:
        path = self.root / self.script
        return self.git("hash-object", "--stdin", data=path.read_bytes()) if path.is_file() else None

    def settle(self, base: str, candidate: str, kept: bool) -> str:
        """Advances the branch when `kept`, and lets the tree's script follow the branch. Repeating it is harmless.

        Only the script is written, and only if it is the candidate's or the base's; anything else in it is newer work
        of the user. Returns a remark on that, else an empty text."""
        if kept and self.tip() == base:
            self.git("update-ref", f"refs/heads/{self.branch}", candidate, base)
        tip, remark = self.tip(), ""
        if self.git("rev-parse", "--symbolic-full-name", "HEAD") == f"refs/heads/{self.branch}":
            if self.tree_blob() in (self.blob(base), self.blob(candidate), self.blob(tip), None):
                self.git("checkout", "--quiet", tip, "--", self.script)
            else:
                self.git("reset", "--quiet", tip, "--", self.script)
                remark = f"{self.script} was edited meanwhile and is left as it is"
        return remark

    @contextlib.contextmanager
    def settling(self) -> Iterator[None]:
        """Marks the time in which a kill leaves a row without its git step, or a lock of git."""
        (self.root / FOLDER / "settling").touch()
        yield
        (self.root / FOLDER / "settling").unlink()

    def clear_locks(self) -> bool:
        """Removes lock files that this loop's git left behind when it was killed; only under the loop's own lock. True
        when a git step may be missing."""
        common = self.root / self.git("rev-parse", "--git-common-dir")
        stale = [common / f"refs/heads/{self.branch}.lock", *(common / self.ref_folder).glob("*.lock")]
        for link in (self.root / FOLDER / "work").glob("*/.git"):
            stale += Path(link.read_text(encoding="utf-8").removeprefix("gitdir:").strip()).glob("*.lock")
        mark = self.root / FOLDER / "settling"
        interrupted = mark.exists()
        if interrupted:
            own = self.root / self.git("rev-parse", "--git-dir")
            stale += [path for path in (own / "index.lock", own / "HEAD.lock")
                      if path.exists() and path.stat().st_mtime >= mark.stat().st_mtime - 1]
        for path in stale:
            path.unlink(missing_ok=True)
        mark.unlink(missing_ok=True)
        return interrupted

    # -- worktrees -----------------------------------------------------------------------------------------------------

    def worktree(self, name: str, commit: str, links: list[str]) -> Path:
        """A clean checkout of `commit` in `.research/work/`, with links to untracked data of the user's tree."""
        path = self.root / FOLDER / "work" / name
        inside = {"GIT_CEILING_DIRECTORIES": str(path.parent)}  # never the user's repository, which lies above
        for attempt in range(3):
            try:
                if (path / ".git").exists():
                    git(path, "checkout", "--quiet", "--force", "--detach", commit, **inside)
                else:
                    shutil.rmtree(path, ignore_errors=True)
                    self.git("worktree", "prune")  # twice --force: a killed add leaves its entry locked
                    self.git("worktree", "add", "--quiet", "--force", "--force", "--detach", str(path), commit)
                git(path, "clean", "-ffdxq", **inside)
                break
            except ValueError:  # a checkout that a kill left half done
                if attempt == 2:
                    raise
                shutil.rmtree(path, ignore_errors=True)
                time.sleep(0.1 * attempt)
        for link in links:
            target = path / link
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(self.root / link)
        return path


def untracked_data(root: Path, folders: list[str]) -> list[str]:
    """Untracked files and folders below these, as seen from `root`: what a run in a worktree would miss."""
    folders = [folder for folder in folders if (root / folder).exists()]
    if not folders:
        return []
    names = git(root, "ls-files", "-z", "--others", "--directory", "--", *folders).split("\0")
    own = (FOLDER, RESULTS)
    return [name.rstrip("/") for name in names if name and "__pycache__" not in name and not name.startswith(own)]
