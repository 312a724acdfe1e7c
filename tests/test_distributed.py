"""Several ranks: torchrun with gloo on the CPU gives what one process gives, and a failing rank ends the job."""

import re
import socket
import time

import numpy as np
import pytest
import torch
from conftest import (
    ROOT,
    SCRIPT,
    make_data,
    new_folder,
    records,
    run_environment,
    run_script,
    run_together,
    settings,
    summary_block,
    torchrun,
    train_losses,
    write_wrapper,
)

import train_gpt as tg

# Every draw has 8 windows, whatever the number of ranks, so all these runs see the same data.
EQUAL = {"run_id": "r", "train_batch_tokens": 4096, "iterations": 8, "warmup_steps": 0}
SHORT = {"run_id": "r", "warmup_steps": 0, "gptq_enabled": 0, "sliding_window_enabled": 0}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def node_options(number: int, port: int) -> tuple[str, ...]:
    return "--nnodes=2", f"--node_rank={number}", "--master_addr=127.0.0.1", f"--master_port={port}"


def node(folder, number: int, port: int):
    return torchrun(
        folder,
        1,
        *node_options(number, port),
        **EQUAL,
        micro_batch_tokens=256,
        output_dir="out",
        gloo_socket_ifname="lo",
    )


def only_error(result) -> str:
    """The one error message of a job that failed without a traceback of ours (torchrun adds its own)."""
    messages = re.findall(r"(?m)^error: .*", result.stderr)
    assert result.returncode != 0 and len(messages) == 1, result.stderr
    assert 'train_gpt.py", line' not in result.stderr
    return messages[0]


OTHER_WEIGHTS = """
build = train_gpt.build_model

def other(*args):
    model = build(*args)
    for p in model.parameters():
        p.data += 0.01 * int(os.environ["RANK"])
    return model

train_gpt.build_model = other
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(folder, result) by name; the two standalone runs of two ranks run at the same time, so do the two nodes.

    Of the four ranks each starts with weights of its own, as nodes do whose processors round differently."""
    base, port = tmp_path_factory.mktemp("ranks"), free_port()
    folders = {name: new_folder(base, name) for name in ("one", "four", "eight", "two", "two_again", "node0", "node1")}
    stages = [
        {
            "one": lambda: run_script(folders["one"], **EQUAL, micro_batch_tokens=512),
            "four": lambda: torchrun(folders["four"], 4, **EQUAL, micro_batch_tokens=128,
                                     script=write_wrapper(folders["four"], OTHER_WEIGHTS)),
        },
        {"eight": lambda: torchrun(folders["eight"], 8, **EQUAL, micro_batch_tokens=64)},
        {
            name: lambda n=name: torchrun(folders[n], 2, **EQUAL, micro_batch_tokens=256)
            for name in ("two", "two_again")
        },
        {f"node{n}": lambda n=n: node(folders[f"node{n}"], n, port) for n in (0, 1)},
    ]
    return {name: (folders[name], result) for stage in stages for name, result in run_together(stage).items()}


@pytest.mark.parametrize("name", ["one", "four", "eight", "two", "two_again", "node0", "node1"])
def test_run_succeeds(runs, name):
    assert runs[name][1].returncode == 0, runs[name][1].stderr


@pytest.mark.parametrize("name", ["two", "two_again", "four", "eight"])
def test_ranks_give_the_losses_of_one_process(runs, name):
    expected = train_losses(runs["one"][0], "r")
    assert len(expected) == 8
    np.testing.assert_allclose(train_losses(runs[name][0], "r"), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["two", "four", "eight"])
def test_ranks_give_the_scores_of_one_process(runs, name):
    expected = {r["name"]: r["val_loss"] for r in records(runs["one"][0], "r", "evaluation")}
    ours = {r["name"]: r["val_loss"] for r in records(runs[name][0], "r", "evaluation")}
    assert ours == pytest.approx(expected, abs=2e-4)
    starts = [records(runs[n][0], "r", "validation")[0]["val_loss"] for n in ("one", name)]
    assert starts[0] == pytest.approx(starts[1], abs=1e-6)


def test_concurrent_standalone_runs_do_not_disturb_each_other(runs):
    assert train_losses(runs["two"][0], "r") == train_losses(runs["two_again"][0], "r")


def test_two_nodes_give_the_score_of_two_ranks_though_one_has_no_artifact(runs):
    expected, ours = (summary_block(runs[name][1].stdout) for name in ("two", "node0"))
    for key in ("val_bpb", "int6_val_bpb", "pre_quant_val_bpb", "model_bytes"):
        assert ours[key] == expected[key]
    assert (runs["node0"][0] / "out/final_model.int6.ptz").is_file()
    assert not (runs["node1"][0] / "out").exists() and "val_bpb" not in runs["node1"][1].stdout


def test_only_rank_0_logs(runs):
    folder, result = runs["four"]
    assert len(re.findall(r"(?m)^val_bpb: ", result.stdout)) == 1
    assert len(list((folder / "logs").glob("*.txt"))) == 1


def test_the_log_names_the_ranks(runs):
    assert "  world_size: 4\n" in (runs["four"][0] / "logs/r.txt").read_text(encoding="utf-8")
    assert "batch: 4096 tokens = 4 ranks x 8 micro-batches x 2 sequences of 64" in runs["four"][1].stdout


# -- failing ranks -----------------------------------------------------------------------------------------------------

FAIL_AT_STEP_3 = """
step = train_gpt.Trainer.step
calls = []

def failing(self, *args, **kwargs):
    calls.append(1)
    if os.environ["RANK"] == "1" and len(calls) == 3:
        raise {error}("a broken rank")
    return step(self, *args, **kwargs)

train_gpt.Trainer.step = failing
"""

NAN_ON_RANK_1 = """
step = train_gpt.Trainer.step
calls = []

def broken(self, *args, **kwargs):
    calls.append(1)
    loss = step(self, *args, **kwargs)
    return (lambda: float("nan")) if os.environ["RANK"] == "1" and len(calls) == {call} else loss

train_gpt.Trainer.step = broken
"""


def run_broken(folder, body: str, **changes):
    """(result, seconds) of two ranks of which one fails."""
    make_data(folder)
    began = time.monotonic()
    result = torchrun(folder, 2, script=write_wrapper(folder, body), **{**SHORT, "iterations": 50, **changes})
    return result, time.monotonic() - began


def test_a_rank_that_raises_ends_the_job_and_is_named(tmp_path):
    result, seconds = run_broken(tmp_path, FAIL_AT_STEP_3.format(error="RuntimeError"))
    assert result.returncode != 0 and seconds < 60
    assert "error: rank 1 failed" in result.stderr and "a broken rank" in result.stderr


def test_a_rank_that_is_killed_is_named_as_the_cause(tmp_path):
    result, seconds = run_broken(tmp_path, FAIL_AT_STEP_3.format(error="os.kill(os.getpid(), 9) or RuntimeError"))
    assert result.returncode != 0 and seconds < 60
    cause = result.stderr.partition("Root Cause")[2]
    assert re.search(r"rank +: 1\b", cause) and re.search(r"exitcode +: -9\b", cause), result.stderr[-3000:]
    assert "error: rank 0 failed" not in result.stderr


def test_a_rank_alone_with_a_known_error_prints_it(tmp_path):
    result, seconds = run_broken(tmp_path, FAIL_AT_STEP_3.format(error="train_gpt.SetupError"))
    assert result.returncode != 0 and seconds < 60
    assert "a broken rank" in result.stderr


def test_nan_on_one_rank_stops_all_ranks_and_names_it(tmp_path):
    result, seconds = run_broken(tmp_path, NAN_ON_RANK_1.format(call=3))
    assert result.returncode != 0 and seconds < 60
    assert re.search(r"\b3\b.*rank\w* \[?1\b", only_error(result))
    assert len(train_losses(tmp_path, "r")) == 2 and not (tmp_path / "final_model.pt").exists()


def test_nan_on_one_rank_in_warm_up_stops_all_ranks_and_names_it(tmp_path):
    result, seconds = run_broken(tmp_path, NAN_ON_RANK_1.format(call=1), warmup_steps=2)
    assert result.returncode != 0 and seconds < 60
    assert re.search(r"(?m)^error: .*rank\w* \[?1\b", result.stderr)


def test_a_world_that_does_not_divide_names_sizes_that_do(tmp_path):
    make_data(tmp_path)
    refused = torchrun(tmp_path, 3, **SHORT, train_batch_tokens=3072, iterations=1)
    message = re.search(r"MICRO_BATCH_TOKENS to one of \[([\d, ]+)\]", only_error(refused))
    sizes = [int(n) for n in message[1].split(",")]
    for size in sizes:
        tg.plan_batches(settings(train_batch_tokens=3072, micro_batch_tokens=size), 3)
    assert not (tmp_path / "logs").exists()
    result = torchrun(tmp_path, 3, **SHORT, train_batch_tokens=3072, iterations=1, micro_batch_tokens=sizes[-1])
    assert result.returncode == 0, result.stderr


def test_a_setup_failure_is_said_once_for_all_ranks(tmp_path):
    make_data(tmp_path)
    for path in tmp_path.glob("data/tokenizers/*"):
        path.unlink()
    result = torchrun(tmp_path, 2, **SHORT)
    assert "fineweb_512_bpe.model" in only_error(result)


# -- parts -------------------------------------------------------------------------------------------------------------

TWO_RANKS = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
sys.path.insert(0, {root!r})
import train_gpt as tg

hp = tg.Hyperparameters.from_env(os.environ)
world = tg.join_world(hp, os.environ)
model = tg.build_model(hp, tg.Operations(tg.sdpa_attention), torch.device("cpu"), torch.float32)
for p in model.parameters():
    p.data += world.rank
world.broadcast_weights(model)
optimizers = tg.Optimizers(model, world)
generator = torch.Generator().manual_seed(5)
gradients = tg.Gradients(model.parameters())
for step in range(3):
    for p in model.parameters():  # each rank draws both ranks' gradients and keeps its own
        p.grad.copy_(torch.stack([torch.randn(p.shape, generator=generator) for _ in range(2)])[world.rank])
    gradients.average(world)
    optimizers.step(1.0, 0.95)
torch.save(model.state_dict(), f"weights{{world.rank}}.pt")
shared = [world.gather([float(world.rank), 7.0]), world.broadcast_object({{"rank": world.rank}})]
torch.save(shared, f"shared{{world.rank}}.pt")
dist.destroy_process_group()
os._exit(0)  # gloo threads may abort the interpreter's own shutdown
"""


def test_averaging_and_sharded_muon_equal_one_rank(tmp_path):
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS.format(root=str(ROOT)))
    result = torchrun(tmp_path, 2, script=script)
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert torch.load(tmp_path / f"shared{rank}.pt") == [[[0.0, 7.0], [1.0, 7.0]], {"rank": 0}]
    hp = tg.Hyperparameters.from_env(run_environment())
    model = tg.build_model(hp, tg.Operations(tg.sdpa_attention), torch.device("cpu"), torch.float32)
    optimizers, generator = tg.Optimizers(model, tg.World()), torch.Generator().manual_seed(5)
    for _ in range(3):
        for p in model.parameters():
            p.grad = torch.stack([torch.randn(p.shape, generator=generator) for _ in range(2)]).mean(0)
        optimizers.step(1.0, 0.95)
    ranks = [torch.load(tmp_path / f"weights{rank}.pt", weights_only=True) for rank in (0, 1)]
    for name, expected in model.state_dict().items():
        assert torch.equal(ranks[0][name], ranks[1][name]), name
        torch.testing.assert_close(ranks[0][name], expected, rtol=0, atol=1e-5, msg=name)


QUANTIZE = """
import os, sys
import torch, torch.distributed as dist
sys.path.insert(0, {root!r})
import train_gpt as tg

hp = tg.Hyperparameters.from_env(os.environ)
world = tg.join_world(hp, os.environ)
model = tg.build_model(hp, tg.Operations(tg.sdpa_attention), torch.device("cpu"), torch.float32)
generator = torch.Generator().manual_seed(7)
batches = [torch.randint(hp.vocab_size, (2, 64), generator=generator) for _ in range(4)]
with torch.no_grad():
    for p in model.parameters():
        p.add_(0.05 * torch.randn(p.shape, generator=generator))
    collector = tg.HessianCollector(model)
    mine = batches[world.rank::world.size]
    for ids in mine:
        model.hidden(ids)
    hessians = collector.finish(len(mine), world)
equal = hessians if world.size == 1 else torch.load("quantized1_0.pt")[3]
without = {{name: h for name, h in equal.items() if name != "blocks.0.mlp.fc.weight"}}  # that one is row-searched
done = tg.quantize_state(model.state_dict(), without, hp, 1.1, world)
torch.save([done.tensors, done.meta, sorted(done.gptq), hessians], f"quantized{{world.size}}_{{world.rank}}.pt")
if world.size > 1:
    dist.destroy_process_group()
os._exit(0)
"""


def test_matrices_shared_over_ranks_and_mean_hessians_give_what_one_rank_gives(tmp_path):
    script = tmp_path / "quantize.py"
    script.write_text(QUANTIZE.format(root=str(ROOT)))
    large = {"model_dim": 160, "embedding_dim": 160, "num_layers": 2, "xsa_last_n": 2, "ve_layers": "1", "mlp_mult": 5}
    for ranks in (1, 2, 4):
        result = torchrun(tmp_path, ranks, script=script, **large)
        assert result.returncode == 0, result.stderr
    alone, *shared = (torch.load(tmp_path / f"quantized{name}.pt") for name in ("1_0", "2_0", "2_1", "4_0", "4_3"))
    assert len(alone[2]) == 3 and "blocks.0.mlp.fc.weight" not in alone[2]
    for tensors, meta, gptq, hessians in shared:
        assert meta == alone[1] and gptq == alone[2] and set(tensors) == set(alone[0])
        for name, hessian in hessians.items():
            torch.testing.assert_close(hessian, alone[3][name], rtol=1e-5, atol=1e-4)
        for name, tensor in tensors.items():  # to the byte, since the Hessians are the same
            assert torch.equal(tensor, alone[0][name]), name


def test_ranks_say_whose_hessians_were_used_and_fit_the_size_together(tmp_path):
    make_data(tmp_path)
    large = {"model_dim": 160, "embedding_dim": 160, "num_layers": 1, "xsa_last_n": 1, "ve_enabled": 0, "mlp_mult": 5}
    target = SCRIPT.stat().st_size + 180_000
    result = torchrun(tmp_path, 2, **large, iterations=1, warmup_steps=0, sliding_window_enabled=0,
                      gptq_calibration_batches=2, target_total_bytes=target)
    assert result.returncode == 0, result.stderr
    assert int(summary_block(result.stdout)["total_bytes"]) <= target
    assert f"over TARGET_TOTAL_BYTES={target}" in result.stdout
    assert result.stdout.count("Hessians are means over 2 ranks; the published script takes those of rank 0") == 1


def test_a_parameter_without_gradient_is_no_obstacle(tmp_path):
    make_data(tmp_path)
    result = torchrun(tmp_path, 2, **SHORT, iterations=1, num_layers=1, xsa_last_n=1, ve_layers=0)
    assert result.returncode == 0, result.stderr


def test_a_refused_output_folder_reaches_every_rank(tmp_path):
    make_data(tmp_path)
    (tmp_path / "plain").write_text("x")
    result = torchrun(tmp_path, 2, **SHORT, output_dir="plain/out")
    assert "OUTPUT_DIR=plain/out" in only_error(result)
