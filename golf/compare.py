"""`golf compare`: two sets of runs, seed by seed, with Welch's one-sided test in nats.

Nats are per token. Runs with other tokens than B's are compared in bits per byte, given in nats of B's tokens.
"""
from __future__ import annotations

import argparse
import math
import warnings
from pathlib import Path
from typing import Any

from golf.cli import add_command, number, print_json, print_table
from golf.logs import OFFICIAL, Log, final, unfinished
from golf.records import RECORD_ALPHA, RECORD_MARGIN_NATS, mean_std, read_logs

STAGES = {"pre-quant": "pre_quant", "quantised": "int6", "final": None}

def read_runs(text: str) -> list[Log]:
    """Finished runs behind one argument, by seed. Raises ValueError when there are none, or one is there twice."""
    logs = read_logs(map(Path, filter(None, text.split(","))))
    if not logs:
        raise ValueError(f"{text!r} names no log; give a folder, a log, or several with commas between")
    for log in logs:
        if problem := unfinished(log):
            raise ValueError(f"{log.path}: {problem}; let the run finish")
    same = [(log.settings.get("run_id") or log.path.resolve(), log.seed, round(final(log)[0], 6)) for log in logs]
    if twice := [name for name in same if same.count(name) > 1]:  # also as a copy, which may lack its .jsonl
        raise ValueError(f"{text}: run {twice[0][0]} is there twice, but counts once; give each log once")
    return logs

def budget(log: Log) -> str | None:
    """The limit that ended the run: a number of steps, or seconds."""
    if log.iterations is not None and log.steps_done == log.iterations:
        return f"{log.iterations} steps"
    seconds = log.settings.get("max_wallclock_seconds")
    return None if seconds is None else f"{float(seconds):g} s"

def dataset(log: Log) -> str | None:
    return Path(log.settings["datasets_dir"]).name if "datasets_dir" in log.settings else None

def score(log: Log) -> str:
    """Which evaluation its official score is."""
    return next(name for name in OFFICIAL if name in log.evaluations)

CONDITIONS = {"machine": lambda log: log.hardware, "ranks": lambda log: log.world_size, "budget": budget,
              "data": dataset, "validation tokens": lambda log: log.val_tokens, "score": score,
              "train shards": lambda log: log.train_shards}

def differences(a: list[Log], b: list[Log]) -> list[str]:
    """What makes the two sets' numbers incomparable; what one side does not say is no difference."""
    found = []
    for name, fact in CONDITIONS.items():
        left, right = ({fact(log) for log in logs} - {None} for logs in (a, b))
        if left and right and (left != right or len(left) > 1):
            found.append(f"{name}: {', '.join(map(str, sorted(left)))} against {', '.join(map(str, sorted(right)))}")
    return found

def stage_means(logs: list[Log], stage: str | None) -> list[float]:
    """Mean val_loss in nats and val_bpb of the runs with this stage (None: the official score), or nothing."""
    scores = [final(log) if stage is None else log.evaluations.get(stage) for log in logs]
    return [mean_std(column)[0] for column in zip(*(score[:2] for score in scores if score is not None))]

def same_tokens(a: list[Log], b: list[Log]) -> bool:
    """Whether nats per token can be compared: the datasets' names state the tokenizer. Silent logs count as alike."""
    return len({dataset(log) for log in (*a, *b)} - {None}) <= 1

def scores(logs: list[Log], b: list[Log], alike: bool) -> list[float]:
    """val_loss of each run; of other tokens than B's the val_bpb, in nats of B's tokens."""
    if alike:
        return [final(log)[0] for log in logs]
    loss, bpb = stage_means(b, None)
    return [final(log)[1] * (loss / bpb if bpb else 0.0) for log in logs]

def compare(a: list[Log], b: list[Log], margin: float, alpha: float) -> dict[str, Any]:
    stages, alike = {}, same_tokens(a, b)
    for name, stage in STAGES.items():
        if (left := stage_means(a, stage)) and (right := stage_means(b, stage)):
            stages[name] = {"a_nats": left[0], "b_nats": right[0],
                            "difference_nats": left[0] - right[0] if alike else None,
                            "a_bpb": left[1], "b_bpb": right[1], "difference_bpb": left[1] - right[1]}
    p, p_any_gain = (welch(scores(a, b, alike), scores(b, b, alike), m) for m in (margin, 0.0))
    return {"a": runs(a), "b": runs(b), "stages": stages, "margin_nats": margin, "alpha": alpha, "same_tokens": alike,
            "p": p, "p_any_gain": p_any_gain, "beats": p is not None and p < alpha}

def runs(logs: list[Log]) -> list[dict[str, Any]]:
    deviation = mean_std([final(log)[0] for log in logs])[1]
    return [{"log": str(log.path), "seed": log.seed, "steps": log.steps_done, "train_seconds": log.train_seconds,
             "val_loss": final(log)[0], "val_bpb": final(log)[1], "std_nats": deviation} for log in logs]

def welch(a: list[float], b: list[float], margin: float) -> float | None:
    """One-sided p that mean(a) is not below mean(b) - margin; None when a side has one run or nothing varies."""
    if min(len(a), len(b)) < 2:
        return None
    from scipy.stats import ttest_ind
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        p = float(ttest_ind([loss + margin for loss in a], b, equal_var=False, alternative="less").pvalue)
    return None if math.isnan(p) else p

def run(args: argparse.Namespace) -> int:
    a, b = read_runs(args.a), read_runs(args.b)
    conflicts = differences(a, b)
    if conflicts and not args.force:
        raise ValueError(f"not comparable: {'; '.join(conflicts)}; run both alike, or add --force")
    result = compare(a, b, args.margin, args.alpha) | {"differences": conflicts}
    print_json(result) if args.json else show(args, result)
    return 0

def show(args: argparse.Namespace, result: dict[str, Any]) -> None:
    rows = [(side.upper(), row["seed"], row["steps"], f"{row['val_loss']:.6f}", f"{row['val_bpb']:.6f}")
            for side in ("a", "b") for row in result[side]]
    print_table(f"A = {args.a}, B = {args.b}", ("", "seed", "steps", "nats", "bpb"), rows)
    rows = [(name, f"{stage['a_nats']:.6f}", f"{stage['b_nats']:.6f}",
             f"{stage['difference_nats']:+.6f}" if result["same_tokens"] else "-", f"{stage['difference_bpb']:+.6f}")
            for name, stage in result["stages"].items()]
    print_table("means (negative: A is better)", ("stage", "A nats", "B nats", "A - B nats", "A - B bpb"), rows)
    for conflict in result["differences"]:
        print(f"forced although different: {conflict}")
    if not result["same_tokens"]:
        print("A and B have different tokens: bits per byte are compared, the margin is in nats of B's tokens")
    if result["p"] is None:
        print("Welch's test needs at least two differing runs on both sides")
    else:
        print(f"Welch's one-sided p: {result['p']:.3g}; for a gain of any size {result['p_any_gain']:.3g}")
    print(f"beats by {result['margin_nats']:g} nats at p < {result['alpha']:g}: {'yes' if result['beats'] else 'no'}")

def add_parser(subparsers: Any) -> None:
    parser = add_command(subparsers, "compare", run, "does A beat B? per-seed values, means, split and Welch's test")
    for name in ("A", "B"):
        parser.add_argument(name.lower(), metavar=name, help="folder, log, or several of them with commas between")
    parser.add_argument("--margin", type=number(float, -10, 10), default=RECORD_MARGIN_NATS,
                        help="nats by which A must beat B")
    parser.add_argument("--alpha", type=number(float, 0, 1), default=RECORD_ALPHA, help="largest p that counts")
    parser.add_argument("--force", action="store_true", help="compare runs of different machines, budgets or data")
