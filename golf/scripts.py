"""What can be known about a training script: read without running it, compiled by each Python, imported elsewhere."""
from __future__ import annotations

import ast
import base64
import bz2
import contextlib
import importlib.util
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

PYTHONS = ("3.10", "3.11", "3.12", "3.13")
NOT_FOUND = "not found"
IMPORT_TIMEOUT_SECONDS = 90
NO_CODE = re.compile(  # not counted: logs, which are read as such, data, tokenizers, texts
    r".*\.log|(.*/)?(fineweb_(train|val)_\d+\.(bin|bytes)|fineweb_\d+_bpe\w*\.(model|vocab))|"
    r"(.*/)?(README\.md|submission\.json|requirements\.txt)")
GPU_CALLS = ("torch.cuda.", "torch.distributed.", "dist.", "init_process_group")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
# Modules whose package has another name, or that come with another package.
PACKAGE_OF = {"flash_attn_interface": ("flash-attn-3", "flash-attn"), "flash_attn": ("flash-attn",),
              "yaml": ("pyyaml",), "triton": ("triton", "torch"), "sklearn": ("scikit-learn",), "google": ("protobuf",)}
COMMON = ("torch", "numpy", "sentencepiece", "brotli", "tqdm", "huggingface_hub", "datasets", "tiktoken", "zstandard",
          "kernels", "einops", "scipy")
COMPILE = "import sys; compile(sys.stdin.buffer.read(), 'train_gpt.py', 'exec', dont_inherit=True)"
IMPORT = ("import importlib.util as u, sys; sys.path[0] = sys.argv[2]; s = u.spec_from_file_location('train_gpt', "
          "sys.argv[1]); m = u.module_from_spec(s); sys.modules['train_gpt'] = m; s.loader.exec_module(m)")

# -- what packed scripts hold ------------------------------------------------------------------------------------------

# Of the packed text; without ESC, which would reach a terminal that shows the file.
ALPHABET = bytes(c for c in range(1, 128) if c not in b'\n\r\x1b"\\')
MOST_TEXT = 200_000  # digits of one number, which takes a time of their square
MOST_SOURCE_BYTES = 2**20  # of an unpacked script: a small file can hold one of gigabytes

def expand(coder: Any, data: bytes) -> bytes:
    """All that a decompressor of lzma, bz2 or zlib makes of `data`. Raises ValueError when cut short or too long."""
    source = coder.decompress(data, MOST_SOURCE_BYTES)
    if not coder.eof:
        raise ValueError(f"cut short, or over {MOST_SOURCE_BYTES} bytes")
    return source

def expand_lzma(data: bytes) -> bytes:
    return expand(lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=[{"id": lzma.FILTER_LZMA2}]), data)

def expand_brotli(data: bytes) -> bytes:
    import brotli

    coder, source = brotli.Decompressor(), b""
    for at in range(0, len(data), 64):  # few bytes at a time, since old versions put no limit on what they give
        source += coder.process(data[at:at + 64])
        if len(source) > MOST_SOURCE_BYTES:
            raise ValueError(f"over {MOST_SOURCE_BYTES} bytes")
    if not coder.is_finished():
        raise ValueError("cut short")
    return source

def unpack_source(packed: str) -> str:
    """The minified source inside a packed script, read without running it. Raises ValueError for any other file."""
    try:
        body = ast.parse(packed).body
        module, text = body[0].names[0].name, body[2].iter.value
        length = body[3].value.func.value.args[0].args[0].value
        if not len(text) >= length or len(text) > MOST_TEXT:
            raise ValueError(f"{len(text)} characters for {length} bytes")
        number = 0
        for digit in text:
            number = number * len(ALPHABET) + ALPHABET.index(digit)
        data = number.to_bytes(length, "big")
        return {"lzma": expand_lzma, "brotli": expand_brotli}[module](data).decode("utf-8")
    except Exception as error:  # noqa: BLE001 - a foreign or damaged file fails in many ways, which mean the same
        raise ValueError(f"not a script that `pack` wrote ({error!r}); give the packed file") from None

# -- reading -----------------------------------------------------------------------------------------------------------

def parse(source: str) -> ast.Module:
    """`ast.parse` that raises SyntaxError for whatever is no Python."""
    try:
        return ast.parse(source)
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, or nested too deeply
        raise SyntaxError(str(error)) from None

def sources(script: str) -> list[str]:
    """The script and, when it unpacks itself from a text constant, what it unpacks. Raises SyntaxError."""
    with contextlib.suppress(ValueError):  # then it is not one of ours
        return [script, unpack_source(script)]
    blobs = [node.value for node in ast.walk(parse(script))
             if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and len(node.value) > 500]
    return [script, *(text for blob in blobs for text in unpacked(blob))]

def unpacked(blob: str | bytes) -> Iterator[str]:
    """Python sources that a constant holds in any usual encoding and compression."""
    raw = blob.encode("latin-1", "ignore") if isinstance(blob, str) else blob
    expanders = (lambda data: expand(lzma.LZMADecompressor(), data), expand_lzma, expand_brotli,
                 lambda data: expand(zlib.decompressobj(), data), lambda data: expand(bz2.BZ2Decompressor(), data))
    for decode in (bytes, base64.b85decode, base64.a85decode, base64.b64decode):
        for expander in expanders:
            with contextlib.suppress(Exception):  # each library has its own error for foreign bytes
                text = expander(decode(raw)).decode("utf-8")
                if "\n" in text and parse(text):
                    yield text

def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"

def imported(node: ast.AST) -> list[str]:
    """Dotted names that one node imports; for `from a import b` both a and a.b, since b may be a module."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module or ''}.{alias}".strip(".") for alias in ("", *(alias.name for alias in node.names))]
    if isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("import_module", "__import__"):
        return [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return []

def packages(source: str) -> dict[str, bool]:
    """Imported top names outside the standard library; true where a missing one stops the script at its start."""
    found: dict[str, bool] = {}
    todo: list[tuple[ast.AST, bool]] = [(parse(source), True)]
    while todo:
        node, needed = todo.pop()
        for name in filter(None, (name.strip(".").split(".")[0] for name in imported(node))):
            found[name] = found.get(name, False) or (needed and not isinstance(node, ast.Call))
        needed = needed and not isinstance(node, (ast.Try, *FUNCTIONS))
        todo += [(child, needed) for child in ast.iter_child_nodes(node)]
    return {name: needed for name, needed in found.items() if name not in sys.stdlib_module_names}

def reached_files(script: Path) -> list[Path]:
    """Files of the script's folder that it, or a module of it, imports or names in a literal (open, exec, ctypes ...).

    Data, tokenizers and logs are left out. Raises SyntaxError."""
    folder, todo, found = script.parent, [script], []
    while todo:
        for source in sources(todo.pop().read_text(encoding="utf-8", errors="replace")):
            for name in sorted(candidates(source)):
                file = folder / name
                ships = file.is_file() and file.resolve().is_relative_to(folder.resolve())
                if ships and not NO_CODE.fullmatch(name) and file not in [script, *found]:
                    found.append(file)
                    todo += [file] if file.suffix == ".py" else []
    return sorted(found)

def candidates(source: str) -> set[str]:
    """Relative paths that imports and short text constants could mean; commands are split into words."""
    names, nodes = set(), list(ast.walk(parse(source)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        for name in filter(None, (name.strip(".").replace(".", "/") for name in imported(node))):
            names |= {f"{name}.py", f"{name}/__init__.py", f"{name}.so", f"{name}.pyd"}
        text = isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) < 300
        if text and node not in docstrings:
            names |= {word for word in node.value.split() if re.fullmatch(r"[\w.+-][\w./+-]*", word)}
    return names

def import_time_work(source: str) -> list[str]:
    """Calls at import level that need a GPU or a process group, or that start the program itself."""
    tree, found = parse(source), []
    starters = {node.name for node in tree.body if isinstance(node, FUNCTIONS[:2])} & {"main", "run", "train"}
    todo: list[ast.AST] = [tree]
    while todo:
        node = todo.pop(0)
        guarded = isinstance(node, ast.If) and re.search("__name__.*__main__", ast.unparse(node.test))
        if isinstance(node, FUNCTIONS) or guarded:
            continue
        if isinstance(node, ast.Call):
            name, values = dotted(node.func), [*node.args, *(keyword.value for keyword in node.keywords)]
            on_gpu = any(isinstance(arg, ast.Constant) and str(arg.value).startswith("cuda") for arg in values)
            if on_gpu or name in starters or name.startswith(GPU_CALLS) or name.endswith(".cuda"):
                found.append(f"{name}() at line {node.lineno}")
        todo += ast.iter_child_nodes(node)
    return found

# -- settings ----------------------------------------------------------------------------------------------------------

def defaults(script: str) -> dict[str, str]:
    """Default of each setting in a script's class Hyperparameters, as text; empty when there is no such class.

    A default is the literal in `name = setting(1)`, `name = int(os.environ.get("NAME", 1))` or `name = 1`."""
    nodes = [node for source in sources(script) for node in ast.walk(parse(source))]
    items = [item for node in nodes if isinstance(node, ast.ClassDef) and node.name == "Hyperparameters"
             for item in node.body if isinstance(item, (ast.Assign, ast.AnnAssign))]
    pairs = ((item.targets[0] if isinstance(item, ast.Assign) else item.target, default_value(item.value))
             for item in items)
    return {name.id: str(value) for name, value in pairs if isinstance(name, ast.Name) and value is not None}

def default_value(node: ast.AST | None) -> Any:
    """The literal that a default's expression holds; None when it is computed."""
    if isinstance(node, ast.Call):
        place = 1 if dotted(node.func).endswith(("environ.get", "getenv")) else 0
        return default_value(node.args[place]) if len(node.args) > place else None
    try:
        return ast.literal_eval(node) if node is not None else None
    except ValueError:
        return None

def same_setting(a: str, b: str) -> bool:
    """Whether two texts mean one value: 1 is True is 1.0."""
    def value(text: str) -> Any:
        text = {"True": "1", "False": "0"}.get(text, text)
        try:
            return float(text)
        except ValueError:
            return text
    return value(a) == value(b)

# -- trying ------------------------------------------------------------------------------------------------------------

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
    return {version: compile_with(find_python(version), source) for version in PYTHONS}

def compile_with(python: str | None, source: str) -> str:
    if python is None:
        return NOT_FOUND
    done = subprocess.run([python, "-I", "-S", "-W", "ignore", "-c", COMPILE], input=source.encode("utf-8"),
                          capture_output=True, check=False, timeout=120)
    lines = done.stderr.decode("utf-8", "replace").strip().split("\n")
    place = next((line.strip() for line in reversed(lines) if "line " in line), "")
    return f"{lines[-1]} ({place})" if done.returncode else ""

@cache
def try_import(script: Path, source: str) -> tuple[str, str]:
    """`fine`, `failed` with the error, or `static` with why it was not tried.

    `source` is the script's text; a changed text is tried anew."""
    try:
        texts = sources(source)
    except SyntaxError:
        return "static", "not imported: it does not compile with this Python"
    for text in texts:
        if work := import_time_work(text):
            return "static", f"not imported: work at import ({', '.join(work[:3])})"
        missing = [name for name, needed in packages(text).items()
                   if needed and not is_local(script.parent, name) and importlib.util.find_spec(name) is None]
        if missing and all(name in PACKAGE_OF or name in COMMON for name in missing):
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

def is_local(folder: Path, name: str) -> bool:
    return (folder / f"{name}.py").is_file() or (folder / name).is_dir()

def undeclared(folder: Path, source: str, requirements: str | None) -> set[str]:
    """Modules imported outside try and functions that neither requirements.txt nor the folder provides.

    Without requirements.txt, as in most public records, packages that everybody has count as declared."""
    def plain(name: str) -> str:
        return re.sub(r"[_.]", "-", name.lower())

    listed = "\n".join((*COMMON, *sum(PACKAGE_OF.values(), ()))) if requirements is None else requirements
    declared = {plain(match[0]) for match in re.finditer(r"(?m)^[A-Za-z0-9][\w.-]*", listed)}
    try:
        needed = {name for text in sources(source) for name, must in packages(text).items() if must}
    except SyntaxError:
        return set()
    return {name for name in needed if not is_local(folder, name)
            and not any(plain(package) in declared for package in PACKAGE_OF.get(name, (name,)))}
