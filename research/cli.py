"""The command line: start, run, auto, history, report, promote."""
from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from golf.cli import add_command, print_json, print_table
from research import guard, report
from research.decide import Rule
from research.loop import Loop, Slot
from research.propose import Agent, NoProposal, OptunaSearch, Proposal
from research.repo import changed_files, exclude_own_files, find_root, first_commit, git, untracked_data
from research.store import FOLDER, RESULTS, Row, State, load_state, locked, one_line, save_state
from research.trial import Limits, Stopped

TAG = re.compile(r"[A-Za-z0-9][\w.-]*")
FAILURES_IN_A_ROW = 5  # of an agent, before `auto` gives up


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="research", description="A fixed-budget research loop on one training script (see research/program.md).",
        epilog="Exit status: 0 fine, 1 the experiment failed, 2 usage or bad input, 130 interrupted.")
    commands = parser.add_subparsers(dest="command_name", metavar="COMMAND", required=True)
    add_start(commands)
    run = add_command(commands, "run", run_command, "try the script as it is in the tree now")
    run.add_argument("-d", "--description", required=True, help="what was changed, in a few words")
    run.add_argument("--gpu", help="number of the GPU to use")
    add_auto(commands)
    report.add_parsers(commands)
    return parser


def add_start(commands: Any) -> None:
    start = add_command(commands, "start", start_command, "begin: branch research/TAG and a baseline, run twice")
    start.formatter_class = argparse.ArgumentDefaultsHelpFormatter
    option = start.add_argument
    option("tag", help="short name, such as a date: mar5")
    option("--script", default="train_gpt.py", help="the one file that may change")
    option("--command", help="how to run it from the repository's root; None: this Python and the script")
    option("--budget", type=float, default=300.0, help="seconds of training, passed as MAX_WALLCLOCK_SECONDS")
    option("--limit", type=float, help="seconds in all, after which a run is ended; None: twice the budget")
    option("--cap-bytes", type=int, default=Limits.total_bytes, help="total_bytes at most")
    option("--seed", type=int, default=1337, help="first seed; each run has the next one")
    option("--k", type=float, default=Rule.k, help="standard errors that a gain must exceed")
    option("--runs", type=int, default=Rule.most_runs, help="runs of a candidate at most")
    option("--frozen", default=guard.FROZEN, help="regular expression: definitions that may not change")
    option("--link", action="append", default=[], metavar="PATH", help="untracked path, besides data, that runs need")
    option("--gpu", help="number of the GPU to use")


def add_auto(commands: Any) -> None:
    auto = add_command(commands, "auto", auto_command, "try proposals of an agent or a search until a limit or Ctrl-C")
    source = auto.add_mutually_exclusive_group(required=True)
    source.add_argument("--agent", metavar="COMMAND", help="command line that reads the prompt from stdin (or the file "
                        "{prompt}) and edits the script in its working directory")
    source.add_argument("--proposer", choices=["optuna"], help="search the script's numbers without an agent")
    option = auto.add_argument
    option("--agent-seconds", type=float, default=900.0, help="time of one call (default %(default)g)")
    option("--settings", default="", metavar="NAME,...", help="numbers to search (default: all but whole numbers)")
    option("--gpus", default="", metavar="0,1,...", help="one candidate per GPU at a time")
    option("--iterations", type=int, default=sys.maxsize, help="proposals at most")
    option("--hours", type=float, default=math.inf, help="start nothing new after so long")
    option("--target", type=float, default=0.0, metavar="BPB", help="end when the kept score is at most this")
    option("--plateau", type=int, default=sys.maxsize, metavar="N", help="end after N experiments without a keep")


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; errors of the user become one line on stderr and status 2."""
    args = build_parser().parse_args(arguments)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) == signal.SIG_DFL:  # under nohup it is ignored, and must stay so
            signal.signal(number, signal.default_int_handler)
    try:
        return args.run(args)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (KeyboardInterrupt, Stopped):
        print("interrupted: what ran is recorded, the tree is that of the kept script", file=sys.stderr)
        return 130
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def open_loop(root: Path) -> Loop:
    """The session, with whatever a killed loop left behind put in order."""
    loop = Loop(root, lambda text: print(text, file=sys.stderr, flush=True))
    for row in loop.recover():
        loop.say(f"found half done: {row.commit} {row.description}; recorded as {row.status}")
    return loop


def show_row(row: Row, as_json: bool) -> int:
    if as_json:
        print_json(vars(row))
    else:
        print_table(row.description, ("commit", "val_bpb", "gain", "status", "reason"),
                    [(row.commit, f"{row.val_bpb:.6f}", f"{row.gain:+.6f}", row.status, row.reason)])
    return 0 if row.status in ("keep", "discard") else 1


# -- start -------------------------------------------------------------------------------------------------------------

def start_command(args: argparse.Namespace) -> int:
    if not TAG.fullmatch(args.tag) or args.tag.endswith((".", ".lock")) or ".." in args.tag:
        raise ValueError(f"tag {args.tag!r} must be letters, digits, - _ and single dots; choose another")
    root = find_root()
    with locked(root):
        exclude_own_files(root)
        begin(root, args)
        loop = open_loop(root)
        with loop.ending_cleanly():
            loop.baseline(Slot("0", args.gpu))
    return show_row(loop.rows()[0], args.json)


def resumes(root: Path, tag: str) -> bool:
    """Whether a start with this tag made the branch, and no more. Raises ValueError when a session is under way."""
    if not (root / FOLDER / "state.json").exists():
        return False
    old = load_state(root)
    if old.tag == tag and not (root / RESULTS).exists():
        return bool(git(root, "for-each-ref", f"refs/heads/{old.branch}"))
    raise ValueError(f"session {old.tag} is under way in {root}; go on with run or auto, start in a folder of "
                     f"`git worktree add`, or move {FOLDER} and {RESULTS} away")


def begin(root: Path, args: argparse.Namespace) -> None:
    """Checks everything, makes the branch, then writes the state."""
    again = resumes(root, args.tag)
    state = make_state(root, args)
    if (root / RESULTS).exists():
        raise ValueError(f"{root / RESULTS} exists and is kept; move it away")
    if not again and git(root, "for-each-ref", f"refs/heads/{state.branch}", f"refs/research/{state.tag}"):
        raise ValueError(f"branch {state.branch} or its experiments exist; choose another tag")
    if not is_born(root):
        first_commit(root)
    if changed := changed_files(root):
        raise ValueError(f"the tree is not clean ({', '.join(changed[:3])}); commit or stash first")
    if not git(root, "ls-files", "--", args.script):
        raise ValueError(f"{args.script} is not tracked; git add and commit it first")
    if missing := [link for link in args.link if Path(link).is_absolute() or not (root / link).exists()]:
        raise ValueError(f"--link {missing[0]}: no such path below {root}; give it as seen from there")
    data = os.environ.get("DATA_DIR", "data")
    state.links = untracked_data(root, [] if Path(data).is_absolute() else [data]) + args.link
    save_state(root, state)
    git(root, "checkout", "--quiet", *([] if again else ["-b"]), state.branch)


def is_born(root: Path) -> bool:
    try:
        git(root, "rev-parse", "--verify", "HEAD")
    except ValueError:
        return False
    return True


def make_state(root: Path, args: argparse.Namespace) -> State:
    script = root / args.script
    if not script.is_file() or Path(args.script).is_absolute():
        raise ValueError(f"--script {args.script}: no such file below {root}; give its path from there")
    limit = 2 * args.budget if args.limit is None else args.limit
    if not 0 < args.budget <= limit or args.runs < 2 or args.k <= 0 or args.seed < 0:
        raise ValueError(f"budget {args.budget:g}, limit {limit:g}, runs {args.runs}, k {args.k:g}, seed {args.seed}: "
                         "need 0 < budget <= limit, runs of at least 2, k above 0, seed of at least 0")
    data = os.environ.get("DATA_DIR", "data")
    if not Path(data).is_absolute() and Path(os.path.normpath(data)).parts[:1] == ("..",):
        raise ValueError(f"DATA_DIR={data} leaves the repository, and runs happen in worktrees; give an absolute path")
    try:
        guard.frozen_parts(script.read_bytes(), args.frozen)
    except (SyntaxError, re.error) as error:
        raise ValueError(f"{args.script} or --frozen cannot be read: {error}") from None
    command = shlex.split(args.command) if args.command else [sys.executable, args.script]
    if "/" in command[0] and (root / command[0]).exists():
        command[0] = str(root / command[0])  # the worktrees have no .venv
    return State(args.tag, args.script, command, Limits(args.budget, limit, args.cap_bytes), Rule(args.k, args.runs),
                 args.seed, args.frozen, data=guard.fingerprint_data(root, dict(os.environ)))


# -- run ---------------------------------------------------------------------------------------------------------------

def run_command(args: argparse.Namespace) -> int:
    root = find_root()
    description = one_line(args.description)
    if not description:
        raise ValueError("-d '' says nothing; describe the change")
    with locked(root):
        loop = open_loop(root)
        slot, base, repo = Slot("0", args.gpu), loop.repo.tip(), loop.repo
        if git(root, "rev-parse", "--symbolic-full-name", "HEAD") != f"refs/heads/{repo.branch}":
            raise ValueError(f"the tree is not on {repo.branch}; git checkout {repo.branch}")
        if repo.tree_blob() in (None, repo.blob(base)):
            raise ValueError(f"{repo.script} is as it was kept last; change it, then run")
        source = (root / repo.script).read_bytes()
        if (same := repo.same_script(source)) is not None:
            raise ValueError(f"this script was tried as experiment {same} (python -m research history); change it")
        also = [name for name in changed_files(root) if name != repo.script and guard.is_code_or_data(name)]
        with loop.ending_cleanly():
            loop.baseline(slot)
            return show_row(loop.experiment(slot, base, source, description, also), args.json)


# -- auto --------------------------------------------------------------------------------------------------------------

@dataclass
class Drive:
    """Slots that propose and try until a limit is reached."""

    loop: Loop
    propose: Agent | OptunaSearch
    args: argparse.Namespace
    began: float = field(default_factory=time.monotonic)
    proposals: int = 0
    failures: int = 0
    why: str = ""

    def ended(self) -> bool:
        """Counts a proposal, unless a limit says that there is none any more."""
        with self.loop.mutex:
            rows, args = self.loop.rows(), self.args
            kept = [i for i, row in enumerate(rows) if row.status == "keep"]
            reasons = {f"{args.iterations} iterations": self.proposals >= args.iterations,
                       f"{args.hours:g} hours": time.monotonic() - self.began > 3600 * args.hours,
                       f"the target of {args.target:g}": bool(kept) and rows[kept[-1]].val_bpb <= args.target,
                       f"{args.plateau} experiments without a keep": len(rows) - 1 - (kept or [0])[-1] >= args.plateau}
            self.why = next((reason for reason, reached in reasons.items() if reached), self.why)
            self.proposals += not self.why
            return bool(self.why) or self.loop.stop.is_set()

    def work(self, slot: Slot) -> None:
        try:
            with self.loop.mutex:  # one slot measures the baseline, the others find it
                self.loop.baseline(slot)
            while not self.ended():
                self.once(slot)
        except BaseException:
            self.loop.stop.set()
            raise

    def once(self, slot: Slot) -> None:
        base = self.loop.repo.tip()
        try:
            proposal: Proposal = self.propose(slot, base)
        except NoProposal as error:
            self.failures += 1
            self.loop.say(f"  {error}")
            if self.failures >= FAILURES_IN_A_ROW:
                raise ValueError(f"{self.failures} calls in a row brought no proposal; the last: {error}") from None
            return
        self.failures = 0
        also = [name for name in proposal.also_changed if guard.is_code_or_data(name)]
        proposal.learn(self.loop.experiment(slot, base, proposal.source, proposal.description, also))


def auto_command(args: argparse.Namespace) -> int:
    root = find_root()
    names = [name for name in args.gpus.split(",") if name]
    slots = [Slot(name, name) for name in names] or [Slot("0")]
    if len(set(names)) < len(names) or args.iterations < 1 or args.plateau < 1:
        raise ValueError(f"gpus {args.gpus or '-'}, iterations {args.iterations}, plateau {args.plateau}: need "
                         "different GPUs and at least 1 of the others")
    with locked(root):
        loop = open_loop(root)
        search = [name.upper() for name in args.settings.split(",") if name]
        propose = Agent(loop, args.agent, args.agent_seconds) if args.agent is not None else OptunaSearch(loop, search)
        drive = Drive(loop, propose, args)
        with loop.ending_cleanly(), ThreadPoolExecutor(len(slots)) as pool:
            futures = [pool.submit(drive.work, slot) for slot in slots]
            try:
                wait(futures)
            except KeyboardInterrupt:
                loop.stop.set()
                raise
            errors = [error for future in futures if (error := future.exception())]
            for error in sorted(errors, key=lambda error: isinstance(error, Stopped)):
                raise error
        loop.say(f"ended after {drive.why}")
    return report.show(root, args.json)
