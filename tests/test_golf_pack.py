"""`golf pack`: the packed script is smaller, behaves the same, and is refused when it does not."""
import json
import os
import runpy
import subprocess
import sys

import pytest
from conftest import ROOT, SCRIPT

from golf import pack

# As much of a training script as `pack` looks at: settings, a log that embeds the source, losses, an artifact.
TRAINER = '''"""A stand-in."""
from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_type_hints


@dataclass(frozen=True)
class Settings:
    """All of them."""

    seed: int = 1337
    name: str = "r"


def losses(settings: Settings) -> Iterator[float]:
    """A few numbers."""
    for number_of_step in range(3):
        yield 5.0 - number_of_step / 10 + EXTRA


def main() -> None:
    source, settings = Path(__file__).read_bytes(), Settings()
    if "--print-config" in sys.argv:
        for item in fields(Settings):
            print(item.name, getattr(settings, item.name), get_type_hints(Settings)[item.name])
        return
    Path("logs").mkdir()
    rule = "=" * 100
    with open("logs/trial.txt", "w") as log:
        print(rule, "Hyperparameters:", "  seed: 1337", rule, source.decode(), rule, sep="\\n", file=log)
        print("Running Python 3", "Running PyTorch 2", rule, sep="\\n", file=log)
        for step, loss in enumerate(losses(settings), 1):
            print(f"{step}/3 train_loss: {loss:.4f} train_time: 0.1m tok/s: 100", file=log)
        print(f"Code size: {len(source)} bytes", file=log)
    Path("model.ptz").write_bytes(b"weights")


if __name__ == "__main__":
    main()
'''
TRAINER = TRAINER + "# padding, so that there is something to save\n" * 40


def golf(*arguments, **changes):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **changes}
    return subprocess.run([sys.executable, "-m", "golf", *map(str, arguments)], env=environment, capture_output=True,
                          text=True, check=False, timeout=200)


def trainer(folder, extra: str = "0.0"):
    path = folder / "train.py"
    path.write_text(TRAINER.replace("EXTRA", extra), encoding="utf-8")
    return path


@pytest.mark.parametrize("data", [b"\x01", b"\xff" * 50, bytes(range(1, 256)), b"\x00\x00\x07"])
def test_text_is_an_ascii_literal_that_holds_the_number(data, tmp_path):
    text = pack.to_text(data)
    assert text.isascii() and not set(text) & set('\0\r\n\x1b"\\')
    stub = pack.STUB.split("s=")[0].format(digest="", module="sys", text=text, base=len(pack.ALPHABET))
    (tmp_path / "stub.py").write_text(stub, encoding="ascii", newline="")
    assert runpy.run_path(str(tmp_path / "stub.py"))["n"].to_bytes(len(data), "big") == data


@pytest.mark.parametrize("codec", ["lzma", "brotli"])
def test_packed_source_can_be_read_back_without_running_it(codec):
    packed, report = pack.pack_source(TRAINER.encode(), "train.py", codec)
    assert pack.unpack_source(packed) == pack.shrink_source(TRAINER)
    assert report["bytes_after"] == len(packed) < len(TRAINER) and report["source_sha256"] in packed


def test_brotli_is_no_new_requirement():
    assert pack.pack_source(TRAINER.encode(), "train.py")[1]["codec"] == "lzma"
    assert not pack.needs_brotli("import lzma")
    assert pack.needs_brotli("def f():\n    import brotli")


def test_names_and_hints_that_are_read_from_outside_survive():
    small = pack.shrink_source(
        'from __future__ import annotations\nfrom typing import Any, Literal, get_args\nfrom somewhere import effect\n'
        'class C:\n    """Doc."""\n    width: Literal[1, 2] = 1\n'
        '@custom_op("a::b")\ndef operator(value: Tensor) -> Tensor:\n    "doc"\n    return value\n'
        'def plain(given: Any) -> Any:\n    local_name = given\n    return local_name + get_args(local_name)\n'
        'def keyword(value: Any) -> Any:\n    return plain(value)\n'
        'print(keyword(value=1))\n'
        'def spread(width_of_all): return width_of_all\nprint(spread(**{"width_of_all": 1}))\n')
    for part in ("width:Literal[1,2]=1", "value:Tensor", "->Tensor", "def keyword(value)", "def spread(width_of_all)",
                 "from somewhere import effect", "from __future__ import annotations"):
        assert part in small
    for part in (":Any", "Doc", "doc", "local_name", "given"):
        assert part not in small


def test_packed_script_replaces_the_original_when_it_behaves_the_same(tmp_path):
    result = golf("pack", trainer(tmp_path), "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    packed = tmp_path / "train_packed.py"
    assert report["bytes_after"] == packed.stat().st_size < report["bytes_before"]
    before = (tmp_path / "train.py").read_bytes()
    same = golf("pack", tmp_path / "train.py", "-o", tmp_path / "./train.py", "--force")
    assert same.returncode == 2 and "is the script itself" in same.stderr
    assert (tmp_path / "train.py").read_bytes() == before
    again = golf("pack", tmp_path / "train.py")
    assert again.returncode == 2 and "exists and is kept" in again.stderr and "Traceback" not in again.stderr
    assert golf("pack", tmp_path / "train.py", "--check", packed).returncode == 0
    (tmp_path / "train.py").write_text(TRAINER.replace("EXTRA", "0.5"), encoding="utf-8")
    changed = golf("pack", tmp_path / "train.py", "--check", packed)
    assert changed.returncode == 1 and "another source" in changed.stderr and "losses differ" in changed.stderr
    assert golf("pack", packed, "--unpack").stdout.rstrip("\n") == pack.shrink_source(TRAINER.replace("EXTRA", "0.0"))


def test_packing_twice_and_damaged_packs_are_refused():
    packed, _ = pack.pack_source(TRAINER.encode(), "train.py")
    with pytest.raises(ValueError, match="packed already"):
        pack.pack_source(packed.encode(), "train.py")
    for text in (TRAINER, "#golf pack\n", packed.replace('c in b"', 'c in b"~')):
        with pytest.raises(ValueError, match="not a script that"):
            pack.unpack_source(text)


def test_code_that_older_pythons_cannot_read_is_named(monkeypatch):
    packed, _ = pack.pack_source(TRAINER.encode(), "train.py")
    assert pack.lost_pythons(TRAINER, packed) == []
    monkeypatch.setattr("golf.scripts.compile_everywhere", lambda text: {"3.10": "" if text == TRAINER else "no"})
    assert "Python 3.10 (no)" in pack.lost_pythons(TRAINER, packed)[0]


def test_script_that_behaves_otherwise_when_packed_is_refused(tmp_path):
    script = trainer(tmp_path, "(len(Path(__file__).read_bytes()) > 2000)")
    result = golf("pack", script, "-o", tmp_path / "out.py")
    assert result.returncode == 1 and "losses differ" in result.stderr and "nothing written" in result.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["train.py"]


@pytest.mark.parametrize(("text", "status", "part"), [("def broken(:", 2, "line 1 is no Python"),
                                                      ("raise SystemExit(3)", 1, "does not finish a short CPU run")])
def test_script_that_cannot_run_is_one_clear_message(tmp_path, text, status, part):
    (tmp_path / "train.py").write_text(text, encoding="utf-8")
    result = golf("pack", tmp_path / "train.py")
    assert result.returncode == status and part in result.stderr and "Traceback" not in result.stderr


# What real scripts do with their own code: source lines, tracebacks, pickling into a new process, torch.compile.
INTROSPECTION = '''
import inspect
import multiprocessing
import pickle
import sys
import traceback

import torch


class Shape:
    def __init__(self, rows):
        self.rows = rows


def double(shape):
    return shape.rows * 2


def fail():
    raise ValueError("line of the inner source")


def main():
    assert "rows*2" in inspect.getsource(double).replace(" ", "")
    try:
        fail()
    except ValueError:
        assert "raise ValueError('line of" in traceback.format_exc().replace('"', "'"), traceback.format_exc()
    assert pickle.loads(pickle.dumps(Shape(3))).rows == 3
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(double, [Shape(3)]) == [6]
    function = torch.compile(lambda x: torch.relu(x) * double(Shape(1)), backend="eager", fullgraph=True)
    assert function(torch.ones(2)).tolist() == [2, 2]
    print(__file__, __name__)


if __name__ == "__main__":
    main()
'''


def test_packed_code_has_source_lines_and_is_a_module_under_torchrun(tmp_path):
    packed, _ = pack.pack_source(INTROSPECTION.encode(), "train.py")
    script = tmp_path / "train.py"
    script.write_text(packed, encoding="utf-8")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
    done = subprocess.run([*launcher, script], capture_output=True, text=True, check=False, cwd="/", timeout=100)
    assert done.stdout.split() == [str(script), "__main__"], done.stderr
    imported = subprocess.run([sys.executable, "-c", "import train; print(train.double(train.Shape(4)))"], cwd=tmp_path,
                              capture_output=True, text=True, check=False, timeout=100)
    assert imported.stdout == "8\n", imported.stderr


def test_root_script_packs(tmp_path):
    """The whole command on train_gpt.py: it compares settings, losses, scores, artifact and logged source itself."""
    out = tmp_path / "train_gpt.py"
    result = golf("pack", SCRIPT, "-o", out, "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    report = json.loads(result.stdout)
    assert report["bytes_after"] == out.stat().st_size < 0.3 * report["bytes_before"] and "losses" in report["verified"]
