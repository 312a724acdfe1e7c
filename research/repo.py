"""Git, as the loop needs it: worktrees in which candidates are committed and run; a ref for each tried commit; and the
one place that writes to the user's tree."""
from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Collection
from pathlib import Path

from research.store import FOLDER, RESULTS, SHORT, State

# The user's hooks, signatures and name are for the user's commits.
OWN = ("-c", "core.hooksPath=/dev/null", "-c", "commit.gpgSign=false", "-c", "gc.auto=0", "-c", "user.name=research",
       "-c", "user.email=research@localhost")

LOCK_SECONDS, LOCK_PAUSE = 300.0, 0.2  # for a `git commit` of the user, whose open editor holds the index

def git(root: Path, *arguments: str) -> str:
    """Standard output without its last line end. Raises ValueError with git's message."""
    for _ in range(int(LOCK_SECONDS / LOCK_PAUSE)):
        done = subprocess.run(["git", *OWN, *arguments], cwd=root, capture_output=True, check=False)
        if b"index.lock" not in done.stderr:
            break
        time.sleep(LOCK_PAUSE)
    if done.returncode:
        message = done.stderr.decode("utf-8", "replace").strip().replace("\n", "; ")
        raise ValueError(f"git {' '.join(arguments[:3])}: {message or f'exit status {done.returncode}'}")
    return done.stdout.decode("utf-8", "replace").removesuffix("\n")

def find_root() -> Path:
    """Also forgets the repository and index of a git that runs this (an alias, a hook): git here, in runs and in agents
    would use them in place of the worktrees' own."""
    for name in git(Path.cwd(), "rev-parse", "--local-env-vars").split():
        os.environ.pop(name, None)
    return Path(git(Path.cwd(), "rev-parse", "--show-toplevel"))

def exclude_own_files(root: Path) -> None:
    """In .git/info/exclude, so that the user's .gitignore stays as it is."""
    path = root / git(root, "rev-parse", "--git-path", "info/exclude")
    path.parent.mkdir(parents=True, exist_ok=True)
    old, own = path.read_text(encoding="utf-8") if path.exists() else "", f"/{RESULTS}\n/progress.png\n/{FOLDER}/\n"
    if own not in old:
        path.write_text(f"{old}\n{own}", encoding="utf-8")

def changed_files(root: Path, commit: str = "HEAD") -> list[str]:
    """Tracked files that differ from a commit, in index or tree."""
    return [name for name in git(root, "diff", "--name-only", "-z", commit).split("\0") if name]

def remove_tree(path: Path) -> None:
    """A folder of runs, also with folders in it that a run made read-only."""
    subprocess.run(["chmod", "-R", "u+rwX", path], capture_output=True, check=False)
    shutil.rmtree(path, ignore_errors=True)

class Repo:
    """The repository of one session."""

    def __init__(self, root: Path, state: State) -> None:
        self.root, self.script, self.links = root, state.script, state.links
        self.ref_folder, self.branch = f"refs/research/{state.tag}", f"refs/heads/research/{state.tag}"

    def tip(self) -> str:
        return git(self.root, "rev-parse", "--verify", self.branch)

    def parent(self, commit: str) -> str:
        return git(self.root, "rev-parse", f"{commit}^")

    def source(self, commit: str) -> bytes:
        return subprocess.run(["git", "cat-file", "blob", f"{commit}:{self.script}"], cwd=self.root,
                              capture_output=True, check=True).stdout

    def remember(self, number: int, commit: str) -> None:
        git(self.root, "update-ref", f"{self.ref_folder}/{number:04d}", commit, "")

    def tried(self, *options: str) -> dict[int, str]:
        """Commit of each experiment, by number."""
        lines = git(self.root, "for-each-ref", *options, self.ref_folder).splitlines()
        return {int(name.rsplit("/", 1)[1]): commit for commit, _, name in map(str.split, lines)}

    def same_script(self, source: bytes, but: Collection[str] = ()) -> str | None:
        """The first tried commit with exactly this script, but for some (their short names)."""
        return next((commit for commit in self.tried().values()
                     if commit[:SHORT] not in but and self.source(commit) == source), None)

    def worktree(self, gpu: str | None, commit: str) -> Path:
        """A new checkout of `commit`, one per GPU, with links to untracked data of the user's tree."""
        path = self.root / FOLDER / "work" / (gpu or "0")
        remove_tree(path)
        # Twice --force: the entry of the old one is still there, and locked when its making was killed.
        git(self.root, "worktree", "add", "--quiet", "--force", "--force", "--detach", str(path), commit)
        for link in self.links:
            target = path / link
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(self.root / link)
        return path

    def forget_half_made_worktrees(self) -> None:
        """A kill while git makes a worktree can leave its entry with an empty `commondir` or a HEAD of zeros. Then
        `worktree add`, `fsck` and others end at once (git 2.39), and `worktree prune` spares it: it is locked."""
        entries, own = Path(git(self.root, "rev-parse", "--git-common-dir"), "worktrees"), self.root.resolve() / FOLDER
        for gitdir in (self.root / entries).glob("*/gitdir"):
            files = gitdir.with_name("commondir"), gitdir.with_name("HEAD")
            half_made = any(not file.exists() or not file.read_text(encoding="utf-8").strip("0\n ") for file in files)
            if half_made and Path(gitdir.read_text(encoding="utf-8").strip()).is_relative_to(own):
                shutil.rmtree(gitdir.parent)

    def commit(self, gpu: str | None, base: str, source: bytes, message: str) -> str:
        """A commit on `base` with another script, made in a worktree: no branch or file of the user changes."""
        tree = self.worktree(gpu, base)
        (tree / self.script).write_bytes(source)
        git(tree, "commit", "--quiet", "--allow-empty", "-m", message, "--", self.script)
        return git(tree, "rev-parse", "HEAD")

    def moved(self, gpu: str | None, tip: str, commit: str) -> bytes | None:
        """The script of `tip` with the change of `commit` made in it too; None when they conflict."""
        tree = self.worktree(gpu, tip)
        try:
            git(tree, "cherry-pick", "--no-commit", commit)
        except ValueError:
            return None
        return (tree / self.script).read_bytes()

    def tree_source(self) -> bytes | None:
        path = self.root / self.script
        return path.read_bytes() if path.is_file() else None

    def settle(self, commit: str, kept: bool) -> str:
        """Advances the branch when `kept`. The tree's script follows when the branch is checked out, unless it is not
        the candidate's nor the base's: then it is newer work, as the text returned says. Repeating it is harmless."""
        base = self.parent(commit)
        if kept and self.tip() == base:
            git(self.root, "update-ref", self.branch, commit, base)
        if git(self.root, "rev-parse", "--symbolic-full-name", "HEAD") != self.branch:
            return ""
        if not git(self.root, "status", "--porcelain", "--", self.script):
            return ""
        tip = self.tip()
        if self.tree_source() in (None, *map(self.source, (base, commit, tip))):
            git(self.root, "checkout", "--quiet", tip, "--", self.script)
            return ""
        git(self.root, "reset", "--quiet", tip, "--", self.script)
        return f" ({self.script} was edited meanwhile and is left as it is)"

    def clear_locks(self, settling_since: float | None) -> None:
        """Removes lock files that this loop's git left behind when it was killed; those of the user's index and HEAD
        only when it was killed while it changed them, and if they are not older."""
        common, own = (self.root / git(self.root, "rev-parse", name) for name in ("--git-common-dir", "--git-dir"))
        for path in (common / f"{self.branch}.lock", *(common / self.ref_folder).glob("*.lock")):
            path.unlink(missing_ok=True)
        for path in (own / "index.lock", own / "HEAD.lock"):
            if settling_since is not None and path.exists() and path.stat().st_mtime >= settling_since - 1:
                path.unlink()
