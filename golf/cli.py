"""The command line: each module of MODULES adds its commands with `add_parser(subparsers)`."""
from __future__ import annotations

import argparse
import importlib
import os
import sys

MODULES = ("new", "check", "compare", "board", "pack", "fit", "plots", "machine")


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="golf", description="From a run to a valid, honest, smaller submission.",
                                     epilog="Exit status: 0 fine, 1 violations, 2 usage or bad input.")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in MODULES:
        importlib.import_module(f"golf.{name}").add_parser(subparsers)
    return parser


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; errors of the user become one line on stderr and status 2."""
    args = build_parser().parse_args(arguments)
    try:
        return args.run(args)
    except BrokenPipeError:  # the reader, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
