"""Tries a script in other interpreters: compiles it with each Python, imports it from another folder."""
from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from golf import static

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
NOT_FOUND = "not found"
IMPORT_TIMEOUT_SECONDS = 90
# Modules whose package has another name, or that come with another package.
PACKAGE_OF = {"flash_attn_interface": ("flash-attn-3", "flash-attn"), "flash_attn": ("flash-attn",),
              "yaml": ("pyyaml",), "triton": ("triton", "torch"), "sklearn": ("scikit-learn",), "google": ("protobuf",)}
COMMON = ("torch", "numpy", "sentencepiece", "brotli", "tqdm", "huggingface_hub", "datasets", "tiktoken", "zstandard",
          "kernels", "einops", "scipy")
COMPILE = "import sys; compile(sys.stdin.buffer.read(), 'train_gpt.py', 'exec', dont_inherit=True)"
IMPORT = ("import importlib.util as u, sys; sys.path[0] = sys.argv[2]; s = u.spec_from_file_location('train_gpt', "
          "sys.argv[1]); m = u.module_from_spec(s); sys.modules['train_gpt'] = m; s.loader.exec_module(m)")


@cache
def find_python(version: str) -> str | None:
    """An executable that is this Python; a launcher whose version is not installed does not count."""
    if sys.version.startswith(f"{version}."):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for path in (shutil.which(f"python{version}"), *pyenv.glob(f"versions/{version}.*/bin/python{version}")):
        if path and subprocess.run([path, "-c", ""], capture_output=True, check=False, timeout=60).returncode == 0:
            return str(path)
    return None


@cache
def compile_everywhere(source: str) -> dict[str, str]:
    """By version: empty when the source compiles, else the error's last line or NOT_FOUND."""
    results = {}
    for version in PYTHONS:
        python = find_python(version)
        if python is None:
            results[version] = NOT_FOUND
            continue
        done = subprocess.run([python, "-I", "-S", "-W", "ignore", "-c", COMPILE], input=source.encode("utf-8"),
                              capture_output=True, check=False, timeout=120)
        lines = done.stderr.decode("utf-8", "replace").strip().split("\n")
        place = next((line.strip() for line in reversed(lines) if "line " in line), "")
        results[version] = f"{lines[-1]} ({place})" if done.returncode else ""
    return results


@cache
def try_import(script: Path, source: str) -> tuple[str, str]:
    """`fine`, `failed` with the error, or `static` with why it was not tried.

    `source` is the script's text; a changed text is tried anew."""
    try:
        texts = static.sources(source)
    except SyntaxError:
        return "static", "not imported: it does not compile with this Python"
    for text in texts:
        if work := static.import_time_work(text):
            return "static", f"not imported: work at import ({', '.join(work[:3])})"
        missing = [name for name, needed in static.packages(text).items()
                   if needed and not local(script.parent, name) and find_spec(name) is None]
        if missing and all(map(is_known_package, missing)):
            return "static", f"not imported: not installed here: {', '.join(missing)}"
    return import_elsewhere(script)


def import_elsewhere(script: Path) -> tuple[str, str]:
    """Imports in a fresh process that works in an empty folder and sees no GPU; writes no bytecode."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = subprocess.run([sys.executable, "-B", "-c", IMPORT, script.resolve(), script.resolve().parent],
                                  cwd=folder, env=environment, capture_output=True, text=True, check=False,
                                  stdin=subprocess.DEVNULL, timeout=IMPORT_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:
            return "failed", f"importing takes longer than {IMPORT_TIMEOUT_SECONDS} s"
    lines = (done.stderr or done.stdout).strip().split("\n")
    return ("failed", lines[-1][:300] or f"exit status {done.returncode}") if done.returncode else ("fine", "")


def local(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()


def is_known_package(name: str) -> bool:
    return name in PACKAGE_OF or name in COMMON


def undeclared(folder: Path, source: str, requirements: str | None) -> set[str]:
    """Modules imported outside try and functions that neither requirements.txt nor the folder provides.

    Without requirements.txt, as in most public records, packages that everybody has count as declared."""
    requirements = "\n".join((*COMMON, *sum(PACKAGE_OF.values(), ()))) if requirements is None else requirements
    declared = {plain(match[0]) for match in re.finditer(r"(?m)^[A-Za-z0-9][\w.-]*", requirements)}
    try:
        needed = {name for text in static.sources(source) for name, must in static.packages(text).items() if must}
    except SyntaxError:
        return set()
    return {name for name in needed if not local(folder, name)
            and not any(plain(package) in declared for package in PACKAGE_OF.get(name, (name,)))}


def plain(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
