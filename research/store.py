"""What the loop keeps in `.research/` and results.tsv. Every record is one appended line, synced before anything else
happens; a line that a crash cut short is dropped by the next append."""
from __future__ import annotations

import contextlib
import fcntl
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from golf.cli import write_file
from research.decide import Rule
from research.trial import Limits

FOLDER, RESULTS = ".research", "results.tsv"
LOCK_SECONDS = 2.0  # a child that a killed loop was just starting may hold its lock for a moment
STATUSES = ("keep", "discard", "crash", "timeout", "nan", "oversize", "invalid")


@dataclass(frozen=True)
class Row:
    """One experiment. The first five columns are the classic ones."""

    commit: str
    val_bpb: float  # mean over its runs; 0 when it has no score
    memory_gb: float
    status: str
    description: str
    seconds: float = 0.0  # of training, mean
    steps: int = 0
    bytes: int = 0
    hardware: str = ""
    seed: str = ""  # all seeds that ran, with commas
    gain: float = 0.0  # over the commit it started from, bpb
    reason: str = ""

    @property
    def is_baseline(self) -> bool:
        return self.reason.startswith("baseline")

    def line(self) -> str:
        shown = {**asdict(self), "val_bpb": f"{self.val_bpb:.6f}", "memory_gb": f"{self.memory_gb:.1f}",
                 "seconds": f"{self.seconds:.1f}", "gain": f"{self.gain:+.6f}"}
        return "\t".join(one_line(str(value)) for value in shown.values())


COLUMNS = tuple(item.name for item in fields(Row))


@dataclass
class State:
    """What `start` fixed for the whole session."""

    tag: str
    script: str
    command: list[str]
    limits: Limits = field(default_factory=Limits)
    rule: Rule = field(default_factory=Rule)
    seed: int = 1337
    frozen: str = ""  # regular expression: definitions in the script that may not change
    links: list[str] = field(default_factory=list)
    data: dict[str, str] = field(default_factory=dict)  # fingerprints

    @property
    def branch(self) -> str:
        return f"research/{self.tag}"


def one_line(text: str) -> str:
    return " ".join(text.split())


def save_state(root: Path, state: State) -> None:
    write_file(root / FOLDER / "state.json", json.dumps(asdict(state), indent=1) + "\n")


def load_state(root: Path) -> State:
    path = root / FOLDER / "state.json"
    if not path.is_file():
        raise ValueError(f"{root} has no research session; begin one with: python -m research start TAG")
    values = json.loads(path.read_text(encoding="utf-8"))
    return State(**{**values, "limits": Limits(**values["limits"]), "rule": Rule(**values["rule"])})


@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """One loop per folder. Raises ValueError when another one works here; the lock goes with its process."""
    (root / FOLDER).mkdir(exist_ok=True)
    deadline = time.monotonic() + LOCK_SECONDS
    with (root / FOLDER / "lock").open("a") as f:
        while True:
            try:
                fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ValueError(f"another loop works in {root}; wait, or start one with its own tag in a folder "
                                     "of `git worktree add`") from None
                time.sleep(0.05)
        yield


# -- lines -------------------------------------------------------------------------------------------------------------

def append_line(path: Path, line: str) -> None:
    """One line in one write, synced. A torn last line, which no newline ends, is cut off first."""
    data = path.read_bytes() if path.exists() else b""
    with path.open("r+b" if path.exists() else "xb") as f:
        f.truncate(data.rfind(b"\n") + 1)
        f.seek(0, os.SEEK_END)
        os.write(f.fileno(), (line + "\n").encode("utf-8"))
        os.fsync(f.fileno())


def whole_lines(path: Path) -> list[str]:
    if not path.exists():
        return []
    return path.read_bytes().decode("utf-8", errors="replace").split("\n")[:-1]


def append_row(path: Path, row: Row) -> None:
    if not whole_lines(path):
        append_line(path, "\t".join(COLUMNS))
    append_line(path, row.line())


def read_rows(path: Path) -> list[Row]:
    """All rows, also those with the classic five columns only. Raises ValueError for a line that is none."""
    rows = []
    kinds = {"val_bpb": float, "memory_gb": float, "seconds": float, "gain": float, "steps": int, "bytes": int}
    for number, line in enumerate(whole_lines(path)[1:], 2):
        values = dict(zip(COLUMNS, line.split("\t")))
        try:
            rows.append(Row(**{name: kinds.get(name, str)(value) for name, value in values.items()}))
        except (TypeError, ValueError):
            raise ValueError(f"{path}:{number}: {line[:60]!r} must be {len(COLUMNS)} columns with tabs between them; "
                             "correct or remove the line") from None
    return rows


def append_record(path: Path, record: dict[str, Any]) -> None:
    append_line(path, json.dumps(record))


def read_records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in whole_lines(path)]
