"""What a session found: history, report with a plot, and the way from a kept script to a record folder."""
from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean
from typing import Any

from golf import cli as golf_cli
from golf.cli import print_json, print_table, write_file
from golf.plots import saved
from research.decide import pooled_noise
from research.loop import Loop, opened
from research.repo import find_root
from research.store import SHORT, Row

LABEL_CHARS, TOP_GAINS = 45, 10

def history_command(args: argparse.Namespace) -> int:
    rows = Loop(find_root()).rows()[-args.last:]
    if args.json:
        print_json([vars(row) for row in rows])
    else:
        print_table(f"{len(rows)} experiments",
                    ("commit", "val_bpb", "gain", "status", "seeds", "description", "reason"),
                    [(row.commit, f"{row.val_bpb:.6f}" if row.val_bpb else None, f"{row.gain:+.6f}", row.status,
                      row.seeds, row.description, row.reason) for row in rows])
    return 0

def report_command(args: argparse.Namespace) -> int:
    loop = Loop(find_root())
    result = {"tag": loop.state.tag, **summarize(loop), "plot": plot(loop.rows(), loop.root)}
    if args.json:
        print_json(result)
        return 0
    top, counts = result.pop("top"), result.pop("counts")
    result["statuses"] = ", ".join(f"{count} {name}" for name, count in counts.items()) or None
    print_table("Session", ("", ""), [(name, f"{value:.8g}" if isinstance(value, float) else value)
                                      for name, value in result.items()])
    print_table("What kept giving", ("commit", "gain", "description"),
                [(row["commit"], f"{row['gain']:+.6f}", row["description"]) for row in top])
    return 0

def summarize(loop: Loop) -> dict[str, Any]:
    """What rows and runs say; None where there is nothing to say."""
    rows = loop.rows()
    gone = {commit[:SHORT] for commit in loop.repo.tried(f"--no-merged={loop.repo.branch}").values()}
    kept = [row for row in rows if row.status == "keep" and row.commit not in gone]  # and not taken back by hand
    same = [row for row in kept if row.hardware == kept[-1].hardware]
    changes = [row for row in rows if not row.reason.startswith("baseline")]
    gains = sorted((row for row in changes if row.status == "keep"), key=lambda row: -row.gain)
    counts = Counter(row.status for row in changes)
    decided = counts["keep"] + counts["discard"]
    # By all their runs: the sum of gains alone is flattered by the luck for which they were kept.
    scores = [scores for commit in dict(loop.kept()) if (scores := loop.scores(commit, kept[-1].hardware))]
    return {"experiments": len(changes), "counts": dict(counts),
            "keep_rate": counts["keep"] / decided if decided else None,
            "baseline_bpb": same[0].val_bpb if kept else None, "best_bpb": kept[-1].val_bpb if kept else None,
            "best_commit": kept[-1].commit if kept else None, "since_last_keep": idle(rows),
            "seconds_of_training": sum(r["seconds"] for r in loop.records),
            "hardware": "; ".join(sorted({row.hardware for row in rows if row.hardware})),
            "noise_bpb": pooled_noise(scores)[0] if scores else None,
            "gain_by_all_runs": fmean(scores[0]) - fmean(scores[-1]) if scores else None,
            "top": [{"commit": row.commit, "gain": row.gain, "description": row.description}
                    for row in gains[:TOP_GAINS]]}

def idle(rows: list[Row]) -> int:  # experiments since the last keep
    return next((i for i, row in enumerate(reversed(rows)) if row.status == "keep"), len(rows))

def plot(rows: list[Row], root: Path) -> str | None:
    """Writes progress.png: every score, the kept ones named, and the running best. None without scores."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("progress.png needs matplotlib; pip install matplotlib", file=sys.stderr)
        return None
    kept = [(i, row) for i, row in enumerate(rows) if row.status == "keep"]
    if not kept:
        return None
    figure, path = Figure(figsize=(16, 8)), root / "progress.png"
    axes = figure.subplots()
    axes.plot([row.val_bpb if row.status == "discard" else None for row in rows], ".", color="0.7", label="discarded")
    best = [row.val_bpb for _, row in kept]
    axes.step([*(i for i, _ in kept), len(rows) - 1], [*best, best[-1]], "o-", where="post", color="tab:green",
              label="kept")
    for i, row in kept:
        axes.annotate(row.description[:LABEL_CHARS], (i, row.val_bpb), rotation=30, fontsize=7, xytext=(4, 4),
                      textcoords="offset points")
    span = max(best) - min(best) or 0.01
    axes.set(xlabel="experiment", ylabel="val_bpb", title=f"{len(rows)} experiments, {len(kept)} kept",
             ylim=(min(best) - 0.1 * span, max(best) + 0.6 * span))  # one failed idea must not flatten the rest
    axes.legend()
    write_file(path, saved(figure, dpi=100, bbox_inches="tight", format="png"))
    return str(path)

def promote_command(args: argparse.Namespace) -> int:
    """Runs the kept script until it has enough seeds, then `golf new`, which checks the folder."""
    with opened(find_root()) as loop:
        tip = loop.repo.tip()
        loop.baseline(args.gpu)
        while len(logs := script_logs(loop, tip)) < args.seeds:
            outcome = loop.run_once(tip, args.gpu)
            if len(script_logs(loop, tip)) == len(logs):
                raise ValueError(f"a run of {loop.state.script} ended with {outcome.status} ({outcome.reason}) and "
                                 f"wrote no OUTPUT_DIR/logs/*.txt that a record can use; see {loop.tail(tip)}")
    return golf_cli.main(["new", args.track, args.name, "--author", args.author, "--github-id", args.github_id,
                          "--blurb", args.blurb, "--logs", *map(str, logs), *["--json"] * args.json,
                          *(["--records", str(args.records)] if args.records else [])])

def script_logs(loop: Loop, commit: str) -> list[Path]:
    """The script's own logs of the good runs of a commit."""
    folders = [loop.output_folder(commit, r["seed"]) / "logs" for r in loop.records
               if r["commit"] == commit and r["status"] == "ok"]
    return [log for folder in folders for log in folder.glob("*.txt")]
