"""`plot` and `report`: runs over each other as one picture, or as one HTML file that needs nothing else."""
from __future__ import annotations

import argparse
import base64
import html
import io
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from golf.cli import add_command, check_output, print_json, print_table, shown, write_file
from golf.logs import Log, final
from golf.records import FOLDER_NAME, SIZE_CAP_BYTES, mean_std, read_logs

Place = Callable[[Log, int], "float | None"]  # where a step stands on the horizontal axis
SCORES = {"pre_quant": "before quantisation", "int6": "quantised", "sliding": "sliding", "ttt": "test-time training"}

# -- panels: each draws one picture of all runs into `axes` ------------------------------------------------------------

def label(log: Log) -> str:
    """Seed and what else tells runs apart: the file's name, or the record folder's when that holds only the seed."""
    folder = FOLDER_NAME.fullmatch(log.path.resolve().parent.name)
    name = re.sub(r"(train_)?seed_?\d+", "", log.path.stem) or (folder[2] if folder else "")
    return f"seed {log.seed}" + f" ({name[:12]})" * bool(name) if log.seed is not None else log.path.stem

def seconds_at(log: Log, step: int) -> float | None:
    """Training seconds at a step, between those that the log has."""
    import numpy as np

    known = [(s[0], s[2]) for s in log.steps if s[2] is not None]
    if log.steps_done and log.train_seconds is not None and (not known or log.steps_done > known[-1][0]):
        known.append((log.steps_done, log.train_seconds - (log.hessian_seconds or 0.0)))
    return float(np.interp(step, *zip((0, 0.0), *known))) if known else None

def draw_line(axes: Any, points: Iterable[tuple[Any, Any]], style: str, **options: Any) -> None:
    if points := [point for point in points if None not in point]:
        axes.plot(*zip(*points), style, ms=4, lw=1, **options)

def draw_losses(axes: Any, logs: list[Log], place: Place) -> None:
    for i, log in enumerate(logs):
        draw_line(axes, [(place(log, s[0]), s[1]) for s in log.steps], f"C{i % 10}-", label=f"{label(log)}, train")
        draw_line(axes, [(place(log, v[0]), v[1]) for v in log.validations], f"C{i % 10}o--",
                  label=f"{label(log)}, validation")
    axes.set(ylabel="loss (nats per token)")

def draw_bpb(axes: Any, logs: list[Log], place: Place) -> None:
    for i, log in enumerate(logs):
        draw_line(axes, [(place(log, v[0]), v[2]) for v in log.validations], f"C{i % 10}o-", label=label(log))
        end = place(log, log.steps_done or 0)
        for marker, name in zip("^s*D", SCORES):
            if name in log.evaluations and end is not None:
                named = any(name in other.evaluations for other in logs[:i])
                axes.plot(end, log.evaluations[name][1], f"C{i % 10}{marker}", ms=8, mfc="none",
                          label=None if named else SCORES[name])
    axes.set(ylabel="validation bits per byte")

def draw_speed(axes: Any, logs: list[Log], place: Place) -> None:
    for i, log in enumerate(logs):
        draw_line(axes, [(place(log, s[0]), s[3]) for s in log.steps], f"C{i % 10}-", label=label(log))
    axes.set(ylabel="tokens per second since the start", ylim=(0, None))

def draw_rate(axes: Any, logs: list[Log], place: Place) -> None:
    for i, log in enumerate(logs):
        draw_line(axes, sorted((place(log, step), rate) for step, rate in log.lr_factors.items()), f"C{i % 10}-",
                  label=label(log))
    axes.set(ylabel="learning rate / base rate")

def draw_sizes(axes: Any, logs: list[Log], _place: Place) -> None:
    """Bars of code and model bytes against the cap."""
    sized = [log for log in logs if log.code_bytes and log.model_bytes]
    rows, code = range(len(sized)), [log.code_bytes for log in sized]
    if sized:
        axes.barh(rows, code, label="code")
        axes.barh(rows, [log.model_bytes for log in sized], left=code, label="model")
    axes.set_yticks(rows, [label(log) for log in sized])  # not as categories: two runs may share a label
    if any(log.code_bytes + log.model_bytes > SIZE_CAP_BYTES / 4 for log in sized):
        axes.axvline(SIZE_CAP_BYTES, color="k", ls="--", lw=1, label="cap")
    axes.set_ylim(-0.6, len(sized) + 0.4)  # room for the legend above the bars
    axes.xaxis.set_major_formatter(lambda value, _position: f"{value / 1e6:g}")

PLACES: dict[str, Place] = {"steps": lambda _log, step: step, "training seconds": seconds_at,
                            "MB (10^6 bytes)": lambda *_: None}
PANELS: dict[str, tuple[Callable[[Any, list[Log], Place], None], str]] = {
    "Loss against steps": (draw_losses, "steps"), "Loss against seconds": (draw_losses, "training seconds"),
    "Bits per byte against steps": (draw_bpb, "steps"), "Bits per byte against seconds": (draw_bpb, "training seconds"),
    "Speed": (draw_speed, "steps"), "Learning rate": (draw_rate, "steps"), "Size": (draw_sizes, "MB (10^6 bytes)")}

def draw_panel(axes: Any, title: str, logs: list[Log]) -> bool:
    """Whether there was anything to draw."""
    draw, xlabel = PANELS[title]
    draw(axes, logs, PLACES[xlabel])
    axes.set(xlabel=xlabel)
    drawn = bool(axes.get_legend_handles_labels()[0])
    if drawn:
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    return drawn

def picture(logs: list[Log]) -> bytes:
    """All panels in one PNG."""
    from matplotlib.figure import Figure

    rows = (len(PANELS) + 1) // 2
    figure = Figure(figsize=(13, 4 * rows), layout="constrained")
    places = figure.subplots(rows, 2).flat
    for title, axes in zip(PANELS, places):
        axes.set_title(title)
        if not draw_panel(axes, title, logs):
            axes.text(0.5, 0.5, "not in these logs", ha="center", transform=axes.transAxes)
    for axes in places[len(PANELS):]:
        axes.axis("off")
    return saved(figure, dpi=110, format="png")

def saved(figure: Any, **options: Any) -> bytes:
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "golf"}):
        figure.savefig(buffer, **options)
    return buffer.getvalue()

def vector(title: str, logs: list[Log]) -> str | None:
    """One panel as an <img> with its SVG inside; None when there is nothing to draw."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2, 3.4), layout="constrained")
    if not draw_panel(figure.subplots(), title, logs):
        return None
    data = base64.b64encode(saved(figure, format="svg", metadata={"Date": None})).decode("ascii")
    return f'<img alt="{html.escape(title)}" src="data:image/svg+xml;base64,{data}">'

# -- tables ------------------------------------------------------------------------------------------------------------

def run_rows(logs: list[Log]) -> list[dict[str, Any]]:
    """What each run came to; None where its log does not say."""
    rows = []
    for log in logs:
        speeds = [s[3] for s in log.steps if s[3] is not None]
        score = final(log) if set(log.evaluations) - {"pre_quant"} else (None, None)
        quantised = {f"{name} bpb": log.evaluations[name][1] if name in log.evaluations else None
                     for name in ("pre_quant", "int6")}
        rows.append({"run": label(log), "final bpb": score[1], "final loss": score[0], **quantised,
                     "steps": log.steps_done, "train s": log.train_seconds, "eval s": log.eval_seconds,
                     "tokens/s": speeds[-1] if speeds else None, "total bytes": log.total_bytes,
                     "model bytes": log.model_bytes, "code bytes": log.code_bytes, "hardware": log.hardware})
    return rows

def mean_line(rows: list[dict[str, Any]]) -> str:
    values = [row["final bpb"] for row in rows if row["final bpb"] is not None]
    if len(values) < 2:
        return f"final bpb {values[0]:.5f}" if values else "no run has a final score"
    mean, deviation = mean_std(values)
    return f"final bpb {mean:.5f}, standard deviation {shown(deviation, '.5f')}, {len(values)} runs"

def cell(name: str, value: Any) -> str:
    """A number in the format of its column."""
    forms = {float: ".5f" if name.endswith(("bpb", "loss")) else ",.1f", int: ","}
    return shown(value, ",.0f" if name == "tokens/s" else forms.get(type(value), ""))

def html_table(columns: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{html.escape(c)}</th>" for c in columns)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(v)}</td>" for v in row) + "</tr>\n" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table></div>'

def setting_table(logs: list[Log], differing: bool) -> str:
    """Settings by run: those that differ, or those that all runs share."""
    names = sorted({name for log in logs for name in log.settings} - {"run_id", "logfile", "rank"})
    columns = {name: [log.settings.get(name, "-") for log in logs] for name in names}
    rows = [[name, *(values if differing else values[:1])] for name, values in columns.items()
            if (len(set(values)) > 1) == differing]
    return html_table(["setting", *([label(log) for log in logs] if differing else ["value"])], rows) if rows else ""

STYLE = """
:root { color-scheme: light }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; color: #1a1a1a }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem }
img { display: block; width: 100%; max-width: 44rem; height: auto }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #ddd; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: #fff }
pre { white-space: pre-wrap; overflow-wrap: anywhere }
@media print { body { max-width: none; padding: 0; font-size: 11px } .scroll { overflow: visible }
  table { font-size: 8px } th, td { white-space: normal; padding: 1px 3px }
  section { break-inside: avoid } img { max-width: 16cm } }
"""

def page(logs: list[Log]) -> str:
    """The whole report."""
    rows = run_rows(logs)
    names = [name for name in rows[0] if any(row[name] is not None for row in rows)]
    table = [[name, *(cell(name, row[name]) for row in rows)] for name in names]
    parts = [("Runs", f"<p>{html.escape(mean_line(rows))}</p>{html_table(*table[:1], table[1:])}")]
    parts += [(title, image) for title in PANELS if (image := vector(title, logs))]
    warnings = [f"{label(log)}: {line}" for log in logs for line in log.warnings]
    if warnings:
        parts.append(("Warnings", f"<pre>{html.escape(chr(10).join(warnings))}</pre>"))
    parts += [(title, table) for title, table in (("Settings that differ", setting_table(logs, True)),
                                                  ("Settings", setting_table(logs, False))) if table]
    body = "\n".join(f"<section><h2>{title}</h2>\n{content}</section>" for title, content in parts)
    title = html.escape(", ".join(label(log) for log in logs))
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n<meta name="viewport" '
            f'content="width=device-width, initial-scale=1">\n<title>{title}</title>\n<style>{STYLE}</style></head>\n'
            f"<body><h1>{title}</h1>\n{body}\n</body></html>\n")

# -- commands ----------------------------------------------------------------------------------------------------------

def draw_command(args: argparse.Namespace) -> int:
    """Both commands: reads the logs, writes one file, prints the table of runs. Raises ValueError for a bad log."""
    check_output(args.output, args.force)
    logs = read_logs(args.logs)
    write_file(args.output, args.draw(logs))
    rows = run_rows(logs)
    if args.json:
        print_json({"out": str(args.output), "runs": rows})
    else:
        columns = ["run", "steps", "train s", "pre_quant bpb", "int6 bpb", "final bpb", "total bytes"]
        print_table(f"{args.output}: {mean_line(rows)}", columns, [[cell(c, row[c]) for c in columns] for row in rows])
    return 0

def add_parser(subparsers: Any) -> None:
    for name, draw, meaning in (("plot", picture, "loss, bits per byte, speed, rate and size of runs as one PNG"),
                                ("report", page, "the same with tables, as one HTML file that needs nothing else")):
        parser = add_command(subparsers, name, draw_command, meaning)
        parser.add_argument("logs", nargs="+", type=Path, help="logs or folders of them; a .jsonl beside one is used")
        parser.add_argument("-o", "--output", type=Path, required=True, help="the file to write")
        parser.add_argument("--force", action="store_true", help="replace an existing file")
        parser.set_defaults(draw=draw)
