"""The fused kernels against their plain twins: first that they are equal, then how long both take.

    python bench/kernels.py [--out bench/results/NAME.json]

Needs a GPU with Triton. Sizes are those of one default micro-batch (TRAIN_BATCH_TOKENS / 8 tokens); settings come from
the environment as in train_gpt.py. Times are medians over forward, and over forward and backward, plain code compiled.
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


def cases(hp: tg.Hyperparameters, device: torch.device) -> dict[str, tuple[list[Tensor], Callable[..., object]]]:
    """Inputs of each operation at full size, bf16, and how to call it: call(function, *inputs)."""
    rows = hp.train_batch_tokens // 8 // hp.train_seq_len
    hidden, heads, kv = int(hp.mlp_mult * hp.model_dim), hp.num_heads, hp.num_kv_heads
    rope = tg.rope_tables(hp, hp.train_seq_len, device, torch.bfloat16)
    targets = torch.randint(hp.vocab_size, (rows * hp.train_seq_len,), device=device)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (scale * torch.randn(*shape, device=device)).bfloat16().requires_grad_()

    size = (rows, hp.train_seq_len)
    return {
        "split_qkv": ([draw(*size, (heads + 2 * kv) * hp.head_dim), draw(heads)],
                      lambda f, qkv, gain: f(qkv, None, [t.to(qkv.dtype) for t in rope], gain.float(), kv)),
        "remove_own_value": ([draw(*size, heads, hp.head_dim), draw(*size, kv, hp.head_dim)], lambda f, y, v: f(y, v)),
        "mlp": ([draw(*size, hp.model_dim), draw(hidden, hp.model_dim, scale=hp.model_dim ** -0.5),
                 draw(hp.model_dim, hidden, scale=hidden ** -0.5)], lambda f, x, a, b: f(x, a, b)),
        "head_losses": ([draw(rows * hp.train_seq_len, hp.model_dim), draw(hp.vocab_size, hp.model_dim, scale=0.2)],
                        lambda f, x, w: f(x, w, targets, hp.logit_softcap)),
    }


def outputs_and_gradients(run: Callable[..., object], inputs: list[Tensor], seeds: list[Tensor]) -> list[Tensor]:
    out = run(*inputs)
    outs = list(out) if isinstance(out, tuple) else [out]
    return [*outs, *torch.autograd.grad(outs, inputs, [s.to(o.dtype) for s, o in zip(seeds, outs)])]


def errors(fused: Callable[..., object], plain: Callable[..., object], inputs: list[Tensor]) -> list[float]:
    """|ours - reference| / |reference| of every output and gradient; the reference is the plain code in fp32."""
    exact = [x.detach().float().requires_grad_() for x in inputs]
    out = plain(*exact)
    seeds = [torch.randn_like(o) for o in (out if isinstance(out, tuple) else (out,))]
    pairs = zip(outputs_and_gradients(fused, inputs, seeds), outputs_and_gradients(plain, exact, seeds))
    return [float((ours.float() - reference).norm() / reference.norm()) for ours, reference in pairs]


def milliseconds(run: Callable[..., object], inputs: list[Tensor]) -> tuple[float, float]:
    """Median GPU milliseconds of the forward alone and of forward and backward."""
    with torch.no_grad():
        forward = triton.testing.do_bench(lambda: run(*inputs), return_mode="median")
    out = run(*inputs)
    seeds = [torch.randn_like(o) for o in (out if isinstance(out, tuple) else (out,))]
    both = triton.testing.do_bench(lambda: outputs_and_gradients(run, inputs, seeds), return_mode="median")
    return forward, both


def measure(hp: tg.Hyperparameters) -> list[dict]:
    device = torch.device("cuda")
    torch.set_float32_matmul_precision("highest")
    attend, _ = tg.choose_attention(hp, device, torch.bfloat16)
    plain, fused = tg.Operations(attend), tg.fused_operations(attend)
    table = []
    for name, (inputs, call) in cases(hp, device).items():
        runs = [lambda *x, f=getattr(ops, name), c=call: c(f, *x) for ops in (fused, plain)]
        worst = max(errors(*runs, inputs))
        if not worst < 1e-2:
            raise SystemExit(f"{name} is off by {worst:.1e}: the kernel does not equal the plain code")
        torch._dynamo.reset()  # all cases share code objects, and a code object may be compiled only a few times
        compiled = [torch.compile(run, dynamic=False, fullgraph=True) for run in runs]
        (forward, both), (plain_forward, plain_both) = (milliseconds(run, inputs) for run in compiled)
        table.append({"operation": name, "worst_relative_error": worst, "forward_ms": forward,
                      "plain_forward_ms": plain_forward, "forward_backward_ms": both,
                      "plain_forward_backward_ms": plain_both})
        print("  ".join(f"{key} {value:.3g}" if isinstance(value, float) else value
                        for key, value in table[-1].items()), flush=True)
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
