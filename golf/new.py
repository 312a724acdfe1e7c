"""`golf new`: a record folder from logs; every number in it is read from them."""
from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import tempfile
import textwrap
from datetime import date
from pathlib import Path
from typing import Any

from golf import scripts
from golf.check import check_folder, show
from golf.cli import add_command, markdown, print_json, shown, write_file
from golf.logs import Log, final, unfinished
from golf.records import (
    FOLDER_NAME,
    HOME,
    IDENTITY,
    RECORDS,
    TRACKS,
    WITHOUT_ARTIFACT,
    facts,
    is_date,
    mean_std,
    read_logs,
    track_name,
)
from golf.trial import ROOT

RUN = ("seed", "steps", "train s", "eval s", "val_loss", "val_bpb")
ARTIFACT = ("pre-quant bpb", "quantised bpb", "model bytes", "total bytes")
README = """# {name}

{blurb}

Mean over {runs}: **{val_bpb:.8f} bpb**, {val_loss:.8f} nats ({spread}).

{table}

Ran on {hardware} with PyTorch {pytorch_version}. The script has {bytes_code} bytes{size}.

## Run

```
{commands}
```

## Settings that differ from the parent script's defaults

{changed}
"""

SIZE = ", the largest artifact with it {bytes_total}. Training seconds include the Hessians"

def read_runs(paths: list[Path], artifacts: bool = True) -> list[Log]:
    """Finished runs of one script with distinct seeds, by seed. Raises ValueError for anything else.

    `artifacts`: whether each must have written one. Only the texts are read, not the .jsonl files, since only the
    texts ship."""
    logs = read_logs(paths, records=False)
    for log in logs:
        if problem := unfinished(log):
            raise ValueError(f"{log.path}: {problem}; let the run finish, and give the log of a whole one")
        if log.settings.get("eval_only"):
            raise ValueError(f"{log.path}: it only scored an artifact (EVAL_ONLY); give the log of the training run")
        if log.source is None:
            raise ValueError(f"{log.path}: holds no script; give logs/<run>.txt, not the console's output")
        if log.seed is None or (artifacts and log.model_bytes is None):
            raise ValueError(f"{log.path}: states no seed{' or no model size' * artifacts}; give the whole log of a "
                             "training run")
        if log.source != logs[0].source:
            raise ValueError(f"{log.path} and {logs[0].path} hold different scripts; one folder is one script: "
                             "give logs of one version")
    seeds = [log.seed for log in logs]
    if twice := {seed for seed in seeds if seeds.count(seed) > 1}:
        raise ValueError(f"seeds {sorted(twice)} occur more than once; give one log a seed")
    return logs

def describe(logs: list[Log], args: argparse.Namespace, track: str) -> dict[str, Any]:
    """The content of submission.json."""
    results = {str(log.seed): {name: value for name, value in facts(log).items() if value is not None}
               for log in logs}
    loss, _ = mean_std([row["val_loss"] for row in results.values()])
    bpb, std = mean_std([row["val_bpb"] for row in results.values()])
    sizes = [log.total_bytes for log in logs if log.total_bytes]
    return {"author": args.author, "github_id": args.github_id, "name": args.name, "blurb": args.blurb,
            "date": args.date, "track": track, "val_loss": round(loss, 8), "val_bpb": round(bpb, 8),
            "val_bpb_std": None if std is None else round(std, 8), "seeds": [log.seed for log in logs],
            "seed_results": results, "hardware": "; ".join(sorted({log.hardware or "unknown" for log in logs})),
            "pytorch_version": "; ".join(sorted({log.torch_version or "unknown" for log in logs})),
            **({"bytes_total": max(sizes)} if sizes else {}), "bytes_code": len(logs[0].source.encode("utf-8"))}

def make_folder(folder: Path, contents: dict[str, str], logs: list[Log]) -> None:
    """All or nothing: fills a temporary folder beside the new one and renames it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        for name, text in contents.items():
            write_file(temporary / name, text)
        for log in logs:
            write_file(temporary / f"train_seed{log.seed}.log", log.path.read_bytes())
        temporary.chmod(0o755)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)

# -- README ------------------------------------------------------------------------------------------------------------

def readme(logs: list[Log], submission: dict[str, Any], parent: Path) -> str:
    std = submission["val_bpb_std"]
    return README.format(
        **submission, runs=f"{len(logs)} seeds" if len(logs) > 1 else "1 seed",
        size=SIZE.format(**submission) if "bytes_total" in submission else "",
        spread="one seed, so no deviation" if std is None else f"standard deviation {std:.8f} bpb",
        table="\n".join(seed_table(logs)), commands="\n".join(run_commands(logs)),
        changed="\n".join(changed_settings(logs[0], parent)))

def seed_table(logs: list[Log]) -> list[str]:
    """A row a run, with what its artifact cost where there is one."""
    rows = []
    for log in logs:
        row = [log.seed, log.steps_done, shown(log.train_seconds, ".1f"), shown(log.eval_seconds, ".1f"),
               *(shown(score, ".8f") for score in final(log)[:2])]
        if log.model_bytes is not None:
            scores = [log.evaluations[name][1] if name in log.evaluations else None for name in ("pre_quant", "int6")]
            row += [*(shown(score, ".8f") for score in scores), log.model_bytes, log.total_bytes]
        rows.append(row)
    return markdown((RUN + ARTIFACT)[:max(map(len, rows))], rows)

def run_commands(logs: list[Log]) -> list[str]:
    """A loop over the seeds, with each setting that is not the shipped script's default; homes are written ~."""
    own = scripts.defaults(logs[0].source)
    changed = {name: value for name, value in logs[0].settings.items()
               if name in own and name not in IDENTITY - {"data_dir"} and not scripts.same_setting(value, own[name])}
    words = [f"{name.upper()}={HOME.sub('~', shlex.quote(value))}" for name, value in sorted(changed.items())]
    launch = f"torchrun --standalone --nproc_per_node={logs[0].world_size or 8} train_gpt.py"
    command = " \\\n    ".join([*textwrap.wrap(" ".join(["SEED=$seed", *words]), 110, break_long_words=False), launch])
    return [f"for seed in {' '.join(str(log.seed) for log in logs)}; do", f"  {command}", "done"]

def changed_settings(log: Log, parent: Path) -> list[str]:
    """Markdown lines for settings whose logged value is not the parent's default, and for new ones."""
    base = scripts.defaults(parent.read_text(encoding="utf-8"))
    if not base:
        return [f"{parent.name} has no class Hyperparameters whose defaults could be compared."]
    apart = IDENTITY | {"world_size", "grad_accum_steps"}
    rows = [(name, base.get(name, "(new)"), value) for name, value in sorted(log.settings.items())
            if name not in apart and not (name in base and scripts.same_setting(value, base[name]))]
    rows += [(name, base[name], "(gone)") for name in sorted(set(base) - set(log.settings)) if log.settings]
    cells = [[re.sub(r"\s+", " ", text) or "(empty)" for text in row] for row in rows]
    return markdown(("setting", "parent", "here"), cells) if rows else ["None."]

# -- command -----------------------------------------------------------------------------------------------------------

def run(args: argparse.Namespace) -> int:
    track = track_name(args.track)
    if track is None:
        raise ValueError(f"track {args.track!r} does not exist; choose one of {', '.join(TRACKS)}")
    folder = args.records / f"track_{track}" / f"{args.date}_{args.name}"
    if not FOLDER_NAME.fullmatch(f"{args.date}_{args.name}") or not is_date(args.date):
        raise ValueError(f"folder name {folder.name!r} must be YYYY-MM-DD_Name of letters, digits, . _ + -; rename")
    if folder.exists():
        raise ValueError(f"{folder} exists and is kept; choose another name or date")
    logs = read_runs(args.logs, artifacts=track not in WITHOUT_ARTIFACT)
    submission = describe(logs, args, track)
    contents = {"train_gpt.py": logs[0].source, "requirements.txt": args.requirements.read_text(encoding="utf-8"),
                "submission.json": json.dumps(submission, indent=1) + "\n",
                "README.md": readme(logs, submission, args.parent)}
    make_folder(folder, contents, logs)
    findings = check_folder(folder)
    if args.json:
        print_json({"folder": str(folder), "findings": [vars(finding) for finding in findings]})
    else:
        print(f"made {os.path.relpath(folder)}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
        show(os.path.relpath(folder), findings)
    return int(any(finding.severity == "error" for finding in findings))

def add_parser(subparsers: Any) -> None:
    parser = add_command(subparsers, "new", run, "make a record folder from the logs of its seeds")
    parser.add_argument("track", help=f"one of {', '.join(TRACKS)}")
    parser.add_argument("name", help="short name without spaces; the folder is called <date>_<name>")
    parser.add_argument("--logs", nargs="+", required=True, type=Path, help="logs/<run>.txt of every seed that was run")
    parser.add_argument("--author", required=True, help="name for the leaderboard")
    parser.add_argument("--github-id", required=True, help="account name")
    parser.add_argument("--blurb", required=True, help="one or two sentences: what is new")
    parser.add_argument("--date", default=date.today().isoformat(), help="YYYY-MM-DD, default today")
    parser.add_argument("--parent", type=Path, default=ROOT / "train_gpt.py", help="script whose defaults are compared")
    parser.add_argument("--requirements", type=Path, default=ROOT / "requirements.txt", help="file to ship")
    parser.add_argument("--records", type=Path, default=RECORDS, help="folder of the tracks")
