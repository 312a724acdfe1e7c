"""`golf compare`: two sets of runs, seed by seed, with Welch's one-sided test in nats."""
from __future__ import annotations

import argparse
import math
import warnings
from pathlib import Path
from typing import Any

from golf.console import add_command, print_json, print_table
from golf.logs import Log, final, read_log
from golf.records import RECORD_ALPHA, RECORD_MARGIN_NATS, log_files, mean_std

STAGES = {"pre-quant": "pre_quant", "quantised": "int6", "final": None}


def add_parser(subparsers: Any) -> None:
    parser = add_command(subparsers, "compare", run, "does A beat B? per-seed values, means, split and Welch's test")
    for name in ("A", "B"):
        parser.add_argument(name.lower(), metavar=name, help="folder, log, or several of them with commas between")
    parser.add_argument("--margin", type=float, default=RECORD_MARGIN_NATS, help="nats by which A must beat B")
    parser.add_argument("--alpha", type=float, default=RECORD_ALPHA, help="largest p that counts")
    parser.add_argument("--force", action="store_true", help="compare runs of different machines, budgets or data")


def run(args: argparse.Namespace) -> int:
    a, b = read_runs(args.a), read_runs(args.b)
    conflicts = differences(a, b)
    if conflicts and not args.force:
        raise ValueError(f"not comparable: {'; '.join(conflicts)}; run both alike, or add --force")
    result = compare(a, b, args.margin, args.alpha) | {"differences": conflicts}
    if args.json:
        print_json(result)
    else:
        show(args, result)
    return 0


def read_runs(text: str) -> list[Log]:
    """Finished runs behind one argument, by seed. Raises ValueError when there are none."""
    logs = []
    for part in filter(None, text.split(",")):
        paths = log_files(Path(part)) if Path(part).is_dir() else [Path(part)]
        logs += [read_log(path) for path in paths]
    if not logs:
        raise ValueError(f"{text}: no *.log or *.txt log there; give a folder with logs, or logs")
    for log in logs:
        final(log)
    return sorted(logs, key=lambda log: log.seed or 0)


def differences(a: list[Log], b: list[Log]) -> list[str]:
    """What makes the two sets' numbers incomparable; what one side does not say is no difference."""
    found = []
    for name, fact in CONDITIONS.items():
        left, right = ({fact(log) for log in logs} - {None} for logs in (a, b))
        if left and right and (left != right or len(left) > 1):
            found.append(f"{name}: {', '.join(map(str, sorted(left)))} against {', '.join(map(str, sorted(right)))}")
    return found


def budget(log: Log) -> str | None:
    """The limit that ended the run: a number of steps, or seconds."""
    if log.iterations is not None and log.steps_done == log.iterations:
        return f"{log.iterations} steps"
    seconds = log.settings.get("max_wallclock_seconds")
    return None if seconds is None else f"{float(seconds):g} s"


def data(log: Log) -> str | None:
    """Tokenizer and validation tokens; the shards' number only when both runs say it."""
    folder = Path(log.settings["datasets_dir"]).name if "datasets_dir" in log.settings else None
    return None if log.val_tokens is None else f"{folder} with {log.val_tokens} validation tokens"


CONDITIONS = {"machine": lambda log: log.hardware, "ranks": lambda log: log.world_size, "budget": budget, "data": data,
              "train shards": lambda log: log.train_shards}


def stage_scores(logs: list[Log], stage: str | None) -> list[tuple[float, float]]:
    """(val_loss in nats, val_bpb) of each run that has this stage; None means the official score."""
    scores = [final(log) if stage is None else log.evaluations.get(stage) for log in logs]
    return [score[:2] for score in scores if score is not None]


def compare(a: list[Log], b: list[Log], margin: float, alpha: float) -> dict[str, Any]:
    losses_a, losses_b = ([final(log)[0] for log in logs] for logs in (a, b))
    p = welch(losses_a, losses_b, margin)
    stages = {}
    for name, stage in STAGES.items():
        left, right = stage_scores(a, stage), stage_scores(b, stage)
        if left and right:
            means = [mean_std([score[place] for score in scores])[0] for scores in (left, right) for place in (0, 1)]
            stages[name] = {"a_nats": means[0], "b_nats": means[2], "difference_nats": means[0] - means[2],
                            "a_bpb": means[1], "b_bpb": means[3], "difference_bpb": means[1] - means[3]}
    return {"a": runs(a), "b": runs(b), "stages": stages, "margin_nats": margin, "alpha": alpha,
            "p": p, "p_any_gain": welch(losses_a, losses_b, 0.0), "beats": p is not None and p < alpha}


def runs(logs: list[Log]) -> list[dict[str, Any]]:
    return [{"log": str(log.path), "seed": log.seed, "steps": log.steps_done, "train_seconds": log.train_seconds,
             "val_loss": final(log)[0], "val_bpb": final(log)[1],
             "std_nats": mean_std([final(other)[0] for other in logs])[1]} for log in logs]


def welch(a: list[float], b: list[float], margin: float) -> float | None:
    """One-sided p that mean(a) is not below mean(b) - margin; None when a side has one run or nothing varies."""
    if min(len(a), len(b)) < 2:
        return None
    from scipy.stats import ttest_ind
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        p = float(ttest_ind([loss + margin for loss in a], b, equal_var=False, alternative="less").pvalue)
    return None if math.isnan(p) else p


def show(args: argparse.Namespace, result: dict[str, Any]) -> None:
    rows = [(side.upper(), row["seed"], row["steps"], f"{row['val_loss']:.6f}", f"{row['val_bpb']:.6f}")
            for side in ("a", "b") for row in result[side]]
    print_table(f"A = {args.a}, B = {args.b}", ("", "seed", "steps", "nats", "bpb"), rows)
    rows = [(name, f"{stage['a_nats']:.6f}", f"{stage['b_nats']:.6f}", f"{stage['difference_nats']:+.6f}",
             f"{stage['difference_bpb']:+.6f}") for name, stage in result["stages"].items()]
    print_table("means (negative: A is better)", ("stage", "A nats", "B nats", "A - B nats", "A - B bpb"), rows)
    for conflict in result["differences"]:
        print(f"forced although different: {conflict}")
    if result["p"] is None:
        print("Welch's test needs at least two differing runs on both sides")
    else:
        print(f"Welch's one-sided p: {result['p']:.3g}; for a gain of any size {result['p_any_gain']:.3g}")
    print(f"beats by {result['margin_nats']:g} nats at p < {result['alpha']:g}: {'yes' if result['beats'] else 'no'}")
