"""`golf check`: what keeps a record folder from being valid and honest. All rules are in one table, RULES."""
from __future__ import annotations

import argparse
import hashlib
import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from golf import records, scripts
from golf.cli import add_command, print_json, print_table
from golf.logs import Log, final, unfinished
from golf.records import (
    ABSURD,
    FOLDER_NAME,
    HOME,
    IDENTITY,
    SIZE_CAP_BYTES,
    Record,
    facts,
    is_date,
    is_scored,
    mean_std,
)

SEVERITIES = ("error", "warning", "note")
SCHEMA = json.loads(Path(__file__).with_name("submission.schema.json").read_text(encoding="utf-8"))
LARGEST_GAP = 0.03  # bpb that quantisation may cost; collapses were seen at 1.1 and 2.4
VAL_BYTES = 151_080_000  # UTF-8 bytes of the first 50,000 documents, less a tail shorter than one context
NUMBER = re.compile(r"(?<![\w.,/-])(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(?!\w|\.\d)")

Verdict = str | bool | None  # what is wrong with one log; anything false means nothing

def per_log(judge: Callable[[Record, Log], Verdict]) -> Callable[[Record], Iterator[str]]:
    """A finder that asks about one log at a time and names it."""
    return lambda record: (f"{log.path.name}: {found}" for log in record.logs if (found := judge(record, log)))

# -- files and names ---------------------------------------------------------------------------------------------------

def files(record: Record) -> Iterator[str]:
    for name in ("README.md", "submission.json", "train_gpt.py"):
        if not (record.folder / name).is_file():
            yield f"{name} is missing"
    if not record.logs and not record.broken:
        yield "no *.log and no *.txt log"

def folder_day(record: Record) -> str | None:
    match = FOLDER_NAME.fullmatch(record.folder.resolve().name)
    return match[1] if match and is_date(match[1]) else None

def track(record: Record) -> Iterator[str]:
    claimed, parent = record.submission.get("track"), record.folder.resolve().parent.name
    meant = records.track_name(str(claimed))
    if claimed is not None and (meant is None or records.track_name(parent) not in (None, meant)):
        yield f"track {claimed!r} in {parent}/"

def dates(record: Record) -> Iterator[str]:
    day, claimed = folder_day(record), str(record.submission.get("date", ""))
    if day and claimed and claimed[:10] != day:
        yield f"date {claimed}, folder {day}"

def schema(record: Record) -> Iterator[str]:
    from jsonschema import Draft202012Validator, FormatChecker
    formats = FormatChecker(())
    formats.checks("day")(is_date)
    errors = Draft202012Validator(SCHEMA, format_checker=formats).iter_errors(record.raw)
    for error in sorted(errors, key=str) if record.raw is not None else ():
        yield f"{'.'.join(map(str, error.absolute_path)) or 'the object'}: {error.message[:160]}"

def variants(record: Record) -> Iterator[str]:
    yield from record.variants
    if unknown := sorted(set(record.submission) - set(SCHEMA["properties"])):
        yield f"unknown fields: {', '.join(unknown)}"

# -- bytes -------------------------------------------------------------------------------------------------------------

def size(record: Record, log: Log) -> Verdict:
    if not record.has_artifact:
        return None
    if log.model_bytes is None:
        return "no model size in a line 'Serialized model int6+brotli: N bytes'"
    code, total = record.script_bytes, record.code_bytes + log.model_bytes
    parts = f"{code:,} script + {record.code_bytes - code:,} other files + {log.model_bytes:,} model"
    return total > SIZE_CAP_BYTES and f"{parts} = {total:,}, {total - SIZE_CAP_BYTES:,} over"

def code_bytes(record: Record) -> Iterator[str]:
    claims = [(log.path.name, log.code_bytes) for log in record.logs]
    for place, claim in [*claims, ("submission.json bytes_code", record.submission.get("bytes_code"))]:
        if record.script_bytes and claim not in (None, record.script_bytes, record.code_bytes):
            yield f"{place}: {claim}, train_gpt.py has {record.script_bytes:,} bytes"

def uncounted(record: Record, log: Log) -> Verdict:
    listed = ", ".join(f"{name} ({size:,} bytes)" for name, size in record.helpers.items())
    return listed and log.code_bytes not in (None, record.code_bytes) and f"{log.code_bytes:,} bytes without {listed}"

def bytes_total(record: Record) -> Iterator[str]:
    claim = record.submission.get("bytes_total")
    ships = [record.code_bytes + log.model_bytes for log in record.logs if log.model_bytes is not None]
    logged = [log.total_bytes for log in record.logs if log.total_bytes is not None]
    means = [round(statistics.fmean(values)) for values in (ships, logged) if values]
    if isinstance(claim, int) and ships and claim not in {*ships, *logged, *means}:
        yield f"bytes_total {claim:,}, from what ships {max(ships):,}"

def model_file(record: Record) -> Iterator[str]:
    known = {log.model_bytes: log.artifact_sha256 for log in record.logs}
    digests = {log.artifact_sha256 for log in record.logs}
    for path in filter(Path.is_file, record.folder.glob("*.ptz")):
        size, digest = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
        if size not in known:
            yield f"{path.name} has {size} bytes, the logs say {set(known)}"
        elif None not in digests and digest not in digests:
            yield f"{path.name} has the size, but not the sha256 of a logged run: {digest[:12]}..."

def unaccounted(record: Record) -> Iterator[str]:
    """Files that a script could read under a name that it computes, so that nothing here sees it."""
    known = {record.script, *(log.path for log in record.logs), *(record.folder / name for name in record.helpers)}
    for path in sorted(record.folder.rglob("*")):
        name = path.relative_to(record.folder).as_posix()
        if path.is_file() and path not in known and not scripts.NO_CODE.fullmatch(name) and not name.endswith(
                (".md", ".png", ".svg", ".ptz")) and "__pycache__" not in name:
            yield f"{name} ({path.stat().st_size:,} bytes)"

# -- runs: finished, in time, honest about seeds -----------------------------------------------------------------------

def not_whole(_record: Record, log: Log) -> Verdict:
    if not is_scored(log):
        return "no final score"
    if log.settings.get("eval_only"):
        return "it only scored an artifact (EVAL_ONLY)"
    return unfinished(log) or (log.valid is False and f"valid: {log.summary['valid']}")

def collapsed(_record: Record, log: Log) -> Verdict:
    before, after = (log.evaluations.get(name, (0.0, math.nan))[1] for name in ("pre_quant", "int6"))
    return after - before > LARGEST_GAP and f"{before:.4f} before, {after:.4f} after"

def fallbacks(_record: Record, log: Log) -> Verdict:
    done, left = log.gptq or (0, 0)
    return 10 * left > done + left and f"{left} of {done + left} matrices"

def other_source(record: Record, log: Log) -> Verdict:
    shipped, logged = (text.replace("\r\n", "\n").split("\n") for text in (record.source, log.source or ""))
    if log.source is None or not record.script_bytes or logged == shipped:
        return None
    same = next((n for n, (a, b) in enumerate(zip(logged, shipped)) if a != b), min(len(logged), len(shipped)))
    return f"differs from train_gpt.py at line {same + 1}"

def over_time(_record: Record, log: Log) -> Verdict:
    """The step during which the cap passes may end, as in the published loop; Hessians may not."""
    seconds = max(log.train_seconds or 0.0, log.last_read_seconds or 0.0)
    step = (log.train_seconds or 0.0) / (log.steps_done or 1) if not log.hessian_seconds else 0.0
    return (seconds > records.TRAIN_CAP_SECONDS + step
            and f"{seconds:.1f} s, of them Hessians {log.hessian_seconds or 0:.1f} s")

def over_budget(record: Record, log: Log) -> Verdict:
    """The step during which the budget ends is part of the run."""
    seconds = log.train_seconds or 0.0
    late = seconds > records.BUDGET_SECONDS + seconds / (log.steps_done or 1)
    return (record.track == "5min_1gpu" and (late or log.world_size not in (None, 1))
            and f"{seconds:.1f} s on {log.world_size or 1} ranks")

def seeds(record: Record) -> Iterator[str]:
    logged, claimed = [log.seed for log in record.logs if log.seed is not None], record.seeds
    for seed, count in (Counter(logged) | Counter(claimed)).items():
        if count > 1:
            yield f"seed {seed} occurs {count} times"
    for log in record.logs:
        if log.seed is not None and records.seed_in_name(log) not in (None, log.seed):
            yield f"{log.path.name} is a run with seed {log.seed}"
    if claimed and logged and not record.broken:
        yield from (f"seed {seed} is claimed, but no log has it" for seed in sorted(set(claimed) - set(logged)))
        yield from (f"seed {seed} has a log, but submission.json leaves it out"
                    for seed in sorted(set(logged) - set(claimed)))

def same_settings(record: Record) -> Iterator[str]:
    first, *others = [log for log in record.logs if log.settings] or [None]
    for log in others:
        for name in sorted(set(log.settings) & set(first.settings) - IDENTITY):
            if not scripts.same_setting(log.settings[name], first.settings[name]):
                yield f"{log.path.name}: {name} {log.settings[name]}, {first.path.name}: {first.settings[name]}"

def machines(record: Record) -> Iterator[str]:
    kinds = {(log.hardware, log.world_size, log.torch_version) for log in record.logs}
    if len(kinds) > 1:
        yield "; ".join(sorted(map(str, kinds)))

def other_hardware(record: Record, log: Log) -> Verdict:
    wrong = log.world_size not in (None, 8) or (log.hardware and "H100" not in log.hardware)
    return record.track == "10min_16mb" and wrong and f"{log.world_size} ranks, {log.hardware}"

def other_validation(_record: Record, log: Log) -> Verdict:
    if not log.val_tokens or not is_scored(log) or not final(log)[1]:
        return None
    found = log.val_tokens * final(log)[0] / (math.log(2) * final(log)[1])
    return (abs(found / VAL_BYTES - 1) > 0.002
            and f"loss, bpb and {log.val_tokens:,} tokens mean {found:,.0f} bytes, the split has {VAL_BYTES:,}")

# -- claims against logs -----------------------------------------------------------------------------------------------

def agrees(claim: Any, actual: float | None, digits: int = 0) -> bool:
    """Whether `claim` is `actual` rounded to the decimals that it shows, at least `digits` of them."""
    if actual is None or not isinstance(claim, (int, float)):
        return True  # nothing to compare; the schema judges types
    if abs(claim) > ABSURD:
        return claim == actual  # the difference to a float may overflow
    decimals = len(str(claim).partition(".")[2]) if "e" not in str(claim) else 16
    return abs(claim - actual) <= 0.5 * 10.0 ** -max(decimals, digits) + 2e-9

def numbers(record: Record) -> Iterator[str]:
    for place, name in enumerate(("val_loss", "val_bpb")) if record.complete else ():
        mean, claim = statistics.fmean(final(log)[place] for log in record.logs), record.submission.get(name)
        if not agrees(claim, mean, 4):
            yield f"{name} {claim}, mean of {len(record.logs)} logs {mean:.8f}"
    for log in record.scored:
        for name, actual in facts(log).items():
            claim = record.results.get(log.seed, {}).get(name)
            if not agrees(claim, actual, 4 if name.startswith("val_") else 0):
                yield f"seed {log.seed}: {name} {claim}, log {actual}"

def spread(record: Record) -> Iterator[str]:
    values, claim = [final(log)[1] for log in record.scored], record.submission.get("val_bpb_std")
    if record.complete and len(values) > 1:
        deviations = statistics.stdev(values), statistics.pstdev(values)
        if not any(agrees(claim, deviation) for deviation in deviations):
            yield f"val_bpb_std {claim}, logs {deviations[0]:.8f}"

def known_numbers(log: Log) -> list[float]:
    """Every number that one log states, and the differences between its scores."""
    scores = [value for score in log.evaluations.values() for value in score if value is not None]
    known = [*scores, *(abs(a - b) for a in scores for b in scores)]
    known += [value for row in (*log.steps, *log.validations) for value in row if value is not None]
    known += [value for value in vars(log).values() if isinstance(value, (int, float))]
    texts = (*log.summary.values(), *log.settings.values())
    return known + [float(text) for text in texts if re.fullmatch(r"[-+]?\d+(\.\d+)?(e[-+]?\d+)?", text)]

def untraced(text: str, known: list[float]) -> list[str]:
    """Numbers with four decimals or from 1,000 up that are none of `known` after rounding."""
    lost = []
    for match in NUMBER.finditer(text):
        whole, decimals = match[1].replace(",", ""), match[2] or ""
        if len(decimals) > 4 or (not decimals and float(whole) >= 1000):
            half = 0.5 * 10.0 ** -max(len(decimals) - 1, 0) + 2e-9
            if not any(abs(float(whole + decimals) - value) <= half for value in known):
                lost.append(match[0])
    return lost

def readme_lines(record: Record) -> tuple[dict[int, str], str]:
    """The README's rows of seeds, by seed, and the rest without its rows of seeds and of settings."""
    seeds = {str(log.seed) for log in record.logs}
    names, rows, rest = {name for log in record.logs for name in log.settings}, {}, []
    for line in record.readme.split("\n"):
        cell = re.match(r"\|[\s*`]*(?:seed )?(\w+)\W*\|", line, re.IGNORECASE)
        if cell and cell[1] in seeds:
            rows.setdefault(int(cell[1]), line[cell.end():])
        elif not cell or (cell[1] not in names and "(gone)" not in line):
            rest.append(line)
    return rows, "\n".join(rest)

def readme_table(record: Record) -> Iterator[str]:
    logs = {log.seed: log for log in record.logs}
    for seed, row in readme_lines(record)[0].items():
        total = record.script_bytes + (logs[seed].model_bytes or 0)
        if lost := untraced(row, [*known_numbers(logs[seed]), total]):
            yield f"seed {seed}: {', '.join(lost)}"

def readme_score(record: Record) -> Iterator[str]:
    if record.complete and record.readme:
        mean = statistics.fmean(final(log)[1] for log in record.logs)
        found = [float(m[0]) for m in NUMBER.finditer(readme_lines(record)[1]) if m[2] and len(m[2]) > 4]
        if not any(agrees(number, mean, 4) for number in found):
            yield f"{mean:.4f} is nowhere in README.md"

def readme_untraced(record: Record) -> Iterator[str]:
    known = [value for log in record.logs for value in known_numbers(log)]
    for name in {name for log in record.logs for name in log.evaluations}:
        for values in list(zip(*(log.evaluations[name] for log in record.logs if name in log.evaluations)))[:2]:
            mean, deviation = mean_std(values)
            known += [mean] if deviation is None else [mean, deviation, deviation * math.sqrt(1 - 1 / len(values))]
    lost = [number for number in untraced(readme_lines(record)[1], known) if "." in number]
    if lost and record.logs:
        yield ", ".join(dict.fromkeys(lost[:8]))

def stated_settings(text: str) -> dict[str, set[str]]:
    """Numbers and truth values that a README gives to names: in rows that start with the name, and in NAME=value."""
    stated: dict[str, set[str]] = {}
    for name, value in re.findall(r"\b([A-Z][A-Z0-9_]+)=(\S+)", text):
        stated.setdefault(name.lower(), set()).add(value)
    for line in text.split("\n"):
        name, *values = [cell.strip(" *`") for cell in line.split("|")[1:-1]] or [""]
        stated.setdefault(name.lower(), set()).update(values)
    return {name: {value for value in values if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?|True|False", value)}
            for name, values in stated.items()}

def readme_settings(record: Record) -> Iterator[str]:
    for name, stated in sorted(stated_settings(record.readme).items()):
        logged = {log.settings[name] for log in record.logs if name in log.settings and name not in IDENTITY}
        if stated and logged and not any(scripts.same_setting(a, b) for a in stated for b in logged):
            yield f"{name}: README {', '.join(sorted(stated))}, logs {', '.join(sorted(logged))}"

def readme_settings_missing(record: Record) -> Iterator[str]:
    """Who runs the shipped script without them gets another score."""
    try:
        own = scripts.defaults(record.text("train_gpt.py") or "")
    except (SyntaxError, ValueError):  # another rule says it
        return
    differ = {name: value for log in record.logs for name, value in log.settings.items()
              if name in own and name not in IDENTITY and not scripts.same_setting(value, own[name])}
    yield from (f"{name.upper()}={value}, default {own[name] or '(empty)'}" for name, value in sorted(differ.items())
                if not re.search(rf"\b{name}\b", record.readme, re.IGNORECASE))

def readme_command(record: Record) -> Iterator[str]:
    command = r"(?:python3?|torchrun|nproc[_-]per[_-]node=\S+)\s+(?:-\S+\s+)*([\w./-]+\.py)\b"
    for path in map(Path, re.findall(command, record.readme)):
        if not (record.folder / path.name).is_file() and not {"data", "golf"} & set(path.parts):
            yield f"{path} is not in the folder"

# -- code --------------------------------------------------------------------------------------------------------------

def compiles(record: Record) -> Iterator[str]:
    for version, problem in scripts.compile_everywhere(record.source).items():
        if problem and problem != scripts.NOT_FOUND:
            yield f"Python {version}: {problem}"

def pythons(record: Record) -> Iterator[str]:
    versions = scripts.compile_everywhere(record.source)
    if missing := [version for version, problem in versions.items() if problem == scripts.NOT_FOUND]:
        yield f"not on this machine: Python {', '.join(missing)}"

def imports(record: Record, wanted: str) -> Iterator[str]:
    verdict, detail = "static", "importing was switched off"
    if record.may_import and record.script_bytes:
        verdict, detail = scripts.try_import(record.script, record.source)
    if verdict == wanted and record.script_bytes:
        yield detail

def undeclared(record: Record) -> Iterator[str]:
    for name in sorted(scripts.undeclared(record.folder, record.source, record.text("requirements.txt"))):
        yield f"{name} is neither in requirements.txt nor in the folder"

def not_ascii(record: Record) -> Iterator[str]:
    lines = enumerate(record.source.split("\n"), 1)
    yield from [f"train_gpt.py:{n}: {line.strip()[:60]!a}" for n, line in lines if not line.isascii()][:1]
    yield from (ascii(path.name) for path in record.folder.iterdir() if not path.name.isascii())

def home_paths(record: Record) -> Iterator[str]:
    for name in ("README.md", "submission.json", "train_gpt.py", "requirements.txt"):
        if match := HOME.search(record.text(name) or ""):
            yield f"{name}: {match[0]}"

# -- the table ---------------------------------------------------------------------------------------------------------

class Rule(NamedTuple):
    """`severity`: error, warning, note, or record: an error in the record track and a note elsewhere."""

    name: str
    severity: str
    text: str
    remedy: str
    find: Callable[[Record], Iterable[str]]

RULES = [Rule(*row) for row in (
    ("files", "error", "README.md, submission.json, train_gpt.py and at least one train log ship",
     "add it; `golf new` makes all files from the logs, which are called train_seed<seed>.log", files),
    ("requirements", "note", "requirements.txt names the packages that the script imports", "add one package a line",
     lambda r: [] if r.text("requirements.txt") is not None else ["requirements.txt is missing"]),
    ("readable", "error", "every log and submission.json can be read",
     "replace the file by the original, or move it out of the folder", lambda r: r.broken),
    ("names", "error", "the folder is called YYYY-MM-DD_Name (letters, digits, . _ + -) inside records/track_<track>/",
     "rename the folder, for example to 2026-04-01_ShortName",
     lambda r: [] if folder_day(r) else [r.folder.resolve().name]),
    ("track", "error", "the track exists and is that of the parent folder",
     f"write one of {', '.join(records.TRACKS)}", track),
    ("date", "warning", "submission.json has the folder's date", "make them agree", dates),
    ("schema", "error", "submission.json follows submission.schema.json", "see golf/submission.schema.json; `golf new` "
     "writes a valid file", schema),
    ("variants", "note", "submission.json uses the names and shapes that `golf new` writes",
     "nothing to do: variants are understood, unknown fields kept and not checked", variants),
    ("size", "error", f"script + every file that it uses + model <= {SIZE_CAP_BYTES:,} bytes, counted from what ships",
     "`golf pack` the script or `golf fit` the model", per_log(size)),
    ("code-bytes", "error", "the code size that logs and submission.json count is the shipped file's",
     "ship the script that trained, as it was counted; if it was packed, ship the packed file", code_bytes),
    ("helpers", "error", "every file that the script imports or opens is counted as code",
     "move the code into train_gpt.py", per_log(uncounted)),
    ("unaccounted", "note", "no other files are in the folder: a script can open one under a computed name",
     "delete what does not belong to the record, or count it as code", unaccounted),
    ("bytes-total", "error", "bytes_total is the largest, the mean or one seed's shipped total", "write the largest",
     bytes_total),
    ("model-file", "error", "a model file in the folder is one that a log describes", "ship the model of a logged run",
     model_file),
    ("finished", "error", "every log ends with a finite final score, and none says that its run does not count",
     "ship complete runs only; let the run finish, or run again", per_log(not_whole)),
    ("official", "record", "no log calls its own split or tokenizer unofficial",
     "fetch the official data; say in the README what was scored", per_log(lambda _, log: log.unofficial)),
    ("quantisation-gap", "warning", f"quantisation costs at most {LARGEST_GAP} bpb",
     "look for matrices whose codes are wrong; see warnings about GPTQ in the log", per_log(collapsed)),
    ("gptq-fallback", "warning", "at most a tenth of the matrices fell back to row search",
     "raise GPTQ_CALIBRATION_BATCHES", per_log(fallbacks)),
    ("source", "error", "the script inside each log is train_gpt.py, byte for byte", "ship the script that the log "
     "holds", per_log(other_source)),
    ("source-logged", "warning", "each log holds the script that ran", "ship logs/<run>.txt, not the console's output",
     per_log(lambda _, log: log.source is None and "no script in it")),
    ("train-time", "record",
     f"training with Hessians, and reading training data, ends within {records.TRAIN_CAP_SECONDS} s",
     "raise GPTQ_RESERVE_SECONDS or lower MAX_WALLCLOCK_SECONDS", per_log(over_time)),
    ("budget", "error", f"in the track 5min_1gpu a run trains at most {records.BUDGET_SECONDS} s, on one GPU",
     "lower MAX_WALLCLOCK_SECONDS, or submit to another track", per_log(over_budget)),
    ("eval-time", "record", f"evaluation takes at most {records.EVAL_CAP_SECONDS} s",
     "raise EVAL_STRIDE or evaluate less",
     per_log(lambda _, log: (log.eval_seconds or 0) > records.EVAL_CAP_SECONDS and f"{log.eval_seconds:.1f} s")),
    ("seeds", "error", "seeds are distinct, named rightly, and the same in logs and submission.json: none is left out",
     "ship one train_seed<seed>.log for every seed that was run, and report them all", seeds),
    ("seed-count", "warning", f"a record shows at least {records.RECORD_SEEDS} seeds",
     "run more seeds: p < 0.01 needs them",
     lambda r: [f"{len(r.logs)} logs"] if r.track == "10min_16mb" and 0 < len(r.logs) < records.RECORD_SEEDS else []),
    ("settings", "error", "all seeds ran with the same settings", "ship seeds of one recipe", same_settings),
    ("machines", "warning", "all seeds ran on one kind of machine with one PyTorch",
     "say in the README which seed ran where", machines),
    ("hardware", "record", "a record ran on 8 x H100", "submit to the track non_record_16mb",
     per_log(other_hardware)),
    ("validation", "record", "the score covers the whole validation split, with the right number of bytes",
     "score the whole split, or say in the README what was scored", per_log(other_validation)),
    ("numbers", "error", "submission.json's scores are the means over all logs; a seed's numbers are its log's",
     "write what the logs say", numbers),
    ("spread", "error", "val_bpb_std is the standard deviation over all logs", "write the sample deviation", spread),
    ("readme-table", "error", "each number in the README's row of a seed is in that seed's log",
     "copy the numbers from the log; `golf new` does it", readme_table),
    ("readme-score", "error", "the README states the mean val_bpb of the logs", "state the mean over all seeds",
     readme_score),
    ("readme-untraced", "warning", "every other score-like number in the README comes from a log",
     "say in the README where they come from, or remove them", readme_untraced),
    ("readme-settings", "error", "a setting that the README states has, somewhere in it, the value that was logged",
     "state what ran", readme_settings),
    ("readme-settings-missing", "warning", "settings of the logs that are not the script's defaults are in the README",
     "make them the script's defaults, or state them in the README's command", readme_settings_missing),
    ("readme-command", "error", "scripts in the README's commands ship", "name a script that ships", readme_command),
    ("compiles", "error", "train_gpt.py compiles with each Python from 3.10 to 3.13 on this machine",
     "write it so that this Python accepts it", compiles),
    ("pythons", "note", "all of Python 3.10 to 3.13 were tried", "check there, or install them", pythons),
    ("imports", "error", "train_gpt.py can be imported from any folder",
     "declare the package in requirements.txt, or ship the code in train_gpt.py", lambda r: imports(r, "failed")),
    ("imports-static", "note", "train_gpt.py was imported, not only read",
     "nothing to do; importing without a GPU tells more", lambda r: imports(r, "static")),
    ("packages", "error", "every package that the script cannot do without is in requirements.txt",
     "add it, or guard its import with try", undeclared),
    ("ascii", "warning", "train_gpt.py and file names are ASCII", "write an escape such as \\u2581, or rename the file",
     not_ascii),
    ("home-paths", "error", "no path of somebody's home in what ships", "use a relative path or a setting", home_paths),
    ("home-paths-logged", "warning", "no path of somebody's home in the logged settings",
     "run with relative paths; do not edit a log",
     per_log(lambda _, log: ", ".join(sorted(set(HOME.findall("\n".join(log.settings.values()))))))))]

# -- command -----------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Finding:
    severity: str  # error, warning or note
    rule: str  # its short name
    text: str  # what the rule wants
    value: str  # what was found
    remedy: str

def check_folder(folder: Path, may_import: bool = True) -> list[Finding]:
    """All findings, errors first. Raises ValueError when `folder` is no folder."""
    record = records.read_record(folder)
    record.may_import = may_import
    severity = {"record": "error" if record.track == "10min_16mb" else "note"}
    findings = [Finding(severity.get(rule.severity, rule.severity), rule.name, rule.text, value, rule.remedy)
                for rule in RULES for value in rule.find(record)]
    return sorted(findings, key=lambda finding: SEVERITIES.index(finding.severity))

def show(folder: str, findings: list[Finding]) -> None:
    for level in SEVERITIES:
        rows = [(f"{finding.rule}: {finding.text}", finding.value, finding.remedy)
                for finding in findings if finding.severity == level]
        if rows:
            print_table(f"{folder}: {len(rows)} {level}{'s' * (len(rows) > 1)}", ("rule", "found", "remedy"), rows)
    errors = sum(finding.severity == "error" for finding in findings)
    verdict = f"{errors} violation{'s' * (errors > 1)}" if errors else "fine"
    print(f"{folder}: {verdict} ({len(RULES)} rules)")

def run(args: argparse.Namespace) -> int:
    results = {str(folder): check_folder(folder, not args.no_import) for folder in args.folders}
    if args.json:
        print_json({folder: [asdict(finding) for finding in findings] for folder, findings in results.items()})
    else:
        for folder, findings in results.items():
            show(folder, findings)
    bad = {"error", "warning"} if args.strict else {"error"}
    return int(any(finding.severity in bad for findings in results.values() for finding in findings))

def add_parser(subparsers: Any) -> None:
    parser = add_command(subparsers, "check", run, "check record folders against the rules and their own logs")
    parser.add_argument("folders", nargs="+", type=Path, metavar="DIR")
    parser.add_argument("--no-import", action="store_true", help="never import train_gpt.py; importing runs its code")
    parser.add_argument("--strict", action="store_true", help="warnings count as violations")
