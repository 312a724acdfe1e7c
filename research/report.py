"""What a session found: history, report with a plot, and the way from a kept script to a record folder."""
from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from golf import cli as golf_cli
from golf.cli import add_command, print_json, print_table
from research.decide import spread
from research.loop import Loop, Slot
from research.repo import find_root
from research.store import RESULTS, STATUSES, Row, load_state, locked, read_rows

PLATEAU = 20  # experiments without a keep
LABEL_CHARS = 45
SUBMISSION_SEEDS = 3


def add_parsers(commands: Any) -> None:
    history = add_command(commands, "history", history_command, "all experiments with the reasons of their verdicts")
    history.add_argument("--status", choices=STATUSES, help="only these")
    history.add_argument("--last", type=int, default=0, metavar="N", help="only the last N")
    history.add_argument("--search", default="", metavar="WORDS", help="only descriptions and reasons with this text")
    add_command(commands, "report", report_command, "what was gained, the keep rate, and progress.png")
    promote = add_command(commands, "promote", promote_command, "make a checked record folder of the kept script")
    promote.add_argument("track", help="as in `golf new`")
    promote.add_argument("name", help="short name of the record")
    for name in ("author", "github-id", "blurb"):
        promote.add_argument(f"--{name}", required=True, help="as in `golf new`")
    promote.add_argument("--seeds", type=int, default=SUBMISSION_SEEDS, help="logs it needs; missing runs are made "
                         "(default %(default)s)")
    promote.add_argument("--gpu", help="number of the GPU to use")
    promote.add_argument("--records", type=Path, help="folder of the tracks")


def session_rows(root: Path) -> list[Row]:
    load_state(root)
    return read_rows(root / RESULTS)


def history_command(args: argparse.Namespace) -> int:
    rows = [row for row in session_rows(find_root()) if args.status in (None, row.status)
            and args.search.lower() in f"{row.description} {row.reason}".lower()]
    rows = rows[-args.last:] if args.last else rows
    if args.json:
        print_json([vars(row) for row in rows])
    else:
        columns = ("commit", "val_bpb", "gain", "status", "runs", "description", "reason")
        print_table(f"{len(rows)} experiments", columns,
                    [(r.commit, f"{r.val_bpb:.6f}" if r.val_bpb else None, f"{r.gain:+.6f}", r.status,
                      r.seed.count(",") + bool(r.seed), r.description, r.reason) for r in rows])
    return 0


# -- report ------------------------------------------------------------------------------------------------------------

def summarize(rows: list[Row]) -> dict[str, Any]:
    """Everything that the report says; fields are None when there is nothing to say."""
    kept = [i for i, row in enumerate(rows) if row.status == "keep"]
    first = next((row for row in rows if row.status == "keep"), None)
    best = rows[kept[-1]] if kept else None
    counts = Counter(row.status for row in rows if not row.is_baseline)
    decided = counts["keep"] + counts["discard"]
    gains = sorted((row for row in rows if row.status == "keep" and not row.is_baseline), key=lambda row: -row.gain)
    idle = len(rows) - 1 - kept[-1] if kept else len(rows)
    return {"experiments": sum(counts.values()), "counts": {name: counts[name] for name in STATUSES},
            "keep_rate": counts["keep"] / decided if decided else None,
            "baseline_bpb": first and first.val_bpb, "best_bpb": best and best.val_bpb,
            "best_commit": best and best.commit,
            "gained_bpb": sum(row.gain for row in gains) if kept else None,
            "gained_lately_bpb": sum(row.gain for row in rows[-PLATEAU:] if row.status == "keep"),
            "seconds_of_training": sum(row.seconds * (row.seed.count(",") + 1) for row in rows),
            "since_last_keep": idle, "plateau": idle >= PLATEAU,
            "hardware": sorted({row.hardware for row in rows if row.hardware}),
            "top": [{"commit": row.commit, "gain": row.gain, "description": row.description} for row in gains[:10]]}


def report_command(args: argparse.Namespace) -> int:
    return show(find_root(), args.json)


def show(root: Path, as_json: bool) -> int:
    rows = session_rows(root)
    result = {"tag": load_state(root).tag, **summarize(rows), **remeasured(root), "plot": plot(rows, root)}
    if as_json:
        print_json(result)
        return 0
    plain = {name: f"{value:.8g}" if isinstance(value, float) else value for name, value in result.items()
             if not isinstance(value, (list, dict))}
    counts = ", ".join(f"{count} {name}" for name, count in result["counts"].items() if count)
    print_table("Session", ("", ""), [*plain.items(), ("statuses", counts or "-"),
                                      ("hardware", "; ".join(result["hardware"]) or "-")])
    if result["top"]:
        print_table("What kept giving", ("commit", "gain", "description"),
                    [(top["commit"], f"{top['gain']:+.6f}", top["description"]) for top in result["top"]])
    return 0


def remeasured(root: Path) -> dict[str, Any]:
    """The noise of one run, and the kept script against the baseline by all their runs: the sum of gains alone is
    flattered by the luck for which they were kept."""
    loop = Loop(root)
    kept = loop.kept()
    if not kept:
        return {"noise_bpb": None, "gain_by_all_runs": None}
    hardware = kept[-1][1].hardware
    first = next(loop.scores(commit, hardware) for commit, row in kept if row.hardware == hardware)
    last = loop.scores(kept[-1][0], hardware)
    gain = sum(first) / len(first) - sum(last) / len(last) if first and last else None
    noise = spread([loop.scores(commit, hardware) for commit in {commit for commit, _ in kept}]).noise
    return {"noise_bpb": noise, "gain_by_all_runs": gain}


def plot(rows: list[Row], root: Path) -> str | None:
    """Writes progress.png: every score, the kept ones named, and the running best. None without scores."""
    scored = [(i, row) for i, row in enumerate(rows) if row.val_bpb > 0]
    if not scored:
        return None
    try:
        import matplotlib
    except ImportError:
        print("progress.png needs matplotlib; pip install matplotlib", file=sys.stderr)
        return None
    matplotlib.use("Agg")
    from matplotlib import pyplot
    figure, axes = pyplot.subplots(figsize=(16, 8))
    kept = [(i, row) for i, row in scored if row.status == "keep"]
    rest = [(i, row) for i, row in scored if row.status != "keep"]
    axes.plot([i for i, _ in rest], [row.val_bpb for _, row in rest], ".", color="0.7", label="discarded")
    axes.plot([i for i, _ in kept], [row.val_bpb for _, row in kept], "o", color="tab:green", label="kept")
    for i, row in kept:
        axes.annotate(row.description[:LABEL_CHARS], (i, row.val_bpb), rotation=30, fontsize=7, xytext=(4, 4),
                      textcoords="offset points")
    if kept:  # one failed idea must not flatten the rest
        values = [row.val_bpb for _, row in kept]
        axes.step([*(i for i, _ in kept), len(rows) - 1], [*values, values[-1]], where="post", color="tab:green")
        axes.set_ylim(min(values) - 0.1 * span(values), max(values) + 0.6 * span(values))
    axes.set(xlabel="experiment", ylabel="val_bpb", title=f"{len(rows)} experiments, {len(kept)} kept")
    axes.legend()
    path = root / "progress.png"
    figure.savefig(path, dpi=100, bbox_inches="tight")
    pyplot.close(figure)
    return str(path)


def span(values: list[float]) -> float:
    return max(values) - min(values) or 0.01 * abs(values[0])


# -- promote -----------------------------------------------------------------------------------------------------------

def promote_command(args: argparse.Namespace) -> int:
    """Runs the kept script until it has enough seeds, then `golf new`, which checks the folder."""
    root = find_root()
    with locked(root):
        loop = Loop(root, lambda text: print(text, file=sys.stderr, flush=True))
        loop.recover()
        slot, tip = Slot("0", args.gpu), loop.repo.tip()
        loop.baseline(slot)
        number = loop.number_of(tip)
        while len(logs := script_logs(loop, tip)) < args.seeds:
            outcome = loop.run_once(number, tip, slot)
            if outcome.status != "ok":
                raise ValueError(f"the kept script ends with {outcome.status} ({outcome.reason}); see "
                                 f"{loop.log_of(number)}")
            if len(script_logs(loop, tip)) == len(logs):
                raise ValueError(f"{loop.state.script} wrote no OUTPUT_DIR/logs/*.txt, which a record needs")
    command = ["new", args.track, args.name, "--author", args.author, "--github-id", args.github_id,
               "--blurb", args.blurb, "--logs", *map(str, logs)]
    command += (["--records", str(args.records)] if args.records else []) + ["--json"] * args.json
    return golf_cli.main(command)


def script_logs(loop: Loop, commit: str) -> list[Path]:
    """The script's own logs of the good runs of a commit."""
    folders = [loop.run_folder(r["experiment"], r["seed"]) for r in loop.records
               if r["commit"] == commit and r["status"] == "ok"]
    return [max(logs, key=lambda path: path.stat().st_mtime) for folder in folders
            if (logs := list((folder / "logs").glob("*.txt")))]
