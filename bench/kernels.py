"""The fused kernels against their plain twins: first that they are equal, then how long both take.

    python bench/kernels.py [--out bench/results/NAME.json]

Needs a GPU with Triton. Sizes are those of one default micro-batch (TRAIN_BATCH_TOKENS / 8 tokens); settings come from
the environment as in train_gpt.py. Times are sums over GPU kernels, forward alone and forward with backward; both sides
are compiled.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import triton
from torch import Tensor

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import train_gpt as tg  # noqa: E402


def gpu_milliseconds(run: Callable[..., object], inputs: list[Tensor], others: list[object], backward: bool) -> float:
    """Summed time of the GPU kernels of one forward, or of one forward and backward; mean of five."""
    out = run(*inputs, *others)
    seeds = [torch.randn_like(o) for o in (out if isinstance(out, tuple) else (out,))]

    def call() -> None:
        with torch.set_grad_enabled(backward):
            out = run(*inputs, *others)
        if backward:
            torch.autograd.grad(out, inputs, seeds)

    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            call()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in profile.key_averages()) / 5000


def measure(hp: tg.Hyperparameters) -> list[dict]:
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("highest")
    attend, _ = tg.choose_attention(hp, device, torch.bfloat16)
    plain = tg.Operations(attend)
    fused = tg.Operations(attend, tg.SplitQKV.apply, tg.mlp_fused, tg.head_losses_fused)
    batch, table = hp.train_batch_tokens // 8 // hp.train_seq_len, []
    for name, (inputs, others) in tg.operation_cases(hp, device, torch.bfloat16, batch, hp.train_seq_len).items():
        functions = [getattr(operations, name) for operations in (fused, plain)]
        error = tg.largest_error(*functions, inputs, others)
        if not error < 1e-2:
            raise SystemExit(f"{name} is off by {error:.1e}: the kernel does not equal the plain code")
        row = {"operation": name, "largest_relative_error": error}
        for label, function in zip(("fused", "plain"), functions):
            torch._dynamo.reset()  # every case compiles the same code object, and that only so often
            compiled = torch.compile(function, dynamic=False, fullgraph=True)
            row |= {f"{label}_forward_ms": gpu_milliseconds(compiled, inputs, others, False),
                    f"{label}_forward_backward_ms": gpu_milliseconds(compiled, inputs, others, True)}
        table.append(row)
        print("  ".join(f"{key} {x:.3g}" if isinstance(x, float) else x for key, x in row.items()), flush=True)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "error: no CUDA GPU here; tests/test_kernels.py checks the kernels on a CPU\n")
    table = measure(tg.Hyperparameters.from_env(os.environ))
    if args.out:
        about = {"machine": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
                 "command": " ".join(sys.argv)}
        args.out.write_text(json.dumps(about | {"operations": table}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
