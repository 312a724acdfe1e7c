"""The rules of `golf check`: one small function each, in one table, RULES."""
from __future__ import annotations

import json
import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from golf import scripts, static
from golf.logs import Log, final
from golf.records import (
    EVAL_CAP_SECONDS,
    FOLDER_NAME,
    RECORD_SEEDS,
    SIZE_CAP_BYTES,
    TRACKS,
    TRAIN_CAP_SECONDS,
    Record,
    facts,
    is_date,
    track_name,
)

Findings = Iterator[tuple[str, str]]  # value and remedy
SCHEMA = Path(__file__).with_name("submission.schema.json")
# Settings that may differ between the seeds of one record: who ran, and where.
IDENTITY = {"run_id", "rank", "seed", "logfile", "output_dir", "data_dir", "datasets_dir", "train_files", "val_files",
            "tokenizer_path", "model_path", "quantized_model_path", "local_rank", "is_main_process", "eval_only"}
VAL_BYTES = 151_080_000  # UTF-8 bytes of the first 50,000 documents, less a tail shorter than one context
HOME = re.compile(r"(?:/home/|/Users/|/root/|[A-Z]:\\Users\\)[\w.-]*")


class Rule(NamedTuple):
    """`severity`: error, warning, note, or record: an error in the record track and a note elsewhere."""

    name: str
    severity: str
    text: str
    find: Callable[[Record], Findings]


RULES: list[Rule] = []


def rule(name: str, severity: str, text: str) -> Callable[[Callable[[Record], Findings]], Callable[[Record], Findings]]:
    def add(find: Callable[[Record], Findings]) -> Callable[[Record], Findings]:
        RULES.append(Rule(name, severity, text, find))
        return find
    return add


# -- files and names ---------------------------------------------------------------------------------------------------

@rule("files", "error", "README.md, submission.json, train_gpt.py and at least one train log ship")
def files(record: Record) -> Findings:
    for name in ("README.md", "submission.json", "train_gpt.py"):
        if not (record.folder / name).is_file():
            yield f"{name} is missing", f"add {name}; `golf new` makes all files from the logs"
    if not record.logs and not record.broken:
        yield "no *.log and no *.txt log", "copy each seed's log as train_seed<seed>.log"


@rule("requirements", "note", "requirements.txt names the packages that the script imports")
def requirements(record: Record) -> Findings:
    if not (record.folder / "requirements.txt").is_file():
        yield "requirements.txt is missing", "add one package a line"


@rule("readable", "error", "every log and submission.json can be read")
def readable(record: Record) -> Findings:
    for problem in record.broken:
        yield problem, "replace the file by the original, or move it out of the folder"


@rule("names", "error", "the folder is called YYYY-MM-DD_Name (letters, digits, . _ + -) inside records/track_<track>/")
def names(record: Record) -> Findings:
    match = FOLDER_NAME.fullmatch(record.folder.resolve().name)
    if not match or not is_date(match[1]):
        yield record.folder.resolve().name, "rename the folder, for example to 2026-04-01_ShortName"


@rule("track", "error", "the track exists and is that of the parent folder")
def track(record: Record) -> Findings:
    claimed, parent = record.submission.get("track"), record.folder.resolve().parent.name
    meant = track_name(str(claimed))
    if claimed is not None and (meant is None or track_name(parent) not in (None, meant)):
        yield f"track {claimed!r} in {parent}/", f"one of {', '.join(TRACKS)}, the same as the parent folder's"


@rule("date", "warning", "submission.json has the folder's date")
def dates(record: Record) -> Findings:
    match, claimed = FOLDER_NAME.fullmatch(record.folder.resolve().name), str(record.submission.get("date", ""))
    if match and claimed and claimed[:10] != match[1]:
        yield f"date {claimed}, folder {match[1]}", "make them agree"


@rule("schema", "error", "submission.json follows submission.schema.json")
def schema(record: Record) -> Findings:
    if record.raw is None:
        return
    from jsonschema import Draft202012Validator
    validator = Draft202012Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))
    for error in sorted(validator.iter_errors(record.raw), key=str):
        place = ".".join(map(str, error.absolute_path)) or "the object"
        yield f"{place}: {error.message[:160]}", f"see {SCHEMA.name}; `golf new` writes a valid file"
    if not error_free_date(record):
        yield f"date: {record.raw.get('date')!r}", "write a real day as YYYY-MM-DD"


def error_free_date(record: Record) -> bool:
    claimed = record.raw.get("date") if isinstance(record.raw, dict) else None
    return not isinstance(claimed, str) or not re.match(r"\d{4}-\d{2}-\d{2}", claimed) or is_date(claimed)


@rule("variants", "note", "submission.json uses the names and shapes that `golf new` writes")
def variants(record: Record) -> Findings:
    for variant in record.variants:
        yield variant, "nothing to do: it is understood"
    known = json.loads(SCHEMA.read_text(encoding="utf-8"))["properties"]
    unknown = sorted(set(record.submission) - set(known) - {"val_loss", "seed_results"})
    if unknown:
        yield f"unknown fields: {', '.join(unknown)}", "nothing to do: they are kept and not checked"


# -- bytes -------------------------------------------------------------------------------------------------------------

def script_bytes(record: Record) -> int:
    return record.script.stat().st_size if record.script.is_file() else 0


def helpers(record: Record) -> list[Path]:
    """Files beside train_gpt.py that it imports or opens, without the model itself."""
    try:
        found = static.reached_files(record.script) if record.script.is_file() else []
    except SyntaxError:
        return []  # the rule about compiling says it
    models = {log.model_bytes for log in record.logs}
    return [path for path in found if path.suffix != ".ptz" or path.stat().st_size not in models]


def shipped_totals(record: Record) -> list[int]:
    """Script, helpers and model of each log, in bytes, counted from what ships."""
    code = script_bytes(record) + sum(path.stat().st_size for path in helpers(record))
    return [code + log.model_bytes for log in record.logs if log.model_bytes is not None]


@rule("size", "error", f"script + every file that it uses + model <= {SIZE_CAP_BYTES:,} bytes, counted from what ships")
def size(record: Record) -> Findings:
    extra = sum(path.stat().st_size for path in helpers(record))
    for log in record.logs:
        if log.model_bytes is None:
            yield f"{log.path.name} states no model size", "keep the line 'Serialized model int6+brotli: N bytes'"
        elif (total := script_bytes(record) + extra + log.model_bytes) > SIZE_CAP_BYTES:
            parts = f"{script_bytes(record):,} script + {extra:,} other files + {log.model_bytes:,} model"
            yield (f"{log.path.name}: {parts} = {total:,}, {total - SIZE_CAP_BYTES:,} over",
                   "`golf pack` the script or `golf fit` the model")


@rule("code-bytes", "error", "the code size that logs and submission.json count is the shipped file's")
def code_bytes(record: Record) -> Findings:
    code, extra = script_bytes(record), sum(path.stat().st_size for path in helpers(record))
    claims = [(log.path.name, log.code_bytes) for log in record.logs]
    claims.append(("submission.json bytes_code", record.submission.get("bytes_code")))
    for place, claim in claims:
        if record.script.is_file() and claim is not None and claim not in (code, code + extra):
            yield (f"{place}: {claim}, train_gpt.py has {code:,} bytes",
                   "ship the script that trained, as it was counted; if it was packed, ship the packed file")


@rule("helpers", "error", "every file that the script imports or opens is counted as code")
def uncounted_helpers(record: Record) -> Findings:
    found = helpers(record)
    extra, code = sum(path.stat().st_size for path in found), script_bytes(record)
    for log in record.logs:
        if extra and log.code_bytes not in (None, code + extra):
            listed = ", ".join(f"{p.relative_to(record.folder)} ({p.stat().st_size:,} bytes)" for p in found)
            yield f"{log.path.name} counts {log.code_bytes:,} bytes without {listed}", "move the code into train_gpt.py"


@rule("bytes-total", "error", "bytes_total is the largest, the mean or one seed's shipped total")
def bytes_total(record: Record) -> Findings:
    claim, totals = record.submission.get("bytes_total"), shipped_totals(record)
    logged = [log.total_bytes for log in record.logs if log.total_bytes is not None]
    means = [round(statistics.fmean(values)) for values in (totals, logged) if values]
    if isinstance(claim, int) and totals and claim not in {*totals, *logged, *means}:
        yield f"bytes_total {claim:,}, from what ships {max(totals):,}", f"write {max(totals)}"


@rule("model-file", "error", "a model file in the folder is one that a log describes")
def model_file(record: Record) -> Findings:
    known = {log.model_bytes for log in record.logs}
    for path in record.folder.glob("*.ptz"):
        if path.stat().st_size not in known:
            yield f"{path.name} has {path.stat().st_size} bytes, the logs say {known}", "ship the model of a logged run"


# -- runs: finished, in time, honest about seeds -----------------------------------------------------------------------

def scored(record: Record) -> list[Log]:
    return [log for log in record.logs if is_scored(log)]


def is_scored(log: Log) -> bool:
    try:
        return all(map(math.isfinite, final(log)[:2]))
    except ValueError:
        return False


def complete(record: Record) -> bool:
    """Whether means over all logs can be judged; other rules say what is unreadable or unfinished."""
    return not record.broken and all(map(is_scored, record.logs))


@rule("finished", "error", "every log ends with a finite final score")
def finished(record: Record) -> Findings:
    for log in record.logs:
        if not is_scored(log):
            yield f"{log.path.name} has no final score", "ship complete runs only; let the run finish"
        elif log.valid is False:
            yield f"{log.path.name}: valid: {log.summary['valid']}", "the run says why it does not count; run again"


@rule("source", "error", "the script inside each log is train_gpt.py, byte for byte")
def source(record: Record) -> Findings:
    if not record.script.is_file():
        return
    text = record.script.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")
    for log in record.logs:
        if log.source is not None and log.source.replace("\r\n", "\n") != text:
            yield f"{log.path.name}: {first_difference(log.source, text)}", "ship the script that the log holds"


def first_difference(logged: str, shipped: str) -> str:
    pairs = zip(logged.split("\n"), shipped.split("\n"))
    line = next((n for n, (a, b) in enumerate(pairs, 1) if a != b), min(logged.count("\n"), shipped.count("\n")) + 1)
    return f"differs from train_gpt.py at line {line}"


@rule("source-logged", "warning", "each log holds the script that ran")
def source_logged(record: Record) -> Findings:
    for log in record.logs:
        if log.source is None:
            yield f"{log.path.name} holds no script", "ship logs/<run>.txt, not the console's output"


@rule("train-time", "record", f"training with Hessians, and reading training data, ends within {TRAIN_CAP_SECONDS} s")
def train_time(record: Record) -> Findings:
    """The step during which the cap passes may end, as in the published loop; Hessians may not."""
    for log in record.logs:
        seconds = max(log.train_seconds or 0.0, log.last_read_seconds or 0.0)
        step = (log.train_seconds or 0.0) / (log.steps_done or 1) if not log.hessian_seconds else 0.0
        if seconds > TRAIN_CAP_SECONDS + step:
            yield (f"{log.path.name}: {seconds:.1f} s, of them Hessians {log.hessian_seconds or 0:.1f} s",
                   "raise GPTQ_RESERVE_SECONDS or lower MAX_WALLCLOCK_SECONDS")


@rule("eval-time", "record", f"evaluation takes at most {EVAL_CAP_SECONDS} s")
def eval_time(record: Record) -> Findings:
    for log in record.logs:
        if (log.eval_seconds or 0.0) > EVAL_CAP_SECONDS:
            yield f"{log.path.name}: {log.eval_seconds:.1f} s", "raise EVAL_STRIDE or evaluate less"


@rule("seeds", "error", "seeds are distinct, named rightly, and the same in logs and submission.json: none is left out")
def seeds(record: Record) -> Findings:
    logged = [log.seed for log in record.logs if log.seed is not None]
    for seed, count in (Counter(logged) | Counter(record.seeds)).items():
        if count > 1:
            yield f"seed {seed} occurs {count} times", "ship one run a seed"
    for log in record.logs:
        named = re.search(r"seed[_-]?(\d+)", log.path.name)
        if named and log.seed is not None and int(named[1]) != log.seed:
            yield f"{log.path.name} is a run with seed {log.seed}", f"rename it to train_seed{log.seed}.log"
    if record.seeds and logged and not record.broken:
        for seed in sorted(set(record.seeds) - set(logged)):
            yield f"seed {seed} is claimed, but no log has it", "add its log"
        for seed in sorted(set(logged) - set(record.seeds)):
            yield f"seed {seed} has a log, but submission.json leaves it out", "report every seed that was run"


@rule("seed-count", "warning", f"a record shows at least {RECORD_SEEDS} seeds")
def seed_count(record: Record) -> Findings:
    if record.track == "10min_16mb" and 0 < len(record.logs) < RECORD_SEEDS:
        yield f"{len(record.logs)} logs", "run more seeds: p < 0.01 needs them"


@rule("settings", "error", "all seeds ran with the same settings")
def same_settings(record: Record) -> Findings:
    known = [log for log in record.logs if log.settings]
    for log in known[1:]:
        for name in sorted(set(log.settings) & set(known[0].settings) - IDENTITY):
            here, first = log.settings[name], known[0].settings[name]
            if not static.same_setting(here, first):
                yield f"{log.path.name}: {name} {here}, {known[0].path.name}: {first}", "ship seeds of one recipe"


@rule("machines", "warning", "all seeds ran on one kind of machine with one PyTorch")
def machines(record: Record) -> Findings:
    kinds = {(log.hardware, log.world_size, log.torch_version) for log in record.logs}
    if len(kinds) > 1:
        yield "; ".join(sorted(str(kind) for kind in kinds)), "say in the README which seed ran where"


@rule("hardware", "record", "a record ran on 8 x H100")
def hardware(record: Record) -> Findings:
    for log in record.logs if record.track == "10min_16mb" else ():
        if log.world_size not in (None, 8) or (log.hardware and "H100" not in log.hardware):
            yield f"{log.path.name}: {log.world_size} ranks, {log.hardware}", "submit to the track non_record_16mb"


@rule("validation", "record", "the score covers the whole validation split, with the right number of bytes")
def validation(record: Record) -> Findings:
    for log in scored(record):
        loss, bpb, _ = final(log)
        found = log.val_tokens and log.val_tokens * loss / (math.log(2) * bpb)
        if found and abs(found / VAL_BYTES - 1) > 0.002:
            yield (f"{log.path.name}: loss, bpb and {log.val_tokens:,} tokens mean {found:,.0f} bytes, "
                   f"the split has {VAL_BYTES:,}", "score the whole split, or say in the README what was scored")


# -- claims against logs -----------------------------------------------------------------------------------------------

def agrees(claim: Any, actual: float | None, digits: int = 0) -> bool:
    """Whether `claim` is `actual` rounded to the decimals that it shows, at least `digits` of them."""
    if actual is None or not isinstance(claim, (int, float)):
        return True  # nothing to compare; the schema judges types
    shown = len(str(claim).partition(".")[2]) if "e" not in str(claim) else 16
    return abs(claim - actual) <= 0.5 * 10.0 ** -max(shown, digits) + 2e-9


@rule("numbers", "error", "submission.json's scores are the means over all logs; a seed's numbers are its log's")
def numbers(record: Record) -> Findings:
    logs = scored(record)
    for place, name in (("val_loss", 0), ("val_bpb", 1)) if logs and complete(record) else ():
        mean, claim = statistics.fmean(final(log)[name] for log in logs), record.submission.get(place)
        if not agrees(claim, mean, 4):
            yield f"{place} {claim}, mean of {len(logs)} logs {mean:.8f}", f"write {mean:.8f}"
    for log in logs:
        for name, actual in facts(log).items():
            claim = record.results.get(log.seed, {}).get(name)
            if not agrees(claim, actual, 4 if name.startswith("val_") else 0):
                yield f"seed {log.seed}: {name} {claim}, log {actual}", f"write {actual}"


@rule("spread", "error", "val_bpb_std is the standard deviation over all logs")
def spread(record: Record) -> Findings:
    values, claim = [final(log)[1] for log in scored(record)], record.submission.get("val_bpb_std")
    if len(values) < 2 or not complete(record):
        return
    if not any(agrees(claim, deviation(values)) for deviation in (statistics.stdev, statistics.pstdev)):
        yield f"val_bpb_std {claim}, logs {statistics.stdev(values):.8f}", "write the sample deviation"


NUMBER = re.compile(r"(?<![\w.,/-])(\d{1,3}(?:,\d{3})+|\d+)(\.\d+)?(?!\w|\.\d)")


def readme(record: Record) -> str:
    path = record.folder / "README.md"
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def known_numbers(log: Log) -> list[float]:
    """Every number that one log states, and the differences between its scores."""
    scores = [value for score in log.evaluations.values() for value in score if value is not None]
    known = [*scores, *(abs(a - b) for a in scores for b in scores)]
    known += [value for row in (*log.steps, *log.validations) for value in row if value is not None]
    known += [value for value in vars(log).values() if isinstance(value, (int, float))]
    for text in (*log.summary.values(), *log.settings.values()):
        if re.fullmatch(r"[-+.\de]*\d", text):
            known.append(float(text))
    return known


def untraced(text: str, known: list[float]) -> list[str]:
    """Numbers with four decimals or from 1,000 up that are none of `known` after rounding."""
    lost = []
    for match in NUMBER.finditer(text):
        whole, decimals = match[1].replace(",", ""), match[2] or ""
        if len(decimals) > 4 or (not decimals and int(whole) >= 1000):
            half = 0.5 * 10.0 ** -max(len(decimals) - 1, 0) + 2e-9
            if not any(abs(float(whole + decimals) - value) <= half for value in known):
                lost.append(match[0])
    return lost


def seed_rows(record: Record) -> dict[int, str]:
    """The README's table rows whose first cell is a seed of a log."""
    rows = {}
    for line in readme(record).split("\n"):
        match = re.match(r"\|\W*(?:seed\s*)?(\d+)\W*\|", line, re.IGNORECASE)
        if match and int(match[1]) in [log.seed for log in record.logs]:
            rows.setdefault(int(match[1]), line[match.end():])
    return rows


def prose(record: Record) -> str:
    """The README without its rows of seeds and of settings."""
    done = {str(seed) for seed in seed_rows(record)} | {name for log in record.logs for name in log.settings}
    first_cells = ((re.match(r"\|[\s*`]*(?:seed )?(\w+)", line, re.IGNORECASE), line)
                   for line in readme(record).split("\n"))
    return "\n".join(line for cell, line in first_cells if not cell or (cell[1] not in done and "(gone)" not in line))


@rule("readme-table", "error", "each number in the README's row of a seed is in that seed's log")
def readme_table(record: Record) -> Findings:
    logs = {log.seed: log for log in record.logs}
    for seed, row in seed_rows(record).items():
        code = script_bytes(record) + (logs[seed].model_bytes or 0)
        if lost := untraced(row, [*known_numbers(logs[seed]), code]):
            yield f"seed {seed}: {', '.join(lost)}", "copy the numbers from the log; `golf new` does it"


@rule("readme-score", "error", "the README states the mean val_bpb of the logs")
def readme_score(record: Record) -> Findings:
    values = [final(log)[1] for log in scored(record)] if complete(record) else []
    found = [float(m[0]) for m in NUMBER.finditer(prose(record)) if m[2] and len(m[2]) > 4]
    if readme(record) and values and not any(agrees(number, statistics.fmean(values), 4) for number in found):
        yield f"{statistics.fmean(values):.4f} is nowhere in README.md", "state the mean over all seeds"


@rule("readme-untraced", "warning", "every other score-like number in the README comes from a log")
def readme_untraced(record: Record) -> Findings:
    known = [value for log in record.logs for value in known_numbers(log)]
    for name in {name for log in record.logs for name in log.evaluations}:
        for place in (0, 1):
            values = [log.evaluations[name][place] for log in record.logs if name in log.evaluations]
            known += [statistics.fmean(values), statistics.pstdev(values)]
            known += [statistics.stdev(values)] if len(values) > 1 else []
    lost = [number for number in untraced(prose(record), known) if "." in number]
    if lost and record.logs:
        yield ", ".join(dict.fromkeys(lost[:8])), "say in the README where they come from, or remove them"


def stated_settings(text: str) -> dict[str, set[str]]:
    """Numbers and truth values that a README gives to names: in rows that start with the name, and in NAME=value."""
    stated: dict[str, set[str]] = {}
    for name, value in re.findall(r"\b([A-Z][A-Z0-9_]+)=(\S+)", text):
        stated.setdefault(name.lower(), set()).add(value)
    for line in text.split("\n"):
        cells = [cell.strip(" *`") for cell in line.split("|")[1:-1]]
        stated.setdefault(cells[0].lower() if cells else "", set()).update(cells[1:])
    return {name: {value for value in values if re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?|True|False", value)}
            for name, values in stated.items()}


@rule("readme-settings", "error", "a setting that the README states has, somewhere in it, the value that was logged")
def readme_settings(record: Record) -> Findings:
    for name, stated in sorted(stated_settings(readme(record)).items()):
        logged = {log.settings[name] for log in record.logs if name in log.settings and name not in IDENTITY}
        if stated and logged and not any(static.same_setting(a, b) for a in stated for b in logged):
            yield f"{name}: README {', '.join(sorted(stated))}, logs {', '.join(sorted(logged))}", "state what ran"


@rule("readme-command", "error", "scripts in the README's commands ship")
def readme_command(record: Record) -> Findings:
    command = r"(?:python3?|torchrun|nproc[_-]per[_-]node=\S+)\s+(?:-\S+\s+)*([\w./-]+\.py)\b"
    for name in re.findall(command, readme(record)):
        path = Path(name)
        if not (record.folder / path.name).is_file() and "data" not in path.parts and "golf" not in path.parts:
            yield f"{name} is not in the folder", "name a script that ships"


# -- code --------------------------------------------------------------------------------------------------------------

def script_text(record: Record) -> str:
    return record.script.read_bytes().decode("utf-8", "replace") if record.script.is_file() else ""


@rule("compiles", "error", "train_gpt.py compiles with each Python from 3.10 to 3.13 on this machine")
def compiles(record: Record) -> Findings:
    for version, problem in scripts.compile_everywhere(script_text(record)).items():
        if problem and problem != scripts.NOT_FOUND:
            yield f"Python {version}: {problem}", f"write it so that Python {version} accepts it"


@rule("pythons", "note", "all of Python 3.10 to 3.13 were tried")
def pythons(record: Record) -> Findings:
    versions = scripts.compile_everywhere(script_text(record))
    if missing := [version for version, problem in versions.items() if problem == scripts.NOT_FOUND]:
        yield f"not on this machine: Python {', '.join(missing)}", "check there, or install them"


@rule("imports", "error", "train_gpt.py can be imported from any folder")
def imports(record: Record) -> Findings:
    verdict, detail = import_verdict(record)
    if verdict == "failed":
        yield detail, "declare the package in requirements.txt, or ship the code in train_gpt.py"


@rule("imports-static", "note", "train_gpt.py was imported, not only read")
def imports_static(record: Record) -> Findings:
    verdict, detail = import_verdict(record)
    if verdict == "static":
        yield detail, "nothing to do; importing without a GPU tells more"


def import_verdict(record: Record) -> tuple[str, str]:
    if not record.script.is_file():
        return "fine", ""
    if not record.may_import:
        return "static", "importing was switched off"
    return scripts.try_import(record.script, script_text(record))


@rule("packages", "error", "every package that the script cannot do without is in requirements.txt")
def undeclared(record: Record) -> Findings:
    path = record.folder / "requirements.txt"
    declared = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None
    for name in sorted(scripts.undeclared(record.folder, script_text(record), declared)):
        yield f"{name} is neither in requirements.txt nor in the folder", f"add {name}, or guard its import with try"


@rule("ascii", "warning", "train_gpt.py and file names are ASCII")
def ascii_only(record: Record) -> Findings:
    for number, line in enumerate(script_text(record).split("\n"), 1):
        if not line.isascii():
            yield f"train_gpt.py:{number}: {line.strip()[:60]!a}", "write it as an escape such as \\u2581"
            break
    for path in record.folder.iterdir():
        if not path.name.isascii():
            yield ascii(path.name), "rename it"


@rule("home-paths", "error", "no path of somebody's home in what ships")
def home_paths(record: Record) -> Findings:
    for name in ("README.md", "submission.json", "train_gpt.py", "requirements.txt"):
        path = record.folder / name
        if path.is_file() and (match := HOME.search(path.read_text(encoding="utf-8", errors="replace"))):
            yield f"{name}: {match[0]}", "use a relative path or a setting"


@rule("home-paths-logged", "warning", "no path of somebody's home in the logged settings")
def home_paths_logged(record: Record) -> Findings:
    for log in record.logs:
        if match := next(filter(None, map(HOME.search, log.settings.values())), None):
            yield f"{log.path.name}: {match[0]}", "run with relative paths; do not edit a log"
