"""What can be known about a script without running it: files it reaches, imports, defaults, work at import."""
from __future__ import annotations

import ast
import base64
import bz2
import contextlib
import importlib.util
import lzma
import re
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from golf.pack import unpack_source

DOCUMENTS = {"README.md", "submission.json", "requirements.txt"}
NOT_CODE = {".log", ".bin", ".model", ".vocab"}  # logs, data and tokenizers do not count against the cap
GPU_CALLS = ("torch.cuda.", "torch.distributed.", "dist.", "init_process_group")


def parse(source: str) -> ast.Module:
    """`ast.parse` that raises SyntaxError for whatever is no Python."""
    try:
        return ast.parse(source)
    except (ValueError, RecursionError) as error:  # null bytes, or nested too deeply
        raise SyntaxError(str(error)) from None


def sources(script: str) -> list[str]:
    """The script and, when it unpacks itself from a text constant, what it unpacks. Raises SyntaxError."""
    found, tree = [script], parse(script)
    if script.startswith("#golf pack"):
        with contextlib.suppress(ValueError):  # then it is one of somebody else
            return [script, unpack_source(script)]
    blobs = [node.value for node in ast.walk(tree)
             if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) and len(node.value) > 500]
    for blob in blobs:
        found += [text for text in map(as_python, decoded(blob)) if text]
    return found


def decoded(blob: str | bytes) -> Iterator[bytes]:
    raw = blob.encode("latin-1", "ignore") if isinstance(blob, str) else blob
    packed = [raw]
    for decode in (base64.b85decode, base64.a85decode, base64.b64decode):
        try:
            packed.append(decode(raw))
        except ValueError:
            continue
    for data in packed:
        yield from decompressed(data)


def decompressed(data: bytes) -> Iterator[bytes]:
    raw_lzma = {"format": lzma.FORMAT_RAW, "filters": [{"id": lzma.FILTER_LZMA2}]}
    attempts = [lzma.decompress, lambda d: lzma.decompress(d, **raw_lzma), zlib.decompress, bz2.decompress]
    if importlib.util.find_spec("brotli"):
        import brotli
        attempts.append(brotli.decompress)
    for attempt in attempts:
        try:
            yield attempt(data)
        except Exception:  # noqa: BLE001, S112, RUF100 - each library has its own error for foreign bytes
            continue


def as_python(data: bytes) -> str | None:
    try:
        text = data.decode("utf-8")
        return text if isinstance(parse(text), ast.Module) and "\n" in text else None
    except (ValueError, SyntaxError):
        return None


def imports(source: str) -> dict[str, bool]:
    """Top names of all imported modules; true where a missing one stops the script (outside try and functions)."""
    found: dict[str, bool] = {}

    def visit(node: ast.AST, needed: bool) -> None:
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module] if node.module and not node.level else [alias.name for alias in node.names]
        elif isinstance(node, ast.Call) and dotted(node.func).split(".")[-1] in ("import_module", "__import__"):
            names = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
            needed = False
        for name in names:
            top = name.lstrip(".").split(".")[0]
            found[top] = found.get(top, False) or needed
        deeper = needed and not isinstance(node, (ast.Try, ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            visit(child, deeper)

    visit(parse(source), True)
    return found


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def reached_files(script: Path) -> list[Path]:
    """Files of the script's folder that it, or a module of it, imports or names in a literal (open, exec, ctypes ...).

    Data, tokenizers and logs are left out. Raises SyntaxError."""
    folder, todo, found = script.parent, [script], []
    while todo:
        path = todo.pop()
        for source in sources(path.read_text(encoding="utf-8", errors="replace")):
            for name in sorted(candidates(source)):
                file = folder / name
                ships = file.is_file() and file.resolve().is_relative_to(folder.resolve())
                code = file.name not in DOCUMENTS and file.suffix not in NOT_CODE
                if ships and code and file not in [script, *found]:
                    found.append(file)
                    todo += [file] if file.suffix == ".py" else []
    return sorted(found)


def candidates(source: str) -> set[str]:
    """Relative paths that imports and short text constants could mean; commands are split into words."""
    names, tree = set(), parse(source)
    docstrings = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and 0 < len(node.value) < 300:
            if node in docstrings:
                continue
            names |= {word for word in node.value.split() if re.fullmatch(r"[\w./+-]+", word)}
        elif isinstance(node, ast.ImportFrom):
            base = (node.module or "").replace(".", "/")
            names |= {f"{base}/{alias.name}.py".lstrip("/") for alias in node.names} | module_files(base)
        elif isinstance(node, ast.Import):
            names |= {file for alias in node.names for file in module_files(alias.name.replace(".", "/"))}
    names |= {file for name in imports(source) for file in module_files(name)}
    return {name for name in names if not name.startswith("/")}


def module_files(name: str) -> set[str]:
    return {f"{name}.py", f"{name}/__init__.py", f"{name}.so", f"{name}.pyd"} if name else set()


def packages(source: str) -> dict[str, bool]:
    """`imports` without the standard library."""
    return {name: needed for name, needed in imports(source).items() if name not in sys.stdlib_module_names}


def import_time_work(source: str) -> list[str]:
    """Calls at import level that need a GPU or a process group, or that start the program itself."""
    tree, found = parse(source), []
    functions = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}

    def visit(node: ast.AST) -> None:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or is_main_guard(node):
            return
        if isinstance(node, ast.Call):
            name = dotted(node.func)
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            on_gpu = any(isinstance(arg, ast.Constant) and str(arg.value).startswith("cuda") for arg in arguments)
            starts = name in functions & {"main", "run", "train"}
            if on_gpu or starts or name.startswith(GPU_CALLS) or name.endswith(".cuda"):
                found.append(f"{name}() at line {node.lineno}")
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(tree)
    return found


def is_main_guard(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "__name__" in ast.unparse(node.test) and "__main__" in ast.unparse(node.test)


def defaults(script: str) -> dict[str, str]:
    """Default of each setting in a script's class Hyperparameters, as text; empty when there is no such class.

    A default is the literal in `name = setting(1)`, `name = int(os.environ.get("NAME", 1))` or `name = 1`."""
    found: dict[str, str] = {}
    for source in sources(script):
        for node in ast.walk(parse(source)):
            if isinstance(node, ast.ClassDef) and node.name == "Hyperparameters":
                for item in node.body:
                    target = item.targets[0] if isinstance(item, ast.Assign) else getattr(item, "target", None)
                    value = default_value(getattr(item, "value", None))
                    if isinstance(target, ast.Name) and value is not None:
                        found[target.id] = str(value)
    return found


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
