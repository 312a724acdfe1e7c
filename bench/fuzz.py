"""Can a damaged or hostile file do more than be refused? Mutated artifacts, data, tokenizers, records and logs.

    python bench/fuzz.py --cases 100000 --seed 1 --out bench/results/NAME.json
    python bench/fuzz.py --case "artifact: bombs/17" --seed 1          # one case of such a run again

Each case damages a good input (bench/fuzz_targets.py says how), gives it to the function through which users meet it,
and demands a correct result or that function's clean error. A traceback, a crash, a hang, more memory than the bound,
a written file, a started command or a connection is a failure. Every core has a process that works in an empty folder
under an address-space limit; the parent ends one that hangs and starts another. Linux only. Exit status 1 after a
failure.
"""
from __future__ import annotations

import argparse
import faulthandler
import gc
import json
import multiprocessing
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parent.parent

LIMIT_SECONDS = 20.0  # for one case, of which the slowest good one takes a tenth
LIMIT_MIB = 256  # peak of a case over what the process held before it
ADDRESS_SPACE_MIB = 1024  # on top of what is mapped before the first case: ends a bomb before the machine suffers
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
FORBIDDEN = ("os.system os.exec os.fork os.forkpty os.posix_spawn os.spawn os.kill os.putenv subprocess.Popen "
             "socket.connect socket.bind socket.getaddrinfo os.mkdir os.rename os.remove os.rmdir os.link os.symlink "
             "os.truncate os.chmod os.chown os.utime shutil.rmtree shutil.copyfile shutil.move ctypes.dlopen").split()

Examination = Callable[[], str]  # `correct` or `refused`; anything that it raises is a failure

class Kind(NamedTuple):
    """`make` writes a damaged input into a folder; the examination that it returns gives it to the code under test."""

    name: str
    weight: int  # share of a campaign's cases
    make: Callable[[random.Random, Path], Examination]
    prepare: Callable[[], Any] = str  # slow work for all cases, done once before the processes start

class Case(NamedTuple):
    kind: Kind
    number: int

    @property
    def name(self) -> str:
        return f"{self.kind.name}/{self.number}"

@dataclass
class Outcome:
    case: str
    verdict: str  # correct or refused; else what failed: traceback, crash, hang, memory, side effect
    detail: str = ""
    seconds: float = 0.0
    peak_mib: float = 0.0

    @property
    def failed(self) -> bool:
        return self.verdict not in ("correct", "refused")

# -- one case, in a worker ---------------------------------------------------------------------------------------------

@dataclass
class Watch:
    """What the code under test did to the world outside, told by Python's audit events while `on`."""

    on: bool = False
    seen: list[str] = field(default_factory=list)

    def __call__(self, event: str, arguments: tuple) -> None:
        if not self.on:
            return
        written = event == "open" and not isinstance(arguments[0], int) and arguments[2] & WRITES
        if (written and arguments[0] != os.devnull) or (event in FORBIDDEN and not compiles_only(event, arguments)):
            self.seen.append(f"{event} {str(arguments[:2])[:200]}")

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.seen.clear()
        self.on = True
        try:
            yield
        finally:
            self.on = False

def compiles_only(event: str, arguments: tuple) -> bool:
    """`golf check` compiles the script with other Pythons, isolated and without running it."""
    return event == "subprocess.Popen" and list(arguments[1])[1:3] == ["-I", "-S"]

def memory_mib(name: str) -> float:
    """VmRSS, VmHWM (the peak) or VmSize of this process."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(rf"(?m)^{name}:\s+(\d+) kB", status)[1]) / 1024

def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")

def place(error: BaseException) -> str:
    """The last line of our code that an error passed through, and its first line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).is_relative_to(ROOT)
              and "/." not in frame.filename.removeprefix(str(ROOT))]
    at = f"{Path(frames[-1].filename).name}, {frames[-1].name}" if frames else "?"
    return f"{at}: {type(error).__name__}: {str(error).partition(chr(10))[0][:160]}"

def examine(case: Case, seed: int, base: Path, watch: Watch) -> Outcome:
    """Makes the input in an empty folder and judges what becomes of it."""
    folder = base / "case"
    folder.mkdir()
    verdict, detail, before, began = "traceback", "", 0.0, 0.0
    try:
        examination = case.kind.make(random.Random(f"{seed}/{case.name}"), folder)
        reset_peak()
        before, began = memory_mib("VmRSS"), time.perf_counter()
        with watch.watching():
            verdict = examination()
    except BaseException as error:  # noqa: BLE001 - whatever it is, the property is broken
        detail = place(error)
    seconds, peak = time.perf_counter() - began, max(memory_mib("VmHWM") - before, 0.0)
    if watch.seen:
        verdict, detail = "side effect", "; ".join(watch.seen[:3])
    elif {path.name for path in base.iterdir()} != {"case"}:
        verdict, detail = "side effect", "something is beside the case's folder"
    elif peak > LIMIT_MIB:
        verdict, detail = "memory", detail or f"over {LIMIT_MIB} MiB"
    shutil.rmtree(folder)
    return Outcome(case.name, verdict, detail, seconds, peak)

def work(pipe: Connection, cases: list[Case], seed: int) -> None:
    """Examines cases in order; tells the parent the number of each before it begins and its outcome after it."""
    watch, quiet = Watch(), os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)  # libraries say there what the error says too
    faulthandler.disable()
    warnings.simplefilter("ignore")
    sys.dont_write_bytecode = True
    limit = int(memory_mib("VmSize") + ADDRESS_SPACE_MIB) << 20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sys.addaudithook(watch)
    with tempfile.TemporaryDirectory(prefix="fuzz_") as base:
        os.chdir(base)
        for number, case in enumerate(cases):
            pipe.send(number)
            outcome = examine(case, seed, Path(base), watch)
            if outcome.failed:
                gc.collect()
            pipe.send(outcome)
        os.chdir(ROOT)
    pipe.close()
    os._exit(0)

# -- all cases, from the parent ----------------------------------------------------------------------------------------

class Worker:
    """A process for a list of cases, and what of it is known."""

    def __init__(self, cases: list[Case], seed: int) -> None:
        self.cases, self.seed, self.number, self.began = cases, seed, None, time.monotonic()
        self.pipe, theirs = multiprocessing.Pipe(duplex=False)
        self.process = multiprocessing.get_context("fork").Process(target=work, args=(theirs, cases, seed), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def overdue(self) -> bool:
        return self.number is not None and time.monotonic() - self.began > LIMIT_SECONDS

    def receive(self) -> Outcome | None:
        """The next outcome; None when a case begins. Raises EOFError when the process is gone."""
        message = self.pipe.recv()
        self.began = time.monotonic()
        self.number = message if isinstance(message, int) else None
        return None if isinstance(message, int) else message

    def end(self, hanging: bool) -> Outcome | None:
        """Ends the process; the outcome of the case that it was at, if any."""
        if hanging:
            self.process.kill()
        self.process.join()
        self.pipe.close()
        if self.number is None:
            return None
        code = self.process.exitcode or 0
        crash = signal.Signals(-code).name if code < 0 else f"exit status {code}"
        name, seconds = self.cases[self.number].name, time.monotonic() - self.began
        return Outcome(name, "hang" if hanging else "crash", "" if hanging else crash, seconds)

    def successor(self) -> Worker | None:
        """A worker for the cases after the one that ended this one."""
        rest = self.cases[self.number + 1:] if self.number is not None else []
        return Worker(rest, self.seed) if rest else None

def outcomes(cases: list[Case], seed: int, processes: int = os.cpu_count() or 1) -> Iterator[Outcome]:
    """One outcome for each case, as they come; processes that hang or crash are replaced."""
    for kind in {case.kind.name: case.kind for case in cases}.values():
        kind.prepare()
    workers = [Worker(part, seed) for n in range(processes) if (part := cases[n::processes])]
    while workers:
        ready = wait([worker.pipe for worker in workers], timeout=0.5)
        for worker in list(workers):
            gone = False
            if worker.pipe in ready:
                try:
                    outcome = worker.receive()
                except EOFError:
                    gone, outcome = True, worker.end(hanging=False)
            elif worker.overdue:
                gone, outcome = True, worker.end(hanging=True)
            else:
                continue
            if outcome:
                yield outcome
            if gone:
                workers.remove(worker)
                workers += filter(None, [worker.successor()])

def plan(kinds: list[Kind], count: int) -> list[Case]:
    """`count` cases in the kinds' shares, mixed, so that cases of a slow kind are spread over time and processes."""
    total = sum(kind.weight for kind in kinds)
    cases = [Case(kind, n) for kind in kinds for n in range(-(-count * kind.weight // total))]
    random.Random(0).shuffle(cases)
    return list(islice(cases, count))

def summarise(results: list[Outcome]) -> dict[str, Any]:
    """Counts by kind and verdict, the largest seconds and MiB of each kind, and each failure once with its cases."""
    kinds: dict[str, Any] = {}
    failures: dict[tuple[str, str, str], list[str]] = {}
    for outcome in results:
        kind, number = outcome.case.rsplit("/", 1)
        row = kinds.setdefault(kind, {"verdicts": Counter(), "most_seconds": 0.0, "most_mib": 0.0})
        row["verdicts"][outcome.verdict] += 1
        row["most_seconds"] = round(max(row["most_seconds"], outcome.seconds), 3)
        row["most_mib"] = round(max(row["most_mib"], outcome.peak_mib), 1)
        if outcome.failed:
            failures.setdefault((kind, outcome.verdict, outcome.detail), []).append(number)
    listed = [{"kind": kind, "verdict": verdict, "detail": detail, "cases": len(numbers), "first": numbers[:5]}
              for (kind, verdict, detail), numbers in sorted(failures.items())]
    verdicts = Counter(outcome.verdict for outcome in results)
    return {"cases": len(results), "verdicts": dict(verdicts), "failures": listed, "kinds": dict(sorted(kinds.items()))}

def describe() -> dict[str, Any]:
    import brotli
    import numpy
    import sentencepiece
    import torch

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    versions = {module.__name__: module.__version__ for module in (torch, numpy, sentencepiece, brotli)}
    changed = [line[3:] for line in git("status", "--porcelain", "--untracked-files=no").splitlines()]
    return {"command": " ".join(["python", "bench/fuzz.py", *sys.argv[1:]]),
            "commit": git("rev-parse", "--short", "HEAD"), "changed_files": changed,
            "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
            "python": platform.python_version(), **versions,
            "limits": {"seconds": LIMIT_SECONDS, "mib": LIMIT_MIB, "address_space_mib": ADDRESS_SPACE_MIB}}

def main() -> int:
    sys.path[:0] = [str(ROOT), str(ROOT / "bench"), str(ROOT / "tests")]
    import fuzz_targets

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds whose name holds this text")
    parser.add_argument("--case", help="KIND/NUMBER: this case alone, with what it did")
    parser.add_argument("--out", type=Path, help="file for the result (replaced)")
    args = parser.parse_args()
    kinds = [kind for kind in fuzz_targets.KINDS if args.only in kind.name]
    cases = plan(kinds, args.cases) if kinds else []
    if args.case:
        name, _, number = args.case.rpartition("/")
        cases = [Case(kind, int(number)) for kind in kinds if kind.name == name and number.isdigit()]
    if not cases:
        parser.error(f"no case of that name; the kinds are: {', '.join(kind.name for kind in fuzz_targets.KINDS)}")
    began, results = time.monotonic(), []
    for outcome in outcomes(cases, args.seed):
        results.append(outcome)
        if outcome.failed or args.case:
            print(f"{outcome.case}: {outcome.verdict} {outcome.detail}", flush=True)
        if len(results) % 10_000 == 0:
            print(f"{len(results)} cases in {time.monotonic() - began:.0f} s", flush=True)
    summary = summarise(results)
    result = {**describe(), "seed": args.seed, "seconds": round(time.monotonic() - began, 1), **summary}
    print(f"{summary['cases']} cases: {summary['verdicts']}")
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return int(bool(summary["failures"]))

if __name__ == "__main__":
    sys.exit(main())
