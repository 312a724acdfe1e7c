"""The README and what it promises: settings, exit codes, named files, and `make demo` itself."""
import dataclasses
import os
import re
import subprocess
import sys

import pytest
from conftest import ROOT, summary_block

import train_gpt as tg

README = (ROOT / "README.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    """Cells of the first table after a heading or table head."""
    lines = README[README.index(heading):].splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("|-"))
    table = lines[start + 1:]
    end = next((i for i, line in enumerate(table) if not line.startswith("|")), len(table))
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in table[:end]]


def test_settings_table_is_the_settings():
    expected = [[f.name.upper(), tg.format_setting(f.default) or "empty", f.metadata["help"]]
                for f in dataclasses.fields(tg.Hyperparameters)]
    assert rows("## All settings") == expected


def test_exit_codes_are_all_named():
    errors = [tg.RunError, *tg.RunError.__subclasses__()]
    assert {int(code) for code, _ in rows("| exit code |")} == {0, 130} | {error.exit_code for error in errors}


NAMED_FILES = sorted(set(re.findall(r"\b(?:data|bench|golf|tests)/[\w./-]+\.(?:py|md|json|log)", README)))


@pytest.mark.parametrize("path", NAMED_FILES)
def test_named_files_exist(path):
    assert (ROOT / path).is_file()


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("*.md")), ids=lambda path: path.name)
def test_named_tests_exist(path):
    tests = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "tests").glob("test_*.py"))
    named = set(re.findall(r"`(test_\w+)`", path.read_text(encoding="utf-8")))
    assert named - set(re.findall(r"def (test_\w+)\(", tests)) == set()


def test_make_demo_trains_writes_and_scores(tmp_path):
    """The newcomer's command, with 8 seconds of training and every output in a folder of the test."""
    environment = {k: v for k, v in os.environ.items() if k.lower() not in tg.Hyperparameters.__dataclass_fields__}
    command = ["make", "demo", f"PYTHON={sys.executable}", "DEMO_SECONDS=8", f"SAMPLE={tmp_path / 'sample'}",
               f"DEMO_OUTPUT={tmp_path / 'out'}", "SAMPLE_OPTIONS=--max-mb 3 --val-docs 10"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
                          timeout=400)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    block = summary_block(done.stdout)
    artifact = tmp_path / "out" / "final_model.int6.ptz"
    assert block["valid"] == "yes" and int(block["model_bytes"]) == artifact.stat().st_size
    untrained = re.search(r"(?m)^0/\d+ val_loss: \S+ val_bpb: (\S+)$", done.stdout)
    assert float(block["val_bpb"]) < float(untrained[1])
    assert float(block["train_data_last_read_seconds"]) <= 8
    assert "layers with full GPTQ" in done.stdout
