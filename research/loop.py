"""Experiments: commit, run, decide, record, keep or go back; and what a killed loop left behind.

The refs below refs/research/TAG/ and the rows of results.tsv are the truth. The order is: commit and ref, runs, row
(synced), branch, tree. So a ref without a row is an experiment that was cut short, and the file `settling` names a
commit whose row may lack its git step; `recover` finishes both."""
from __future__ import annotations

import contextlib
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from threading import Event, RLock
from typing import Any

from golf.cli import write_file
from golf.trial import end_processes, read_text, run_process
from research import guard
from research.decide import Verdict, decide, pooled_noise
from research.repo import Repo, git, remove_tree
from research.store import FOLDER, SHORT, Row, append_line, append_row, load_state, locked, read_rows, read_runs
from research.trial import Outcome, judge

KEPT_FILE_BYTES = 2**20  # larger outputs, such as weights, are deleted: a night of them would fill a disk
ATTEMPTS = 3  # runs of a commit that already ran well and now fails
BASELINE_RUNS, FIRST_SEED = 2, 1337
TAIL_LINES, TAIL_WIDTH = 100, 300  # torchrun alone ends with some fifty lines of its own

class Loop:
    """One session, for one thread per GPU (None: whatever the script finds); one at a time writes."""

    def __init__(self, root: Path) -> None:
        self.root, self.state = root, load_state(root)
        self.repo = Repo(root, self.state)
        self.folder = root / FOLDER
        self.records = read_runs(root)
        # No seed runs twice: one that suits a script or harms all would else decide the night.
        self.seeds = itertools.count(max((r["seed"] for r in self.records), default=FIRST_SEED - 1) + 1)
        self.mutex, self.stop = RLock(), Event()

    def say(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def rows(self) -> list[Row]:
        return read_rows(self.root)

    def runs(self, commit: str, hardware: str) -> list[dict[str, Any]]:
        with self.mutex:
            return [r for r in self.records
                    if (r["commit"], r["hardware"], r["budget"]) == (commit, hardware, self.state.budget)]

    def scores(self, commit: str, hardware: str) -> list[float]:
        return [r["val_bpb"] for r in self.runs(commit, hardware) if r["status"] == "ok"]

    def same_script(self, source: bytes) -> str | None:
        """The first tried commit with exactly this script; one that was interrupted was not tried."""
        cut = {row.commit for row in self.rows() if row.reason == "interrupted"}
        return self.repo.same_script(source, cut)

    def kept(self) -> list[tuple[str, Row]]:
        """Commits of the kept rows that are on the branch still, oldest first."""
        commits = {commit[:SHORT]: commit for commit in self.repo.tried(f"--merged={self.repo.branch}").values()}
        return [(commits[row.commit], row) for row in self.rows() if row.status == "keep" and row.commit in commits]

    def verdict(self, commit: str, hardware: str) -> Verdict:
        with self.mutex:
            base, kept = self.repo.parent(commit), self.kept()
            ancestors = {commit for commit, _ in kept} - {base}
            best = [base, *(commit for commit, row in kept if not row.reason.startswith("equal"))][-1]
            before, after = (guard.syntax_nodes(self.repo.source(name)) for name in (base, commit))
            return decide(self.scores(base, hardware), self.scores(commit, hardware),
                          [self.scores(ancestor, hardware) for ancestor in ancestors], before - after,
                          self.scores(best, hardware))

    def check_environment(self) -> None:
        """Raises ValueError for settings that would make candidates look better or worse than kept scripts did."""
        new = guard.outside_settings(self.repo.source(self.repo.tip()))
        if changed := guard.differing("the environment is not that of `start`", self.state.environment, new):
            raise ValueError(f"{changed}; set what {FOLDER}/state.json says, or put it into the script")

    def run_once(self, commit: str, gpu: str | None) -> Outcome:
        """One run of a commit, recorded."""
        with self.mutex:
            tree, seed = self.repo.worktree(gpu, commit), next(self.seeds)
        for old in (self.folder / "runs").glob(f"*/{seed}"):  # of a run that was cut short: else its seed were used
            remove_tree(old)
        output = self.output_folder(commit, seed)
        output.mkdir(parents=True)
        log = output.with_name("log.txt")
        environment = {**os.environ, "MAX_WALLCLOCK_SECONDS": f"{self.state.budget:g}", "SEED": str(seed),
                       "OUTPUT_DIR": str(output)}
        if gpu is not None:  # in nvidia-smi's order, by which `hardware` names it
            environment |= {"CUDA_VISIBLE_DEVICES": gpu, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        try:
            code = run_process(self.state.command, tree, environment, log, self.state.limit, self.stop)
            outcome = judge(code, read_text(log) if log.is_file() else "", self.state)
        finally:
            for path in output.glob("**/*"):
                with contextlib.suppress(OSError):  # in a folder that the run made read-only
                    if path.is_file() and path.stat().st_size > KEPT_FILE_BYTES and path.suffix != ".txt":
                        path.unlink()
        record = {"commit": commit, "seed": seed, "hardware": guard.hardware(gpu), "budget": self.state.budget,
                  **vars(outcome)}
        with self.mutex:
            append_line(self.folder / "runs.jsonl", json.dumps(record))
            self.records.append(record)
        said = f"{outcome.val_bpb:.6f} bpb" if outcome.status == "ok" else f"{outcome.status}, {outcome.reason}"
        self.say(f"  {commit[:SHORT]} seed {seed}: {said}")
        return outcome

    def output_folder(self, commit: str, seed: int) -> Path:
        return self.folder / "runs" / commit[:SHORT] / str(seed) / "output"  # beside the log: a run may empty it

    def tail(self, commit: str) -> str:
        """The end of a commit's last log, if there is one."""
        logs = (self.folder / "runs" / commit[:SHORT]).glob("*/log.txt")
        if (log := max(logs, key=lambda path: path.stat().st_mtime, default=None)) is None:
            return ""
        lines = read_text(log).rstrip().split("\n")[-TAIL_LINES:]
        return "\n".join([f"{log}:", *(line[:TAIL_WIDTH] for line in lines)])

    def measure(self, commit: str, gpu: str | None) -> Verdict:
        """Runs candidate and incumbent until the rule decides or the candidate fails."""
        failures, outcome, repeated = 0, self.run_once(commit, gpu), False
        while outcome.status == "ok" or (not repeated and outcome.status in ("crash", "timeout")
                                         and self.scores(commit, guard.hardware(gpu))):
            repeated |= outcome.status != "ok"  # it ran well before: once this may be the machine
            verdict = self.verdict(commit, guard.hardware(gpu))
            if verdict.action == "run candidate":
                outcome = self.run_once(commit, gpu)
            elif verdict.action == "run incumbent":
                again = self.run_once(self.repo.parent(commit), gpu)
                failures += again.status != "ok"
                if failures == ATTEMPTS:
                    raise ValueError(f"the kept script now fails ({again.reason}); look at machine and data")
            else:
                return self.seed_problem(commit, gpu) or verdict
        return Verdict(outcome.status, 0.0, outcome.reason)

    def check_machine(self, gpu: str | None) -> None:
        """Raises ValueError when the kept script, which ran, fails too: then no candidate is to blame."""
        outcome = self.run_once(self.repo.tip(), gpu)
        if outcome.status != "ok":
            raise ValueError(f"the kept script now fails too ({outcome.reason}); look at machine and data, then go on")

    def seed_problem(self, commit: str, gpu: str | None) -> Verdict | None:
        """A candidate whose runs are equal where the incumbent's are not has chosen its seed: its noise counts as 0."""
        ours, theirs = (self.scores(c, guard.hardware(gpu)) for c in (commit, self.repo.parent(commit)))
        if len(ours) < 2 or len({*ours}) > 1 or len({*theirs}) < 2:
            return None
        return Verdict("invalid", 0.0, f"its {len(ours)} runs are equal whatever the seed; SEED must decide weights")

    def baseline(self, gpu: str | None) -> str:
        """The tip, after runs on this hardware until its noise can be known. Raises ValueError when one fails."""
        hardware, tip, tried = guard.hardware(gpu), self.repo.tip(), self.repo.tried()
        if tip not in tried.values():  # at the start, and after a commit that was made by hand
            self.repo.remember(max(tried, default=-1) + 1, tip)
        while len(scores := self.scores(tip, hardware)) < BASELINE_RUNS:
            outcome = self.run_once(tip, gpu)
            if outcome.status != "ok":
                raise ValueError(f"the unchanged {self.state.script} ends with {outcome.status} ({outcome.reason}); "
                                 f"see {self.tail(tip)}")
        if (tip, hardware) not in [(commit, row.hardware) for commit, row in self.kept()]:
            same = "; all runs are equal: does the script read SEED?" if len(set(scores)) == 1 else ""
            reason = f"baseline, {len(scores)} runs, noise {pooled_noise([scores])[0]:.6f}{same}"
            append_row(self.root, self.make_row(tip, hardware, "baseline", Verdict("keep", 0.0, reason)))
            self.say(f"  {reason}")
        return tip

    def experiment(self, gpu: str | None, base: str, source: bytes, description: str,
                   changed: Sequence[str] = ()) -> Row:
        """Tries a script on top of `base`; `changed` are the files that differ from it where the script was edited."""
        if problem := guard.data_problem(self.state.data, self.root):
            raise ValueError(f"{problem}; restore it, or start a new session")
        with self.mutex:
            number = max(self.repo.tried(), default=0) + 1
            commit = self.repo.commit(gpu, base, source, f"{description}\n\nExperiment: {number}\n")
            self.repo.remember(number, commit)
        self.say(f"{commit[:SHORT]} {description}")
        verdict = self.problem(commit, changed) or self.measure(commit, gpu)
        if problem := guard.data_problem(self.state.data, self.root):
            verdict = Verdict("invalid", 0.0, f"{problem}; restore it, or start a new session")
        with self.mutex:
            if verdict.action != "keep" or self.repo.tip() == base:
                return self.finish(commit, gpu, verdict)
            # Another thread kept something, or the user committed: the gain must hold on top of that.
            tip = self.baseline(gpu)
            moved = self.repo.moved(gpu, tip, commit)
            fate = "conflicts with a newer keep" if moved is None else "tried again on a newer keep"
            row = self.finish(commit, gpu, Verdict("discard", verdict.gain, f"{fate}: {verdict.reason}"))
        if moved in (None, self.repo.source(tip)):
            return row
        return self.experiment(gpu, tip, moved, f"{description} (on a newer keep)")

    def problem(self, commit: str, changed: Sequence[str]) -> Verdict | None:
        """What forbids a run, found without one."""
        others = [name for name in changed
                  if name != self.state.script and name.endswith((".py", ".model", ".vocab", ".bin"))]
        if others:
            return Verdict("invalid", 0.0, f"only {self.state.script} may change, not {', '.join(others[:3])}")
        base, source = (self.repo.source(name) for name in (f"{commit}^", commit))
        try:
            problem = guard.script_problem(base, source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            return Verdict("crash", 0.0, f"no Python that can be checked: {error}")
        return Verdict("invalid", 0.0, problem) if problem else None

    def finish(self, commit: str, gpu: str | None, verdict: Verdict) -> Row:
        """Row first, synced; then branch and tree."""
        with self.mutex:
            description = git(self.root, "log", "-1", "--format=%s", commit)
            row = self.make_row(commit, guard.hardware(gpu), description, verdict)
            write_file(self.folder / "settling", commit)
            append_row(self.root, row)
            remark = self.repo.settle(commit, row.status == "keep")
            (self.folder / "settling").unlink()
        self.say(f"  {row.status}: {row.reason}{remark}")
        return row

    def make_row(self, commit: str, hardware: str, description: str, verdict: Verdict) -> Row:
        runs = self.runs(commit, hardware)
        good = [r for r in runs if r["status"] == "ok"]
        mean = {name: fmean(r[name] for r in good) if good else 0.0 for name in ("val_bpb", "seconds", "steps")}
        most = {name: max((r[name] for r in runs), default=0) for name in ("memory_mib", "bytes")}
        return Row(commit[:SHORT], mean["val_bpb"] if verdict.action in ("keep", "discard") else 0.0,
                   round(most["memory_mib"] / 1024, 1), verdict.action, description, round(mean["seconds"], 1),
                   round(mean["steps"]), most["bytes"], hardware, ",".join(str(r["seed"]) for r in runs), verdict.gain,
                   verdict.reason)

    def recover(self) -> None:
        """Finishes what a kill or interrupt left: processes, locks, worktrees, a git step, half-done experiments."""
        end_processes(self.folder)
        settling, rows = self.folder / "settling", {row.commit: row for row in self.rows()}
        self.repo.clear_locks(settling.stat().st_mtime if settling.exists() else None)
        self.repo.forget_half_made_worktrees()
        if settling.exists():
            commit = settling.read_text(encoding="utf-8")
            if row := rows.get(commit[:SHORT]):
                self.repo.settle(commit, row.status == "keep")
            settling.unlink()
        for commit in self.repo.tried(f"--no-merged={self.repo.branch}").values():
            if commit[:SHORT] not in rows:
                self.say(f"found half done: {commit[:SHORT]}")
                self.finish(commit, None, Verdict("crash", 0.0, "interrupted"))

@contextlib.contextmanager
def opened(root: Path) -> Iterator[Loop]:
    """The session, put in order after a kill and after an interrupt."""
    with locked(root):
        loop = Loop(root)
        loop.recover()
        loop.check_environment()
        try:
            yield loop
        except KeyboardInterrupt:
            loop.stop.set()
            loop.recover()
            raise
