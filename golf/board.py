"""`golf board`: the leaderboards in records/README.md, rebuilt from every submission.json."""
from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from golf.cli import add_command, markdown, print_json, print_table, shown, write_file
from golf.records import ABSURD, RECORD_MARGIN_NATS, RECORDS, TRACKS, read_record, track_name

BEGIN, END = "<!-- board: made by `python -m golf board`, do not edit -->", "<!-- board: end -->"

def entries(folder: Path, published: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A track's own entries, best first, with rank and status. Raises ValueError for an unreadable one."""
    found = [entry(path.parent) for path in sorted(folder.glob("*/submission.json"))]
    found.sort(key=lambda row: (round(row["val_bpb"], 4), row["date"], row["folder"]))
    for place, row in enumerate(found):
        tie = place > 0 and round(found[place - 1]["val_bpb"], 4) == round(row["val_bpb"], 4)
        row["rank"] = found[place - 1]["rank"] if tie else f"{place + 1}"
        record = folder.name != "track_non_record_16mb" and is_record(row, found, published)
        row["status"] = ("record" if record else "non-record") + (", tie" if tie else "")
    return found

def entry(folder: Path) -> dict[str, Any]:
    record = read_record(folder)
    values = record.submission
    scores = {name: values.get(name) for name in ("val_bpb", "val_loss", "val_bpb_std")}
    for name, score in scores.items():
        is_number = isinstance(score, (int, float)) and abs(score) < ABSURD
        if not is_number and (score is not None or name == "val_bpb"):
            raise ValueError(f"{folder}/submission.json: no {name} as a number; run `python -m golf check {folder}`")
    return {"folder": f"{folder.parent.name}/{folder.name}", **scores,
            "name": str(values.get("name", folder.name)), "author": str(values.get("author", "?")),
            "date": str(values.get("date", ""))[:10], "seeds": len(record.seeds), "bytes": values.get("bytes_total")}

def is_record(row: dict[str, Any], own: list[dict[str, Any]], published: list[dict[str, Any]]) -> bool:
    """Whether it beat all that are older by the margin, which is in nats; p is not judged."""
    margin = RECORD_MARGIN_NATS * row["val_bpb"] / row["val_loss"] if row["val_loss"] else 0.0
    older = [rival for rival in published if (rival["date"] or "") <= row["date"]]
    older += [rival for rival in own if (rival["date"], rival["val_bpb"]) < (row["date"], row["val_bpb"])]
    return all(row["val_bpb"] <= rival["val_bpb"] - margin for rival in older)

def board(rows: dict[str, list[dict[str, Any]]], published: dict[str, list[dict[str, Any]]], source: str) -> str:
    """The Markdown of all tables, in ASCII."""
    lines = []
    for track, found in rows.items():
        table = [[row["rank"], f"{row['val_bpb']:.4f}", shown(row["val_bpb_std"], ".4f"),
                  f"[{row['name']}]({row['folder']}/README.md)", row["author"], row["date"], row["seeds"] or "-",
                  row["bytes"] or "-", row["status"]] for row in found]
        head = ("rank", "bpb", "std", "name", "author", "date", "seeds", "bytes", "status")
        lines += [f"### {track}", "", *(markdown(head, table) if table else ["No entries yet."]), ""]
    lines += ["### Published results of others", "", f"Source: {source}. Quoted, not checked.", ""]
    for track, theirs in published.items():
        theirs = sorted(theirs, key=lambda row: (row["val_bpb"], row["name"]))
        table = [[f"{row['val_bpb']:.4f}", row["name"], row["date"] or "-",
                  f"#{row['pull_request']}" if row["pull_request"] else "-"] for row in theirs]
        lines += [f"#### {track}", "", *markdown(("bpb", "name", "date", "pull request"), table), ""] if table else []
    return "\n".join(lines).encode("ascii", "xmlcharrefreplace").decode("ascii")

def run(args: argparse.Namespace) -> int:
    """0 when the tables are, or were made, up to date; 1 with --check when they are not."""
    path = args.records / "README.md"
    others = json.loads((args.records / "published.json").read_text(encoding="utf-8"))
    published = {track: [row for row in others["rows"] if track_name(row["track"]) == track] for track in TRACKS}
    rows = {track: entries(args.records / f"track_{track}", published[track]) for track in TRACKS}
    old = path.read_text(encoding="utf-8")
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{path}: the tables belong between the lines '{BEGIN}' and '{END}'; put them back")
    new = f"{before}{BEGIN}\n{board(rows, published, others['source'])}{END}{after}"
    if new != old and not args.check:
        write_file(path, new)
    if args.json:
        print_json({"tracks": rows, "out_of_date": new != old, "written": new != old and not args.check})
    else:
        for track, found in rows.items():
            print_table(track, ("rank", "bpb", "name", "status"),
                        [(row["rank"], f"{row['val_bpb']:.4f}", row["name"], row["status"]) for row in found])
        stale = "is out of date; run `python -m golf board`" if args.check else "was rebuilt"
        print(f"{path} {stale if new != old else 'is up to date'}")
    return int(new != old and args.check)

def add_parser(subparsers: Any) -> None:
    parser = add_command(subparsers, "board", run, "rebuild the leaderboards in records/README.md")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when the tables are out of date")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the tracks, README.md, published.json")
