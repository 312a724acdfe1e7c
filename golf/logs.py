"""Reads a run's log: our script's .txt and .jsonl, and published logs of the same and of older layouts."""
from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# From the best to the weakest claim: the first that a log holds is its official score.
OFFICIAL = ("ttt", "sliding", "int6")
# What the challenge's clocks count in each summary: seconds, bytes, MiB.
SUMMARY_NUMBERS = {"train_seconds": float, "hessian_seconds": float, "eval_seconds": float, "code_bytes": int,
                   "model_bytes": int, "total_bytes": int, "peak_memory_mib": int, "steps": int}

@dataclass
class Log:
    """One run. What the file does not say is None or empty."""

    path: Path
    settings: dict[str, str] = field(default_factory=dict)
    source: str | None = None  # the script between the rules, exactly as it was read
    torch_version: str | None = None
    gpu: str | None = None  # name of the first GPU in nvidia-smi's table
    machine: str | None = None  # as in `machine: 8 x NVIDIA H100 80GB HBM3, ...`; only our script says it
    attention: str | None = None
    steps: list[tuple[int, float, float, float | None]] = field(default_factory=list)  # step, loss, seconds, tokens/s
    validations: list[tuple[int, float, float]] = field(default_factory=list)  # step, val_loss (nats), val_bpb
    evaluations: dict[str, tuple[float, float, float | None]] = field(default_factory=dict)  # val_loss, val_bpb, s
    lr_factors: dict[int, float] = field(default_factory=dict)  # by step; only with a .jsonl beside the log
    iterations: int | None = None  # steps at most
    steps_done: int | None = None
    train_seconds: float | None = None  # training and Hessians: what the 600 s count
    hessian_seconds: float | None = None
    last_read_seconds: float | None = None  # training data last read, on the same clock
    eval_seconds: float | None = None  # all evaluations of the artifact together
    code_bytes: int | None = None
    model_bytes: int | None = None
    total_bytes: int | None = None
    peak_memory_mib: int | None = None
    seed: int | None = None
    world_size: int | None = None
    train_shards: int | None = None
    val_tokens: int | None = None
    valid: bool | None = None  # the script's own verdict
    unofficial: str | None = None  # what its own words call unofficial, such as `UNOFFICIAL SPLIT`
    artifact_sha256: str | None = None
    gptq: tuple[int, int] | None = None  # matrices quantised with Hessians, and those that fell back to row search
    summary: dict[str, str] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)

    @property
    def hardware(self) -> str | None:
        """Such as `8 x NVIDIA H100 80GB HBM3`; None when the log names no machine."""
        return self.machine or (f"{self.world_size or '?'} x {self.gpu}" if self.gpu else None)

def final(log: Log) -> tuple[float, float, float | None]:
    """The official score: val_loss in nats, val_bpb, eval seconds. Raises ValueError when nothing was scored."""
    if found := [log.evaluations[name] for name in OFFICIAL if name in log.evaluations]:
        return found[0]
    raise ValueError(f"{log.path}: no final score; a whole run ends with final_int6_roundtrip or "
                     "final_int6_sliding_window; let the run finish")

def unfinished(log: Log) -> str | None:
    """Why a log is not that of a whole run; what only our script writes is asked of logs that hold it."""
    if not any(name in log.evaluations for name in OFFICIAL):
        return "no final score"
    sliding = log.settings.get("sliding_window_enabled") in ("1", "True")
    if sliding and not {"sliding", "ttt"} & log.evaluations.keys():
        return "it ended before its sliding score"
    return "it ended before its summary" if log.valid is None and "\nvalid: {" in (log.source or "") else None

def read_log(path: Path | str, records: bool = True) -> Log:
    """The log at `path`, made more exact by the .jsonl beside it unless `records` is off.

    Raises ValueError, with file, line and what is wrong, for a file that is no log.
    """
    log = Log(Path(path))
    try:
        text = log.path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: byte {error.start} is not UTF-8; give the .txt or .log of a run") from None
    head, body = split_head(log, text)
    read_head(log, head)
    found = read_body(log, body)
    if not found:
        line = text.count("\n") - body.count("\n") + 1
        raise ValueError(f"{path}:{line}: no step, validation or score from here on; give the .txt or .log of a run")
    companion = log.path.with_suffix(".jsonl")
    if records and companion.is_file():
        merge_records(log, companion)
    complete(log)
    return log

# -- head: settings, source, versions ----------------------------------------------------------------------------------

RULE = r"={60,}[ \t]*\r?$"
HEAD_END = re.compile(rf"(?m)^{RULE}\n(?=Running Python )")
NEXT_RULE = re.compile(rf"(?m)^{RULE}")
FILE_START = re.compile(rf"\A{RULE}\nHyperparameters:", re.MULTILINE)  # the console has no rule there
SETTINGS_START = re.compile(rf"\A(?:{RULE}\n)?Hyperparameters:[ \t]*\n", re.MULTILINE)
SETTING = re.compile(r"  (\w+): ?(.*)\n")
VERSIONS = [re.compile(rf"(?m)^{pattern}") for pattern in (
    r"Running PyTorch (\S+)", r"\|\s+\d+\s+(\S.*?)\s+(?:On|Off|N/A)\s+\|")]  # last: a GPU

def split_head(log: Log, text: str) -> tuple[str, str]:
    """Settings, source and versions apart from the log lines.

    The source may hold rules and log lines itself, so its end is the last rule that `Running Python` follows.
    """
    ends = list(HEAD_END.finditer(text))
    if not ends:
        if FILE_START.match(text):
            raise ValueError(f"{log.path}:2: no rule of '=' followed by 'Running Python' ends settings and source: the "
                             "file is cut short; copy the whole log")
        return "", text
    log.source, rest = text[:ends[-1].start()], text[ends[-1].end():]
    rule = NEXT_RULE.search(rest)
    stop = rule.end() if rule else rest.find("\n", rest.find("\nRunning PyTorch") + 1)
    return rest[:stop], rest[stop:].removeprefix("\n")

def read_head(log: Log, versions: str) -> None:
    if log.source is not None:
        log.settings, at = read_settings(log.source)
        log.source = re.sub(rf"\A{RULE}\n", "", log.source[at:], flags=re.MULTILINE)
        log.source = log.source.removesuffix("\n")  # the log's own line end; the file's own stays
    log.torch_version, log.gpu = (
        match and match[1] for match in (pattern.search(versions) for pattern in VERSIONS))

def read_settings(text: str) -> tuple[dict[str, str], int]:
    """The indented `name: value` lines under `Hyperparameters:` and the position after them."""
    start = SETTINGS_START.match(text)
    if not start:
        return {}, 0
    settings, at = {}, start.end()
    while match := SETTING.match(text, at):
        settings[match[1]], at = match[2].rstrip("\r"), match.end()
    return settings, at

# -- body: one line, one fact ------------------------------------------------------------------------------------------

NUMBER = r"([-+]?(?:\d+\.?\d*(?:e[-+]?\d+)?|nan|inf))"
WHOLE = r"(\d{1,19})(?!\d)"  # the largest seed has 19 digits
SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0}
STEP = re.compile(rf"(?:step:)?{WHOLE}/{WHOLE} train_loss: ?{NUMBER}(?: train_time: ?{NUMBER}(ms|s|m))?"
                  rf"(?:.*tok/s: ?{NUMBER})?")
VALIDATION = re.compile(rf"(?:step:)?{WHOLE}/{WHOLE} val_loss: ?{NUMBER} val_bpb: ?{NUMBER}")
STOP = re.compile(rf"stopping_early: \S+ train_time: ?{NUMBER}ms step: ?{WHOLE}/{WHOLE}")
SCORE = re.compile(rf"([a-z][\w +-]*?) val_loss: ?{NUMBER} val_bpb: ?{NUMBER}(?:.*? eval_time: ?{NUMBER}ms)?")
FACTS = {name: re.compile(pattern) for name, pattern in {
    "machine": r"machine: (.*?)(?:, PyTorch.*)?$",
    "attention": r"attention: (\S+)",
    "train_shards": rf"(?:train_loader:.* )?train_shards: ?{WHOLE}",
    "val_tokens": rf"(?:val_tokens|val_loader:.* tokens): ?{WHOLE}",
    "unofficial": r"val_bytes:.*?(UNOFFICIAL \w+)",
    "artifact_sha256": r"sha256 of the artifact: ([0-9a-f]{64})$",
    "seed": rf"seed: ?{WHOLE}",
    "world_size": rf"world_size: ?{WHOLE}",
    "peak_memory_mib": rf"peak memory allocated: {WHOLE} MiB",
    "code_bytes": rf"Code size[^:]*: {WHOLE} bytes",
    "model_bytes": rf"Serialized model (?:int|q)\S*: {WHOLE} bytes",
    "total_bytes": rf"Total submission size (?:int|q)\S*: {WHOLE} bytes",
    "eval_seconds": rf"total_eval_time: ?{NUMBER}s",
    "hessian_seconds": rf"GPTQ:collected \d+ Hessians in {NUMBER}s",
    "last_read_seconds": rf"training data last read at {NUMBER}s",
}.items()}

def read_body(log: Log, text: str) -> bool:
    """Takes every known line; true when there was a step, a validation or a score among them."""
    body, _, summary = text.partition("\n---\n")
    for line in body.split("\n"):
        line = line.rstrip("\r")
        if "WARNING" in line:
            log.warnings.append(line)
        if not (read_step(log, line) or read_score(log, line)):
            read_fact(log, line)
    log.summary = dict(line.split(": ", 1) for line in summary.split("\n") if re.match(r"\w+: ", line))
    try:
        numbers = {name: kind(log.summary[name]) for name, kind in SUMMARY_NUMBERS.items() if name in log.summary}
        check_record({"type": "summary", **numbers})
        take_summary(log, numbers)
    except ValueError as error:
        raise ValueError(f"{log.path}: a line of the summary must be a number: {error}") from None
    if "valid" in log.summary:
        log.valid = log.summary["valid"].startswith("yes")
    return bool(log.steps or log.validations or log.evaluations)

def take_summary(log: Log, values: dict[str, Any]) -> None:
    for name in SUMMARY_NUMBERS:
        if name in values:
            setattr(log, "steps_done" if name == "steps" else name, values[name])

def read_step(log: Log, line: str) -> bool:
    if match := STEP.match(line):
        step, log.iterations = int(match[1]), int(match[2])
        seconds = float(match[4]) * SECONDS[match[5]] if match[4] else None
        log.steps.append((step, float(match[3]), seconds, float(match[6]) if match[6] else None))
    elif match := VALIDATION.match(line):
        step, log.iterations = int(match[1]), int(match[2])
        log.validations.append((step, float(match[3]), float(match[4])))
    elif match := STOP.match(line):
        log.train_seconds, step, log.iterations = float(match[1]) / 1000, int(match[2]), int(match[3])
    else:
        return False
    log.steps_done = max(log.steps_done or 0, step)
    return True

def read_score(log: Log, line: str) -> bool:
    match = SCORE.match(line)
    if not match or not (name := score_name(match[1])):
        return False
    loss, bpb, seconds = float(match[2]), float(match[3]), match[4] and float(match[4]) / 1000
    if seconds is None and name in log.evaluations:  # older scripts repeat the score with more digits, without a time
        seconds = log.evaluations[name][2]
    log.evaluations[name] = (loss, bpb, seconds)
    return True

def score_name(label: str) -> str | None:
    """Which evaluation a published label means: pre_quant, int6 (quantised, no overlap), sliding or ttt."""
    if "pre-quant" in label:
        return "pre_quant"
    if not label.removeprefix("diagnostic ").startswith(("final_", "quantized", "legal_ttt")):
        return None
    return "ttt" if "ttt" in label else "sliding" if "sliding" in label else "int6"

TEXTS = {"machine", "attention", "unofficial", "artifact_sha256"}
GPTQ = re.compile(rf"GPTQ quantization: {WHOLE} layers with full GPTQ, {WHOLE} fallback")

def read_fact(log: Log, line: str) -> None:
    if match := GPTQ.match(line):
        log.gptq = int(match[1]), int(match[2])
    for name, pattern in FACTS.items():
        if match := pattern.match(line):
            kind = str if name in TEXTS else float if name.endswith("seconds") else int
            if getattr(log, name) is None or name not in ("seed", "world_size"):
                setattr(log, name, kind(match[1]))

# -- the .jsonl beside it, and what follows from the rest --------------------------------------------------------------

NUMBERS_OF = {"step": ("step", "train_loss", "train_seconds", "tokens_per_second"),
              "validation": ("step", "val_loss", "val_bpb"), "evaluation": ("val_loss", "val_bpb", "eval_seconds")}

def merge_records(log: Log, path: Path) -> None:
    """Replaces what the text rounds. Raises ValueError for a broken line, except a last one cut by a crash."""
    by_kind: dict[str, list[dict[str, Any]]] = {}
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            check_record(record)
            by_kind.setdefault(record["type"], []).append(record)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            if number == len(lines):  # no line end after it
                log.warnings.append(f"WARNING: {path.name}:{number} is cut short; left out")
                break
            raise ValueError(f"{path}:{number}: no record ({error}); without this file the text is used") from None
    ours = log.settings.get("run_id")
    for run_id in (record.get("run_id") for record in by_kind.get("settings", [])):
        if run_id != ours:
            raise ValueError(f"{path}: belongs to run {run_id!a}, the log beside it to {ours!a}; move one of them")
    apply_records(log, by_kind)

def check_record(record: dict[str, Any]) -> None:
    """Raises ValueError when a record lacks a number or a name that `apply_records` takes from it."""
    needed = NUMBERS_OF.get(record["type"], ())
    optional = {"step": ("lr_factor",), "summary": SUMMARY_NUMBERS}.get(record["type"], ())
    if record["type"] == "evaluation" and not isinstance(record.get("name"), str):
        raise ValueError("an evaluation must have a name")
    for name in (*needed, *(name for name in optional if name in record)):
        if not isinstance(record.get(name), (int, float)) or abs(record[name]) >= 10**19:
            raise ValueError(f"{name} must be a number, is {str(record.get(name))[:40]!a}")

def apply_records(log: Log, by_kind: dict[str, list[dict[str, Any]]]) -> None:
    steps, validations, evaluations = (
        [tuple(r[name] for name in names) for r in by_kind.get(kind, [])] for kind, names in NUMBERS_OF.items())
    log.steps, log.validations = steps or log.steps, validations or log.validations
    log.lr_factors = {r["step"]: r["lr_factor"] for r in by_kind.get("step", []) if "lr_factor" in r}
    log.evaluations |= zip((r["name"] for r in by_kind.get("evaluation", [])), evaluations)
    for r in by_kind.get("summary", []):
        take_summary(log, r)

def complete(log: Log) -> None:
    """Derives what a log without summary only implies: seed, ranks, whole train and eval seconds, total bytes."""
    for name in ("seed", "world_size", "iterations"):
        if re.fullmatch(WHOLE, log.settings.get(name, "")):
            setattr(log, name, int(log.settings[name]))
    batch = log.settings.get("train_batch_tokens", "")
    if re.fullmatch(WHOLE, batch) and not log.lr_factors:  # the text rounds to a tenth of a minute, the rate does not
        log.steps = [(step, loss, step * int(batch) / rate if rate else seconds, rate)
                     for step, loss, seconds, rate in log.steps]
    if "train_seconds" not in log.summary:
        if log.train_seconds is None and log.steps:
            log.train_seconds = log.steps[-1][2]
        if log.train_seconds is not None:
            log.train_seconds += log.hessian_seconds or 0.0
    if log.eval_seconds is None:
        seconds = [log.evaluations[name][2] for name in OFFICIAL if name in log.evaluations]
        log.eval_seconds = sum(s for s in seconds if s is not None) if any(seconds) else None
    if log.model_bytes is not None and log.total_bytes is not None:
        log.code_bytes = log.total_bytes - log.model_bytes  # what was counted; some logs state two sizes of code
    elif log.model_bytes is not None and log.code_bytes is not None:
        log.total_bytes = log.code_bytes + log.model_bytes
