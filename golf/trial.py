"""Short runs of a training script: the recipe itself, tiny data, settings, a subprocess with a time limit."""
from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 3  # between asking a process group to end and ending it
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

def run_limited(command: list[str], folder: Path, environment: dict[str, str], seconds: float) -> tuple[int, str]:
    """Exit status and joined output of a command; 124 when it ran out of time and its whole process group was ended."""
    process = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                               text=True, errors="replace", start_new_session=True)
    try:
        output, _ = process.communicate(timeout=seconds)
        return process.returncode, output
    except subprocess.TimeoutExpired:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=GRACE_SECONDS)
        return 124, f"{process.communicate()[0]}\nstopped after {seconds:.0f} s"

def last_lines(output: str, count: int = 6) -> str:
    return "\n".join([line for line in output.splitlines() if line.strip()][-count:])

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
