"""A record folder: its submission.json in any published variant, its logs, and what follows from them."""
from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import date
from functools import cached_property
from pathlib import Path
from typing import Any

from golf import scripts
from golf.logs import Log, final, read_log
from golf.trial import ROOT

RECORDS = ROOT / "records"
SIZE_CAP_BYTES, TRAIN_CAP_SECONDS, EVAL_CAP_SECONDS = 16_000_000, 600, 600
BUDGET_SECONDS = 300  # of training in the track 5min_1gpu
RECORD_MARGIN_NATS, RECORD_ALPHA, RECORD_SEEDS = 0.005, 0.01, 3
TRACKS = ("10min_16mb", "non_record_16mb", "5min_1gpu")
WITHOUT_ARTIFACT = {"5min_1gpu"}  # there the trained model itself is scored, at any size
FOLDER_NAME = re.compile(r"(\d{4}-\d{2}-\d{2})_([A-Za-z0-9][A-Za-z0-9.+_-]*)")
ABSURD = 1e9  # no loss or bpb is as large; means of numbers much larger overflow
HOME = re.compile(r"/(?:home|Users)/[\w.-]+|/root(?=/)|[A-Z]:\\Users\\[\w.-]+")
# Settings that may differ between the seeds of one record: who ran, and where.
IDENTITY = {"run_id", "rank", "seed", "logfile", "output_dir", "data_dir", "datasets_dir", "train_files", "val_files",
            "tokenizer_path", "model_path", "quantized_model_path", "local_rank", "is_main_process", "eval_only"}
# Where published files keep a number that `new` writes under the first name.
ALIASES = {"val_bpb": ("mean_val_bpb", "mean_bpb"), "val_loss": ("mean_val_loss", "mean_loss"),
           "val_bpb_std": ("std_bpb", "bpb_std"), "bytes_code": ("code_bytes",),
           "bytes_total": ("artifact_bytes", "total_bytes"), "seed_results": ("seed_scores",)}
RESULT_ALIASES = {"val_bpb": ("bpb", "final_bpb"), "val_loss": ("loss",), "steps": ("step",),
                  "artifact_bytes": ("bytes_total", "total_bytes"), "train_seconds": ("train_time_s",),
                  "eval_seconds": ("eval_time_s",)}

@dataclass
class Record:
    """What a folder holds. A part that cannot be read is None, empty or missing, with the reason in `broken`."""

    folder: Path
    raw: Any = None  # submission.json as it is
    submission: dict[str, Any] = field(default_factory=dict)  # under the names that `new` writes
    results: dict[int, dict[str, Any]] = field(default_factory=dict)  # seed_results
    seeds: list[int] = field(default_factory=list)  # as submission.json states them
    variants: list[str] = field(default_factory=list)  # what was read under another name or shape
    logs: list[Log] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    may_import: bool = True  # whether rules may run the script's import

    @property
    def script(self) -> Path:
        return self.folder / "train_gpt.py"

    @property
    def track(self) -> str:
        """From the parent folder, else from submission.json; `10min_16mb` when neither says it."""
        names = (self.folder.resolve().parent.name, str(self.submission.get("track", "")))
        return next(filter(None, map(track_name, names)), "10min_16mb")

    @property
    def has_artifact(self) -> bool:
        return self.track not in WITHOUT_ARTIFACT

    def text(self, name: str) -> str | None:
        path = self.folder / name
        return path.read_bytes().decode("utf-8", "replace") if path.is_file() else None

    @cached_property
    def readme(self) -> str:
        return self.text("README.md") or ""

    @cached_property
    def source(self) -> str:
        return self.text("train_gpt.py") or ""

    @cached_property
    def script_bytes(self) -> int:
        return self.script.stat().st_size if self.script.is_file() else 0

    @cached_property
    def helpers(self) -> dict[str, int]:
        """Bytes of the files beside train_gpt.py that it imports or opens, without the model itself."""
        try:
            found = scripts.reached_files(self.script) if self.script.is_file() else []
        except SyntaxError:
            return {}  # the rule about compiling says it
        models = {log.model_bytes for log in self.logs}
        sizes = {path.relative_to(self.folder).as_posix(): path.stat().st_size for path in found}
        return {name: size for name, size in sizes.items() if not name.endswith(".ptz") or size not in models}

    @property
    def code_bytes(self) -> int:
        return self.script_bytes + sum(self.helpers.values())

    @property
    def scored(self) -> list[Log]:
        return [log for log in self.logs if is_scored(log)]

    @property
    def complete(self) -> bool:
        """Whether means over all logs can be judged; other rules say what is unreadable or unfinished."""
        return bool(self.logs) and not self.broken and all(map(is_scored, self.logs))

def is_scored(log: Log) -> bool:
    try:
        return all(abs(number) < ABSURD for number in final(log)[:2])
    except ValueError:
        return False

def track_name(text: str) -> str | None:
    name = text.lower().replace("-", "_").replace(" ", "_").removeprefix("track_")
    return next((track for track in TRACKS if name in (track, track.removesuffix("_16mb"))), None)

def is_date(text: Any) -> bool:
    try:
        return date.fromisoformat(str(text)[:10]).isoformat() == str(text)[:10]
    except ValueError:
        return False

def log_files(folder: Path) -> list[Path]:
    """Every log in a folder, or in its logs/ when it holds none itself."""
    for place in (folder, folder / "logs"):
        paths = [path for path in place.glob("*.*") if path.suffix in (".log", ".txt") and path.is_file()]
        if found := sorted(path for path in paths if path.name != "requirements.txt"):
            return found
    return []

def read_logs(paths: Iterable[Path], records: bool = True) -> list[Log]:
    """Every log, those in a folder too, by seed. Raises ValueError where there is none or a file is none."""
    logs = []
    for path in paths:
        if path.is_dir() and not log_files(path):
            raise ValueError(f"{path}: no *.log or *.txt log there; give a folder with logs, or logs")
        logs += [read_log(file, records) for file in (log_files(path) if path.is_dir() else [path])]
    return sorted(logs, key=lambda log: log.seed or 0)

def read_record(folder: Path) -> Record:
    """Reads what is readable. Raises ValueError only when `folder` is no folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder; give a folder such as records/track_10min_16mb/2026-04-01_Name")
    record = Record(folder)
    try:
        if (path := folder / "submission.json").is_file():  # else the rule about files says it
            record.raw = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(record.raw, dict):
            normalise(record)
    except (ValueError, OSError, RecursionError) as error:
        record.broken.append(f"submission.json: {error}")
    for path in log_files(folder):
        try:
            record.logs.append(log := read_log(path, records=False))
            log.seed = seed_in_name(log) if log.seed is None else log.seed
        except (ValueError, OSError) as error:
            record.broken.append(str(error))
    return record

def seed_in_name(log: Log) -> int | None:
    named = re.search(r"seed[_-]?(\d+)", log.path.name)
    return int(named[1]) if named else None

def rename(values: dict[str, Any], aliases: dict[str, tuple[str, ...]], variants: list[str]) -> dict[str, Any]:
    renamed = dict(values)
    for name, others in aliases.items():
        for other in others:
            if name not in renamed and other in values:
                renamed[name] = renamed.pop(other)
                variants.append(f"{other} read as {name}")
    return renamed

def normalise(record: Record) -> None:
    submission = rename(record.raw, ALIASES, record.variants)
    seeds, results = submission.get("seeds"), submission.get("seed_results")
    if isinstance(seeds, dict):
        record.variants.append("seeds holds the results of each seed")
        results = results or seeds
    if isinstance(results, list):
        record.variants.append("seed_results is a list")
        results = {str(row.get("seed")): row for row in results if isinstance(row, dict)}
    for key, row in (results or {}).items() if isinstance(results, dict) else ():
        if isinstance(row, (int, float)):
            row = {"val_bpb": row}
        if isinstance(row, dict) and (digits := re.search(r"\d+", str(key))):
            record.results[int(digits[0])] = rename(row, RESULT_ALIASES, record.variants)
    listed = seeds if isinstance(seeds, list) else list(record.results)
    record.seeds = [int(seed) for seed in listed if str(seed).isdigit()]
    record.submission, record.variants = submission, sorted(set(record.variants))

def facts(log: Log) -> dict[str, float | None]:
    """A finished run's numbers under submission.json's names: nats, bpb, bytes, steps, seconds.

    Raises ValueError for a run without a score."""
    loss, bpb, _ = final(log)
    train, evaluation = (None if x is None else round(x, 3) for x in (log.train_seconds, log.eval_seconds))
    return {"val_loss": loss, "val_bpb": bpb, "artifact_bytes": log.total_bytes, "steps": log.steps_done,
            "train_seconds": train, "eval_seconds": evaluation}

def mean_std(values: list[float]) -> tuple[float, float | None]:
    """Mean and sample standard deviation; None for a single value. NaN and None when one is not finite or absurd."""
    if not all(abs(value) < ABSURD for value in values):
        return math.nan, None
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None
