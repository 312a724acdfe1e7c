"""Short runs of a training script: tiny data, a settings environment, a subprocess with a time limit."""
from __future__ import annotations

import contextlib
import io
import os
import signal
import struct
import subprocess
from pathlib import Path
from typing import Any

GRACE_SECONDS = 3  # between asking a process group to end and ending it
SHARD_HEADER = (20240520, 1)  # magic and version; then the token count, in 256 int32 altogether

# Small, yet with matrices of over 65,536 weights, so that Hessians, int6 and int8 all run. The user's settings win.
TINY = {"VOCAB_SIZE": "512", "NUM_LAYERS": "3", "XSA_LAST_N": "3", "NUM_KV_HEADS": "2", "MODEL_DIM": "160",
        "EMBEDDING_DIM": "160", "NUM_HEADS": "4", "MLP_MULT": "4", "ROPE_DIMS": "4", "VE_DIM": "8", "VE_LAYERS": "1,2",
        "TRAIN_SEQ_LEN": "64", "EVAL_SEQ_LEN": "64", "EVAL_STRIDE": "32", "TRAIN_BATCH_TOKENS": "1024"}
# What makes a run short, the same each time, and free of the clock.
SHORT = {"ITERATIONS": "5", "WARMUP_STEPS": "1", "MAX_WALLCLOCK_SECONDS": "0", "TRAIN_LOG_EVERY": "1",
         "VAL_LOSS_EVERY": "0", "EMA_DECAY": "0.5", "GPTQ_CALIBRATION_BATCHES": "2", "RUN_ID": "trial"}

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

# -- data --------------------------------------------------------------------------------------------------------------

def dataset_folder(data_dir: Path, vocab_size: int) -> Path:
    return data_dir / "datasets" / f"fineweb10B_sp{vocab_size}"

def tokenizer_file(data_dir: Path, vocab_size: int) -> Path:
    return data_dir / "tokenizers" / f"fineweb_{vocab_size}_bpe.model"

def write_shard(path: Path, tokens: Any) -> None:
    """Writes a numpy array of token ids in the recipe's layout."""
    path.write_bytes(struct.pack("<3i1012x", *SHARD_HEADER, len(tokens)) + tokens.astype("<u2").tobytes())

def shard_problem(path: Path) -> str | None:
    """What is wrong with a shard's header or size; None for a good one."""
    with path.open("rb") as file:
        header = file.read(1024)
    if len(header) < 1024 or struct.unpack("<2i", header[:8]) != SHARD_HEADER:
        return f"{path.name}: its header must be {SHARD_HEADER[0]}, {SHARD_HEADER[1]}"
    tokens, found = struct.unpack("<i", header[8:12])[0], path.stat().st_size
    expected = 1024 + 2 * tokens
    return None if found == expected else f"{path.name}: {tokens} tokens need {expected} bytes, it has {found}"

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
    tokenizer_file(data_dir, vocab_size).parent.mkdir(parents=True)
    tokenizer_file(data_dir, vocab_size).write_bytes(model.getvalue())
    encode = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).encode
    tokens = np.concatenate([[1, *encode(text)] for text in texts[:60]])
    folder = dataset_folder(data_dir, vocab_size)
    folder.mkdir(parents=True)
    parts = {"val_000000": tokens[:2000], "train_000000": tokens[2000:20000], "train_000001": tokens[20000:]}
    for name, part in parts.items():
        write_shard(folder / f"fineweb_{name}.bin", part)
