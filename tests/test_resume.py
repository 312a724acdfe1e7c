"""Snapshots and resuming, ranks that hang or drift, shards that vanish; bench/kill_runs.py kills at length."""
import random
import shutil
import socket
import sys
import time
from functools import partial

import pytest
from conftest import (
    ROOT,
    make_data,
    new_folder,
    records,
    run_script,
    run_together,
    torchrun,
    train_losses,
    write_wrapper,
)

sys.path.insert(0, str(ROOT / "bench"))
import kill_runs

SHORT = {"warmup_steps": 0, "gptq_enabled": 0, "sliding_window_enabled": 0}


@pytest.mark.parametrize(("ranks", "kills"), [(1, 1), (2, 2)])
def test_a_killed_run_goes_on_to_the_last_bit(tmp_path, ranks, kills):
    reference, folder = kill_runs.new_folder(tmp_path / "reference"), kill_runs.new_folder(tmp_path / "run")
    assert kill_runs.start(reference, ranks).wait(timeout=120) == 0
    assert len(kill_runs.one_run(folder, ranks, random.Random(5), kills)) == kills
    assert kill_runs.verify(folder, reference) >= kill_runs.STEPS
    assert len(kill_runs.losses(folder)) > kills and not (folder / "checkpoints").exists()


STOP_AFTER_STEP_12 = """
from pathlib import Path
after_step = train_gpt.Snapshots.after_step

def stopping(self, seconds):
    after_step(self, seconds)
    if self.trainer.steps_done == 12:
        self.finish()
        os._exit(9)

train_gpt.Snapshots.after_step = stopping
"""


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A folder with the snapshots of two ranks that died after 12 of 16 steps; the clock stood at some seconds then."""
    folder = new_folder(tmp_path_factory.mktemp("stopped"), "run")
    torchrun(folder, 2, script=write_wrapper(folder, STOP_AFTER_STEP_12), **SHORT, run_id="r", iterations=16,
             checkpoint_every_seconds=1e-6)
    assert len(train_losses(folder, "r")) == 12
    return folder


def copy_of(stopped, tmp_path):
    shutil.copytree(stopped, tmp_path / "run")
    return tmp_path / "run"


def test_the_last_two_snapshots_are_kept(stopped):
    assert sorted(p.name for p in (stopped / "checkpoints").iterdir()) == ["step_000011", "step_000012"]


def test_another_number_of_ranks_goes_on_and_the_clock_counts_both_parts(stopped, tmp_path):
    folder = copy_of(stopped, tmp_path)
    result = run_script(folder, **SHORT, run_id="r", iterations=16, resume="auto")
    assert result.returncode == 0, result.stderr
    assert "resumed after step 12 and " in result.stdout
    before, after = records(folder, "r", "step"), records(folder, "r.2", "step")
    assert [row["step"] for row in after] == [13, 14, 15, 16]
    assert after[0]["train_seconds"] > before[-1]["train_seconds"]
    assert after[0]["train_loss"] < before[5]["train_loss"]
    assert records(folder, "r.2", "validation")[0]["step"] == 16


def test_other_settings_are_refused_by_name(stopped, tmp_path):
    changes = {**SHORT, "run_id": "r", "iterations": 17, "matrix_lr": 0.03, "seed": 7, "train_batch_tokens": 2048}
    result = run_script(copy_of(stopped, tmp_path), **changes, resume="auto")
    assert result.returncode == 2
    message = result.stderr[result.stderr.index("error: "):]
    assert "ITERATIONS=17 (there 16)" in message and "MATRIX_LR=0.03 (there 0.02)" in message
    assert "SEED=7 (there 1337)" in message and "TRAIN_BATCH_TOKENS=2048 (there 1024)" in message
    assert "RUN_ID" not in message


def test_a_damaged_snapshot_is_named(stopped, tmp_path):
    folder = copy_of(stopped, tmp_path)
    for path in (folder / "checkpoints/step_000012").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:1000])
    result = run_script(folder, **SHORT, run_id="r", iterations=16, resume="auto")
    assert result.returncode == 2 and "checkpoints/step_000012 cannot be read" in result.stderr


def test_snapshots_of_another_run_are_not_mixed_with_new_ones(stopped, tmp_path):
    result = run_script(copy_of(stopped, tmp_path), **SHORT, run_id="other", checkpoint_every_seconds=5)
    assert result.returncode == 2 and "checkpoints exists and is kept" in result.stderr


def test_resume_without_a_snapshot_is_a_new_run(tmp_path):
    make_data(tmp_path)
    result = run_script(tmp_path, **SHORT, run_id="r", iterations=2, resume="auto")
    assert result.returncode == 0, result.stderr
    assert len(train_losses(tmp_path, "r")) == 2 and not (tmp_path / "checkpoints").exists()


NO_SPACE = """
import torch.distributed.checkpoint as checkpoint
from concurrent.futures import Future

def full(*args, **kwargs):
    future = Future()
    future.set_exception(OSError(28, "No space left on device"))
    return future

checkpoint.async_save = full
"""


def test_a_disk_too_full_for_snapshots_does_not_end_the_run(tmp_path):
    make_data(tmp_path)
    result = run_script(tmp_path, script=write_wrapper(tmp_path, NO_SPACE), **SHORT, run_id="r",
                        checkpoint_every_seconds=1e-6)
    assert result.returncode == 0, result.stderr
    assert "WARNING: snapshot step_000001 was not written ([Errno 28] No space left on device)" in result.stdout


HANG = """
log_step, step = train_gpt.Trainer._log_step, train_gpt.Trainer.step
second = os.environ["RANK"] == "1"
calls = []

def late(self, *args):
    log_step(self, *args)
    time.sleep(0.5 * second)  # rank 0's time is up first, while it waits: not because the other has gone

def hanging(self, *args):
    calls.append(1)
    if second and len(calls) == 3:
        time.sleep(600)
    return step(self, *args)

train_gpt.Trainer._log_step, train_gpt.Trainer.step = late, hanging
"""


def test_a_rank_that_hangs_ends_every_rank_with_its_stack(tmp_path):
    make_data(tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        place = {"world_size": 2, "master_addr": "127.0.0.1", "master_port": free.getsockname()[1]}
    wrapper, began = write_wrapper(tmp_path, HANG), time.monotonic()
    run = partial(run_script, tmp_path, script=wrapper, **SHORT, **place, run_id="r", iterations=9, stall_seconds=4)
    results = run_together({rank: partial(run, rank=rank, local_rank=rank) for rank in (0, 1)})
    assert time.monotonic() - began < 60
    for rank, where in ((0, "in all_reduce"), (1, "in hanging")):  # without a launcher that ends one for the other
        assert results[rank].returncode != 0 and "Timeout (0:00:04)!" in results[rank].stderr
        assert where in results[rank].stderr


DRIFT = """
train_gpt.CHECK_WEIGHTS_EVERY = 2
step = train_gpt.Trainer.step

def drifting(self, data, number, factor):
    loss = step(self, data, number, factor)
    if os.environ["RANK"] == "1" and number == 2:
        list(self.model.parameters())[3].data.view(-1)[0] += 1e-3
    return loss

train_gpt.Trainer.step = drifting
"""


def test_ranks_whose_weights_drift_apart_stop(tmp_path):
    make_data(tmp_path)
    result = torchrun(tmp_path, 2, script=write_wrapper(tmp_path, DRIFT), **SHORT, run_id="r", iterations=9)
    assert result.returncode != 0
    assert "ranks [1] have other weights than rank 0 after step 4" in result.stderr


LOSE_A_SHARD = """
from pathlib import Path
step = train_gpt.Trainer.step

def losing(self, data, number, factor):
    if number == 2:
        for path in Path("data/datasets/fineweb10B_sp512").glob("fineweb_train_*.bin"):
            {act}
    return step(self, data, number, factor)

train_gpt.Trainer.step = losing
"""


@pytest.mark.parametrize(("act", "message"), [
    ("path.unlink()", "No such file or directory"),
    ("os.truncate(path, 2000)", "ends before token"),
])
def test_shards_that_vanish_during_a_run_cost_one_clear_line(tmp_path, act, message):
    make_data(tmp_path)
    result = run_script(tmp_path, script=write_wrapper(tmp_path, LOSE_A_SHARD.format(act=act)), **SHORT, run_id="r",
                        iterations=50)
    assert result.returncode == 2 and "Traceback" not in result.stderr, result.stderr
    assert message in result.stderr and "fineweb_train_" in result.stderr


def test_two_runs_cannot_share_an_output_folder(tmp_path):
    make_data(tmp_path)
    first = kill_runs.start(kill_runs.new_folder(tmp_path / "run"), 1, ITERATIONS="100000", RUN_ID="first")
    try:
        log = tmp_path / "run/logs/first.txt"
        for _ in range(600):
            if log.exists():
                break
            time.sleep(0.1)
        result = run_script(tmp_path / "run", **SHORT, run_id="second")
    finally:
        first.kill()
        first.wait()
    assert result.returncode == 2 and "another run writes to it" in result.stderr
    assert run_script(tmp_path / "run", **SHORT, run_id="third").returncode == 0  # the lock goes with the process


def test_deterministic_runs_write_the_same_artifact(tmp_path):
    artifacts = set()
    for name in ("a", "b"):
        folder = new_folder(tmp_path, name)
        result = run_script(folder, **SHORT, run_id="r", deterministic=1)
        assert result.returncode == 0, result.stderr
        artifacts.add((folder / "final_model.int6.ptz").read_bytes())
    assert len(artifacts) == 1
