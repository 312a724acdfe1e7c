"""Where candidates come from: any agent's command line, or a search over the script's numbers with Optuna."""
from __future__ import annotations

import importlib
import math
import os
import random
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from golf.trial import read_text, run_process
from research import guard
from research.loop import Loop
from research.repo import changed_files
from research.store import RESULTS, SHORT, Row, one_line, whole_lines

PROTOCOL = Path(__file__).with_name("program.md")
SHOWN_ROWS, DESCRIPTION_CHARS = 40, 120
CHANGED_TOGETHER = 3  # settings in one proposal of the search
SEARCH_TRIES = 20  # for a script that was not tried yet

@dataclass(frozen=True)
class Proposal:
    source: bytes
    description: str
    changed: tuple[str, ...] = ()  # files that differ from the kept commit
    learn: Callable[[Row], None] = lambda row: None

class NoProposal(ValueError):  # noqa: N818 - no error: the next call may bring one
    """This time nothing came that could be tried."""

class Agent:
    """Calls a command once per proposal, in a worktree at the kept commit. It reads the prompt from stdin (or from the
    file that takes the place of `{prompt}`), edits the script, and its last output line becomes the description."""

    def __init__(self, loop: Loop, command: str, seconds: float) -> None:
        self.loop, self.command, self.seconds, self.note = loop, shlex.split(command), seconds, ""
        if not self.command:
            raise ValueError("--agent '' is empty; give a command line")

    def __call__(self, gpu: str | None, base: str) -> Proposal:
        repo, folder = self.loop.repo, self.loop.folder / "runs" / "agent" / str(time.time_ns())
        folder.mkdir(parents=True)
        prompt, log = folder / "prompt.md", folder / "log.txt"
        with self.loop.mutex:
            tree = repo.worktree(gpu, base)
            prompt.write_text(self.prompt(), encoding="utf-8")
        command = [word.replace("{prompt}", str(prompt)) for word in self.command]
        code = run_process(command, tree, os.environ, log, self.seconds, self.loop.stop, prompt)
        said = next((line.strip() for line in reversed(read_text(log).split("\n")) if line.strip()), "")
        if code != 0:
            end = f"exit status {code}" if code is not None else f"no answer in {self.seconds:g} s"
            raise NoProposal(f"the agent failed: {end}{': ' + said if said else ''} (log: {log})")
        script = tree / repo.script
        source = script.read_bytes() if script.is_file() else b""
        same = self.loop.same_script(source)
        self.note = same and f"Your last proposal was the same script as {same[:SHORT]}. Propose something else."
        if same:
            raise NoProposal(f"the agent's script is that of {same[:SHORT]}")
        old = repo.source(base).splitlines()
        first = next((line for line in source.splitlines() if line not in old), b"lines removed")
        description = one_line(said or first.decode("utf-8", "replace"))[:DESCRIPTION_CHARS]
        return Proposal(source, description, tuple(changed_files(tree, base)))

    def prompt(self) -> str:
        columns, *lines = whole_lines(self.loop.root / RESULTS)
        parts = [PROTOCOL.read_text(encoding="utf-8"), "# This call", f"Edit {self.loop.repo.script} in this folder: "
                 "one idea. Do not run it, do not commit. End with one line that says what you tried.", self.note,
                 f"# The last of {len(lines)} experiments", "\n".join([columns, *lines[-SHOWN_ROWS:]])]
        last = self.loop.rows()[-1]
        if last.status not in ("keep", "discard"):
            parts += ["# The end of the last experiment's log", self.loop.tail(last.commit)]
        return "\n\n".join(part for part in parts if part) + "\n"

@dataclass(frozen=True)
class Setting:
    """A number in the script: where it stands, and the range to search."""
    value: float
    span: tuple[int, int]  # of characters
    low: float
    high: float
    whole: bool
    by_default: bool  # searched when no names are given

NUMBER = r"([-+]?(?:\d[\d_]*\.?\d*|\.\d+)(?:e[-+]?\d+)?)"
ASSIGNED = re.compile(rf"(?mi)^[ \t]*(\w+)(?:: *\w+)? *= *(setting\( *)?{NUMBER}(?= *(?:[,)#]|$))(.*)$")
BOUND = re.compile(rf"\b(least|most|below) *= *{NUMBER}")
RANGE = re.compile(rf"(?i)#.*?\[ *{NUMBER} *, *{NUMBER} *\]")  # a comment with [low, high] declares a range
NOT_SEARCHED = re.compile(r"(?i)seed|seconds|wallclock|every|iterations|vocab|bytes|stride|eval|val_")

def find_settings(source: str) -> dict[str, Setting]:
    """Positive numbers given to upper-case names, or to any name as `setting(NUMBER, ...)`, by upper-case name. Only a
    declared range, or a setting that is no whole number, says that it may be searched without being named."""
    found = {}
    for match in ASSIGNED.finditer(source):
        name, call, number, rest = match.groups()
        fixed = NOT_SEARCHED.search(name) or guard.FROZEN.search(name)
        if (call or name.isupper()) and not fixed and float(number) > 0:
            whole = number.replace("_", "").isdigit()
            low, high = search_range(float(number), whole, rest)
            if low < high:
                by_default = bool(RANGE.search(rest) or (call and not whole))
                found[name.upper()] = Setting(float(number), match.span(3), low, high, whole, by_default)
    return found

def search_range(value: float, whole: bool, rest: str) -> tuple[float, float]:
    """As a comment says; else half to twice the value, or by its distance from 1, inside the bounds of `setting`."""
    low, high = (1 - 3 * (1 - value), 1 - (1 - value) / 3) if 0.8 < value < 1 else (value / 2, value * 2)
    bounds = {name: float(number) for name, number in BOUND.findall(rest)}
    low, high = max(low, bounds.get("least", low)), min(high, bounds.get("most", high), bounds.get("below", high))
    if declared := RANGE.search(rest):
        low, high = float(declared[1]), float(declared[2])
    return (math.ceil(low), math.floor(high)) if whole else (low, high)

def written(value: float, whole: bool) -> str:
    """A number with four digits, also of its distance from 1; one that is not whole keeps a point or an exponent."""
    size = min(abs(value), abs(1 - value)) or 1.0
    return str(round(value)) if whole else repr(round(float(value), 3 - math.floor(math.log10(size))))

def rewrite(source: str, settings: dict[str, Setting], values: dict[str, float]) -> str:
    """The script with these numbers in place of the old ones."""
    for name in sorted(values, key=lambda name: settings[name].span, reverse=True):
        start, end = settings[name].span
        source = source[:start] + written(values[name], settings[name].whole) + source[end:]
    return source

class OptunaSearch:
    """Changes a few settings of the kept script at a time, by Optuna's tree-structured Parzen estimator (Bergstra et
    al. 2011), which learns from their gains and is kept in `.research/`."""

    def __init__(self, loop: Loop, names: list[str]) -> None:
        try:
            self.optuna = importlib.import_module("optuna")
        except ImportError:
            raise ValueError("--proposer optuna needs the package optuna; pip install -r research/requirements.txt, or "
                             "use --agent") from None
        self.loop, self.names, self.given = loop, names, set()
        self.optuna.logging.set_verbosity(self.optuna.logging.WARNING)
        backend = self.optuna.storages.journal.JournalFileBackend(str(loop.folder / "optuna.log"))
        self.study = self.optuna.create_study(storage=self.optuna.storages.JournalStorage(backend), load_if_exists=True,
                                              sampler=self.optuna.samplers.TPESampler(constant_liar=True),
                                              study_name=",".join([loop.state.tag, *names]))
        for trial in self.study.get_trials(states=[self.optuna.trial.TrialState.RUNNING]):
            self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)  # of a loop that was killed

    def __call__(self, gpu: str | None, base: str) -> Proposal:
        with self.loop.mutex:
            source = self.loop.repo.source(base).decode("utf-8")
            found = find_settings(source)
            names = self.names or [name for name in found if found[name].by_default]
            if not names or set(names) - set(found):
                raise ValueError(f"--settings {','.join(self.names)}: the numbers to search in the script are "
                                 f"{', '.join(found) or 'none'}; name some of them")
            for _ in range(SEARCH_TRIES):
                trial = self.study.ask()
                values = {}
                for name in random.sample(names, min(CHANGED_TOGETHER, len(names))):
                    suggest = trial.suggest_int if found[name].whole else trial.suggest_float
                    values[name] = suggest(name, found[name].low, found[name].high, log=found[name].low > 0)
                proposed = rewrite(source, found, values).encode()
                if proposed not in self.given and not self.loop.same_script(proposed):
                    self.given.add(proposed)
                    said = ", ".join(f"{name} {source[slice(*found[name].span)]} -> {written(value, found[name].whole)}"
                                     for name, value in values.items())
                    return Proposal(proposed, said, learn=partial(self.learn, trial))
                self.study.tell(trial, state=self.optuna.trial.TrialState.FAIL)
        raise NoProposal(f"the search found no script that was not tried, {SEARCH_TRIES} times; name more settings")

    def learn(self, trial: Any, row: Row) -> None:
        with self.loop.mutex:
            failed = row.status not in ("keep", "discard")
            self.study.tell(trial, None if failed else -row.gain,
                            state=self.optuna.trial.TrialState.FAIL if failed else None)
