"""Record folders made by hand, in the published layout: every number is computed here, none by golf."""
import json
import math
import statistics
import subprocess
import sys
from functools import cache
from pathlib import Path

import conftest

ROOT = Path(__file__).resolve().parent.parent
RULE = "=" * 100
VAL_TOKENS, VAL_BYTES = 45_508_608, 151_080_000
# Holds what a careless parser would take for the log's own lines.
SCRIPT = f'''"""A script that logs itself.

{RULE}
Running out of names
0/20000 val_loss: 9.9999 val_bpb: 9.9999
final_int6_sliding_window val_loss:9.99999999 val_bpb:9.99999999 eval_time:1ms
Serialized model int6+brotli: 1 bytes
---
val_bpb: 9.99999999
"""
import argparse
import os


class Hyperparameters:
    vocab_size = int(os.environ.get("VOCAB_SIZE", 4096))
    matrix_lr = float(os.environ.get("MATRIX_LR", "0.02"))
    ema_enabled = bool(int(os.environ.get("EMA_ENABLED", "1")))


if __name__ == "__main__":
    argparse.ArgumentParser().parse_args()
'''
RESULTS = {1337: 2.5261, 42: 2.5275, 7: 2.5269}  # val_loss in nats by seed


def bpb(loss: float) -> float:
    return round(loss * VAL_TOKENS / (math.log(2) * VAL_BYTES), 8)


def log_text(seed: int, loss: float, script: str = SCRIPT, code_bytes: int | None = None, model_bytes: int = 15_837_214,
             train_ms: int = 590_009, hessian_seconds: float = 8.2, eval_ms: int = 64_001, val_tokens: int = VAL_TOKENS,
             world_size: int = 8, gpu: str = "NVIDIA H100 80GB HBM3", steps: int = 5962, **settings) -> str:
    """A whole published log; `settings` replace logged ones."""
    code = len(script.encode()) if code_bytes is None else code_bytes
    values = {"vocab_size": 4096, "matrix_lr": 0.02, "ema_enabled": True, "seed": seed, "world_size": world_size,
              "rank": 0, "run_id": f"run{seed}", "datasets_dir": "./data/datasets/fineweb10B_sp4096",
              "train_batch_tokens": 786432, "max_wallclock_seconds": 600.0, **settings}
    lines = [RULE, "Hyperparameters:", *(f"  {name}: {values[name]}" for name in sorted(values)), script, RULE,
             "Running Python 3.12.3 (main, Jan  1 2026, 00:00:00) [GCC 13.3.0]", "Running PyTorch 2.11.0+cu130",
             "+-----------------------------------------+", "|=========================================+",
             *(f"|   {n}  {gpu}          On  |   00000000:19:00.0 Off |     0 |" for n in range(world_size)), RULE,
             "train_shards: 143", f"val_tokens: {val_tokens}", "model_params:34401371",
             "gptq:reserving 10s, effective=590000ms", "warmup_step: 1/20", "0/20000 val_loss: 8.3169 val_bpb: 3.6144",
             "1/20000 train_loss: 8.3200 train_time: 0.0m tok/s: 7990000",
             "500/20000 train_loss: 3.0237 train_time: 0.8m tok/s: 7997340",
             f"{steps}/20000 val_loss: {loss + 0.02:.4f} val_bpb: {bpb(loss + 0.02):.4f}",
             f"stopping_early: wallclock_cap train_time: {train_ms}ms step: {steps}/20000",
             "peak memory allocated: 25769 MiB reserved: 25878 MiB",
             f"pre-quantization post-ema val_loss:{loss + 0.016:.8f} val_bpb:{bpb(loss + 0.016):.8f} eval_time:1733ms",
             "Serialized model: 132405827 bytes", f"Code size: {code} bytes",
             f"GPTQ:collected 66 Hessians in {hessian_seconds}s", f"Serialized model int6+brotli: {model_bytes} bytes",
             f"Total submission size int6+brotli: {model_bytes + code} bytes",
             f"final_int6_roundtrip val_loss:{loss + 0.04:.8f} val_bpb:{bpb(loss + 0.04):.8f} eval_time:7001ms",
             f"final_int6_sliding_window val_loss:{loss:.8f} val_bpb:{bpb(loss):.8f} eval_time:{eval_ms}ms", ""]
    return "\n".join(lines)


def build(base: Path, name: str = "2026-04-01_Good", track: str = "10min_16mb", script: str = SCRIPT,
          results: dict[int, float] = RESULTS, **log_options) -> Path:
    """A good folder whose submission.json and README.md repeat what the logs claim."""
    folder = base / f"track_{track}" / name
    folder.mkdir(parents=True)
    (folder / "train_gpt.py").write_text(script, encoding="utf-8")
    (folder / "requirements.txt").write_text("torch\n")
    for seed, loss in results.items():
        text = log_text(seed, loss, script, **log_options)
        (folder / f"train_seed{seed}.log").write_text(text, encoding="utf-8")
    write_claims(folder, track, results, script, **log_options)
    return folder


def write_claims(folder: Path, track: str, results: dict[int, float], script: str, code_bytes: int | None = None,
                 model_bytes: int = 15_837_214, train_ms: int = 590_009, hessian_seconds: float = 8.2,
                 eval_ms: int = 64_001, steps: int = 5962, **_) -> None:
    code = len(script.encode()) if code_bytes is None else code_bytes
    total, scores = code + model_bytes, {seed: bpb(loss) for seed, loss in results.items()}
    mean, loss = statistics.fmean(scores.values()), statistics.fmean(results.values())
    rows = {str(seed): {"val_loss": value, "val_bpb": scores[seed], "artifact_bytes": total, "steps": steps,
                        "train_seconds": round(train_ms / 1000 + hessian_seconds, 1),
                        "eval_seconds": round(eval_ms / 1000 + 7.001, 1)} for seed, value in results.items()}
    submission = {"author": "A. Person", "github_id": "person", "name": "Good", "blurb": "A test.",
                  "date": "2026-04-01", "track": track, "val_loss": round(loss, 8), "val_bpb": round(mean, 8),
                  "val_bpb_std": round(statistics.stdev(scores.values()), 8) if len(scores) > 1 else None,
                  "seeds": list(results), "seed_results": rows, "hardware": "8xH100", "pytorch_version": "2.11.0+cu130",
                  "bytes_total": total, "bytes_code": code}
    (folder / "submission.json").write_text(json.dumps(submission), encoding="utf-8")
    table = [f"| {seed} | {steps:,} | {scores[seed]:.4f} | **{total:,}** |" for seed in results]
    text = "\n".join([
        "# Good", "", f"Mean **{mean:.4f}** bpb ({loss:.5f} nats).", "", "| Seed | Steps | bpb | Bytes |", "|-|-|-|-|",
        *table, "", "```", "SEED=1337 torchrun --standalone --nproc_per_node=8 train_gpt.py", "```", ""])
    (folder / "README.md").write_text(text, encoding="utf-8")


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text, (path, old)
    path.write_text(text.replace(old, new), encoding="utf-8")


def edit_json(folder: Path, **changes) -> None:
    """Changes fields of submission.json; None removes one."""
    path = folder / "submission.json"
    values = {**json.loads(path.read_text(encoding="utf-8")), **changes}
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not None}), encoding="utf-8")


@cache
def real_runs(base: Path) -> dict[int, Path]:
    """Logs by seed of two real tiny runs with the script as it is; made once for all tests."""
    folder = conftest.new_folder(base, "golf_runs")
    runs = {seed: (folder, {"seed": seed, "run_id": f"run{seed}", "iterations": 6}) for seed in (1, 2)}
    done = conftest.run_forked(runs)
    assert [result.returncode for result in done.values()] == [0, 0], done
    return {seed: folder / "logs" / f"run{seed}.txt" for seed in runs}


def golf(*arguments, cwd: Path = ROOT) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-m", "golf", *map(str, arguments)], cwd=cwd, capture_output=True, text=True,
                          check=False, timeout=120)
