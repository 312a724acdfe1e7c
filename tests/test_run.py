"""Whole runs of train_gpt.py in subprocesses: what it prints and writes, and how it refuses what cannot work."""

import ast
import dataclasses
import io
import json
import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from conftest import (
    GOLDEN,
    LARGE,
    ROOT,
    SCRIPT,
    assert_refused,
    make_data,
    new_folder,
    records,
    run_environment,
    run_forked,
    run_script,
    run_together,
    selected_cases,
    summary_block,
    train_losses,
    write_wrapper,
)

import train_gpt as tg

FIELDS = [item.name for item in dataclasses.fields(tg.Hyperparameters)]
RULE = "=" * 100
SHORT = {"iterations": 1, "warmup_steps": 0, "gptq_enabled": 0, "sliding_window_enabled": 0}
SUMMARY_KEYS = (
    "val_bpb val_loss pre_quant_val_bpb int6_val_bpb train_seconds eval_seconds total_seconds steps tokens "
    "tokens_per_second peak_memory_mib code_bytes model_bytes total_bytes headroom_bytes parameters"
).split()


# -- one full run ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def full(tmp_path_factory):
    """(folder, result) of a whole run of the tiny configuration with validation at half time."""
    folder = new_folder(tmp_path_factory.mktemp("run"), "full")
    result = run_script(folder, run_id="full", val_loss_every=2, muon_beta2=0.95)
    assert result.returncode == 0, result.stderr
    return folder, result


@pytest.fixture(scope="session")
def full_log(full):
    return (full[0] / "logs/full.txt").read_text(encoding="utf-8")


def test_log_begins_with_sorted_settings(full_log):
    lines = full_log.splitlines()
    assert lines[:2] == [RULE, "Hyperparameters:"]
    block = lines[2 : next(i for i, line in enumerate(lines) if i > 1 and not line.startswith("  "))]
    names = [re.fullmatch(r"  (\w+): .*", line)[1] for line in block]
    assert names == sorted(names)
    assert set(FIELDS) | {"rank", "world_size", "grad_accum_steps"} <= set(names)
    assert "  run_id: full" in block and "  model_dim: 32" in block


def test_log_embeds_the_exact_source_and_the_versions(full_log):
    after = full_log.split(SCRIPT.read_text(encoding="utf-8"), 1)
    assert len(after) == 2
    tail = after[1].lstrip("\n").splitlines()
    assert tail[0] == RULE
    assert tail[1] == f"Running Python {sys.version.splitlines()[0]}"
    assert f"Running PyTorch {torch.__version__}" in tail[:5]
    assert RULE in tail[3:]


LINES = [
    r"train_shards: 4",
    r"val_tokens: 2944",
    r"model_params:77719",
    r"warmup_step: 1/1",
    r"0/4 val_loss: \d+\.\d{4} val_bpb: \d+\.\d{4}",
    r"2/4 val_loss: \d+\.\d{4} val_bpb: \d+\.\d{4}",
    r"4/4 val_loss: \d+\.\d{4} val_bpb: \d+\.\d{4}",
    *(rf"{step}/4 train_loss: \d+\.\d{{4}} train_time: \d+\.\dm tok/s: \d+" for step in range(1, 5)),
    r"peak memory allocated: \d+ MiB reserved: \d+ MiB",
    r"pre-quantization post-ema val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8} eval_time:\d+ms",
    r"Serialized model: \d+ bytes",
    r"Code size: \d+ bytes",
    r"GPTQ:collected \d+ Hessians in \d+\.\ds",
    r"GPTQ quantization: \d+ layers with full GPTQ, \d+ fallback to clip-search.*",
    r"Serialized model int6\+brotli: \d+ bytes",
    r"Total submission size int6\+brotli: \d+ bytes",
    r"final_int6_roundtrip val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8} eval_time:\d+ms",
    r"final_int6_sliding_window val_loss:\d+\.\d{8} val_bpb:\d+\.\d{8} eval_time:\d+ms",
]


@pytest.mark.parametrize("pattern", LINES)
def test_each_line_of_the_published_log_is_there_once(full, full_log, pattern):
    own_lines = full_log.rsplit(RULE, 1)[1]
    assert len(re.findall(rf"(?m)^{pattern}$", own_lines)) == 1
    assert len(re.findall(rf"(?m)^{pattern}$", full[1].stdout)) == 1


def test_artifact_is_written_before_any_final_evaluation(full_log):
    own_lines = full_log.rsplit(RULE, 1)[1]
    written = own_lines.index("Serialized model int6+brotli")
    for evaluation in (
        "4/4 val_loss",
        "pre-quantization post-ema",
        "final_int6_roundtrip",
        "final_int6_sliding_window",
    ):
        assert written < own_lines.index(evaluation)


def test_summary_block_has_every_key_and_equals_the_record(full):
    folder, result = full
    printed, (recorded,) = summary_block(result.stdout), records(folder, "full", "summary")
    assert set(SUMMARY_KEYS) <= set(printed)
    for key in SUMMARY_KEYS:
        decimals = len(printed[key].partition(".")[2])
        assert abs(float(printed[key]) - recorded[key]) <= 0.5001 * 10**-decimals, key
    assert summary_block((folder / "logs/full.txt").read_text(encoding="utf-8")) == printed
    assert printed["valid"] == "yes" and recorded["valid"] is True
    assert printed["steps"] == "4" and printed["tokens"] == "4096" and printed["parameters"] == "77719"


def test_official_score_is_that_of_the_sliding_window(full):
    printed = summary_block(full[1].stdout)
    line = re.search(r"(?m)^final_int6_sliding_window val_loss:(\S+) val_bpb:(\S+)", full[1].stdout)
    assert line.groups() == (printed["val_loss"], printed["val_bpb"])


def test_total_is_the_file_plus_the_script(full):
    printed = summary_block(full[1].stdout)
    model, code = (full[0] / "final_model.int6.ptz").stat().st_size, SCRIPT.stat().st_size
    assert (printed["model_bytes"], printed["code_bytes"]) == (str(model), str(code))
    assert printed["total_bytes"] == str(model + code) and printed["headroom_bytes"] == str(16_000_000 - model - code)


def test_artifact_keeps_a_name_of_its_own(full):
    assert (full[0] / "logs/full.int6.ptz").read_bytes() == (full[0] / "final_model.int6.ptz").read_bytes()
    assert sorted(p.name for p in full[0].iterdir()) == ["data", "final_model.int6.ptz", "final_model.pt", "logs"]


def test_final_model_holds_the_averaged_state_dict(full):
    state = torch.load(full[0] / "final_model.pt", weights_only=True)
    hp = tg.Hyperparameters.from_env(run_environment())
    expected = tg.build_model(hp, tg.Operations(tg.sdpa_attention), torch.device("cpu"), torch.float32).state_dict()
    assert {name: t.shape for name, t in state.items()} == {name: t.shape for name, t in expected.items()}
    assert list(state) == list(expected)


def test_each_score_is_of_its_own_weights(full, monkeypatch):
    monkeypatch.chdir(full[0])
    hp = tg.Hyperparameters.from_env(run_environment())
    model = tg.build_model(hp, tg.Operations(tg.sdpa_attention), torch.device("cpu"), torch.float32)
    model.load_state_dict(torch.load("final_model.pt", weights_only=True))
    val = tg.load_validation(hp, tg.byte_tables(tg.load_tokenizer(hp)))
    loss = tg.Evaluator(hp, tg.plan_batches(hp, 1), tg.World(), val, model).full().val_loss
    scores = {record["name"]: record["val_loss"] for record in records(full[0], "full", "evaluation")}
    assert scores["pre_quant"] == pytest.approx(loss, abs=1e-5)
    assert abs(records(full[0], "full", "validation")[-1]["val_loss"] - loss) > 1e-3, "the raw weights' own"


def test_a_setting_that_nothing_reads_is_named(full):
    assert full[1].stdout.count("WARNING: MUON_BETA2 is set, but nothing reads it") == 1


def test_records_cover_steps_validations_evaluations_and_the_result(full):
    folder = full[0]
    steps = records(folder, "full", "step")
    assert [record["step"] for record in steps] == [1, 2, 3, 4]
    assert all(math.isfinite(record["train_loss"]) and record["tokens"] == 1024 * record["step"] for record in steps)
    assert [record["step"] for record in records(folder, "full", "validation")] == [0, 2, 4]
    assert {record["name"] for record in records(folder, "full", "evaluation")} >= {"pre_quant", "int6", "sliding"}
    assert len(records(folder, "full", "summary")) == 1


def test_warm_up_leaves_no_mark(full, tmp_path):
    make_data(tmp_path)
    assert run_script(tmp_path, run_id="a", **{**SHORT, "warmup_steps": 2}).returncode == 0
    assert train_losses(tmp_path, "a")[0] == train_losses(full[0], "full")[0]


def test_artifact_scores_the_same_alone_without_training_data(full, tmp_path):
    make_data(tmp_path)
    for shard in tmp_path.glob("data/datasets/*/fineweb_train_*"):
        shard.unlink()
    result = run_script(tmp_path, run_id="again", eval_only=full[0] / "final_model.int6.ptz")
    assert result.returncode == 0, result.stderr
    ours, theirs = summary_block(result.stdout), summary_block(full[1].stdout)
    for key in ("val_bpb", "val_loss", "int6_val_bpb", "model_bytes", "total_bytes"):
        assert ours[key] == theirs[key]
    changed = {"run_id": "other", "rope_base": 5000, "ve_layers": 3}
    other = run_script(tmp_path, eval_only=full[0] / "final_model.int6.ptz", **changed)
    assert other.returncode == 6 and "it was trained with ROPE_BASE=10000.0 VE_LAYERS=3,4; set that" in other.stderr


# -- the same and other seeds ------------------------------------------------------------------------------------------

RECORD_WINDOWS = """
draw = train_gpt.CoprimeLoader.next_windows

def recorded(self):
    windows = draw(self)
    with open("windows.txt", "a") as f:
        print(windows, file=f)
    return windows

train_gpt.CoprimeLoader.next_windows = recorded
"""


@pytest.fixture(scope="module")
def seeds(tmp_path_factory):
    base = tmp_path_factory.mktemp("seeds")
    folders = {name: new_folder(base, name) for name in ("first", "second", "other")}
    calls = {
        name: lambda f=folder, n=name: run_script(
            f,
            script=write_wrapper(f, RECORD_WINDOWS),
            run_id="r",
            **{**SHORT, "iterations": 3, "warmup_steps": 0},  # a warm-up reads ahead as far as it happens to get
            seed=7 if n == "other" else 1337,
        )
        for name, folder in folders.items()
    }
    for result in run_together(calls).values():
        assert result.returncode == 0, result.stderr
    return folders


def read_artifact(folder):
    return (folder / "final_model.int6.ptz").read_bytes()


def test_same_seed_gives_the_same_artifact(seeds):
    assert read_artifact(seeds["first"]) == read_artifact(seeds["second"])
    assert train_losses(seeds["first"], "r") == train_losses(seeds["second"], "r")


def test_other_seed_gives_other_weights_but_the_same_data_order(seeds):
    assert read_artifact(seeds["first"]) != read_artifact(seeds["other"])
    used = 3 * 8  # draws of three steps; a reader may have read ahead
    orders = [(seeds[name] / "windows.txt").read_text().splitlines()[:used] for name in ("first", "other")]
    assert len(orders[0]) == used and orders[0] == orders[1]


# -- the clock and the size cap ----------------------------------------------------------------------------------------

LATE_HESSIANS = """
collect = train_gpt.collect_hessians

def late(*args, **kwargs):
    time.sleep(2.5)
    return collect(*args, **kwargs)

train_gpt.collect_hessians = late
"""


@pytest.fixture(scope="module")
def limits(tmp_path_factory):
    """Runs that end at a limit: the clock as planned, the clock overrun, the size cap."""
    base = tmp_path_factory.mktemp("limits")
    clock, late, size = (new_folder(base, name) for name in ("clock", "late", "size"))
    large = {name.lower(): value for name, value in LARGE.items()}
    results = run_together(
        {
            "clock": lambda: run_script(
                clock,
                run_id="r",
                **large,
                max_wallclock_seconds=5,
                gptq_reserve_seconds=2,
                iterations=100000,
                sliding_window_enabled=0,
            ),
            "late": lambda: run_script(
                late,
                run_id="r",
                script=write_wrapper(late, LATE_HESSIANS),
                max_wallclock_seconds=2,
                gptq_reserve_seconds=1.5,
                iterations=100000,
                sliding_window_enabled=0,
                **{**large, "num_layers": 1, "xsa_last_n": 1, "ve_layers": 0},
            ),
            "size": lambda: run_script(
                size, run_id="r", script=write_wrapper(size, "train_gpt.SIZE_CAP_BYTES = 50_000"), **SHORT
            ),
        }
    )
    return {"clock": (clock, results["clock"]), "late": (late, results["late"]), "size": (size, results["size"])}


def test_wall_clock_stops_the_run_and_the_hessians_fit(limits):
    result = limits["clock"][1]
    assert result.returncode == 0, result.stderr
    out, block = result.stdout, summary_block(result.stdout)
    stop = re.search(r"(?m)^stopping_early: wallclock_cap train_time: (\d+)ms step: (\d+)/100000$", out)
    assert int(stop[1]) >= 3000 and stop[2] == block["steps"]
    assert "gptq:reserving 2s, effective=3000ms" in out
    assert float(block["train_data_last_read_seconds"]) <= 5
    assert float(block["train_seconds"]) <= 5.5
    assert re.search(r"(?m)^GPTQ quantization: 8 layers with full GPTQ, 0 fallback to clip-search", out)
    assert re.search(r"(?m)^GPTQ:collected 8 Hessians", out)


def test_rate_follows_the_clock_down_to_the_cap(limits):
    steps = records(limits["clock"][0], "r", "step")
    seconds = [0.0] + [record["train_seconds"] for record in steps]
    expected = [tg.lr_factor(before / 3, 0.667, 0.0) for before in seconds[:-1]]  # 3 of 5 s, the rest is reserved
    assert [record["lr_factor"] for record in steps] == pytest.approx(expected, abs=1e-9)
    assert expected[0] == 1.0 and seconds[-2] < 3 <= seconds[-1]


def test_training_data_in_use_past_the_cap_fails_the_run(limits):
    folder, result = limits["late"]
    assert_refused(result, 5, "past the cap")
    block = summary_block(result.stdout)
    assert block["valid"].startswith("no") and float(block["train_seconds"]) > 2
    assert records(folder, "r", "summary")[0]["valid"] is False
    assert (folder / "final_model.int6.ptz").is_file()


def test_exceeding_the_size_cap_is_said_and_keeps_the_files(limits):
    folder, result = limits["size"]
    assert_refused(result, 4, "over the cap of 50000")
    block = summary_block(result.stdout)
    assert block["valid"].startswith("no") and int(block["headroom_bytes"]) < 0
    assert int(block["headroom_bytes"]) == 50_000 - int(block["total_bytes"])
    assert (folder / "final_model.int6.ptz").is_file() and (folder / "final_model.pt").is_file()


def test_an_artifact_over_the_target_is_quantised_again_until_it_fits(tmp_path):
    folder = new_folder(tmp_path, "target")
    large = {name.lower(): value for name, value in LARGE.items()} | {"sliding_window_enabled": 0, "iterations": 2}
    free = summary_block(run_script(folder, run_id="free", target_total_bytes=0, **large).stdout)
    target = int(free["total_bytes"]) - 15_000
    result = run_script(folder, run_id="fitted", target_total_bytes=target, **large)
    assert result.returncode == 0, result.stderr
    block = summary_block(result.stdout)
    assert target - 20_000 < int(block["total_bytes"]) <= target
    assert float(free["int6_scale_factor"]) == 1 < float(block["int6_scale_factor"]) < 2
    assert f"over TARGET_TOTAL_BYTES={target}" in result.stdout
    assert block["pre_quant_val_bpb"] == free["pre_quant_val_bpb"]
    assert float(block["int6_val_bpb"]) - float(block["pre_quant_val_bpb"]) < 0.03


def test_memory_that_ends_in_the_first_validation_is_one_line(tmp_path):
    """After the warm-up, which tries only the training step."""
    folder = new_folder(tmp_path, "memory")
    wrapper = write_wrapper(folder, """
def full(self):
    raise train_gpt.torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.\\nMore about it")
def fit_memory(self):
    self.parts = 2
train_gpt.Evaluator.full, train_gpt.Trainer.fit_memory = full, fit_memory
""")
    result = run_script(folder, run_id="r", script=wrapper, iterations=2, warmup_steps=1)
    assert result.returncode == 2 and result.stderr.splitlines()[-1] == (
        "error: CUDA out of memory. Tried to allocate 8.00 GiB.; set MICRO_BATCH_TOKENS under 64 or "
        "VAL_BATCH_TOKENS under 524288")


def test_memory_that_ends_when_the_artifact_is_scored_says_how_to_score_it(tmp_path):
    """The message of a GPU is one long line; the artifact is on disk and can be scored as the message says."""
    folder = new_folder(tmp_path, "memory")
    wrapper = write_wrapper(folder, """
def sliding(self):
    raise train_gpt.torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 96.00 MiB. 11.18 GiB allowed; Of the allocated memory 10.51 GiB is more")
train_gpt.Evaluator.sliding = sliding
""")
    result = run_script(folder, run_id="r", script=wrapper, iterations=2)
    told = "error: CUDA out of memory. Tried to allocate 96.00 MiB. 11.18 GiB allowed"
    assert result.returncode == 2 and result.stderr.splitlines()[-1] == (
        f"{told}; score it with EVAL_ONLY=final_model.int6.ptz and VAL_BATCH_TOKENS under 524288")
    again = {"run_id": "s", "eval_only": "final_model.int6.ptz", "val_batch_tokens": 1024}
    result = run_script(folder, **again)
    assert result.returncode == 0 and "valid: yes" in result.stdout
    result = run_script(folder, script=wrapper, **again | {"run_id": "t"})
    assert result.returncode == 2 and result.stderr.splitlines()[-1] == (
        f"{told}; score it with EVAL_ONLY=final_model.int6.ptz and VAL_BATCH_TOKENS under 1024")


def test_the_size_is_predicted_before_the_first_compression(tmp_path):
    folder = new_folder(tmp_path, "predicted")
    large = {name.lower(): value for name, value in LARGE.items()} | {"sliding_window_enabled": 0, "iterations": 2}
    wrapper = write_wrapper(folder, "train_gpt.PREDICTED_FROM_BYTES = 0")
    result = run_script(folder, run_id="r", script=wrapper, target_total_bytes=850_000, **large)
    assert result.returncode == 0, result.stderr
    warning, packed = (result.stdout.index(part) for part in ("over TARGET_TOTAL_BYTES=850000", "compression:"))
    assert warning < packed and 750_000 < int(summary_block(result.stdout)["total_bytes"]) <= 850_000


def test_a_target_that_codes_cannot_reach_costs_no_run(tmp_path):
    large = {name.lower(): value for name, value in LARGE.items()} | {"sliding_window_enabled": 0, "iterations": 2}
    result = run_script(new_folder(tmp_path, "tiny"), run_id="r", target_total_bytes=1000, **large)
    assert result.returncode == 0, result.stderr
    block = summary_block(result.stdout)
    assert block["int6_scale_factor"] == "16.0000" and "over TARGET_TOTAL_BYTES=1000 still" in result.stdout


def test_a_model_without_int6_matrices_says_that_it_is_over_the_target(tmp_path):
    result = run_script(new_folder(tmp_path, "none"), run_id="r", target_total_bytes=1000, iterations=2,
                        sliding_window_enabled=0)
    assert result.returncode == 0 and result.stdout.count("over TARGET_TOTAL_BYTES=1000 still") == 1


FULL_DISK = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
largest = os.path.getsize(train_gpt.__file__) + {more}
resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
"""


def run_on_full_disk(folder, more: int, **changes) -> subprocess.CompletedProcess:
    """A run in which no file can grow beyond the script's size plus `more` bytes."""
    make_data(folder)
    script = write_wrapper(folder, FULL_DISK.format(more=more))
    return run_script(folder, script=script, run_id="r", **{**SHORT, **changes})


def test_a_disk_too_full_for_the_checkpoint_still_takes_the_artifact(tmp_path):
    result = run_on_full_disk(tmp_path, 60_000)
    assert result.returncode == 0, result.stderr
    assert "WARNING: final_model.pt was not written" in result.stdout
    assert (tmp_path / "final_model.int6.ptz").is_file() and not (tmp_path / "final_model.pt").exists()
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_disk_too_full_for_the_artifact_is_one_clear_line(tmp_path):
    assert_refused(run_on_full_disk(tmp_path, 60_000, model_dim=64, embedding_dim=64), 2, "final_model.int6.ptz")
    assert not list(tmp_path.glob(".*.tmp")) and not (tmp_path / "final_model.int6.ptz").exists()


def test_a_disk_too_full_for_the_log_does_not_end_the_run(tmp_path):
    small = {"num_layers": 1, "xsa_last_n": 1, "ve_enabled": 0}
    result = run_on_full_disk(tmp_path, 1_000, **small)
    assert result.returncode == 0, result.stderr
    assert "r.txt was not written" in result.stderr
    assert summary_block(result.stdout)["valid"] == "yes" and (tmp_path / "final_model.int6.ptz").is_file()


def test_an_interrupted_run_says_so_in_one_line(tmp_path):
    make_data(tmp_path)
    body = "def stop(*_):\n    raise KeyboardInterrupt\n\n\ntrain_gpt.Trainer.fit = stop"
    assert_refused(run_script(tmp_path, script=write_wrapper(tmp_path, body), **SHORT), 130, "interrupted")


# -- refused before the first step -------------------------------------------------------------------------------------


def shard(folder: Path, name: str) -> Path:
    return folder / f"data/datasets/fineweb10B_sp512/fineweb_{name}.bin"


def remove(folder: Path, pattern: str) -> None:
    for path in folder.glob(pattern):
        path.unlink()


def set_token(path: Path, place: int, value: int) -> None:
    words = np.fromfile(path, dtype="<u2")
    words[512 + place] = value
    words.tofile(path)


def set_header(path: Path, place: int, value: int) -> None:
    data = path.read_bytes()
    header = np.frombuffer(data[:1024], "<i4").copy()
    header[place] = value
    path.write_bytes(header.tobytes() + data[1024:])


def rename_variant(folder: Path, size: int) -> None:
    (folder / "data/datasets/fineweb10B_sp512").rename(folder / f"data/datasets/fineweb10B_sp{size}")
    (folder / "data/tokenizers/fineweb_512_bpe.model").rename(folder / f"data/tokenizers/fineweb_{size}_bpe.model")


def write_manifest(folder: Path, tokens_val: int) -> None:
    datasets = [{"name": "fineweb10B_sp512", "stats": {"tokens_val": tokens_val}}]
    (folder / "data/manifest.json").write_text(json.dumps({"version": "10B", "datasets": datasets}))


def tokenizer_without_spaces(folder: Path) -> None:
    """A model whose training text has no space: U+2581 is no piece of its own."""
    letters = np.random.default_rng(0).integers(97, 123, (200, 30), dtype=np.uint8)
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([row.tobytes().decode() for row in letters]),
        model_writer=model,
        model_type="bpe",
        vocab_size=512,
        byte_fallback=True,
        add_dummy_prefix=False,
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    (folder / "data/tokenizers/fineweb_512_bpe.model").write_bytes(model.getvalue())


def hide_brotli(folder: Path) -> dict[str, str]:
    """Environment in which `import brotli` fails as if it were not installed."""
    (folder / "hidden").mkdir()
    (folder / "hidden/brotli.py").write_text("raise ImportError('No module named brotli')\n")
    return {"PYTHONPATH": str(folder / "hidden")}


def write(path: Path, data: bytes = b"x") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


FETCH = "python data/cached_challenge_fineweb.py --variant sp512"
Prepare = Callable[[Path], dict[str, str] | None] | None
REFUSALS: dict[str, tuple[Prepare, dict, tuple[str, ...]]] = {
    "no train shards": (lambda f: remove(f, "data/datasets/*/fineweb_train_*"), {}, (FETCH, "train")),
    "no validation shards": (lambda f: remove(f, "data/datasets/*/fineweb_val_*"), {}, (FETCH, "val")),
    "no tokenizer": (lambda f: remove(f, "data/tokenizers/*"), {}, (FETCH, "fineweb_512_bpe.model")),
    "tokenizer is no model": (
        lambda f: write(f / "data/tokenizers/fineweb_512_bpe.model"),
        {},
        ("fineweb_512_bpe.model",),
    ),
    "tokenizer of another size": (lambda f: rename_variant(f, 600), {"vocab_size": 600}, ("VOCAB_SIZE=600", "512")),
    "tokenizer without a lone space": (tokenizer_without_spaces, {}, ("U+2581",)),
    "id too large in validation": (
        lambda f: set_token(shard(f, "val_000000"), 1500, 600),
        {},
        ("600", "VOCAB_SIZE=512"),
    ),
    "id too large in training": (
        lambda f: set_token(shard(f, "train_000001"), 4000, 600),
        {},
        ("600", "VOCAB_SIZE=512", "fineweb_train_000001.bin"),
    ),
    "bad magic": (lambda f: set_header(shard(f, "train_000002"), 0, 7), {}, ("fineweb_train_000002.bin", "20240520")),
    "bad version": (lambda f: set_header(shard(f, "val_000000"), 1, 2), {}, ("fineweb_val_000000.bin",)),
    "empty shard file": (lambda f: write(shard(f, "train_000009"), b""), {}, ("fineweb_train_000009.bin",)),
    "truncated train shard": (
        lambda f: os.truncate(shard(f, "train_000001"), 3000),
        {},
        ("fineweb_train_000001.bin", "3000"),
    ),
    "truncated validation shard": (
        lambda f: os.truncate(shard(f, "val_000000"), 3001),
        {},
        ("fineweb_val_000000.bin", "3001"),
    ),
    "fewer train tokens than a batch": (None, {"train_batch_tokens": 16384}, ("9978", "TRAIN_BATCH_TOKENS", "16384")),
    "fewer validation tokens than a sequence": (None, {"eval_seq_len": 4096}, ("3000", "EVAL_SEQ_LEN=4096")),
    "validation split of another size": (
        lambda f: write_manifest(f, 4000),
        {},
        ("3000", "4000", "manifest.json", FETCH),
    ),
    "damaged manifest": (lambda f: write(f / "data/manifest.json", b"{"), {}, ("manifest.json",)),
    "unknown compressor": (None, {"compressor": "zip"}, ("COMPRESSOR", "zip", "brotli", "lzma")),
    "no brotli": (hide_brotli, {}, ("pip install brotli", "COMPRESSOR")),
    "output below a file": (lambda f: write(f / "plain"), {"output_dir": "plain/out"}, ("OUTPUT_DIR=plain/out",)),
    "output is a file": (lambda f: write(f / "plain"), {"output_dir": "plain"}, ("OUTPUT_DIR=plain",)),
    "misspelt setting": (None, {"iteration": 5}, ("ITERATION ", "ITERATIONS")),
    "two misspelt settings": (
        None,
        {"max_wallclock_second": 5, "grad_clip_nrm": 1},
        ("MAX_WALLCLOCK_SECONDS", "GRAD_CLIP_NORM"),
    ),
    "several bad settings": (
        None,
        {"iterations": "many", "model_dim": -1, "compressor": "zip", "tie_embeddings": "yes"},
        ("ITERATIONS", "MODEL_DIM", "COMPRESSOR", "TIE_EMBEDDINGS"),
    ),
    "batch that does not divide": (None, {"train_batch_tokens": 1000}, ("TRAIN_BATCH_TOKENS=1000", "960", "1024")),
    "micro-batch that does not divide": (None, {"micro_batch_tokens": 384}, ("MICRO_BATCH_TOKENS=384", "256", "512")),
    "heads that do not divide": (None, {"num_heads": 3, "num_kv_heads": 1}, ("NUM_HEADS=3", "MODEL_DIM=32")),
    "groups that do not divide": (None, {"num_kv_heads": 3}, ("NUM_KV_HEADS=3", "NUM_HEADS=4")),
    "value layer that is not there": (None, {"ve_layers": "4,5"}, ("VE_LAYERS",)),
    "stride beyond the window": (None, {"eval_stride": 65}, ("EVAL_STRIDE=65", "EVAL_SEQ_LEN=64")),
    "reserve beyond the cap": (
        None,
        {"max_wallclock_seconds": 5, "gptq_reserve_seconds": 6, "gptq_enabled": 1},
        ("GPTQ_RESERVE_SECONDS",),
    ),
    "run id with a slash": (None, {"run_id": "a/b"}, ("RUN_ID",)),
    "seed beyond 64 bits": (None, {"seed": 10**30}, ("SEED",)),
    "two rotary dims beyond the training length": (None, {"rope_dims": 2, "eval_seq_len": 128}, ("ROPE_DIMS",)),
    "MLP without width": (None, {"mlp_mult": 0.01}, ("MLP_MULT",)),
    "no such GPU": (None, {"device": "cuda"}, ("DEVICE=cuda",)),
    "no FlashAttention-3": (None, {"attention": "fa3"}, ("ATTENTION=fa3", "flash_attn_interface")),
    "control patterns that miss a vector": (
        None,
        {"control_tensor_name_patterns": "attn_scale"},
        ("skip_weights", "CONTROL_TENSOR_NAME_PATTERNS"),
    ),
    "no artifact to score": (None, {"eval_only": "missing.ptz"}, ("EVAL_ONLY=missing.ptz",)),
}


@pytest.fixture(scope="module")
def refused(request, tmp_path_factory):
    """Folder and result of each run that must be refused."""
    base = tmp_path_factory.mktemp("refused")

    runs = {}
    for case in selected_cases(request, "test_setup_failure_is_one_clear_message"):
        folder = new_folder(base, case.replace(" ", "_"))
        prepare, changes, _ = REFUSALS[case]
        extra = (prepare(folder) if prepare else None) or {}
        runs[case] = folder, {"run_id": "r", **SHORT, **changes, **extra}
    return {case: (runs[case][0], result) for case, result in run_forked(runs).items()}


@pytest.mark.parametrize("case", REFUSALS)
def test_setup_failure_is_one_clear_message(refused, case):
    folder, result = refused[case]
    assert_refused(result, 2, *REFUSALS[case][2])
    assert "train_loss" not in result.stdout
    left = [p for p in folder.rglob("*") if p.suffix in (".txt", ".jsonl", ".ptz", ".pt", ".tmp")]
    assert left == [], "a refused run leaves no files"


def test_run_id_is_used_once(full):
    before = {p.name: p.read_bytes() for p in (full[0] / "logs").iterdir()}
    assert_refused(run_script(full[0], run_id="full"), 2, "RUN_ID=full", "logs/full.txt")
    assert {p.name: p.read_bytes() for p in (full[0] / "logs").iterdir()} == before


def named_values(message: str) -> list[int]:
    """The sizes that a message proposes after `use` or `to one of`."""
    return [int(n) for n in re.findall(r"\d+", re.split(r"; use |to one of ", message)[-1])]


def test_sizes_that_a_message_names_work(tmp_path):
    make_data(tmp_path)
    hp = tg.Hyperparameters.from_env(run_environment(train_batch_tokens=1000))
    with pytest.raises(tg.SetupError) as error:
        tg.plan_batches(hp, 1)
    batch = named_values(str(error.value))[-1]
    with pytest.raises(tg.SetupError) as error:
        tg.plan_batches(
            tg.Hyperparameters.from_env(run_environment(train_batch_tokens=batch, micro_batch_tokens=384)), 1
        )
    micro = named_values(str(error.value))[-1]
    for size in named_values(str(error.value)):
        tg.plan_batches(
            tg.Hyperparameters.from_env(run_environment(train_batch_tokens=batch, micro_batch_tokens=size)), 1
        )
    result = run_script(tmp_path, train_batch_tokens=batch, micro_batch_tokens=micro, **SHORT)
    assert result.returncode == 0, result.stderr


def test_manifest_of_this_split_is_accepted(tmp_path, monkeypatch):
    make_data(tmp_path)
    write_manifest(tmp_path, 3000)
    monkeypatch.chdir(tmp_path)
    hp = tg.Hyperparameters.from_env(run_environment())
    assert tg.load_validation(hp, tg.byte_tables(tg.load_tokenizer(hp))).targets == 2944


def test_lzma_works_end_to_end_without_brotli(tmp_path):
    make_data(tmp_path)
    result = run_script(tmp_path, run_id="r", compressor="lzma", **SHORT, **hide_brotli(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "Serialized model int6+lzma" in result.stdout
    assert (tmp_path / "final_model.int6.ptz").read_bytes().startswith(b"\xfd7zXZ")


# -- a loss that is not finite -----------------------------------------------------------------------------------------


def test_infinite_loss_stops_the_run_at_once(tmp_path):
    make_data(tmp_path)
    result = run_script(
        tmp_path, run_id="r", matrix_lr=1e30, scalar_lr=1e30, tied_embed_lr=1e30, iterations=50, warmup_steps=0
    )
    assert_refused(result, 3, "rank", "0", "step")
    steps = [record["step"] for record in records(tmp_path, "r", "step")]
    assert len(steps) <= 10 and all(math.isfinite(loss) for loss in train_losses(tmp_path, "r"))
    assert not (tmp_path / "final_model.int6.ptz").exists()


def test_weights_that_the_last_step_made_infinite_are_a_diverged_run(tmp_path):
    make_data(tmp_path)
    assert_refused(run_script(tmp_path, scalar_lr=1e12, matrix_lr=1e12, tied_embed_lr=1e12, **SHORT), 3, "finite")


# -- artifacts that cannot be scored -----------------------------------------------------------------------------------


class Malicious:
    def __reduce__(self):
        return os.system, ("touch pwned",)


def packed(content) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return tg.compress(tg.byte_shuffle(buffer.getvalue()), "brotli")


def flipped(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x10]) + data[place + 1 :]


ARTIFACTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda data: b"",
    "truncated by one byte": lambda data: data[:-1],
    "truncated to half": lambda data: data[: len(data) // 2],
    "a flipped bit": lambda data: flipped(data, len(data) // 2),
    "random bytes": lambda data: np.random.default_rng(0).bytes(5000),
    "trailing bytes": lambda data: data + b"garbage",
    "of another configuration": lambda data: (GOLDEN / "artifact.int6.ptz").read_bytes(),
    "a pickle that runs a command": lambda data: packed({"w": Malicious(), "m": {}}),
    "a list": lambda data: packed([1, 2]),
}


@pytest.fixture(scope="module")
def unreadable(request, full, tmp_path_factory):
    base, good = tmp_path_factory.mktemp("unreadable"), read_artifact(full[0])

    runs = {}
    for case in selected_cases(request, "test_unreadable_artifact_is_one_clear_message"):
        folder = new_folder(base, case.replace(" ", "_"))
        (folder / "given.ptz").write_bytes(ARTIFACTS[case](good))
        runs[case] = folder, {"run_id": "r", "eval_only": "given.ptz"}
    return {case: (runs[case][0], result) for case, result in run_forked(runs).items()}


@pytest.mark.parametrize("case", ARTIFACTS)
def test_unreadable_artifact_is_one_clear_message(unreadable, case):
    folder, result = unreadable[case]
    assert_refused(result, 6, "given.ptz")
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (folder / "pwned").exists()


# -- options, import, source -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    folder = tmp_path_factory.mktemp("options")
    return run_together(
        {
            "help": lambda: run_script(folder, "--help"),
            "config": lambda: run_script(folder, "--print-config", seed=7, ve_enabled=0, matrix_lr=0.5),
            "misspelt": lambda: run_script(folder, "--print-config", iteration=5),
            "unknown": lambda: run_script(folder, "--no-such-option"),
            "files": lambda: sorted(folder.iterdir()),
        }
    )


@pytest.mark.parametrize("item", dataclasses.fields(tg.Hyperparameters), ids=FIELDS)
def test_help_names_each_setting_with_default_and_meaning(options, item):
    text = options["help"].stdout
    assert options["help"].returncode == 0
    default = int(item.default) if isinstance(item.default, bool) else item.default
    assert f"{item.name.upper()}={default}" in text.split()
    assert item.metadata["help"] in text


def test_help_documents_the_exit_codes(options):
    for code in range(1, 7):
        assert re.search(rf"(?i)exit codes.*\b{code}\b", options["help"].stdout, re.DOTALL)


def test_print_config_honours_the_environment(options):
    assert options["config"].returncode == 0
    lines = dict(re.fullmatch(r"(\w+): (.*)", line).groups() for line in options["config"].stdout.splitlines())
    assert set(lines) == set(FIELDS)
    assert (lines["seed"], lines["ve_enabled"], lines["matrix_lr"], lines["model_dim"]) == ("7", "0", "0.5", "32")


def test_print_config_refuses_a_misspelt_setting(options):
    assert_refused(options["misspelt"], 2, "ITERATIONS")


def test_unknown_option_exits_with_2(options):
    assert options["unknown"].returncode == 2 and "--no-such-option" in options["unknown"].stderr


IMPORT_ONLY = """
import os, sys, threading, time
import numpy, torch, tqdm, torch.distributed
sys.path.insert(0, {root!r})
began = time.perf_counter()
import train_gpt
print(time.perf_counter() - began < 3, torch.distributed.is_initialized(), threading.active_count(), os.listdir())
"""


def test_import_has_no_side_effects_in_any_folder(tmp_path):
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "ITERATIONS": "nonsense"}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ONLY.format(root=str(ROOT))],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["True", "False", "1", "[]"], done.stderr
    assert done.stderr == ""


def test_source_is_ascii():
    assert SCRIPT.read_bytes().isascii()


def test_source_compiles_on_supported_pythons():
    source = SCRIPT.read_text(encoding="ascii")
    ast.parse(source, feature_version=(3, 10))
    for python in filter(None, (shutil.which(f"python3.{minor}") for minor in range(10, 14))):
        if subprocess.run([python, "--version"], capture_output=True, check=False).returncode == 0:
            check = f"compile(open({str(SCRIPT)!r}).read(), 'train_gpt.py', 'exec')"
            subprocess.run([python, "-c", check], check=True, timeout=60)


def test_source_imports_no_module_of_this_repository():
    modules = set()
    for node in ast.walk(ast.parse(SCRIPT.read_text(encoding="ascii"))):
        if isinstance(node, ast.Import):
            modules |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            modules.add(node.module.partition(".")[0])
    foreign = modules - set(sys.stdlib_module_names)
    assert foreign <= {"numpy", "torch", "tqdm", "sentencepiece", "brotli", "triton", "flash_attn_interface"}


NO_NETWORK = """
import socket

def refuse(*args, **kwargs):
    raise OSError("no network here")

socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
"""


def test_one_process_works_without_network(tmp_path):
    make_data(tmp_path)
    result = run_script(tmp_path, script=write_wrapper(tmp_path, NO_NETWORK), **SHORT)
    assert result.returncode == 0, result.stderr


def has_cxx_compiler() -> bool:
    return any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "g++", "clang++", "c++"))


@pytest.mark.skipif(not has_cxx_compiler(), reason="torch.compile on a CPU needs a C++ compiler")
def test_compiled_and_eager_losses_agree(tmp_path):
    # one layer whose matrices all have one shape: three graphs to compile
    small = {
        **SHORT,
        "iterations": 3,
        "num_layers": 1,
        "xsa_last_n": 1,
        "ve_enabled": 0,
        "mlp_mult": 1,
        "num_kv_heads": 4,
        "train_batch_tokens": 512,
        "micro_batch_tokens": 512,
        "run_id": "r",
    }
    folders = {compiled: new_folder(tmp_path, compiled) for compiled in ("0", "1")}
    for compiled, result in run_together(
        {c: lambda c=c: run_script(folders[c], compile=c, timeout=300, **small) for c in folders}
    ).items():
        assert result.returncode == 0, result.stderr
        assert f"compile: {compiled}" in result.stdout
    eager, compiled = (train_losses(folders[c], "r") for c in ("0", "1"))
    np.testing.assert_allclose(compiled, eager, rtol=0, atol=1e-4)
    scores = [records(folders[c], "r", "summary")[0]["val_loss"] for c in ("0", "1")]
    assert abs(scores[0] - scores[1]) <= 1e-3
