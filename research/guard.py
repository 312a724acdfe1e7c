"""What an experiment may not change: the metric in the script, other code, tokenizer and data."""
from __future__ import annotations

import ast
import hashlib
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path

# Names of definitions that compute, count, time or print the score.
FROZEN = "(?i)eval|valid|bpb|score|byte_?table|tokenizer|sliding|pad_win|sidecar|summar|size_cap|manifest|watch|clock"
READ_WHOLE = (".model", ".vocab", ".json")


def definitions(node: ast.AST, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Qualified name and text, without comments and layout, of functions, classes and constants; methods one by one."""
    for item in getattr(node, "body", []):
        if isinstance(item, ast.ClassDef):
            yield prefix + item.name, ast.unparse(item)
            yield from definitions(item, f"{prefix}{item.name}.")
        elif isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield prefix + item.name, ast.unparse(item)
        elif isinstance(item, (ast.Assign, ast.AnnAssign)):
            for target in getattr(item, "targets", None) or [item.target]:
                yield prefix + ast.unparse(target), ast.unparse(item)


def frozen_parts(source: bytes, pattern: str) -> dict[str, str]:
    """Functions, methods, classes and module constants whose last name matches, by name; fields of a class, such as
    settings, may change. Raises SyntaxError."""
    chosen = re.compile(pattern)
    found: dict[str, str] = {}
    for name, text in definitions(ast.parse(source)):
        last = name.rsplit(".", 1)[-1]
        if chosen.search(last) and (text.startswith(("def ", "async ", "class ", "@")) or "." not in name):
            found[name] = found.get(name, "") + text  # defined twice: both count
    return found


def script_problem(base: bytes, source: bytes, pattern: str) -> str | None:
    """Why a changed script is invalid; None when it may run. Raises SyntaxError for a script that cannot run."""
    old, new = frozen_parts(base, pattern), frozen_parts(source, pattern)
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return f"changes the metric: {', '.join(names[:5])}" if names else None


def is_code_or_data(name: str) -> bool:
    return name.endswith((".py", ".model", ".vocab", ".bin"))


def fingerprint_data(root: Path, environ: dict[str, str]) -> dict[str, str]:
    """By path: sha256 of tokenizers, manifests and validation shards, and the size of all other shards."""
    folder = root / environ.get("DATA_DIR", "data")
    found = {}
    for path in sorted(Path(parent, name) for parent, _, names in os.walk(folder, followlinks=True) for name in names):
        if path.is_file() and path.suffix in (*READ_WHOLE, ".bin"):
            if path.suffix in READ_WHOLE or "val" in path.name:
                with path.open("rb") as f:
                    value = hashlib.file_digest(f, "sha256").hexdigest()
            else:
                value = f"{path.stat().st_size} bytes"
            found[os.path.relpath(path, root)] = value
    return found


def data_problem(old: dict[str, str], new: dict[str, str]) -> str | None:
    names = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
    return f"data or tokenizer changed: {', '.join(names[:3])}" if names else None


def hardware(gpu: str | None = None) -> str:
    """Such as `1 x NVIDIA H200, torch 2.11.0`: scores compare only when it is the same."""
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    return f"{gpus(gpu) or f'{os.cpu_count()} cores {platform.machine()}'}, torch {torch}"


@cache
def gpus(gpu: str | None) -> str | None:
    if shutil.which("nvidia-smi") is None:
        return None
    done = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True,
                          check=False, timeout=60)
    names = [name.strip() for name in done.stdout.split("\n") if name.strip()]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = 1 if gpu is not None else len(names) if visible is None else len([v for v in visible.split(",") if v])
    return f"{count} x {names[0]}" if done.returncode == 0 and names and count else None
