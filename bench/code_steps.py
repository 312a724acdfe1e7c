"""What each kind of matrix costs when it alone is quantised, and the steps of codes that follow.

    DATA_DIR=lab python bench/code_steps.py RECORD/train_gpt.py final_model.pt [--out bench/results/NAME.json]

RECORD/train_gpt.py is a script with CODE_STEPS (records/track_non_record_16mb), final_model.pt its unquantised weights;
settings come from the environment as in that script. Divergence is that of the quantised model's next-token
distribution from the whole one's, in nats a token, on training text that the Hessians have not seen. At rates of
several bits it grows with the square of the step and a bit saved doubles the step, so bytes are best spent where
divergence / weights is alike for all kinds.
"""
from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import pickle
import platform
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor


def load_script(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("record_script", path)
    sys.modules["record_script"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@torch.no_grad()
def log_probabilities(model: torch.nn.Module, ids: Tensor) -> Tensor:
    """Token ids (1, T) -> fp32 log-probabilities of what follows, (1, T, vocab_size)."""
    hidden, cap = model.hidden(ids), model.hp.logit_softcap
    logits = cap * torch.tanh(hidden @ model.tok_emb.weight.to(hidden.dtype).T / cap)
    return torch.log_softmax(logits.float(), dim=-1)


def divergence(model: torch.nn.Module, state: Mapping[str, Tensor], references: list[tuple[Tensor, Tensor]]) -> float:
    """Mean Kullback-Leibler divergence, nats a token, of the model with `state` from (ids, log-probabilities)."""
    model.load_state_dict(state)
    total = sum(float((expected.exp() * (expected - log_probabilities(model, ids))).sum())
                for ids, expected in references)
    return total / sum(ids.numel() for ids, _ in references)


def hessians(script: ModuleType, model: torch.nn.Module, sequences: Iterator[Tensor], count: int) -> dict[str, Tensor]:
    collector = script.HessianCollector(model)
    with torch.no_grad():
        for _ in range(count):
            collector.add("head", model.hidden(next(sequences)))
    return collector.finish(count, script.World())


def suggested_steps(rows: list[dict[str, float]]) -> list[float]:
    """Steps with which divergence / weights would be alike; the mean of log step over all weights stays."""
    costs = [math.log(row["divergence"] / row["weights"]) for row in rows]
    mean = sum(cost * row["weights"] for cost, row in zip(costs, rows)) / sum(row["weights"] for row in rows)
    return [row["step"] * math.exp((mean - cost) / 2) for cost, row in zip(costs, rows)]


def measure(script: ModuleType, checkpoint: Path, calibration: int, count: int) -> list[dict[str, float]]:
    """A row for each kind in CODE_STEPS that the model has, and one for all at once."""
    hp = script.Hyperparameters.from_env(os.environ)
    device = script.choose_device(hp.device, 0)
    ops, _ = script.choose_operations(hp, script.sdpa_attention, device, torch.float32)
    model = script.build_model(hp, ops, device, torch.float32)
    whole = {name: t.to(device, torch.float32) for name, t in torch.load(checkpoint, map_location="cpu").items()}
    model.load_state_dict(whole)
    loader = script.CoprimeLoader(script.find_shards(hp, "train"), hp.train_seq_len, 8, vocab_size=hp.vocab_size)
    sequences = (torch.from_numpy(row[None]).to(device) for _ in iter(int, 1) for row in loader.next_batch()[0])
    quantizer = script.Quantizer(whole, hessians(script, model, sequences, calibration), hp)
    references = [(ids, log_probabilities(model, ids)) for ids, _ in zip(sequences, range(count))]
    tensors = quantizer(hp.quant_step_factor)
    coded, rows = script.dequantize(tensors, whole), []
    for kind, step in script.CODE_STEPS.items():
        names = [n for n in quantizer.matrices if next(part for part in script.CODE_STEPS if part in n) == kind]
        if names:
            cost = divergence(model, whole | {n: coded[n] for n in names}, references)
            weights = sum(whole[n].numel() for n in names)
            rows.append({"kind": kind or "other", "weights": weights, "step": step, "divergence": cost})
    for row, step in zip(rows, suggested_steps(rows)):
        row["suggested_step"] = step
    everything = divergence(model, coded, references)
    return [*rows, {"kind": "all", "weights": quantizer.weights, "divergence": everything,
                    "bytes": len(script.pack_artifact(tensors))}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("script", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--calibration-sequences", type=int, default=64)
    parser.add_argument("--sequences", type=int, default=8, help="on which divergence is measured")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if min(args.calibration_sequences, args.sequences) < 1:
        parser.error("--calibration-sequences and --sequences must be at least 1")
    for path in (args.script, args.checkpoint):
        if not path.is_file():
            parser.error(f"{path}: no such file")
    if args.out and args.out.exists():
        parser.error(f"--out {args.out} exists; choose another name")
    script = load_script(args.script)
    if not hasattr(script, "CODE_STEPS"):
        parser.error(f"{args.script} has no CODE_STEPS; give a script of records/track_non_record_16mb that has")
    try:
        rows = measure(script, args.checkpoint, args.calibration_sequences, args.sequences)
    except script.RunError as error:
        parser.error(str(error))
    except (RuntimeError, pickle.UnpicklingError, AttributeError):
        parser.error(f"{args.checkpoint} does not hold this model's weights; give final_model.pt of a run of this "
                     "script and set the variables that it was trained with")
    for row in rows:
        print("  ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                        for key, value in row.items()))
    if args.out:
        machine = f"{platform.machine()}, PyTorch {torch.__version__}"
        args.out.write_text(json.dumps({"machine": machine, "command": sys.argv[1:], "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
