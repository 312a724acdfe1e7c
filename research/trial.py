"""One run of the script under its budget: in a session of its own, ended with all its children, judged by its log."""
from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from golf.logs import Log, read_body

MARK = "RESEARCH_RUN"  # environment variable by which a run's processes are found, whatever session they are in
GRACE_SECONDS = 10.0  # between TERM and KILL
LOG_BYTES = 64 * 2**20  # more output than this ends a run: it would fill the disk
TAIL_LINES, TAIL_WIDTH = 50, 300
CAUSE = re.compile(r"(?m)^(?:\[rank\d+\]: ?)?((?:[\w.]+(?:Error|Exception)|error): .{1,200})")  # the first one named
# Row's name and the summary lines that mean it: ours, and those of the classic loop's script.
NAMES = {"seconds": ("train_seconds", "training_seconds"), "steps": ("steps", "num_steps"),
         "memory_mib": ("peak_memory_mib", "peak_vram_mb"), "bytes": ("total_bytes",)}


class Stopped(Exception):  # noqa: N818 - no error: the loop was asked to end
    """The loop was told to stop while a process ran; the process is gone."""


@dataclass(frozen=True)
class Limits:
    train_seconds: float = 300.0
    total_seconds: float = 600.0
    total_bytes: int = 16_000_000


@dataclass(frozen=True)
class Outcome:
    """One finished run; status is ok, crash, timeout, nan, oversize or invalid."""

    status: str
    reason: str
    val_bpb: float = 0.0
    seconds: float = 0.0  # of training, as the script says
    steps: int = 0
    bytes: int = 0
    memory_mib: float = 0.0


# -- processes ---------------------------------------------------------------------------------------------------------

def run_process(command: Sequence[str], cwd: Path, environment: Mapping[str, str], log: Path, limit_seconds: float,
                stop: Event, text: str = "") -> int | None:
    """Exit status, or None after `limit_seconds`; `text` goes to stdin, all output to `log`.

    Whatever way it ends, no process of the run is left, also none that says nothing, ignores TERM or left the process
    group (torchrun gives each worker a session of its own). Raises Stopped when `stop` is set, and ValueError when the
    command cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    source = log.with_suffix(".stdin")
    source.write_text(text, encoding="utf-8")
    log.unlink(missing_ok=True)
    with log.open("ab") as output, source.open("rb") as given:
        try:
            process = subprocess.Popen(command, cwd=cwd, env={**environment, MARK: str(log.parent)}, stdin=given,
                                       stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise ValueError(f"{command[0]!r} cannot be started ({error.strerror}); correct the command") from None
        finally:
            source.unlink()
        try:
            return wait_for(process, log, time.monotonic() + limit_seconds, stop)
        finally:
            end_processes(str(log.parent), process)


def wait_for(process: subprocess.Popen, log: Path, deadline: float, stop: Event) -> int | None:
    while process.poll() is None:
        if stop.is_set():
            raise Stopped
        if time.monotonic() > deadline:
            return None
        if log.stat().st_size > LOG_BYTES:
            with log.open("ab") as f:
                f.write(f"\nerror: ended after {LOG_BYTES} bytes of output\n".encode())
            return 1
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.05)
    return process.returncode


def marked(mark: str) -> list[int]:
    """Processes whose environment has MARK = `mark` or a path below it; zombies have none. Needs /proc."""
    found, value = [], f"{MARK}={mark}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(item == value or item.startswith(value + b"/")
                   for item in (folder / "environ").read_bytes().split(b"\0")):
                found.append(int(folder.name))
    return [pid for pid in found if pid != os.getpid()]


def end_processes(mark: str, process: subprocess.Popen | None = None) -> None:
    """TERM, then KILL, to a run's process group and to all that carry its mark, until none is left."""
    began, sent = time.monotonic(), None
    while True:
        group = [process.pid] if process is not None and group_lives(process) else []
        single = marked(mark)
        if not group and not single:
            break
        number = signal.SIGKILL if time.monotonic() - began > GRACE_SECONDS else signal.SIGTERM
        if number != sent or number == signal.SIGKILL:
            for pid in group:
                send(os.killpg, pid, number)
            for pid in single:
                send(os.kill, pid, number)
            sent = number
        time.sleep(0.02)
    if process is not None:
        process.wait()


def group_lives(process: subprocess.Popen) -> bool:
    process.poll()  # reaps the leader, which would else count as alive
    try:
        os.killpg(process.pid, 0)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def send(function, pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        function(pid, number)


# -- verdict on one run ------------------------------------------------------------------------------------------------

def read_text(log: Path) -> str:
    """A log with progress bars' carriage returns as line ends, so that every line starts at column 0."""
    return log.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")


def failure_tail(text: str) -> str:
    """The first traceback (with several ranks: of the rank that failed first) and the last lines."""
    lines = [line[:TAIL_WIDTH] for line in text.rstrip().split("\n")]
    starts = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if starts and starts[0] < len(lines) - TAIL_LINES:
        return "\n".join([*lines[starts[0]:starts[0] + TAIL_LINES // 2], "[...]", *lines[-TAIL_LINES:]])
    return "\n".join(lines[-TAIL_LINES:])


def judge(code: int | None, text: str, limits: Limits) -> Outcome:
    """What a run's exit status (None: over the limit) and output mean. Exit codes 3 and 4 are the script's own for a
    loss that is not finite and for too many bytes; torchrun hides them in its table of failures."""
    if code is None:
        return Outcome("timeout", f"over {limits.total_seconds:g} s in all; ended")
    log = Log(Path("log"))
    try:
        read_body(log, "\n" + text)  # the rule of the summary may be the first line
        found = {name: float(next((log.summary[key] for key in keys if key in log.summary), 0))
                 for name, keys in NAMES.items()}
        bpb = float(log.summary["val_bpb"]) if "val_bpb" in log.summary else None
    except ValueError as error:
        return Outcome("crash", f"summary not readable: {error}")
    values = {**found, "steps": int(found["steps"]), "bytes": int(found["bytes"])}
    codes = {code, *map(int, re.findall(r"exitcode\s*:\s*(-?\d+)", text))}
    status, reason = classify(codes, bpb, log, values, limits, text)
    return Outcome(status, reason, bpb if status == "ok" else 0.0, **values)


def classify(codes: set[int], bpb: float | None, log: Log, values: Mapping[str, float], limits: Limits,
             text: str) -> tuple[str, str]:
    losses = [step[1] for step in log.steps] + ([] if bpb is None else [bpb])
    if 3 in codes or not all(map(math.isfinite, losses)):
        return "nan", "the loss or the score is not finite"
    if 4 in codes or values["bytes"] > limits.total_bytes:
        return "oversize", f"{values['bytes'] or 'too many'} bytes, at most {limits.total_bytes} may be used"
    if codes != {0}:
        cause = CAUSE.search(text)
        return "crash", f"exit status {', '.join(map(str, sorted(codes - {0})))}{': ' + cause[1] if cause else ''}"
    if bpb is None:
        return "crash", "no line 'val_bpb: NUMBER' after a line '---'"
    if not log.summary.get("valid", "yes").startswith("yes"):
        return "invalid", f"the script says valid: {log.summary['valid']}"
    if bpb <= 0:
        return "invalid", f"val_bpb {bpb} is not above 0"
    # A step that begins in time may end after it.
    if values["seconds"] > 1.03 * limits.train_seconds + 2:
        return "invalid", f"trained {values['seconds']:.1f} s, the budget is {limits.train_seconds:g} s"
    return "ok", "finished"
