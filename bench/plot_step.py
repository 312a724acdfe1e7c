"""Where a micro-batch's GPU time goes, as stacked bars from results of bench/train_step.py --profile.

    python bench/plot_step.py LABEL=bench/results/NAME.json [LABEL=...] -o bench/results/NAME.png
"""
from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.figure import Figure

COLOURS = {"attention": "#4c72b0", "matrix products": "#55a868", "everything else": "#c44e52"}


def draw(results: dict[str, dict[str, float]]) -> Figure:
    figure = Figure(figsize=(8, 1.2 + 0.6 * len(results)), layout="constrained")
    axes = figure.subplots()
    for row, kinds in enumerate(results.values()):
        left = 0.0
        for kind, colour in COLOURS.items():
            axes.barh(row, kinds[kind], left=left, color=colour, label=None if row else kind)
            axes.text(left + kinds[kind] / 2, row, f"{kinds[kind]:.1f}", ha="center", va="center", color="white")
            left += kinds[kind]
        axes.text(left + 0.5, row, f"{left:.1f} ms", va="center")
    axes.set_yticks(range(len(results)), list(results))
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("GPU milliseconds of one micro-batch, forward and backward")
    figure.legend(loc="outside upper center", ncols=len(COLOURS), frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", metavar="LABEL=FILE")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    pairs = [text.rpartition("=") for text in args.results]
    wrong = [path for label, _, path in pairs if not label or not Path(path).is_file()]
    if wrong:
        parser.exit(2, f"error: {wrong[0]!r} is no LABEL=FILE with a file that exists\n")
    draw({label: json.loads(Path(path).read_text(encoding="utf-8"))["kernels_by_kind_ms"]
          for label, _, path in pairs}).savefig(args.out, dpi=120)


if __name__ == "__main__":
    main()
