"""The command line: start, run, auto, history, report, promote."""
from __future__ import annotations

import argparse
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from golf import cli as golf_cli
from golf.cli import add_command, print_json, print_table, write_file
from research import guard, report
from research.loop import Loop, opened
from research.propose import Agent, NoProposal, OptunaSearch
from research.repo import Repo, changed_files, exclude_own_files, find_root, git
from research.store import FOLDER, RESULTS, SHORT, Row, State, load_state, locked, one_line

FAILURES_IN_A_ROW = 5  # of an agent, before `auto` gives up
FAILED_RUNS_IN_A_ROW = 3  # of candidates, before `auto` asks whether the kept script still runs

def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m research",
        description="A fixed-budget research loop on one training script (see research/program.md).",
        epilog="Exit status: 0 fine, 1 the experiment failed, 2 usage or bad input, 130 interrupted.")
    commands = parser.add_subparsers(dest="command_name", metavar="COMMAND", required=True)
    add_start(commands)
    run = add_command(commands, "run", run_command, "try the script as it is in the tree now")
    run.add_argument("-d", "--description", required=True, help="what was changed, in a few words")
    add_auto(commands)
    history = add_command(commands, "history", report.history_command, "all experiments with their verdicts' reasons")
    history.add_argument("--last", type=int, default=0, metavar="N", help="only the last N")
    add_command(commands, "report", report.report_command, "what was gained, the keep rate, and progress.png")
    promote = add_command(commands, "promote", report.promote_command, "make a checked record of the kept script")
    for name in ("track", "name", "--author", "--github-id", "--blurb", "--records"):
        required = {"required": name != "--records"} if name.startswith("-") else {}
        promote.add_argument(name, help="as in `golf new`", **required)
    promote.add_argument("--seeds", type=int, default=3, help="runs it needs; missing ones are made (default 3)")
    for command in (commands.choices[name] for name in ("start", "run", "promote")):
        command.add_argument("--gpu", help="number of the GPU to use")
    return parser

def add_start(commands: Any) -> None:
    start = add_command(commands, "start", start_command, "begin: branch research/TAG and a baseline, run twice")
    option = start.add_argument
    option("tag", help="short name, such as a date: mar5")
    option("--script", default="train_gpt.py", help="the one file that may change (default %(default)s)")
    option("--command", default="", help="how to run it from the root (default: this Python and the script)")
    option("--budget", type=float, default=State.budget, help="seconds of training of a run (default %(default)g)")
    option("--limit", type=float, help="seconds in all, after which a run is ended (default: twice the budget)")
    option("--cap-bytes", type=int, default=State.cap_bytes, help="total_bytes at most (default %(default)s)")
    option("--link", action="append", default=[], metavar="PATH", help="untracked path, besides data, that runs need")

def add_auto(commands: Any) -> None:
    auto = add_command(commands, "auto", auto_command, "try proposals of an agent or a search until a limit or Ctrl-C")
    source = auto.add_mutually_exclusive_group(required=True)
    source.add_argument("--agent", metavar="COMMAND", help="reads the prompt from stdin or {prompt}, edits the script")
    source.add_argument("--proposer", choices=["optuna"], help="search the script's numbers without an agent")
    option = auto.add_argument
    option("--agent-seconds", type=float, default=900.0, help="time of one call (default %(default)g)")
    option("--settings", default="", metavar="NAME,...", help="numbers to search (default: see program.md)")
    option("--gpus", default="", metavar="0,1,...", help="one candidate per GPU at a time")
    option("--iterations", type=int, default=sys.maxsize, help="proposals at most")
    option("--hours", type=float, default=math.inf, help="start nothing new after so long")
    option("--target", type=float, default=0.0, metavar="BPB", help="end when the kept score is at most this")
    option("--plateau", type=int, default=sys.maxsize, metavar="N", help="end after N experiments without a keep")

def main(arguments: list[str] | None = None) -> int:
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup it is ignored, and must stay so
            signal.signal(number, signal.default_int_handler)
    try:
        return golf_cli.main(arguments, build_parser())
    except KeyboardInterrupt:
        print("interrupted: what ran is recorded, the tree is that of the kept script", file=sys.stderr)
        return 130

def show_row(row: Row, as_json: bool) -> int:
    if as_json:
        print_json(vars(row))
    else:
        print_table(row.description, ("commit", "val_bpb", "gain", "status", "reason"),
                    [(row.commit, f"{row.val_bpb:.6f}", f"{row.gain:+.6f}", row.status, row.reason)])
    return 0 if row.status in ("keep", "discard") else 1

def start_command(args: argparse.Namespace) -> int:
    root = find_root()
    with locked(root):
        exclude_own_files(root)
        begin(root, args)
    with opened(root) as loop:
        loop.baseline(args.gpu)
        return show_row(loop.rows()[0], args.json)

def begin(root: Path, args: argparse.Namespace) -> None:
    """Checks everything, writes the state, then makes the branch; all again when it ended before the baseline."""
    again = (path := root / FOLDER / "state.json").exists() and load_state(root).tag == args.tag
    if (root / RESULTS).exists():
        raise ValueError(f"a session is under way in {root}; go on with run or auto, start in a folder of "
                         f"`git worktree add`, or move {FOLDER} and {RESULTS} away")
    state = make_state(root, args)
    if not git(root, "for-each-ref", "--count=1"):  # fresh from git init
        git(root, "add", "--all")
        git(root, "commit", "--quiet", "-m", "Start of the research")
    branch = f"research/{args.tag}"
    exists = git(root, "for-each-ref", f"refs/heads/{branch}")
    if not again and (exists or git(root, "for-each-ref", f"refs/{branch}")):
        raise ValueError(f"branch {branch} or its experiments exist; choose another tag")
    if changed := changed_files(root):
        raise ValueError(f"the tree is not clean ({', '.join(changed[:3])}); commit or stash first")
    git(root, "ls-files", "--error-unmatch", "--", state.script)
    if (repo := Repo(root, state)).tree_source() != repo.source("HEAD"):
        raise ValueError(f"{state.script} is not as git holds it: its line ends are changed at checkout; unset "
                         "core.autocrlf and its eol attribute, delete it and check it out again")
    if again:
        repo.clear_locks(path.stat().st_mtime)
    write_file(path, json.dumps(asdict(state), indent=1))
    try:
        git(root, "checkout", "--quiet", *([] if exists else ["-b"]), branch)
    except ValueError:
        path.unlink()  # else the next start would take this one for begun
        raise

def make_state(root: Path, args: argparse.Namespace) -> State:
    if not re.fullmatch(r"[\w-]+", args.tag):
        raise ValueError(f"tag {args.tag!r} must be letters, digits, - and _; choose another")
    script, links = os.path.normpath(args.script), [os.path.normpath(link) for link in args.link]
    for option, path in (("--script", script), *(("--link", link) for link in links)):
        if Path(path).is_absolute() or path.startswith("..") or not (root / path).exists():
            raise ValueError(f"{option} {path}: no such path below {root}; give it as seen from there")
    if (root / script).is_symlink():
        raise ValueError(f"--script {script} is a link, which git holds in place of the text; give the file itself")
    limit = 2 * args.budget if args.limit is None else args.limit
    if not 0 < args.budget <= limit:
        raise ValueError(f"budget {args.budget:g}, limit {limit:g}: need 0 < budget <= limit")
    data = os.environ.get("DATA_DIR", "data")
    if os.path.normpath(data).startswith(".."):
        raise ValueError(f"DATA_DIR={data} leaves the repository, and runs happen in worktrees; give an absolute path")
    command = shlex.split(args.command) or [sys.executable, script]
    if "/" in command[0] and (root / command[0]).exists():
        command[0] = str(root / command[0])  # the worktrees have no .venv
    if shutil.which(command[0]) is None:
        raise ValueError(f"--command {args.command}: {command[0]!r} cannot be started; give a program that exists")
    untracked = ("ls-files", "-z", "--others", "--directory", "--exclude=__pycache__", "--", data)
    if not Path(data).is_absolute():
        links = [name.rstrip("/") for name in git(root, *untracked).split("\0") if name] + links
    return State(args.tag, script, command, args.budget, limit, args.cap_bytes, links, guard.fingerprint_data(root),
                 guard.outside_settings((root / script).read_bytes()))

def run_command(args: argparse.Namespace) -> int:
    root = find_root()
    with opened(root) as loop:
        repo, base = loop.repo, loop.repo.tip()
        source = repo.tree_source()
        if source in (None, repo.source(base)):
            raise ValueError(f"{repo.script} is as it was kept last; change it, then run")
        if same := loop.same_script(source):
            raise ValueError(f"this script was tried as {same[:SHORT]} (python -m research history); change it")
        changed = changed_files(root, base)
        base = loop.baseline(args.gpu)
        return show_row(loop.experiment(args.gpu, base, source, one_line(args.description), changed), args.json)

@dataclass
class Drive:
    """Threads that propose and try, one per GPU, until a limit is reached."""
    loop: Loop
    propose: Agent | OptunaSearch
    args: argparse.Namespace
    rows_before: int
    began: float = field(default_factory=time.monotonic)
    proposals: int = 0
    failures: int = 0
    failed_runs: int = 0
    ended: str = ""

    def work(self, gpu: str | None) -> None:
        try:
            while self.another():
                self.once(gpu)
        except BaseException:
            self.loop.stop.set()
            raise

    def another(self) -> bool:
        """Counts a proposal, unless a limit is reached."""
        with self.loop.mutex:
            rows, args = self.loop.rows()[self.rows_before:], self.args
            kept = [row.val_bpb for _, row in self.loop.kept()]
            limits = {f"{args.iterations} iterations": self.proposals >= args.iterations,
                      f"{args.hours:g} hours": time.monotonic() - self.began > 3600 * args.hours,
                      f"the target of {args.target:g}": bool(kept) and kept[-1] <= args.target,
                      f"{args.plateau} experiments without a keep": report.idle(rows) >= args.plateau}
            self.ended = self.ended or next((name for name, reached in limits.items() if reached), "")
            self.proposals += 1
            return not (self.ended or self.loop.stop.is_set())

    def once(self, gpu: str | None) -> None:
        with self.loop.mutex:  # one thread measures the baseline, also of a commit made by hand; the others find it
            base = self.loop.baseline(gpu)
        try:
            proposal = self.propose(gpu, base)
        except NoProposal as error:
            self.failures += 1
            self.loop.say(f"  {error}")
            if self.failures >= FAILURES_IN_A_ROW:
                raise ValueError(f"{self.failures} calls in a row brought no proposal; the last: {error}") from None
            return
        self.failures = 0
        row = self.loop.experiment(gpu, base, proposal.source, proposal.description, proposal.changed)
        proposal.learn(row)
        self.failed_runs = self.failed_runs + 1 if row.status in ("crash", "timeout", "nan") else 0
        if self.failed_runs and self.failed_runs % FAILED_RUNS_IN_A_ROW == 0:
            self.loop.check_machine(gpu)

def auto_command(args: argparse.Namespace) -> int:
    gpus = [name for name in args.gpus.split(",") if name] or [None]
    if len(set(gpus)) < len(gpus) or args.iterations < 1 or args.plateau < 1:
        raise ValueError(f"gpus {args.gpus or '-'}, iterations {args.iterations}, plateau {args.plateau}: need "
                         "different GPUs and at least 1 of the others")
    if len(gpus) > 1:  # on 32 cores four runs took 4 minutes to their first line; three with 4 threads each 71 s
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // len(gpus))))
    with opened(find_root()) as loop:
        names = [name.upper() for name in args.settings.split(",") if name]
        propose = OptunaSearch(loop, names) if args.proposer else Agent(loop, args.agent, args.agent_seconds)
        drive = Drive(loop, propose, args, len(loop.rows()))
        with ThreadPoolExecutor(len(gpus)) as pool:
            futures = [pool.submit(drive.work, gpu) for gpu in gpus]
            try:
                wait(futures)
            except KeyboardInterrupt:
                loop.stop.set()
                raise
        for error in (future.exception() for future in futures):
            if error and not isinstance(error, KeyboardInterrupt):  # the cause, not who was stopped by it
                raise error
        loop.say(f"ended after {drive.ended}")
        return report.report_command(args)
