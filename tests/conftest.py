"""Shared fixtures: the golden vectors and the tiny configuration they were made with (tests/golden/README.md)."""
import json
import os
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
sys.path.insert(0, str(ROOT))

os.environ["TRITON_INTERPRET"] = "1"  # for tests/test_kernels.py; Triton looks at it when it is first imported

import train_gpt as tg  # noqa: E402

torch.set_num_threads(1)  # two workers share two cores: with two threads each three files took 220 s, not 163

TINY = {
    "VOCAB_SIZE": "512", "NUM_LAYERS": "5", "XSA_LAST_N": "5", "NUM_KV_HEADS": "2", "MODEL_DIM": "32",
    "EMBEDDING_DIM": "32", "NUM_HEADS": "4", "MLP_MULT": "4", "ROPE_DIMS": "4", "VE_DIM": "8", "VE_LAYERS": "3,4",
    "TRAIN_SEQ_LEN": "64", "EVAL_SEQ_LEN": "64", "EVAL_STRIDE": "16", "TRAIN_BATCH_TOKENS": "1024",
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
    model = tg.build_model(hp, tg.Operations(attend or tg.sdpa_attention), torch.device("cpu"), torch.float32)
    model.load_state_dict(state)
    return model


def logits_of(model: tg.GPT, ids: torch.Tensor) -> torch.Tensor:
    """Soft-capped logits (B, T, vocab_size)."""
    x, weight = model.head(model.hidden(ids))
    return model.hp.logit_softcap * torch.tanh(torch.nn.functional.linear(x, weight) / model.hp.logit_softcap)


def make_data(folder: Path) -> Path:
    """The golden shards and tokenizer as a data folder for VOCAB_SIZE=512."""
    shards, tokenizers = folder / "data/datasets/fineweb10B_sp512", folder / "data/tokenizers"
    shutil.copytree(GOLDEN / "shards", shards)
    tokenizers.mkdir(parents=True)
    shutil.copy(GOLDEN / "tokenizer_512.model", tokenizers / "fineweb_512_bpe.model")
    return folder / "data"


def run_environment(**changes) -> dict[str, str]:
    """Environment for a subprocess: the tiny configuration on the CPU with changes, free of outer settings."""
    known = {name.upper() for name in tg.Hyperparameters.__dataclass_fields__}
    outer = {key: value for key, value in os.environ.items() if key not in known}
    quick = {"DEVICE": "cpu", "MAX_WALLCLOCK_SECONDS": "0", "WARMUP_STEPS": "1", "ITERATIONS": "4",
             "TRAIN_LOG_EVERY": "1", "VAL_LOSS_EVERY": "0", "EMA_DECAY": "0.5", "GPTQ_CALIBRATION_BATCHES": "2",
             "OMP_NUM_THREADS": "1"}
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


# -- real runs in subprocesses -----------------------------------------------------------------------------------------

SCRIPT = ROOT / "train_gpt.py"
LARGE = {  # the configuration of the golden artifact: its MLP matrices are large enough for int6 and GPTQ
    "MODEL_DIM": "160", "EMBEDDING_DIM": "160", "NUM_LAYERS": "4", "XSA_LAST_N": "4", "MLP_MULT": "5", "VE_DIM": "64",
    "VE_LAYERS": "2,3",
}


def new_folder(base: Path, name: str) -> Path:
    """A folder of this name that holds data/ with the golden shards."""
    make_data(base / name)
    return base / name


def run_script(folder: Path, *arguments: str, script: Path = SCRIPT, launcher: tuple[str, ...] = (), timeout: int = 120,
               **changes) -> subprocess.CompletedProcess:
    """train_gpt.py (or a wrapper of it) in a subprocess that works in `folder`; changes are settings in lower case."""
    command = [sys.executable, *launcher, str(script), *arguments]
    return subprocess.run(command, cwd=folder, env=run_environment(**changes), capture_output=True, text=True,
                          check=False, timeout=timeout)


def torchrun(folder: Path, ranks: int, *options: str, **changes) -> subprocess.CompletedProcess:
    """A run of several gloo ranks on this machine, with a free port."""
    options = options or ("--standalone",)
    launcher = ("-m", "torch.distributed.run", *options, f"--nproc_per_node={ranks}")
    return run_script(folder, launcher=launcher, **changes)


def write_wrapper(folder: Path, body: str) -> Path:
    """A script that imports train_gpt, runs `body` to change a part of it, and then does the whole run."""
    path = folder / "wrapper.py"
    head = f"import os\nimport sys\nimport time\n\nsys.path.insert(0, {str(ROOT)!r})\nimport train_gpt\n"
    path.write_text(f"{head}\n{body}\nsys.exit(train_gpt.main())\n", encoding="utf-8")
    return path


def run_together(calls: dict) -> dict:
    """Results of argument-free calls by key, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        futures = {key: pool.submit(call) for key, call in calls.items()}
        return {key: future.result() for key, future in futures.items()}


def selected_cases(request, test: str) -> list[str]:
    """The values of the parameter `case` with which pytest is about to run this test."""
    return [item.callspec.params["case"] for item in request.session.items if getattr(item, "originalname", "") == test]


def records(folder: Path, run_id: str, kind: str) -> list[dict]:
    lines = (folder / "logs" / f"{run_id}.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["type"] == kind]


def train_losses(folder: Path, run_id: str) -> list[float]:
    return [record["train_loss"] for record in records(folder, run_id, "step")]


def summary_block(text: str) -> dict[str, str]:
    """The `key: value` lines at column 0 after the line of dashes."""
    return dict(line.split(": ", 1) for line in text.split("\n---\n")[1].splitlines() if ": " in line)


def assert_refused(result: subprocess.CompletedProcess, code: int, *parts: str) -> None:
    """This exit code, exactly one error message, which holds all the parts, and no traceback."""
    assert result.returncode == code, result.stdout + result.stderr
    assert "Traceback" not in result.stdout + result.stderr
    errors = re.findall(r"(?m)^error: ", result.stdout + result.stderr)
    assert len(errors) == 1, result.stderr
    message = result.stderr[result.stderr.index("error: "):]
    for part in parts:
        assert part in message, message


FORK_RUNS = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
import train_gpt

for run in json.load(sys.stdin):
    if os.fork() == 0:
        os.chdir(run["folder"])
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        os.environ.clear()
        os.environ.update(run["environment"])
        sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        sys.argv = ["train_gpt.py"]
        code = 1
        try:
            code = train_gpt.main()
        finally:
            sys.stdout.flush()
            os._exit(code)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


def run_forked(runs: dict[str, tuple[Path, dict]]) -> dict[str, subprocess.CompletedProcess]:
    """Many short runs by key, each (folder, changes) in a process of its own, with one import of PyTorch for all."""
    todo = [{"folder": str(folder), "environment": run_environment(**changes)} for folder, changes in runs.values()]
    done = subprocess.run([sys.executable, "-c", FORK_RUNS, str(ROOT)], input=json.dumps(todo), capture_output=True,
                          text=True, check=True, timeout=240, env={**os.environ, "OMP_NUM_THREADS": "1"})
    results = {}
    for (key, (folder, _)), code in zip(runs.items(), done.stdout.split(), strict=True):
        output = [(folder / name).read_text(encoding="utf-8") for name in ("stdout", "stderr")]
        results[key] = subprocess.CompletedProcess(["train_gpt.py"], int(code), *output)
    return results
