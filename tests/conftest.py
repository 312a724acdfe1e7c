"""Shared fixtures: the golden vectors and the tiny configuration they were made with (tests/golden/README.md)."""
import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
sys.path.insert(0, str(ROOT))

import train_gpt as tg  # noqa: E402

TINY = {
    "VOCAB_SIZE": "512", "NUM_LAYERS": "5", "XSA_LAST_N": "5", "NUM_KV_HEADS": "2", "MODEL_DIM": "32", "EMBEDDING_DIM": "32",
    "NUM_HEADS": "4", "MLP_MULT": "4", "ROPE_DIMS": "4", "VE_DIM": "8", "VE_LAYERS": "3,4", "TRAIN_SEQ_LEN": "64",
    "EVAL_SEQ_LEN": "64", "EVAL_STRIDE": "16", "TRAIN_BATCH_TOKENS": "1024",
}


def settings(**changes) -> tg.Hyperparameters:
    """The tiny configuration with changes, read as from the environment."""
    return tg.Hyperparameters.from_env({**TINY, **{name.upper(): str(value) for name, value in changes.items()}})


def golden_arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name) as arrays:
        return {key: arrays[key] for key in arrays.files}


def golden_tensors(name: str) -> dict[str, torch.Tensor]:
    return {key: torch.from_numpy(value) for key, value in golden_arrays(name).items()}


def load_model(hp: tg.Hyperparameters, state: dict[str, torch.Tensor], attend=None) -> tg.GPT:
    """An fp32 CPU model with these weights; every name must be there."""
    model = tg.build_model(hp, attend or tg.sdpa_attention, torch.device("cpu"), torch.float32)
    model.load_state_dict(state)
    return model


def make_data(folder: Path) -> Path:
    """The golden shards and tokenizer as a data folder for VOCAB_SIZE=512."""
    shards, tokenizers = folder / "data/datasets/fineweb10B_sp512", folder / "data/tokenizers"
    shutil.copytree(GOLDEN / "shards", shards)
    tokenizers.mkdir(parents=True)
    shutil.copy(GOLDEN / "tokenizer_512.model", tokenizers / "fineweb_512_bpe.model")
    return folder / "data"


def run_environment(**changes) -> dict[str, str]:
    """Environment for a subprocess: the tiny configuration on the CPU, changes by lower-case name, no outer settings."""
    known = {name.upper() for name in tg.Hyperparameters.__dataclass_fields__}
    outer = {key: value for key, value in os.environ.items() if key not in known}
    quick = {"DEVICE": "cpu", "MAX_WALLCLOCK_SECONDS": "0", "WARMUP_STEPS": "1", "ITERATIONS": "4", "TRAIN_LOG_EVERY": "1",
             "VAL_LOSS_EVERY": "0", "EMA_DECAY": "0.5", "GPTQ_CALIBRATION_BATCHES": "2", "OMP_NUM_THREADS": "1"}
    return {**outer, **TINY, **quick, **{name.upper(): str(value) for name, value in changes.items()}}


@pytest.fixture
def data_here(tmp_path, monkeypatch):
    """A working directory that holds data/ with the golden shards: the loader hashes relative paths."""
    make_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def model_state():
    return golden_tensors("model_state.npz")
