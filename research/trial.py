"""One run of the script under its budget: ended with all its children, judged by its log."""
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
from research.store import State

MARK = "RESEARCH_RUN"  # environment variable by which a run's processes are found, whatever session they are in
GRACE_SECONDS = 10.0  # between TERM and KILL
LOG_BYTES = 64 * 2**20  # more output than this ends a run: it would fill the disk
CAUSE = re.compile(r"(?m)^(?:\[rank\d+\]: ?)?((?:[\w.]+(?:Error|Exception)|error): .{1,200})")  # the first one named

@dataclass(frozen=True)
class Outcome:
    """One finished run; status is ok, crash, timeout, nan, oversize or invalid."""
    status: str
    reason: str
    val_bpb: float = 0.0
    seconds: float = 0.0  # of training, as the script says
    steps: int = 0
    bytes: int = 0
    memory_mib: int = 0

def run_process(command: Sequence[str], cwd: Path, environment: Mapping[str, str], log: Path, limit_seconds: float,
                stop: Event, stdin: Path = Path(os.devnull)) -> int | None:
    """Exit status, or None when it ran or wrote too long; all output goes to `log`. No process of the run is left, also
    none that ignores TERM or left the process group (torchrun gives each worker a session of its own). Raises
    KeyboardInterrupt when `stop` is set, and ValueError when the command cannot be started."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output, stdin.open("rb") as given:
        try:
            process = subprocess.Popen(command, cwd=cwd, env={**environment, MARK: f"{log.parent}/"}, stdin=given,
                                       stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise ValueError(f"{command[0]!r} cannot be started ({error.strerror}); correct the command") from None
    deadline = time.monotonic() + limit_seconds
    try:
        while (code := process.poll()) is None and time.monotonic() < deadline and log.stat().st_size < LOG_BYTES:
            if stop.wait(0.05):
                raise KeyboardInterrupt
        return code
    finally:
        end_processes(log.parent)
        process.kill()  # where there is no /proc
        process.wait()

def marked(folder: Path) -> list[int]:
    """Processes of the runs whose logs are in or below this folder. Needs Linux's /proc."""
    found, value = [], f"\0{MARK}={folder}/".encode()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if value in b"\0" + (process / "environ").read_bytes():
                found.append(int(process.name))
    return found

def end_processes(folder: Path) -> None:
    """TERM, then KILL, to all of these processes, until none is left."""
    asked: set[int] = set()
    deadline = time.monotonic() + GRACE_SECONDS
    while pids := marked(folder):
        late = time.monotonic() > deadline
        for pid in pids if late else set(pids) - asked:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
        asked.update(pids)
        time.sleep(0.02)

def read_text(log: Path) -> str:
    """A log with progress bars' carriage returns as line ends, so that every line starts at column 0."""
    return log.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n").replace("\r", "\n")

def judge(code: int | None, text: str, state: State) -> Outcome:
    """What a run's exit status (None: over the limit) and output mean. Exit codes 3 and 4 are the script's own for a
    loss that is not finite and for too many bytes; torchrun hides them in its table of failures."""
    if code is None:
        return Outcome("timeout", f"over {state.limit:g} s in all, or {LOG_BYTES >> 20} MiB of output; ended")
    log = Log(Path("log"))
    try:
        read_body(log, "\n" + text)  # the rule of the summary may be the first line
        bpb = float(log.summary.get("val_bpb", 0))
    except ValueError as error:
        return Outcome("crash", f"summary not readable: {error}")
    codes, cause = {code, *map(int, re.findall(r"exitcode\s*:\s*(-?\d+)", text))}, CAUSE.search(text)
    failed = f"exit status {', '.join(map(str, sorted(codes - {0})))}{': ' + cause[1] if cause else ''}"
    seconds, total_bytes = log.train_seconds or 0.0, log.total_bytes or 0
    verdicts = [  # the first that holds counts
        (3 in codes or not all(map(math.isfinite, [bpb, *(step[1] for step in log.steps)])),
         "nan", "the loss or the score is not finite"),
        (4 in codes or total_bytes > state.cap_bytes,
         "oversize", f"{total_bytes or 'too many'} bytes, at most {state.cap_bytes} may be used"),
        (codes != {0}, "crash", failed),
        (bpb <= 0, "crash", "no line 'val_bpb: NUMBER', above 0, after a line '---'"),
        (log.valid is False, "invalid", f"the script says valid: {log.summary.get('valid')}"),
        (seconds > 1.03 * state.budget + 2,  # a step that begins in time may end after it
         "invalid", f"trained {seconds:.1f} s, the budget is {state.budget:g} s"),
        (True, "ok", "finished")]
    status, reason = next((status, reason) for holds, status, reason in verdicts if holds)
    return Outcome(status, reason, bpb if status == "ok" else 0.0, seconds, log.steps_done or 0, total_bytes,
                   log.peak_memory_mib or 0)
