"""Simulated nights of the research loop's keep rule: false keeps, true gains found, runs spent.

    python bench/research_nights.py --nights 20 --json OUT.json
"""
from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from research import decide as rule  # noqa: E402

NOISE = 0.002  # bpb, standard deviation of one run


def night(gains: list[float], rng: random.Random, noise: float = NOISE) -> tuple[list[float], int]:
    """The true gains of the candidates kept, in order, and the number of runs."""
    level, kept, runs, ancestors = 1.0, [], 2, []
    incumbent = [rng.gauss(level, noise) for _ in range(2)]
    for gain in gains:
        candidate = [rng.gauss(level - gain, noise)]
        while (verdict := rule.decide(incumbent, candidate, ancestors)).action.startswith("run"):
            if verdict.action == "run candidate":
                candidate.append(rng.gauss(level - gain, noise))
            else:
                incumbent.append(rng.gauss(level, noise))
                runs += 1
        runs += len(candidate)
        assert len(candidate) <= rule.MOST_RUNS, "a candidate ran too often"
        if verdict.action == "keep":
            kept.append(gain)
            level -= gain
            ancestors.append(incumbent)
            incumbent = candidate
    return kept, runs


def campaign(nights: int, seed: int, no_ops: int, true_gains: int, gain: float = 0.004) -> dict[str, float]:
    """Means over nights of candidates in random order."""
    rng, results = random.Random(seed), []
    for _ in range(nights):
        gains = [0.0] * no_ops + [gain] * true_gains
        rng.shuffle(gains)
        results.append(night(gains, rng))
    return {"nights": nights, "no_ops": no_ops, "true_gains": true_gains, "gain_bpb": gain, "noise_bpb": NOISE,
            "false_keeps": statistics.mean(sum(g == 0 for g in kept) for kept, _ in results),
            "worst_false_keeps": max(sum(g == 0 for g in kept) for kept, _ in results),
            "true_keeps": statistics.mean(sum(g > 0 for g in kept) for kept, _ in results),
            "runs": statistics.mean(runs for _, runs in results)}


def simpler(candidates: int, seed: int, loss: float) -> dict[str, float]:
    """The share kept of simpler candidates that are worse by `loss`, each against the same level and two ancestors."""
    rng, kept = random.Random(seed), 0
    for _ in range(candidates):
        ancestors = [[rng.gauss(1.0, NOISE) for _ in range(rule.MOST_RUNS)] for _ in range(2)]
        incumbent, candidate = [rng.gauss(1.0, NOISE) for _ in range(2)], [rng.gauss(1.0 + loss, NOISE)]
        while (verdict := rule.decide(incumbent, candidate, ancestors, saved=1)).action.startswith("run"):
            worse, group = (loss, candidate) if verdict.action == "run candidate" else (0.0, incumbent)
            group.append(rng.gauss(1.0 + worse, NOISE))
        kept += verdict.action == "keep"
    return {"candidates": candidates, "loss_bpb": loss, "noise_bpb": NOISE, "kept": kept / candidates}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nights", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="file for the result")
    args = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True,
                            check=False).stdout.strip()
    result = {"command": " ".join(["python", "bench/research_nights.py", *sys.argv[1:]]), "commit": commit,
              "machine": f"{platform.system()} {platform.machine()}", "python": platform.python_version(),
              "rule": {"k": rule.K, "most_runs": rule.MOST_RUNS, "most_incumbent_runs": rule.MOST_INCUMBENT_RUNS},
              "only no-ops": campaign(args.nights, args.seed, 50, 0),
              "gains among no-ops": campaign(args.nights, args.seed, 90, 10),
              "half as large": campaign(args.nights, args.seed, 90, 10, 0.002),
              "twice as large": campaign(args.nights, args.seed, 90, 10, 0.008),
              "simpler": [simpler(100 * args.nights, args.seed, loss) for loss in (0.0, 0.001, 0.002, 0.004)]}
    text = json.dumps(result, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
