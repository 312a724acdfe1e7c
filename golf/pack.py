"""`pack`: turns a training script into a much smaller one that does exactly the same, and proves that it does."""
from __future__ import annotations

import argparse
import ast
import hashlib
import lzma
import os
import re
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from golf import scripts, trial
from golf.cli import add_command, check_output, print_json, print_table, write_file
from golf.logs import read_log
from golf.scripts import ALPHABET, unpack_source

# The shipped file: the hash of the readable source; a number whose digits are the ASCII characters that may stand in a
# literal as they are; its decoder. `__file__` stays the shipped file, whose bytes count; linecache gives tracebacks,
# inspect and Triton the inner source.
STUB = """#golf pack of sha256 {digest}
import {module} as z,linecache as l
n=0
for c in b"{text}":n=n*{base}+c-1-(c>10)-(c>13)-(c>27)-(c>34)-(c>92)
s=z.decompress(n.to_bytes({length},"big"){options}).decode()
f="<{name}>"
l.cache[f]=len(s),None,s.splitlines(1),f
exec(compile(s,f,"exec"))
"""
RAW_LZMA = ",3,None,[{\"id\":33}]"  # FORMAT_RAW, FILTER_LZMA2: no header, no checksum
# Decorators that never look at annotations or names of parameters; any other one (custom operators, jit) may.
PLAIN_DECORATORS = {"property", "staticmethod", "classmethod", "contextmanager", "no_grad", "inference_mode", "setter",
                    "cached_property", "lru_cache", "cache", "wraps", "compile", "disable"}

# -- smaller source ----------------------------------------------------------------------------------------------------

class Stripper(ast.NodeTransformer):
    """Drops docstrings and the annotations of functions, and frees parameters to be renamed.

    Class bodies keep their annotations, since dataclasses read them. Parameters before the first whose name is a
    keyword of a call, or a text, in the script become positional-only: only then may the minifier rename them.
    """

    def __init__(self, tree: ast.Module) -> None:
        nodes = list(ast.walk(tree))
        calls = [node for node in nodes if isinstance(node, ast.Call)]
        self.keywords = {keyword.arg for call in calls for keyword in call.keywords}
        self.keywords |= {node.value for node in nodes if isinstance(node, ast.Constant)}
        self.spread = {last_name(call.func) for call in calls if any(k.arg is None for k in call.keywords)}

    def visit_Module(self, node: ast.Module) -> ast.AST:
        return self._without_docstring(node)

    visit_ClassDef = visit_Module  # noqa: N815 - the name that ast calls

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._without_docstring(node)
        if {last_name(decorator) for decorator in node.decorator_list} <= PLAIN_DECORATORS:
            args, node.returns = node.args, None
            for arg in filter(None, [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]):
                arg.annotation = None
            while node.name not in self.spread and args.args and args.args[0].arg not in self.keywords:
                args.posonlyargs.append(args.args.pop(0))
        return node

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815

    def _without_docstring(self, node: Any) -> Any:
        self.generic_visit(node)
        if ast.get_docstring(node, clean=False) is not None:
            node.body = node.body[1:] or ([] if isinstance(node, ast.Module) else [ast.Pass()])
        return node

def last_name(node: ast.expr) -> str:
    return scripts.dotted(node.func if isinstance(node, ast.Call) else node).split(".")[-1]

def shrink_source(source: str, rename_globals: bool = False) -> str:
    """The same program in fewer characters. Raises ValueError for text that is no Python.

    Literals are not hoisted into variables: that makes the text shorter, but its compressed form 1 % longer.
    """
    import python_minifier

    if source.startswith("#golf pack"):
        raise ValueError("this script is packed already; pack its readable source")
    try:
        tree = ast.parse(source)
    except SyntaxError as error:
        raise ValueError(f"line {error.lineno} is no Python ({error.msg}); pack a script that runs") from None
    tree = ast.fix_missing_locations(Stripper(tree).visit(tree))
    annotations = python_minifier.RemoveAnnotationsOptions(remove_argument_annotations=False,
                                                           remove_return_annotations=False)
    return python_minifier.minify(
        ast.unparse(tree), remove_annotations=annotations, hoist_literals=False, rename_globals=rename_globals,
        preserve_globals=["Hyperparameters"], preserve_shebang=False)

# -- smaller bytes -----------------------------------------------------------------------------------------------------

def compress_lzma(data: bytes) -> bytes:
    """The smallest raw LZMA2 stream over its literal and position bits."""
    settings = ({"id": lzma.FILTER_LZMA2, "preset": 9 | lzma.PRESET_EXTREME, "lc": lc, "lp": lp, "pb": pb}
                for lc in range(5) for lp in range(5 - lc) for pb in range(2))
    return min((lzma.compress(data, lzma.FORMAT_RAW, filters=[s]) for s in settings), key=len)

def compress_brotli(data: bytes) -> bytes:
    import brotli

    return min((brotli.compress(data, mode=mode, quality=11, lgwin=window) for mode in (brotli.MODE_GENERIC,
                brotli.MODE_TEXT) for window in range(16, 25)), key=len)

def to_text(data: bytes) -> str:
    """Bytes as one number with the alphabet's characters as digits, most significant first."""
    number, digits = int.from_bytes(data, "big"), bytearray()
    while number:
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return digits[::-1].decode("ascii")

def needs_brotli(source: str) -> bool:
    return re.search(r"(?m)^\s*(import|from) brotli\b", source) is not None

def pack_source(source: bytes, name: str, codec: str = "auto",
                rename_globals: bool = False) -> tuple[str, dict[str, Any]]:
    """The packed script and its numbers. Brotli competes only when the script itself imports it: no new requirement."""
    text = source.decode("utf-8")
    small = shrink_source(text, rename_globals).encode("utf-8")
    digest, packed = hashlib.sha256(source).hexdigest(), {}
    auto = ["lzma", "brotli"] if needs_brotli(text) else ["lzma"]
    for module in auto if codec == "auto" else [codec]:
        data = {"lzma": compress_lzma, "brotli": compress_brotli}[module](small)
        packed[module] = STUB.format(digest=digest, module=module, text=to_text(data), base=len(ALPHABET), name=name,
                                     length=len(data), options=RAW_LZMA if module == "lzma" else "")
    best = min(packed, key=lambda module: len(packed[module]))
    return packed[best], {"bytes_before": len(source), "bytes_minified": len(small), "bytes_after": len(packed[best]),
                          "codec": best, "source_sha256": digest}

def lost_pythons(source: str, packed: str) -> list[str]:
    """Versions that compile the source but not what is packed: newer Pythons may write syntax of their own."""
    before, after = scripts.compile_everywhere(source), scripts.compile_everywhere(unpack_source(packed))
    return [f"the packed code does not compile with Python {version} ({error}); pack with Python 3.11 or older"
            for version, error in after.items() if error and not before[version]]

# -- proof -------------------------------------------------------------------------------------------------------------

def observe(script: Path, folder: Path, environment: Mapping[str, str], run: bool, seconds: float) -> dict[str, Any]:
    """What a script prints as its settings, logs as losses and writes as its artifact, in `folder`."""
    folder.mkdir()
    command = [sys.executable, str(script)]
    status, output = trial.run_limited([*command, "--print-config"], folder, environment, seconds)
    seen: dict[str, Any] = {"settings status": status, "settings": output}
    if not run:
        return seen
    status, output = trial.run_limited(command, folder, environment, seconds)
    logs = sorted(folder.glob("logs/*.txt"))
    seen |= {"exit status": status, "output": trial.last_lines(output)}
    if status == 0 and logs:
        log = read_log(logs[0])
        seen |= {"losses": [(step, loss) for step, loss, *_ in log.steps], "validations": log.validations,
                 "scores": {name: score[:2] for name, score in log.evaluations.items()}, "code_bytes": log.code_bytes,
                 "source": log.source, "artifacts": {p.name: hashlib.sha256(p.read_bytes()).hexdigest()
                                                     for p in sorted(folder.glob("*.ptz"))}}
    return seen

def differences(before: dict[str, Any], after: dict[str, Any], packed: str, run: bool) -> list[str]:
    """Why the packed script may not replace the original; empty when it may."""
    if run and (before.get("exit status") != 0 or not before.get("losses") or not before.get("artifacts")):
        return [f"the original does not finish a short CPU run (status {before.get('exit status')}), so nothing can be "
                f"compared; set its variables, or compare only the settings with --no-run. Its last lines:\n"
                f"{before.get('output', '')}"]
    found = [f"{key} differ: {before.get(key)!r} before, {after.get(key)!r} after" + (
                 f"; last lines:\n{after.get('output', '')}" if key == "exit status" else "")
             for key in ("settings status", "settings", "exit status", "losses", "validations", "scores", "artifacts")
             if before.get(key) != after.get(key)]
    if run and not found:
        if after["code_bytes"] not in (None, len(packed)):
            found.append(f"the log counts {after['code_bytes']} bytes of code, the file has {len(packed)}")
        if after["source"] not in (None, packed, packed.rstrip("\n")):
            found.append("the source in the log is not the packed file")
    return found

def compare_runs(script: Path, packed: str, data_dir: str | None, run: bool, seconds: float) -> list[str]:
    """Runs both scripts side by side on the CPU in folders of their own; the differences."""
    with tempfile.TemporaryDirectory() as scratch:
        base = Path(scratch)
        environment = {**trial.TINY, **os.environ, **trial.SHORT, "DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": "",
                       "OMP_NUM_THREADS": "1"}
        environment.pop("EVAL_ONLY", None)
        environment.pop("OUTPUT_DIR", None)
        given = data_dir or os.environ.get("DATA_DIR")
        if run and not given:
            trial.make_tiny_data(base / "data", int(environment["VOCAB_SIZE"]))
        environment["DATA_DIR"] = str(Path(given or base / "data").resolve())
        (base / "shipped").mkdir()
        shipped = base / "shipped" / script.name
        shipped.write_bytes(packed.encode("ascii"))
        with ThreadPoolExecutor(2) as pool:
            before, after = pool.map(lambda job: observe(*job, environment, run, seconds),
                                     [(script.resolve(), base / "before"), (shipped, base / "after")])
        return differences(before, after, packed, run)

# -- command -----------------------------------------------------------------------------------------------------------

def run(args: argparse.Namespace) -> int:
    """0 when written (or, with --check, when equal), 1 when the packed script behaves otherwise."""
    if not args.script.is_file():
        raise ValueError(f"{args.script}: no such file; give the path of a training script")
    source = args.script.read_bytes()
    if args.unpack:
        print(unpack_source(source.decode("utf-8")))
        return 0
    out = args.output or args.script.with_name(f"{args.script.stem}_packed.py")
    if args.check:
        packed = args.check.read_bytes().decode("utf-8")
        unpack_source(packed)
        report: dict[str, Any] = {"bytes_before": len(source), "bytes_after": len(packed)}
        same = hashlib.sha256(source).hexdigest() in packed.split("\n")[0]
        problems = [] if same else [f"{args.check} names the hash of another source than {args.script}"]
    else:
        if out.resolve() == args.script.resolve():
            raise ValueError(f"-o {out} is the script itself, whose comments would be lost; choose another -o")
        check_output(out, args.force)
        packed, report = pack_source(source, args.script.name, args.codec, args.rename_globals)
        problems = lost_pythons(source.decode("utf-8"), packed)
    problems += compare_runs(args.script, packed, args.data_dir, not args.no_run, args.timeout)
    if not args.check and not problems:
        write_file(out, packed)
        report["out"] = str(out)
    report["verified"] = "settings" if args.no_run else "settings, losses, scores, artifact, code bytes, logged source"
    if args.json:
        print_json({**report, "problems": problems})
    elif problems:
        print("refused, nothing written:\n" + "\n".join(f"- {p}" for p in problems), file=sys.stderr)
    else:
        print_table(str(args.script), ["number", "value"], list(report.items()))
    return int(bool(problems))

def add_parser(subparsers: Any) -> None:
    parser = add_command(subparsers, "pack", run, "make a self-extracting script that behaves the same")
    parser.add_argument("script", type=Path)
    parser.add_argument("-o", "--output", type=Path, help="where to write it (default: SCRIPT_packed.py beside it)")
    parser.add_argument("--codec", choices=["auto", "lzma", "brotli"], default="auto",
                        help="auto: the smaller one, brotli only when the script needs it anyway")
    parser.add_argument("--rename-globals", action="store_true", help="shorten names of functions and classes too")
    parser.add_argument("--data-dir", help="data for the comparison (default: DATA_DIR, else tiny data made for it)")
    parser.add_argument("--no-run", action="store_true", help="compare only --print-config (scripts that need a GPU)")
    parser.add_argument("--check", type=Path, metavar="PACKED", help="write nothing, compare SCRIPT with this file")
    parser.add_argument("--unpack", action="store_true", help="print the source inside a packed SCRIPT; runs nothing")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds for each run (default: 300)")
    parser.add_argument("--force", action="store_true", help="replace an existing output")
