"""`golf check`: what keeps a record folder from being valid and honest."""
from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from golf.console import add_command, print_json, print_table
from golf.records import Record, read_record
from golf.rules import RULES

SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True)
class Finding:
    severity: str  # error, warning or note
    rule: str  # its short name
    text: str  # what the rule wants
    value: str  # what was found
    remedy: str


def add_parser(subparsers: Any) -> None:
    parser = add_command(subparsers, "check", run, "check record folders against the rules and their own logs")
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--no-import", action="store_true", help="never import train_gpt.py; importing runs its code")
    parser.add_argument("--strict", action="store_true", help="warnings count as violations")


def check_folder(folder: Path, may_import: bool = True) -> list[Finding]:
    """All findings, errors first. Raises ValueError when `folder` is no folder."""
    record = read_record(folder)
    record.may_import = may_import
    findings = [Finding(severity(rule.severity, record), rule.name, rule.text, value, remedy)
                for rule in RULES for value, remedy in rule.find(record)]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))


def severity(level: str, record: Record) -> str:
    if level != "record":
        return level
    return "error" if record.track == "10min_16mb" else "note"


def run(args: argparse.Namespace) -> int:
    results = {str(folder): check_folder(folder, not args.no_import) for folder in args.folders}
    if args.json:
        print_json({folder: [asdict(finding) for finding in findings] for folder, findings in results.items()})
    else:
        for folder, findings in results.items():
            show(folder, findings)
    bad = {"error", "warning"} if args.strict else {"error"}
    return int(any(finding.severity in bad for findings in results.values() for finding in findings))


def show(folder: str, findings: list[Finding]) -> None:
    for level in SEVERITIES:
        rows = [(f"{finding.rule}: {finding.text}", finding.value, finding.remedy)
                for finding in findings if finding.severity == level]
        if rows:
            print_table(f"{folder}: {len(rows)} {level}{'s' * (len(rows) > 1)}", ("rule", "found", "remedy"), rows)
    errors = sum(finding.severity == "error" for finding in findings)
    verdict = f"{errors} violation{'s' * (errors > 1)}" if errors else "fine"
    print(f"{folder}: {verdict} ({len(RULES)} rules)")
