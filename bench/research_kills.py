"""Kills the research loop at random moments and checks that the next start finds everything in order.

    python bench/research_kills.py --kills 200 --json OUT.json

Each round starts the loop in a repository with a simulated trainer, as `auto` with one or two slots or as `run`, or
starts a new session, and ends its process group with SIGKILL. The trainers are in sessions of their own and go on, as
after a real kill. Then the loop recovers, and `problems` lists what is lost, doubled, dirty or still running.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from golf.trial import marked  # noqa: E402
from research.loop import Loop  # noqa: E402
from research.store import SHORT, locked, whole_lines  # noqa: E402

TRAINER, AGENT = ROOT / "tests/research_trainer.py", ROOT / "tests/research_agent.py"
USER_FILES = {"user.txt": "an untracked file of the user\n", "helper.py": "CHANGED = False\n"}


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


def make_repository(folder: Path) -> None:
    folder.mkdir(parents=True)
    source = TRAINER.read_text(encoding="utf-8").replace("NOISE = 0.0\n", "NOISE = 0.002\n")
    (folder / "train_gpt.py").write_text(source.replace("SLEEP = 0.0\n", "SLEEP = 0.05\n"), encoding="utf-8")
    for name, text in USER_FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    git(folder, "init", "--quiet")
    git(folder, "add", "train_gpt.py", "helper.py")
    git(folder, "-c", "user.name=t", "-c", "user.email=t@localhost", "commit", "--quiet", "-m", "begin")


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "research", *arguments]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def start(folder: Path) -> subprocess.CompletedProcess:
    return subprocess.run(command("start", "night", "--budget", "1", "--limit", "5"), cwd=folder, env=environment(),
                          capture_output=True, text=True, check=False)


def kill_after(folder: Path, arguments: list[str], seconds: float) -> None:
    """SIGKILL to the loop's process group, which holds its git commands too but not the trainers."""
    process = subprocess.Popen(command(*arguments), cwd=folder, env=environment(), start_new_session=True,
                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(seconds)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def one_kill(folder: Path, rng: random.Random) -> str:
    """One way to work with the loop, cut short; its name."""
    agent = ["auto", "--agent", f"{sys.executable} {AGENT}", "--iterations", "50"]
    way = rng.choice(["auto", "auto", "two slots", "run"])
    if way == "run":
        script = folder / "train_gpt.py"
        level = rng.choice(["0.9", "0.95", "1.1"])
        script.write_text(re.sub(r"(?m)^LEVEL = .*", f"LEVEL = {level}", script.read_text()) + f"# {rng.random()}\n")
        kill_after(folder, ["run", "-d", f"level {level}"], rng.uniform(0.1, 1.2))
    else:
        kill_after(folder, agent + ["--gpus", "0,1"] * (way == "two slots"), rng.uniform(0.1, 1.8))
    return way


def problems(folder: Path, before: list[str]) -> list[str]:
    """What is wrong after recovery; `before` are the lines of results.tsv before the kill."""
    time.sleep(0.1)  # a child that the killed loop was just starting may still hold its lock
    with locked(folder):
        loop = Loop(folder)
        loop.recover()
    lines, rows, tried = whole_lines(folder / "results.tsv"), loop.rows(), loop.repo.tried()
    found = []
    if lines[:len(before)] != before:
        found.append("earlier rows changed")
    counts = Counter(row.commit for row in rows)
    found += [f"{commit} has {counts[commit[:SHORT]]} rows" for commit in tried.values() if counts[commit[:SHORT]] != 1]
    found += [] if len(tried) == len(rows) else [f"{len(tried)} commits but {len(rows)} rows"]
    kept = [row.commit for row in rows if row.status == "keep"]
    if kept and not loop.repo.tip().startswith(kept[-1]):
        found.append(f"the branch is not at the last keep {kept[-1]}")
    script, expected = folder / "train_gpt.py", {"?? user.txt"}
    if loop.repo.same_script(script.read_bytes()) is None:  # killed before it was committed: it must stay
        expected.add(" M train_gpt.py")
    found += [f"tree: {line}" for line in git(folder, "status", "--porcelain").splitlines() if line not in expected]
    found += [f"{name} changed" for name, text in USER_FILES.items() if (folder / name).read_text() != text]
    # A lock in the entry of one of the loop's own worktrees goes with it: each run makes its worktree anew.
    found += [f"lock left: {path}" for path in (folder / ".git").rglob("*.lock") if "worktrees" not in path.parts]
    found += [f"process {pid} left" for pid in marked(folder / ".research")]
    return found


def campaign(kills: int, seed: int) -> dict[str, object]:
    rng, ways, bad, began = random.Random(seed), Counter(), [], time.monotonic()
    with tempfile.TemporaryDirectory() as base:
        main = Path(base).resolve() / "main"
        make_repository(main)
        assert start(main).returncode == 0, "the session must start"
        for number in range(kills):
            if number % 10 == 9:
                fresh = main.with_name("fresh")
                make_repository(fresh)
                kill_after(fresh, ["start", "night", "--budget", "1", "--limit", "5"], rng.uniform(0.05, 0.7))
                way, again = "start", start(fresh)
                found = problems(fresh, []) if again.returncode in (0, 2) else [again.stderr]
                if again.returncode == 2 and "is under way" not in again.stderr:
                    found.append(again.stderr)
                shutil.rmtree(fresh)
            else:
                before = whole_lines(main / "results.tsv")
                way = one_kill(main, rng)
                found = problems(main, before)
                git(main, "checkout", "--quiet", "--", "train_gpt.py")
            ways[way] += 1
            bad += [f"kill {number} ({way}): {problem}" for problem in found]
        rows = Loop(main).rows()
        fsck = subprocess.run(["git", "fsck", "--connectivity-only"], cwd=main, capture_output=True, text=True,
                              check=False)
        bad += [] if fsck.returncode == 0 else [f"git fsck: {fsck.stderr}"]
    return {"kills": kills, "ways": dict(ways), "problems": bad, "experiments": len(rows) - 1,
            "statuses": dict(Counter(row.status for row in rows)),
            "interrupted": sum(row.reason.startswith("interrupted") for row in rows),
            "seconds": round(time.monotonic() - began, 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args()
    result = {"command": " ".join(["python", "bench/research_kills.py", *sys.argv[1:]]),
              "commit": git(ROOT, "rev-parse", "--short", "HEAD").strip(),
              "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
              "python": platform.python_version(), "git": git(ROOT, "--version").split()[-1],
              **campaign(args.kills, args.seed)}
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    return int(bool(result["problems"]))


if __name__ == "__main__":
    sys.exit(main())
