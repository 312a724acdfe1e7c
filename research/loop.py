"""Experiments: commit, run, decide, record, keep or go back; and what a killed loop left behind.

The refs below refs/research/TAG/ and the rows of results.tsv are the truth. The order is: ref, runs, row (synced),
branch, tree. So a ref without a row is an experiment that was cut short, and the mark `settling` says that the git step
of the last row may be missing; `recover` finishes both.
"""
from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event, RLock

from research import guard
from research.decide import Verdict, decide, spread
from research.repo import Repo
from research.store import FOLDER, RESULTS, Row, append_record, append_row, load_state, read_records, read_rows
from research.trial import Outcome, Stopped, end_processes, failure_tail, judge, read_text, run_process

KEPT_FILE_BYTES = 2**20  # larger outputs, such as weights, are deleted: a night of them would fill a disk
ATTEMPTS = 3  # runs of a commit that already ran well and now fails
BASELINE_RUNS = 2


@dataclass(frozen=True)
class Slot:
    """One place where runs happen, one at a time: a worktree and, if named, a GPU."""

    name: str
    gpu: str | None = None


@dataclass(frozen=True)
class Experiment:
    number: int
    base: str
    commit: str
    source: bytes
    description: str


class Loop:
    """One session. Its methods may be called from several threads; one at a time writes."""

    def __init__(self, root: Path, say: Callable[[str], None] = print) -> None:
        self.root, self.state, self.say = root, load_state(root), say
        self.repo = Repo(root, self.state)
        self.folder, self.results = root / FOLDER, root / RESULTS
        self.records = read_records(self.folder / "runs.jsonl")
        self.mutex, self.stop = RLock(), Event()
        self.reserved: set[int] = set()  # seeds of the runs under way

    # -- what is known -------------------------------------------------------------------------------------------------

    def rows(self) -> list[Row]:
        return read_rows(self.results)

    def scores(self, commit: str, hardware: str) -> list[float]:
        with self.mutex:
            return [r["val_bpb"] for r in self.records
                    if (r["commit"], r["hardware"], r["status"]) == (commit, hardware, "ok")]

    def kept(self) -> list[tuple[str, Row]]:
        """Commits of the kept rows, oldest first."""
        commits = self.repo.tried().values()
        return [(commit, row) for row in self.rows() if row.status == "keep"
                for commit in commits if commit.startswith(row.commit)]

    def decide(self, experiment: Experiment, hardware: str) -> Verdict:
        with self.mutex:
            kept = self.kept()
            others = {commit for commit, _ in kept} - {experiment.base}
            best = [commit for commit, row in kept if not row.reason.startswith("equal")][-1]
            saved = len(self.repo.source(experiment.base)) - len(experiment.source)
            return decide(self.scores(experiment.base, hardware), self.scores(experiment.commit, hardware),
                          spread([self.scores(commit, hardware) for commit in others]), saved,
                          self.scores(best, hardware), self.state.rule)

    # -- runs ----------------------------------------------------------------------------------------------------------

    def run_once(self, number: int, commit: str, slot: Slot) -> Outcome:
        """One run of a commit, recorded, with a seed that none had before: a seed that suits one script or harms all
        would else decide the night. Raises Stopped."""
        hardware = guard.hardware(slot.gpu)
        with self.mutex:
            tree = self.repo.worktree(slot.name, commit, self.state.links)
            seed = max(self.reserved | {r["seed"] for r in self.records}, default=self.state.seed - 1) + 1
            self.reserved.add(seed)
        output, limits = self.run_folder(number, seed), self.state.limits
        environment = {**os.environ, "MAX_WALLCLOCK_SECONDS": f"{limits.train_seconds:g}", "SEED": str(seed),
                       "OUTPUT_DIR": str(output), **({} if slot.gpu is None else {"CUDA_VISIBLE_DEVICES": slot.gpu})}
        try:
            code = run_process(self.state.command, tree, environment, output / "log.txt", limits.total_seconds,
                               self.stop)
            outcome = judge(code, read_text(output / "log.txt"), limits)
            self.note(number, commit, seed, hardware, outcome)
        finally:
            self.reserved.discard(seed)
            delete_weights(output)
        return outcome

    def note(self, number: int, commit: str, seed: int, hardware: str, outcome: Outcome) -> None:
        record = {"experiment": number, "commit": commit, "seed": seed, "hardware": hardware, **vars(outcome)}
        with self.mutex:
            append_record(self.folder / "runs.jsonl", record)
            self.records.append(record)
        said = f"{outcome.val_bpb:.6f} bpb" if outcome.status == "ok" else f"{outcome.status}, {outcome.reason}"
        self.say(f"  #{number} seed {seed}: {said}")

    def run_folder(self, number: int, seed: int) -> Path:
        return self.folder / "runs" / f"{number:04d}" / str(seed)

    def measure(self, experiment: Experiment, slot: Slot) -> Verdict | Outcome:
        """Runs candidate and incumbent until the rule decides, or the candidate fails: then its outcome."""
        hardware, failures = guard.hardware(slot.gpu), 0
        outcome = self.run_once(experiment.number, experiment.commit, slot)
        while outcome.status == "ok":
            verdict = self.decide(experiment, hardware)
            if verdict.action == "run candidate":
                outcome = self.run_once(experiment.number, experiment.commit, slot)
            elif verdict.action == "run incumbent":
                again = self.run_once(self.number_of(experiment.base), experiment.base, slot)
                failures += again.status != "ok"
                if failures == ATTEMPTS:
                    raise ValueError(f"the kept script now fails ({again.reason}); look at machine and data")
            else:
                return verdict
        return outcome

    def number_of(self, commit: str) -> int:
        return next(number for number, tried in self.repo.tried().items() if tried == commit)

    # -- one experiment ------------------------------------------------------------------------------------------------

    def experiment(self, slot: Slot, base: str, source: bytes, description: str,
                   also_changed: Sequence[str] = ()) -> Row:
        """Tries a script on top of `base`; `also_changed` are code or data files that were changed with it."""
        with self.mutex:
            number = max(self.repo.tried(), default=0) + 1
            commit = self.repo.commit_script(base, source, f"{description}\n\nExperiment: {number}\n")
            self.repo.remember(number, commit)
        tried = Experiment(number, base, commit, source, description)
        self.say(f"#{number} {description}")
        result = self.problem(tried, also_changed) or self.measure(tried, slot)
        changed = guard.data_problem(self.state.data, guard.fingerprint_data(self.root, dict(os.environ)))
        result = Outcome("invalid", changed) if changed else result
        if isinstance(result, Outcome):
            return self.finish(tried, slot, result.status, 0.0, result.reason)
        return self.conclude(tried, slot, result)

    def problem(self, tried: Experiment, also_changed: Sequence[str]) -> Outcome | None:
        """What forbids a run, found without one."""
        if also_changed:
            return Outcome("invalid", f"only {self.state.script} may change, not {', '.join(also_changed[:3])}")
        if changed := guard.data_problem(self.state.data, guard.fingerprint_data(self.root, dict(os.environ))):
            return Outcome("invalid", f"{changed}; restore it, or start a new session")
        try:
            metric = guard.script_problem(self.repo.source(tried.base), tried.source, self.state.frozen)
        except (SyntaxError, ValueError) as error:
            return Outcome("crash", f"no Python: {error}")
        return Outcome("invalid", metric) if metric else None

    def conclude(self, tried: Experiment, slot: Slot, verdict: Verdict) -> Row:
        """Records a decided experiment. A gain over a commit that is no longer the tip, because another slot kept
        something meanwhile, is tried again on the tip."""
        with self.mutex:
            tip = self.repo.tip()
            if verdict.action == "discard" or tip == tried.base:
                return self.finish(tried, slot, verdict.action, verdict.gain, verdict.reason)
            merged = self.repo.merged(tip, tried.base, tried.commit)
            fate = "conflicts with a newer keep" if merged is None else "tried again on a newer keep"
            row = self.finish(tried, slot, "discard", verdict.gain, f"{fate}: {verdict.reason}")
        if merged is None or merged == self.repo.source(tip):
            return row
        return self.experiment(slot, tip, merged, f"{tried.description} (on a newer keep)")

    def finish(self, tried: Experiment, slot: Slot, status: str, gain: float, reason: str) -> Row:
        """Row first, synced; then branch and tree."""
        with self.mutex:
            row = self.make_row(tried.commit, guard.hardware(slot.gpu), status, tried.description, gain, reason)
            with self.repo.settling():
                append_row(self.results, row)
                remark = self.repo.settle(tried.base, tried.commit, status == "keep")
        self.say(f"  {status}: {reason}" + (f" ({remark})" if remark else ""))
        return row

    def make_row(self, commit: str, hardware: str, status: str, description: str, gain: float, reason: str) -> Row:
        runs = [r for r in self.records if r["commit"] == commit and r["hardware"] == hardware]
        good = [r for r in runs if r["status"] == "ok"]

        def mean(name: str) -> float:
            return statistics.fmean(r[name] for r in good) if good else 0.0
        scored = status in ("keep", "discard")
        return Row(self.repo.short(commit), mean("val_bpb") if scored else 0.0,
                   max((r["memory_mib"] for r in good), default=0.0) / 1024, status, description, mean("seconds"),
                   round(mean("steps")), max((r["bytes"] for r in runs), default=0), hardware,
                   ",".join(str(r["seed"]) for r in runs), gain, reason)

    # -- begin, end and resume -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def ending_cleanly(self) -> Iterator[None]:
        """Records what an interrupt leaves half done."""
        try:
            yield
        except (KeyboardInterrupt, Stopped):
            self.stop.set()
            self.recover()
            raise

    def baseline(self, slot: Slot) -> None:
        """Runs of the tip on this hardware, until its noise can be known. Raises ValueError when one fails."""
        hardware, tip, tried = guard.hardware(slot.gpu), self.repo.tip(), self.repo.tried()
        if tip not in tried.values():  # at the start, and after a commit that was made by hand
            self.repo.remember(max(tried, default=-1) + 1, tip)
        number = self.number_of(tip)
        while len(self.scores(tip, hardware)) < BASELINE_RUNS:
            outcome = self.run_once(number, tip, slot)
            if outcome.status != "ok":
                raise ValueError(f"the unchanged {self.state.script} ends with {outcome.status} ({outcome.reason}); "
                                 f"see {self.log_of(number)}, which ends:\n{self.tail(number)}")
        if (self.repo.short(tip), hardware) not in {(row.commit, row.hardware) for row in self.rows()
                                                    if row.status == "keep"}:
            scores = self.scores(tip, hardware)
            same = "; both runs are equal: does the script read SEED?" if len(set(scores)) == 1 else ""
            reason = f"baseline, {len(scores)} runs, noise {spread([scores]).noise:.6f}{same}"
            append_row(self.results, self.make_row(tip, hardware, "keep", "baseline", 0.0, reason))
            self.say(f"  {reason}")

    def recover(self) -> list[Row]:
        """Finishes what a killed loop left: processes, locks, half-done experiments, a missing git step."""
        end_processes(str(self.folder))
        interrupted = self.repo.clear_locks()
        tried, rows = self.repo.tried(), self.rows()
        if interrupted and rows and not rows[-1].is_baseline:
            last = next(commit for commit in tried.values() if commit.startswith(rows[-1].commit))
            self.repo.settle(self.parent(last), last, rows[-1].status == "keep")
        found = []
        for number, commit in tried.items():
            if commit != self.repo.tip() and not any(commit.startswith(row.commit) for row in rows):
                description = self.repo.git("log", "-1", "--format=%s", commit)
                half = Experiment(number, self.parent(commit), commit, b"", description)
                found.append(self.finish(half, Slot("0"), "crash", 0.0, "interrupted"))
        return found

    def parent(self, commit: str) -> str:
        return self.repo.git("rev-parse", f"{commit}^")

    def log_of(self, number: int) -> Path | None:
        logs = (self.folder / "runs" / f"{number:04d}").glob("*/log.txt")
        return max(logs, key=lambda path: path.stat().st_mtime, default=None)

    def tail(self, number: int) -> str:
        log = self.log_of(number)
        return failure_tail(read_text(log)) if log else ""


def delete_weights(output: Path) -> None:
    for path in output.glob("**/*"):
        if path.is_file() and not path.is_symlink() and path.stat().st_size > KEPT_FILE_BYTES and path.suffix != ".txt":
            path.unlink()
