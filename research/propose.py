"""Where candidates come from: any agent's command line, or a search over the script's numbers with Optuna."""
from __future__ import annotations

import ast
import importlib
import math
import os
import random
import re
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from research.loop import Loop, Slot
from research.repo import changed_files
from research.store import Row, one_line
from research.trial import read_text, run_process

PROTOCOL = Path(__file__).with_name("program.md")
SHOWN_ROWS = 40
DESCRIPTION_CHARS = 120
CHANGED_TOGETHER = 3  # settings in one proposal of the search


@dataclass(frozen=True)
class Proposal:
    source: bytes
    description: str
    also_changed: list[str] = field(default_factory=list)
    learn: Callable[[Row], None] = lambda row: None


class NoProposal(ValueError):  # noqa: N818 - no error: the next call may bring one
    """This time nothing came that could be tried."""


# -- agents ------------------------------------------------------------------------------------------------------------

class Agent:
    """Calls a command once per proposal, in a worktree at the kept commit. It reads the prompt from stdin (or from the
    file that takes the place of `{prompt}`), edits the script, and its last output line becomes the description."""

    def __init__(self, loop: Loop, command: str, seconds: float) -> None:
        self.loop, self.command, self.seconds, self.note = loop, shlex.split(command), seconds, ""
        if not self.command:
            raise ValueError("--agent '' is empty; give a command line")

    def __call__(self, slot: Slot, base: str) -> Proposal:
        with self.loop.mutex:
            folder = self.loop.folder / "runs" / "agent" / str(time.time_ns())
            tree = self.loop.repo.worktree(slot.name, base, self.loop.state.links)
            prompt = self.prompt()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "prompt.md").write_text(prompt, encoding="utf-8")
        command = [word.replace("{prompt}", str(folder / "prompt.md")) for word in self.command]
        code = run_process(command, tree, os.environ, folder / "log.txt", self.seconds, self.loop.stop, prompt)
        said = [line.strip() for line in read_text(folder / "log.txt").split("\n") if line.strip()]
        if code != 0:
            end = f"exit status {code}" if code is not None else f"no answer in {self.seconds:g} s"
            raise NoProposal(f"the agent failed: {end}{': ' + said[-1] if said else ''} (log: {folder / 'log.txt'})")
        return self.collect(tree, base, said[-1] if said else "")

    def collect(self, tree: Path, base: str, said: str) -> Proposal:
        script = tree / self.loop.state.script
        if not script.is_file():
            raise NoProposal(f"the agent removed {self.loop.state.script}")
        source = script.read_bytes()
        with self.loop.mutex:
            same = self.loop.repo.same_script(source)
        if same is not None:
            self.note = f"Your last proposal was the same script as experiment {same}. Propose something else."
            raise NoProposal(f"the agent's script is that of experiment {same}")
        self.note = ""
        others = [name for name in changed_files(tree, base) if name != self.loop.state.script]
        old = set(self.loop.repo.source(base).splitlines())
        first = next((line for line in source.splitlines() if line not in old), b"lines removed")
        description = one_line(said or first.decode("utf-8", "replace"))[:DESCRIPTION_CHARS]
        return Proposal(source, description, others)

    def prompt(self) -> str:
        rows = self.loop.rows()
        lines = ["\t".join((r.commit, f"{r.val_bpb:.6f}", f"{r.gain:+.6f}", r.status, r.description, r.reason))
                 for r in rows[-SHOWN_ROWS:]]
        state = self.loop.state
        parts = [PROTOCOL.read_text(encoding="utf-8"), "# This call", f"Edit {state.script} in the current folder: one "
                 "idea. Do not run it, do not commit. End with one line that says what you tried.", self.note,
                 f"# The last {len(lines)} of {len(rows)} experiments", "commit, val_bpb, gain, status, description, "
                 "reason:", "\n".join(lines)]
        if rows and rows[-1].status not in ("keep", "discard"):
            failed = [n for n, commit in self.loop.repo.tried().items() if commit.startswith(rows[-1].commit)]
            parts += ["# The end of the last experiment's log", *map(self.loop.tail, failed)]
        return "\n\n".join(part for part in parts if part) + "\n"


# -- settings ----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Setting:
    """A number in the script: where it stands, and the range to search."""

    name: str
    value: float
    line: int
    start: int  # byte columns, as in ast
    end: int
    low: float
    high: float
    log: bool
    whole: bool


NOT_SEARCHED = re.compile(r"(?i)seed|seconds|wallclock|every|iterations|_dir|vocab|bytes|stride|eval|val_")
RANGE = re.compile(r"#.*?\[\s*([-+.\deE]+)\s*,\s*([-+.\deE]+)\s*\]")  # a comment with [low, high] declares a range


def find_settings(source: str) -> dict[str, Setting]:
    """Numbers given to upper-case names or fields, plainly, in `setting(NUMBER, ..., least=..., most=...)` or in
    `float(os.environ.get("NAME", NUMBER))`. Raises SyntaxError."""
    tree, lines, found = ast.parse(source), source.split("\n"), {}
    bodies = [tree.body, *(node.body for node in tree.body
                           if isinstance(node, ast.ClassDef) and re.search("(?i)param|config|setting|args", node.name))]
    for item in (item for body in bodies for item in body if isinstance(item, (ast.Assign, ast.AnnAssign))):
        target = item.targets[0] if isinstance(item, ast.Assign) else item.target
        number, bounds = literal(item.value)
        plain_constant = isinstance(item.value, ast.Constant) and item in tree.body
        if not isinstance(target, ast.Name) or number is None or (plain_constant and not target.id.isupper()):
            continue
        if declared := RANGE.search(lines[number.lineno - 1]):
            bounds = {"least": float(declared[1]), "most": float(declared[2]), "declared": 1.0}
        setting = with_range(target.id.upper(), number, bounds)
        if setting and not NOT_SEARCHED.search(setting.name):
            found[setting.name] = setting
    return found


def literal(node: ast.AST | None) -> tuple[ast.Constant | None, dict[str, float]]:
    """The number in a default's expression, and keywords with numbers beside it."""
    if isinstance(node, ast.Constant):
        text = node.value if isinstance(node.value, str) else None
        is_number = type(node.value) in (int, float) or (text is not None and re.fullmatch(r"[-+.\deE]+", text))
        return (node if is_number else None), {}
    if not isinstance(node, ast.Call) or not node.args:
        return None, {}
    bounds = {word.arg: float(word.value.value) for word in node.keywords
              if word.arg and isinstance(word.value, ast.Constant) and type(word.value.value) in (int, float)}
    place = 1 if ast.unparse(node.func).endswith(("environ.get", "getenv")) else 0
    number, inner = literal(node.args[place]) if len(node.args) > place else (None, {})
    return number, {**inner, **bounds}


def with_range(name: str, number: ast.Constant, bounds: dict[str, float]) -> Setting | None:
    """Half to twice the value, inside the declared bounds; a declared range as a whole; a share close to 1 by its
    distance from 1. None for zero or text that is no number."""
    whole = isinstance(number.value, int) or (isinstance(number.value, str) and number.value.isdigit())
    try:
        value = float(number.value)
    except ValueError:
        return None
    if value <= 0 or number.end_lineno != number.lineno:
        return None
    low, high = value / 2, value * 2
    if (0.5 if 1 in (bounds.get("below"), bounds.get("most")) else 0.8) < value < 1:
        low, high = max(low, 1 - 3 * (1 - value)), 1 - (1 - value) / 3
    if "declared" in bounds:
        low, high = bounds["least"], bounds["most"]
    low, high = max(low, bounds.get("least", low)), min(high, bounds.get("most", high))
    if whole:
        low, high = max(1, math.ceil(low)), math.floor(high)
    if not low < high:
        return None
    return Setting(name, value, number.lineno, number.col_offset, number.end_col_offset, low, high,
                   low > 0 and high / low > 1.5, whole)


def rewrite(source: str, settings: dict[str, Setting], values: dict[str, float]) -> str:
    """The script with these numbers in place of the old ones; quotes around a number stay."""
    lines = source.split("\n")
    for name in sorted(values, key=lambda name: (settings[name].line, settings[name].start), reverse=True):
        place, line = settings[name], lines[settings[name].line - 1].encode("utf-8")
        old = line[place.start:place.end].decode("utf-8")
        quote = old[0] if old[0] in "\"'" else ""
        text = quote + (str(int(values[name])) if place.whole else f"{values[name]:.4g}") + quote
        lines[place.line - 1] = (line[:place.start] + text.encode("utf-8") + line[place.end:]).decode("utf-8")
    return "\n".join(lines)


class OptunaSearch:
    """Proposals from Optuna's tree-structured Parzen estimator (Bergstra et al. 2011), kept in `.research/`.

    Each changes a few settings of the kept script and is judged by its gain over it; a setting's model learns from the
    trials that changed it."""

    def __init__(self, loop: Loop, names: list[str]) -> None:
        try:
            self.optuna = importlib.import_module("optuna")
        except ImportError:
            raise ValueError("--proposer optuna needs the package optuna; pip install -r research/requirements.txt, or "
                             "use --agent") from None
        self.loop, self.names = loop, names
        self.optuna.logging.set_verbosity(self.optuna.logging.WARNING)
        self.settings(loop.repo.source(loop.repo.tip()).decode("utf-8"))  # unknown names are told before any run
        backend = self.optuna.storages.journal.JournalFileBackend(str(loop.folder / "optuna.log"))
        sampler = self.optuna.samplers.TPESampler(constant_liar=True)
        self.study = self.optuna.create_study(storage=self.optuna.storages.JournalStorage(backend), sampler=sampler,
                                              study_name=",".join([loop.state.tag, *names]), load_if_exists=True)
        for trial in self.study.get_trials(states=[self.optuna.trial.TrialState.RUNNING]):
            self.study.tell(trial.number, state=self.optuna.trial.TrialState.FAIL)  # of a loop that was killed

    def settings(self, source: str) -> dict[str, Setting]:
        found = find_settings(source)
        if unknown := sorted(set(self.names) - set(found)):
            raise ValueError(f"--settings {','.join(unknown)}: no number of that name in {self.loop.state.script}; it "
                             f"has {', '.join(sorted(found)) or 'none'}")
        chosen = {name: found[name] for name in self.names or found if self.names or not found[name].whole}
        if not chosen:
            raise ValueError(f"{self.loop.state.script} has no numbers to search; name some with --settings")
        return chosen

    def __call__(self, slot: Slot, base: str) -> Proposal:
        with self.loop.mutex:
            source = self.loop.repo.source(base).decode("utf-8")
            settings, trial = self.settings(source), self.study.ask()
            chosen = random.sample(sorted(settings), min(CHANGED_TOGETHER, len(settings)))
            values = {name: self.suggest(trial, settings[name]) for name in chosen}
        said = ", ".join(f"{name} {settings[name].value:g} -> {value:.4g}" for name, value in values.items())
        return Proposal(rewrite(source, settings, values).encode(), said, learn=lambda row: self.learn(trial, row))

    def suggest(self, trial: Any, setting: Setting) -> float:
        """A value from the range that the first script declared: Optuna wants the same range in every trial."""
        key = f"range {setting.name}"
        low, high, log = self.study.user_attrs.get(key) or (setting.low, setting.high, setting.log)
        self.study.set_user_attr(key, [low, high, log])
        if setting.whole:
            return trial.suggest_int(setting.name, int(low), int(high), log=log)
        return trial.suggest_float(setting.name, low, high, log=log)

    def learn(self, trial: Any, row: Row) -> None:
        with self.loop.mutex:
            failed = row.status not in ("keep", "discard")
            self.study.tell(trial, None if failed else -row.gain,
                            state=self.optuna.trial.TrialState.FAIL if failed else None)
