"""What one run of the script under its budget came to: judged by its exit status and log."""
from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from golf.logs import Log, read_body
from golf.trial import LOG_BYTES
from research.store import State

CAUSE = re.compile(r"(?m)^(?:\[rank\d+\]: ?)?((?:[\w.]+(?:Error|Exception)|error): .{1,200})")  # the first one named
COUNTED = "val_bpb", "train_seconds", "total_bytes", "valid"  # lines of the summary that decide

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
    timed = 0 < seconds < math.inf
    twice = [name for name in COUNTED if len(re.findall(rf"(?m)^{name}: ", text.partition("---\n")[2])) > 1]
    verdicts = [  # the first that holds counts
        (3 in codes or not all(map(math.isfinite, [bpb, *(step[1] for step in log.steps)])),
         "nan", "the loss or the score is not finite"),
        (4 in codes or total_bytes > state.cap_bytes,
         "oversize", f"{total_bytes or 'too many'} bytes, at most {state.cap_bytes} may be used"),
        (codes != {0}, "crash", failed),
        (bpb <= 0, "crash", "no line 'val_bpb: NUMBER', above 0, after a line '---'"),
        (log.valid is False, "invalid", f"the script says valid: {log.summary.get('valid')}"),
        (twice, "invalid", f"the summary has {', '.join(twice)} twice; print it once"),
        (not timed, "invalid", "no line 'train_seconds: NUMBER', above 0, after a line '---'"),
        (seconds > 1.03 * state.budget + 2,  # a step that begins in time may end after it
         "invalid", f"trained {seconds:.1f} s, the budget is {state.budget:g} s"),
        (True, "ok", "finished")]
    status, reason = next((status, reason) for holds, status, reason in verdicts if holds)
    return Outcome(status, reason, bpb if status == "ok" else 0.0, seconds if timed else 0.0, log.steps_done or 0,
                   total_bytes, log.peak_memory_mib or 0)
