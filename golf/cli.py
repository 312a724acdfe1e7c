"""The command line, and what its commands share: tables, JSON, and files that are never half written."""
from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MODULES = ("new", "check", "compare", "board", "pack", "fit", "plots", "machine")  # each has an add_parser(subparsers)

def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m golf",
                                     description="From a run to a valid, honest, smaller submission.",
                                     epilog="Exit status: 0 fine, 1 violations, 2 usage or bad input.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in MODULES:
        importlib.import_module(f"golf.{name}").add_parser(subparsers)
    return parser

def main(arguments: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> int:
    """Runs one command, of another parser if given; errors of the user become one line on stderr and status 2."""
    args = (parser or build_parser()).parse_args(arguments)
    try:
        return args.run(args)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return 130

def add_command(subparsers: Any, name: str, run: Callable[[argparse.Namespace], int],
                meaning: str) -> argparse.ArgumentParser:
    """A subcommand with --json; `run` gets the arguments and returns the exit status (0 fine, 1 violations)."""
    parser = subparsers.add_parser(name, help=meaning, description=meaning)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=run)
    return parser

def number(kind: type, least: float, most: float = math.inf) -> Callable[[str], Any]:
    """A type for options: int or float from `least` to `most`, both allowed."""
    def read(text: str) -> Any:
        value = kind(text)
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"{text} must be from {least:g} to {most:g}")
        return value
    read.__name__ = "whole number" if kind is int else "number"  # what argparse calls text that is none
    return read

def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, default=str))

def shown(value: Any, form: str = "") -> str:
    """A value in its format, `-` for None; what no encoding holds, such as half a surrogate pair, as an escape."""
    text = "-" if value is None else format(value, form)
    return text.encode("utf-8", "backslashreplace").decode("utf-8")

def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """A rich table on a terminal; aligned plain text in a pipe or file."""
    cells = [[shown(cell) for cell in row] for row in rows]
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

def markdown(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table."""
    lines = [head, ["-"] * len(head), *([str(cell).replace("|", "\\|") for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]

def check_output(path: Path, force: bool) -> None:
    """Raises ValueError before any work is done when `path` is there and may not be replaced."""
    if path.exists() and not force:
        raise ValueError(f"{path} exists and is kept; choose another -o, or replace it with --force")
    if not path.parent.is_dir():
        raise ValueError(f"{path.parent} is no folder; make it, or choose another -o")

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
