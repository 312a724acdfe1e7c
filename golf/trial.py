"""Short runs of a training script: the recipe itself, tiny data, settings, the GPUs, a command with a time limit."""
from __future__ import annotations

import contextlib
import importlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from threading import Event
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
MARK = "TRIAL_RUN"  # variables by which a run's processes are found: a number for each run around it follows
GRACE_SECONDS = 10.0  # between TERM and KILL
LOG_BYTES = 64 * 2**20  # more output than this ends a run: it would fill the disk
# Small, yet with matrices of over 65,536 weights, so that Hessians, int6 and int8 all run. The user's settings win.
TINY = {"VOCAB_SIZE": "512", "NUM_LAYERS": "3", "XSA_LAST_N": "3", "NUM_KV_HEADS": "2", "MODEL_DIM": "160",
        "EMBEDDING_DIM": "160", "NUM_HEADS": "4", "MLP_MULT": "4", "ROPE_DIMS": "4", "VE_DIM": "8", "VE_LAYERS": "1,2",
        "TRAIN_SEQ_LEN": "64", "EVAL_SEQ_LEN": "64", "EVAL_STRIDE": "32", "TRAIN_BATCH_TOKENS": "1024"}
# What makes a run short, the same each time, and free of the clock.
SHORT = {"ITERATIONS": "5", "WARMUP_STEPS": "1", "MAX_WALLCLOCK_SECONDS": "0", "TRAIN_LOG_EVERY": "1",
         "VAL_LOSS_EVERY": "0", "EMA_DECAY": "0.5", "GPTQ_CALIBRATION_BATCHES": "2", "RUN_ID": "trial"}

@cache
def recipe(name: str = "train_gpt") -> Any:
    """A module of the project: the recipe's own code, or data.shards. The recipe needs PyTorch, so only when used."""
    sys.path.insert(0, str(ROOT))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)

def nvidia_smi(query: str) -> list[str] | None:
    """The answer for each GPU; empty when nvidia-smi fails or hangs, None where it is missing."""
    if shutil.which("nvidia-smi") is None:
        return None
    try:
        done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"], capture_output=True,
                              text=True, check=False, timeout=60)
    except subprocess.TimeoutExpired:
        return []
    return [line.strip() for line in done.stdout.splitlines()] if done.returncode == 0 else []

def run_limited(command: Sequence[str], folder: Path, environment: Mapping[str, str],
                seconds: float) -> tuple[int, str]:
    """Exit status and joined output of a command; 124 when it ran or wrote too long."""
    with tempfile.TemporaryDirectory() as scratch:
        log = Path(scratch, "log.txt")
        status = run_process(command, folder, environment, log, seconds, Event())
        output = read_text(log)
    if status is None:
        return 124, f"{output}\nstopped after {seconds:.0f} s, or {LOG_BYTES >> 20} MiB of output"
    return status, output

def run_process(command: Sequence[str], cwd: Path, environment: Mapping[str, str], log: Path, limit_seconds: float,
                stop: Event, stdin: Path = Path(os.devnull)) -> int | None:
    """Exit status, or None when it ran or wrote too long; all output goes to `log`. No process of the run is left, also
    none that ignores TERM or left the process group (torchrun gives each worker a session of its own). Raises
    KeyboardInterrupt when `stop` is set, and ValueError when the command cannot be started."""
    log.parent.mkdir(parents=True, exist_ok=True)
    mark = f"{MARK}{sum(name.startswith(MARK) for name in environment)}"
    with log.open("wb") as output, stdin.open("rb") as given:
        try:
            process = subprocess.Popen(command, cwd=cwd, env={**environment, mark: f"{log.parent}/"}, stdin=given,
                                       stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        except OSError as error:
            raise ValueError(f"{command[0]!r} cannot be started ({error.strerror}); correct the command") from None
        end, file = time.monotonic() + limit_seconds, output.fileno()  # the run may have deleted its name
        try:
            while (code := process.poll()) is None and time.monotonic() < end and os.fstat(file).st_size < LOG_BYTES:
                if stop.wait(0.05):
                    raise KeyboardInterrupt
            return code
        finally:
            end_processes(log.parent)
            if process.poll() is None:  # where there is no /proc
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()

def marked(folder: Path) -> list[int]:
    """Processes of the runs whose logs are in or below this folder. Needs Linux's /proc."""
    found, mark = [], re.compile(rf"\0{MARK}\d*={re.escape(str(folder))}/".encode())
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.search(b"\0" + (process / "environ").read_bytes()):
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

def last_lines(output: str) -> str:
    return "\n".join([line for line in output.splitlines() if line.strip()][-6:])

def write_shard(path: Path, tokens: Any) -> None:
    """A numpy array of token ids as a shard."""
    path.write_bytes(recipe("data.shards").shard_header(len(tokens)) + tokens.astype("<u2").tobytes())

def make_tiny_data(data_dir: Path, vocab_size: int) -> None:
    """A tokenizer and three shards from Python's own documentation. Raises ValueError when it cannot fill the size."""
    from pydoc_data.topics import topics

    import numpy as np
    import sentencepiece

    texts = [" ".join(topics[name].split()) for name in sorted(topics)]
    sentences, model = [text[i:i + 2000] for text in texts for i in range(0, len(text), 2000)], io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences), model_writer=model, vocab_size=vocab_size, model_type="bpe",
            byte_fallback=True, add_dummy_prefix=False, split_digits=True, pad_id=0, bos_id=1, eos_id=2, unk_id=3,
            num_threads=1, minloglevel=2)
    except RuntimeError as error:
        raise ValueError(f"VOCAB_SIZE={vocab_size}: no tokenizer of this size from the built-in text ({error}); "
                         "use 512, or give --data-dir") from None
    hp = recipe().Hyperparameters(data_dir=str(data_dir), vocab_size=vocab_size)
    for folder in (hp.tokenizer_path.parent, hp.dataset_dir):
        folder.mkdir(parents=True)
    hp.tokenizer_path.write_bytes(model.getvalue())
    encode = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode
    tokens = np.concatenate([[1, *encode(text)] for text in texts[:60]])
    for name, part in zip(("val_000000", "train_000000", "train_000001"), np.split(tokens, [2000, 20000])):
        write_shard(hp.dataset_dir / f"fineweb_{name}.bin", part)
