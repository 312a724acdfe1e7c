"""What a session keeps: state.json and runs.jsonl in `.research/`, and results.tsv. Every record is one appended line,
synced before anything else happens; a line that a kill cut short is none, and the next append removes it."""
from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from operator import itemgetter
from pathlib import Path
from typing import Any

FOLDER, RESULTS = ".research", "results.tsv"
SHORT = 10  # characters of a commit in tables and folder names

@dataclass
class State:
    """What `start` fixed for the whole session."""
    tag: str
    script: str
    command: list[str]
    budget: float = 300.0  # seconds of training
    limit: float = 600.0  # seconds of a run in all
    cap_bytes: int = 16_000_000
    links: list[str] = field(default_factory=list)  # untracked paths that runs need
    data: dict[str, str] = field(default_factory=dict)  # fingerprints
    environment: dict[str, str] = field(default_factory=dict)  # the script's settings that are given there

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
    seeds: str = ""  # all that ran, with commas
    gain: float = 0.0  # over the commit it started from, bpb
    reason: str = ""

COLUMNS = {item.name: {"float": float, "int": int, "str": str}[item.type] for item in fields(Row)}

RUN_KEYS = "commit", "seed", "hardware", "budget", "status", "val_bpb", "seconds", "steps", "bytes", "memory_mib"

def one_line(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())

def load_state(root: Path) -> State:
    path = root / FOLDER / "state.json"
    if not path.is_file():
        raise ValueError(f"{root} has no research session; begin one with: python -m research start TAG")
    try:
        return State(**json.loads(path.read_text(encoding="utf-8")))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); restore it, or move {FOLDER} and {RESULTS} away") from None

@contextlib.contextmanager
def locked(root: Path) -> Iterator[None]:
    """One loop per folder. Raises ValueError when another one works here; the lock goes with its process."""
    (root / FOLDER).mkdir(exist_ok=True)
    with (root / FOLDER / "lock").open("a") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another loop works in {root}; wait, or start one with its own tag in a folder of "
                             "`git worktree add`") from None
        yield

def ended(data: bytes) -> bytes:
    """Only whole lines: a last one without its end is whole when an editor took that, not when a kill cut it short."""
    last = data[data.rfind(b"\n") + 1:]
    whole = last.endswith(b"}") or last.count(b"\t") == len(COLUMNS) - 1
    return data + b"\n" if whole else data.removesuffix(last)

def append_line(path: Path, line: str) -> None:
    path.touch()
    with path.open("r+b") as f:
        old = f.read()
        new = ended(old)
        f.truncate(min(len(old), len(new)))
        f.seek(0, os.SEEK_END)
        f.write(new[len(old):] + (line + "\n").encode("utf-8"))
        f.flush()
        os.fsync(f.fileno())

def whole_lines(path: Path) -> list[str]:
    return ended(path.read_bytes()).decode("utf-8", errors="replace").split("\n")[:-1] if path.exists() else []

def append_row(root: Path, row: Row) -> None:
    path = root / RESULTS
    if not whole_lines(path):
        append_line(path, "\t".join(COLUMNS))
    values = [round(value, 6) if isinstance(value, float) else value for value in asdict(row).values()]
    append_line(path, "\t".join(one_line(str(value)) for value in values))

def parsed(path: Path, first: int, parse: Callable[[str], Any], rule: str) -> list[Any]:
    """Whole lines from the number `first` on. Raises ValueError for a line that is none."""
    found: list[Any] = []
    for number, line in enumerate(whole_lines(path)[first - 1:], first):
        try:
            found.append(parse(line))
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"{path}:{number}: {line[:60]!r} must be {rule}; correct or remove the line") from None
    return found

def read_rows(root: Path) -> list[Row]:
    """All rows, also those with the classic five columns only."""
    def parse(line: str) -> Row:
        return Row(*(kind(text) for kind, text in zip(COLUMNS.values(), line.split("\t"))))
    return parsed(root / RESULTS, 2, parse, f"{len(COLUMNS)} columns with tabs between them")

def read_runs(root: Path) -> list[dict[str, Any]]:
    def parse(line: str) -> dict[str, Any]:
        return dict(zip(RUN_KEYS, itemgetter(*RUN_KEYS)(json.loads(line))))
    return parsed(root / FOLDER / "runs.jsonl", 1, parse, f"JSON with {', '.join(RUN_KEYS)}")
