"""What every command shares: its parser, tables on a terminal and plain elsewhere, JSON, and safe writes."""
from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any


def add_command(subparsers: Any, name: str, run: Callable[[argparse.Namespace], int], meaning: str,
                **options: Any) -> argparse.ArgumentParser:
    """A subcommand with --json; `run` gets the arguments and returns the exit status (0 fine, 1 violations)."""
    parser = subparsers.add_parser(name, help=meaning, description=meaning, **options)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)
    return parser


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, default=str))


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A rich table on a terminal; aligned plain text in a pipe or file."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markup import escape
        from rich.table import Table
        table = Table(*columns, title=escape(title), title_justify="left")
        for row in cells:
            table.add_row(*map(escape, row))
        Console().print(table)
        return
    widths = [max(map(len, column)) for column in zip(columns, *cells)]
    print(title)
    for row in (list(columns), *cells):
        print("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def write_file(path: Path, data: bytes | str) -> None:
    """Writes under a temporary name, syncs and renames: a crash never leaves half a file under `path`."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as f:
            f.write(data.encode("utf-8") if isinstance(data, str) else data)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
