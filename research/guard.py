"""What an experiment may not change: the metric in the script, other code, tokenizer and data. And on what it ran."""
from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

from golf.trial import nvidia_smi

# Names of what computes, counts, times or prints the score, or reads its data or the seed.
FROZEN = re.compile("(?i)eval|valid|bpb|score|byte_?table|tokenizer|sliding|report|sidecar|summar|size_cap|manifest|"
                    "watch|clock|marker|bos_id|plain_text|shard|token_ids|seed|untimed|data(set)?_?dir|^transform$|"
                    "^execute$|^load_artifact$|^warm_up$|^sum$|^main$")
SAID = re.compile(r"(?<!_)(val_bpb|total_bytes|train_seconds)\b|\.seconds \+=")  # by functions that count too
FUNCTIONS = ast.FunctionDef, ast.AsyncFunctionDef

def bindings(node: ast.AST, prefix: str = "", statement: ast.AST | None = None) -> Iterator[tuple[str, ast.AST]]:
    """Each name that a module or its classes bind, also inside of `if`, `with` and loops, with the statement that does;
    and statements that are calls or the like."""
    for item in ast.iter_child_nodes(node):
        by = item if isinstance(item, ast.stmt) else statement
        if isinstance(item, (ast.ClassDef, ast.alias, *FUNCTIONS)):
            yield prefix + (getattr(item, "asname", None) or item.name), by
        elif isinstance(item, ast.Expr) and not isinstance(item.value, ast.Constant):
            yield f"{prefix}statement", item
        elif isinstance(getattr(item, "ctx", None), ast.Store):
            yield prefix + ast.unparse(item), by
        if not isinstance(item, FUNCTIONS):
            yield from bindings(item, f"{prefix}{item.name}." if isinstance(item, ast.ClassDef) else prefix, by)

def frozen_parts(source: bytes) -> dict[str, str]:
    """Text, without comments, of what binds a name whose last part matches FROZEN, by name; of functions and statements
    in which SAID is found; and of calls that seed. Raises SyntaxError."""
    found: dict[str, str] = {}
    tree = ast.parse(source)
    for name, node in bindings(tree):
        counts = isinstance(node, (ast.Expr, *FUNCTIONS)) and SAID.search(ast.unparse(node))
        if counts or FROZEN.search(name.rsplit(".", 1)[-1]):
            found[name] = found.get(name, "") + ast.unparse(node)  # bound twice: both count
    calls = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)
             and ast.unparse(node.func).rsplit(".", 1)[-1] in ("seed", "manual_seed", "manual_seed_all")]
    return found | {"calls that seed": "\n".join(sorted(calls))} if calls else found

def syntax_nodes(source: bytes) -> int:
    """How much a script says: shorter numbers, names, comments, docstrings or layout make it no simpler."""
    nodes = [*ast.walk(ast.parse(source))]
    return len(nodes) - 2 * sum(isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) for n in nodes)

def differing(what: str, old: dict[str, str], new: dict[str, str]) -> str:
    """`what` and the first names whose values differ; empty when none does."""
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return f"{what}: {', '.join(names[:5])}" if names else ""

def script_problem(base: bytes, source: bytes) -> str:
    """Why a changed script is invalid; empty when it may run. Raises SyntaxError for a script that cannot run."""
    return differing("changes the metric", frozen_parts(base), frozen_parts(source))

READ = re.compile(r"(?:environ(?:\.\w+)?[\[(]|getenv\()\s*[\"'](\w+)")
NO_SETTINGS = {"MAX_WALLCLOCK_SECONDS", "SEED", "OUTPUT_DIR", "RUN_ID", "CUDA_VISIBLE_DEVICES"}  # set or told elsewhere

def outside_settings(source: bytes) -> dict[str, str]:
    """The environment's values of a script's settings: fields of Hyperparameters, and what it reads by name."""
    try:
        owners = [name.partition(".") for name, by in bindings(ast.parse(source)) if isinstance(by, ast.AnnAssign)]
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"the script is no Python ({error}); correct it") from None
    names = {name.upper() for owner, _, name in owners if owner == "Hyperparameters"}
    names = names.union(READ.findall(source.decode("utf-8", "replace"))) - NO_SETTINGS
    return {name: os.environ[name] for name in sorted(names) if name in os.environ}

def fingerprint_data(root: Path) -> dict[str, str]:
    """By path below DATA_DIR: sha256 of tokenizers, manifests and validation shards, the size of other shards."""
    folder, found = root / os.environ.get("DATA_DIR", "data"), {}
    for path in sorted(Path(parent, name) for parent, _, names in os.walk(folder, followlinks=True) for name in names):
        if path.suffix in (".model", ".vocab", ".json") or (path.suffix == ".bin" and "val" in path.name):
            found[os.path.relpath(path, root)] = hashlib.sha256(path.read_bytes()).hexdigest()
        elif path.suffix == ".bin":
            found[os.path.relpath(path, root)] = f"{path.stat().st_size} bytes"
    return found

def data_problem(old: dict[str, str], root: Path) -> str:
    """What changed since `start`; new files count only beside shards that were there then."""
    folders = {Path(name).parent for name in old if name.endswith(".bin")}
    new = {name: value for name, value in fingerprint_data(root).items()
           if name in old or Path(name).parent in folders}
    return differing("data or tokenizer changed", old, new)

def gpu_name(names: list[str], number: str) -> str:
    """One that has no number (a UUID) stands for itself where GPUs differ."""
    if number.isdigit() and int(number) < len(names):
        return names[int(number)]
    return names[0] if len({*names}) == 1 else number

@cache
def hardware(gpu: str | None) -> str:
    """Such as `1 x NVIDIA H200, torch 2.11.0`: scores compare only when it is the same. Raises ValueError for a name
    that is none of a GPU: it becomes a folder's too."""
    if gpu is not None and not re.fullmatch(r"[\w,-]+", gpu):
        raise ValueError(f"GPU {gpu!r} must be letters, digits, - and commas; give its number, such as 0")
    machine = f"{os.cpu_count()} cores {platform.machine()}"
    if names := nvidia_smi("name"):
        visible = gpu if gpu is not None else os.environ.get("CUDA_VISIBLE_DEVICES")
        used = names if visible is None else [gpu_name(names, number) for number in visible.split(",") if number]
        machine = f"{len(used)} x {' and '.join(sorted({*used}))}" if used else machine
    try:
        return f"{machine}, torch {metadata.version('torch')}"
    except metadata.PackageNotFoundError:
        return f"{machine}, torch none"
