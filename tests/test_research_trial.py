"""One run: its processes always end, and its output is judged."""
import os
import subprocess
import sys
import time
from threading import Event, Timer

import pytest

from golf import trial
from golf.trial import marked, run_process
from research import guard
from research.store import State
from research.trial import judge

STATE = State("tag", "train_gpt.py", [], budget=300, limit=600)
IGNORE_TERM = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
CHILD = f"{IGNORE_TERM} time.sleep(60)"


def block(**changes) -> str:
    values = {"val_bpb": "1.10000000", "train_seconds": "300.4", "steps": "1639", "peak_memory_mib": "25900",
              "total_bytes": "15990000", "valid": "yes", **changes}
    return "---\n" + "".join(f"{name}: {value}\n" for name, value in values.items() if value is not None)


STEP = "5/10 train_loss: {} train_time: 0.1m tok/s: 1000\n"


@pytest.mark.parametrize("code, text, status", [
    (0, block(), "ok"),
    (0, STEP.format("2.5") + block(), "ok"),
    (0, "\rstep 1\rstep 2\n" + block(), "ok"),
    (0, block(total_bytes=None, valid=None), "ok"),
    (None, block(), "timeout"),
    (1, block(), "crash"),
    (0, "val_bpb: 1.1\n", "crash"),
    (0, "", "crash"),
    (0, block(val_bpb="much"), "crash"),
    (0, block(val_bpb="nan"), "nan"),
    (0, STEP.format("nan") + block(), "nan"),
    (3, "error: diverged", "nan"),
    (1, "  exitcode  : 3 (pid: 7)\n", "nan"),
    (1, "  exitcode  : 4 (pid: 7)\n" + block(), "oversize"),
    (4, block(total_bytes="16000001"), "oversize"),
    (0, block(total_bytes="16000001"), "oversize"),
    (0, block(total_bytes="16000000"), "ok"),
    (0, block(valid="no: read data late"), "invalid"),
    (0, block(train_seconds="340.0"), "invalid"),
    (0, block(val_bpb="-1"), "crash"),
    (0, block(train_seconds=None), "invalid"),
    (0, block(train_seconds="0.0"), "invalid"),
    (0, block(train_seconds="nan"), "invalid"),
    (0, block() + "val_bpb: 0.5\n", "invalid"),
    (0, block(val_bpb="0.5") + block(), "invalid"),
])
def test_status(code, text, status):
    outcome = judge(code, text.replace("\r", "\n"), STATE)
    assert outcome.status == status and outcome.reason
    assert (outcome.val_bpb > 0) == (status == "ok")


def test_a_crash_names_its_first_cause():
    text = "[rank1]: torch.OutOfMemoryError: CUDA out of memory.\nChildFailedError: train_gpt.py\n"
    assert judge(1, text, STATE).reason == "exit status 1: torch.OutOfMemoryError: CUDA out of memory."


def test_numbers():
    outcome = judge(0, block(), STATE)
    assert (outcome.val_bpb, outcome.seconds, outcome.steps, outcome.bytes, outcome.memory_mib) == (
        1.1, 300.4, 1639, 15_990_000, 25_900)


def test_hardware_is_that_of_the_chosen_gpus(monkeypatch):
    names = ["NVIDIA H100", "NVIDIA T4", "NVIDIA T4"]
    monkeypatch.setattr(guard, "nvidia_smi", lambda query: names)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    said = {gpu: guard.hardware.__wrapped__(gpu).partition(", torch")[0] for gpu in ("0", "1", "1,2", "0,2", "GPU-a1")}
    assert said == {"0": "1 x NVIDIA H100", "1": "1 x NVIDIA T4", "1,2": "2 x NVIDIA T4",
                    "0,2": "2 x NVIDIA H100 and NVIDIA T4", "GPU-a1": "1 x GPU-a1"}
    del names[1:]
    assert guard.hardware.__wrapped__("GPU-a1").startswith("1 x NVIDIA H100")
    for gpu in ("..", "0/1", ""):
        with pytest.raises(ValueError, match="must be letters, digits"):
            guard.hardware(gpu)


def test_an_nvidia_smi_that_hangs_is_one_that_fails(monkeypatch, tmp_path):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexec sleep 5\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda *a, **options: run(*a, **{**options, "timeout": 0.1}))
    assert trial.nvidia_smi("name") == []


# -- processes ---------------------------------------------------------------------------------------------------------

@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "GRACE_SECONDS", 0.3)

    def start(code, limit=20.0, stop=None, text=""):
        command, log = [sys.executable, "-S", "-c", code], tmp_path / "run" / "log.txt"
        (tmp_path / "stdin").write_text(text)
        return run_process(command, tmp_path, os.environ, log, limit, stop or Event(), tmp_path / "stdin")
    return start


def test_output_input_and_status(run, tmp_path):
    assert run("import sys; print(sys.stdin.read()); print('err', file=sys.stderr); sys.exit(7)", text="hello") == 7
    assert (tmp_path / "run" / "log.txt").read_text().split() in (["hello", "err"], ["err", "hello"])


def test_a_silent_child_that_ignores_term_in_its_own_session_is_ended(run, tmp_path):
    code = (f"{IGNORE_TERM} import subprocess, sys; "
            f"subprocess.Popen([sys.executable, '-S', '-c', {CHILD!r}], start_new_session=True); time.sleep(60)")
    began = time.monotonic()
    assert run(code, limit=0.5) is None
    assert time.monotonic() - began < 10 and marked(tmp_path / "run") == []


def test_what_a_finished_run_leaves_behind_is_ended_too(run, tmp_path):
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-S', '-c', {CHILD!r}], start_new_session=True)"
    assert run(code) == 0 and marked(tmp_path / "run") == []


def test_a_run_inside_a_run_ends_with_it(run, tmp_path):
    """As when an agent calls `golf preflight` and takes too long."""
    inner = f"open({str(tmp_path / 'pid')!r}, 'w').write(str(__import__('os').getpid())); {CHILD}"
    code = (f"import os, sys; sys.path.insert(0, {str(trial.ROOT)!r}); from golf import trial; "
            f"trial.run_limited([sys.executable, '-S', '-c', {inner!r}], '/', os.environ, 60)")
    assert run(code, limit=2.0) is None
    state = subprocess.run(["ps", "-o", "stat=", "-p", (tmp_path / "pid").read_text()], capture_output=True, text=True,
                           check=False).stdout
    assert state.strip()[:1] in ("", "Z")


def test_others_are_left_alone(run, tmp_path):
    other = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(30)"],
                             env={**os.environ, trial.MARK: f"{tmp_path}/run2/"})
    try:
        assert run("pass") == 0 and other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_stop_ends_a_run(run, tmp_path):
    stop = Event()
    Timer(0.3, stop.set).start()
    with pytest.raises(KeyboardInterrupt):
        run("import time; time.sleep(60)", stop=stop)
    assert marked(tmp_path / "run") == []


def test_endless_output_is_ended(run, monkeypatch):
    monkeypatch.setattr(trial, "LOG_BYTES", 10_000)
    assert run("while True: print('x' * 1000, flush=True)") is None


def test_a_command_that_does_not_exist(tmp_path):
    with pytest.raises(ValueError, match="'no-such-command' cannot be started"):
        run_process(["no-such-command"], tmp_path, os.environ, tmp_path / "run" / "log.txt", 5, Event())
