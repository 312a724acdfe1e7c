"""What one training step costs: tokens/s, milliseconds by part, share of the GPU's peak, memory.

    python bench/train_step.py [--steps 30] [--profile] [--evaluation] [--out bench/results/NAME.json]
    torchrun --standalone --nproc_per_node=2 bench/train_step.py

Takes the settings of train_gpt.py from the environment (TRAIN_BATCH_TOKENS, MICRO_BATCH_TOKENS, ATTENTION, ...);
without shards in DATA_DIR it writes random ones to a temporary folder: the time does not depend on the text.
Parts are timed alone, with a synchronisation around each; tokens/s comes from whole steps as the trainer does them.
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_gpt as tg  # noqa: E402

PEAK_FLOPS = {"H100": 989e12, "H200": 989e12}  # dense bf16, by name; other devices get no share of peak
KINDS = {"attention": ("cudnn", "flash", "fmha", "sdpa"),
         "matrix products": ("nvjet", "gemm", "cutlass", "splitK", "mlp_kernel")}


def write_random_shards(hp: tg.Hyperparameters, tokens: int) -> None:
    rng = np.random.default_rng(0)
    hp.dataset_dir.mkdir(parents=True)
    for index in range(4):
        header = np.zeros(256, "<i4")
        header[:3] = tg.SHARD_MAGIC, tg.SHARD_VERSION, tokens
        body = rng.integers(hp.vocab_size, size=tokens).astype("<u2")
        (hp.dataset_dir / f"fineweb_train_{index:06d}.bin").write_bytes(header.tobytes() + body.tobytes())


def build_trainer(hp: tg.Hyperparameters) -> tg.Trainer:
    """A trainer on this process's device that never evaluates; compiled as train_gpt.py would."""
    world = tg.join_world(hp, os.environ)
    torch.set_float32_matmul_precision("high")
    dtype, _ = tg.choose_dtype(hp.precision, world.device)
    attend, attention = tg.choose_attention(hp, world.device, dtype)
    print(f"attention: {attention}", flush=True)
    ops, kernels = tg.choose_operations(hp, attend, world.device, dtype)
    print(f"kernels: {kernels}", flush=True)
    model = tg.build_model(hp, ops, world.device, dtype)
    on, _ = tg.choose_compile(hp.compile, world.device)
    optimized, orthogonalize = (torch.compile(f, dynamic=False, fullgraph=True) if on else f
                                for f in (model, tg.newton_schulz))
    no_validation = tg.ValidationSet(np.zeros(hp.eval_seq_len + 1, np.uint16), 1, "")
    evaluator = tg.Evaluator(hp, tg.plan_batches(hp, world.size), world, no_validation, optimized)
    return tg.Trainer(model, evaluator, tg.find_shards(hp, "train"), tg.RunLog(None, ""), orthogonalize)


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """Median wall time of a call with the device idle before and after it."""
    times = []
    for _ in range(repeats + 2):
        tg.synchronize(device)
        began = time.perf_counter()
        call()
        tg.synchronize(device)
        times.append(1000 * (time.perf_counter() - began))
    return float(np.median(times[2:]))


def whole_steps(trainer: tg.Trainer, steps: int) -> dict[str, float]:
    """Steps as in Trainer.fit: data, forward, backward, optimizers, EMA and the closing synchronisation."""
    ema = tg.EMA(trainer.model, trainer.hp.ema_decay)
    with trainer.on_the_clock() as data:
        for step in range(3):
            trainer._agree(trainer.step(data, step, 1.0), "warm-up")
            if step == 0:
                trainer.record_graph()
        waited, began = data.wait_seconds, time.perf_counter()
        for step in range(steps):
            loss = trainer.step(data, step, 1.0)
            ema.update()
            trainer._agree(loss, f"step {step}")
        seconds = time.perf_counter() - began
        waited = data.wait_seconds - waited
    tokens = steps * trainer.hp.train_batch_tokens
    return {"tokens_per_second": tokens / seconds, "step_ms": 1000 * seconds / steps,
            "loader_wait_ms": 1000 * waited / steps}


def parts(trainer: tg.Trainer) -> dict[str, float]:
    device, hp, gradients = trainer.world.device, trainer.hp, trainer.gradients
    ema = tg.EMA(trainer.model, hp.ema_decay)
    return {"forward_backward_ms": milliseconds(trainer.run_micro_batch, device),
            "clip_ms": milliseconds(lambda: gradients.clip(hp.grad_clip_norm), device),
            "optimizer_ms": milliseconds(lambda: trainer.optimizers.step(1.0, 0.95), device),
            "ema_ms": milliseconds(ema.update, device)}


def step_flops(trainer: tg.Trainer) -> float:
    """Matrix-product FLOPs of one step, all ranks: 6 per weight and token, causal attention 6 per pair and channel."""
    hp = trainer.hp
    weights = sum(p.numel() for n, p in trainer.model.named_parameters() if p.ndim == 2 and "embed" not in n)
    weights -= 0 if hp.tie_embeddings else hp.vocab_size * hp.embedding_dim
    return hp.train_batch_tokens * (6 * weights + 6 * hp.num_layers * hp.model_dim * hp.train_seq_len)


def kernel_table(call: Callable[[], object], device: torch.device) -> list[dict]:
    """GPU milliseconds of a call by kernel, longest first, mean of three."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(3):
            call()
        tg.synchronize(device)
    events = sorted(profile.key_averages(), key=lambda e: -e.self_device_time_total)
    return [{"ms": e.self_device_time_total / 3000, "calls": e.count / 3, "kernel": e.key} for e in events]


def kernel_tables(trainer: tg.Trainer, rows: int = 60) -> dict[str, object]:
    """Kernels of a micro-batch's forward and backward, and of what follows the last one: clipping, optimizers, EMA."""
    device, hp = trainer.world.device, trainer.hp
    ema = tg.EMA(trainer.model, hp.ema_decay)

    def end_of_step() -> None:
        trainer.gradients.clip(hp.grad_clip_norm)
        trainer.optimizers.step(1.0, 0.95)
        ema.update()

    batch = kernel_table(trainer.run_micro_batch, device)
    end = kernel_table(end_of_step, device)
    return {"kernels_by_kind_ms": by_kind(batch), "kernels": batch[:rows],
            "launches": sum(row["calls"] for row in batch),
            "end_of_step_ms": sum(row["ms"] for row in end), "end_of_step_kernels": end[:rows // 2]}


def by_kind(table: list[dict]) -> dict[str, float]:
    sums = dict.fromkeys([*KINDS, "everything else"], 0.0)
    for row in table:
        kind = next((k for k, words in KINDS.items() if any(w in row["kernel"] for w in words)
                     and not row["kernel"].startswith("triton")), "everything else")
        sums[kind] += row["ms"]
    return sums


def evaluation_speed(trainer: tg.Trainer, targets: int = 400_000) -> dict[str, float]:
    """Scored tokens per second of the sliding evaluation, once compiled."""
    tokens = np.random.default_rng(0).integers(trainer.hp.vocab_size, size=targets + 1).astype(np.uint16)
    val = tg.ValidationSet(tokens, targets, "")
    evaluator = tg.Evaluator(trainer.hp, trainer.plan, trainer.world, val, trainer.loss_function)
    first, second = (evaluator.sliding().eval_seconds for _ in range(2))
    return {"sliding_tokens_per_second": targets / second, "sliding_seconds_with_compile": first}


def measure(args: argparse.Namespace, hp: tg.Hyperparameters) -> dict:
    trainer = build_trainer(hp)
    began = time.perf_counter()
    result = {"whole": whole_steps(trainer, args.steps), "parts": parts(trainer)}
    result["seconds_with_compile"] = time.perf_counter() - began
    device = trainer.world.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor()
    peak = next((flops for part, flops in PEAK_FLOPS.items() if part in name), None)
    if peak:
        rate = step_flops(trainer) / (result["whole"]["step_ms"] / 1000) / trainer.world.size
        result["mfu_percent"] = 100 * rate / peak
    result["peak_memory_mib"] = tg.peak_memory_mib(device)[0]
    if args.profile:
        result |= kernel_tables(trainer)
    if args.evaluation:
        result["evaluation"] = evaluation_speed(trainer)
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return result | {"machine": name, "ranks": trainer.world.size, "torch": torch.__version__,
                     "commit": commit.stdout.strip(), "command": " ".join(sys.argv),
                     "train_batch_tokens": hp.train_batch_tokens, "micro_sequences": trainer.plan.micro_sequences}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--profile", action="store_true", help="also the time of each GPU kernel")
    parser.add_argument("--evaluation", action="store_true", help="also the speed of the sliding evaluation")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        environment = dict(os.environ)
        if not tg.Hyperparameters.from_env(environment).dataset_dir.is_dir():
            environment["DATA_DIR"] = folder
        hp = tg.Hyperparameters.from_env(environment)
        if environment.get("DATA_DIR") == folder:
            write_random_shards(hp, 4 * hp.train_batch_tokens)
        result = measure(args, hp)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if os.environ.get("RANK", "0") != "0":
        return
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(json.dumps({key: value for key, value in result.items() if not key.endswith("kernels")}, indent=1))
    for row in result.get("kernels", []) + result.get("end_of_step_kernels", []):
        print(f"{row['ms']:8.3f} ms {row['calls']:6.0f} x  {row['kernel'][:100]}")


if __name__ == "__main__":
    main()
