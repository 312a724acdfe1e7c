"""`golf check`: one folder per broken rule, and good ones; the verdicts are the tests."""
import base64
import json
import lzma
import random
import statistics
from pathlib import Path

import golf_helpers as gh
import pytest

from golf import scripts
from golf.check import check_folder
from golf.pack import pack_source


def rules(folder: Path, severity: str = "error", may_import: bool = False) -> set[str]:
    findings = [finding for finding in check_folder(folder, may_import) if finding.severity == severity]
    assert all(finding.value and finding.remedy and finding.text for finding in findings)
    return {finding.rule for finding in findings}


def assert_good(folder: Path) -> None:
    bad = [finding for finding in check_folder(folder) if finding.severity != "note"]
    assert bad == []


# -- folders that break one rule ---------------------------------------------------------------------------------------

def with_helper(base, call, name="helper.py", text="x = 1\n"):
    folder = gh.build(base, script=gh.SCRIPT + call)
    (folder / name).write_text(text)
    return folder


def changed_file(base, name, old, new):
    folder = gh.build(base)
    gh.edit(folder / name, old, new)
    return folder


def changed_json(base, **changes):
    folder = gh.build(base)
    gh.edit_json(folder, **changes)
    return folder


def removed(base, name):
    folder = gh.build(base)
    (folder / name).unlink()
    return folder


def seed_left_out(base):
    """Four runs, a mean over four, but only three named."""
    folder = gh.build(base, results={**gh.RESULTS, 5: 2.5280})
    results = json.loads((folder / "submission.json").read_text())["seed_results"]
    gh.edit_json(folder, seeds=list(gh.RESULTS), seed_results={k: v for k, v in results.items() if k != "5"})
    return folder


def unfinished(base):
    folder = gh.build(base)
    log = folder / "train_seed7.log"
    log.write_text(log.read_text()[:log.read_text().rindex("final_int6_roundtrip")])
    return folder


def wrong_seed_in_name(base):
    folder = gh.build(base)
    (folder / "train_seed7.log").rename(folder / "train_seed0.log")
    return folder


def settings_differ(base):
    folder = gh.build(base)
    gh.edit(folder / "train_seed42.log", "  matrix_lr: 0.02\n", "  matrix_lr: 0.022\n")
    return folder


def copied_artifact_size(base):
    folder = gh.build(base)
    size, score = 15_837_214 + len(gh.SCRIPT), f"{gh.bpb(gh.RESULTS[42]):.4f}"
    gh.edit(folder / "train_seed42.log", "int6+brotli: 15837214", "int6+brotli: 15837000")
    gh.edit(folder / "train_seed42.log", f"int6+brotli: {size}", f"int6+brotli: {size - 214}")
    gh.edit(folder / "README.md", f"{score} | **{size:,}**", f"{score} | **{size - 214:,}**")
    return folder


def without_sliding(base):
    """The runs ended during their official evaluation; everything states the score before it."""
    folder = gh.build(base, sliding_window_enabled=1)
    for path in folder.glob("*.log"):
        head, tail = path.read_text().rsplit("\nfinal_int6_roundtrip ", 1)
        score = tail.split("\nfinal_int6_sliding_window ")[1].replace("eval_time:64001ms", "eval_time:71002ms")
        path.write_text(f"{head}\nfinal_int6_roundtrip {score}")
    return folder


def collapsed(base):
    """The score before quantisation is 0.04 bpb better than it was."""
    folder = gh.build(base)
    for seed, loss in gh.RESULTS.items():
        bpb = gh.bpb(loss + 0.016)
        gh.edit(folder / f"train_seed{seed}.log", f"val_bpb:{bpb:.8f}", f"val_bpb:{bpb - 0.04:.8f}")
    return folder


def in_each_log(base, old, new, **options):
    folder = gh.build(base, **options)
    for path in folder.glob("*.log"):
        gh.edit(path, old, new)
    return folder


def other_artifact(base):
    digest = f"sha256 of the artifact: {'0' * 64}\nCode size:"
    folder = in_each_log(base, "Code size:", digest, model_bytes=1000)
    (folder / "final_model.int6.ptz").write_bytes(bytes(1000))
    return folder


LATE = "def late():\n    import helper\n    return helper\n"
IMPORTLIB = "import importlib\nimportlib.import_module('helper')\n"
EXEC = "def late():\n    exec(open(os.path.join(os.path.dirname(__file__), 'tail.txt.gz')).read())\n"
COMPILE = "def late():\n    import subprocess\n    subprocess.run('cc -O3 ngram.c', shell=True)\n"
SWEEP = ("nproc_per_node=8 train_gpt.py", "nproc_per_node=8 train_gpt_sweep.py")
FIRST_LOG = gh.log_text(7, gh.RESULTS[7])
RATE = "SEED=1337 MATRIX_LR=0.022"
TITLE = "# Good"
HOME = ("./data/", "/root/data/")
BEST = gh.bpb(min(gh.RESULTS.values()))
SCORE = f"{statistics.fmean(map(gh.bpb, gh.RESULTS.values())):.4f}"
CAP = 16_000_000
CASES = {  # name: (rules with errors, how the folder is made)
    "one byte over the cap": ("size", lambda b: gh.build(b, model_bytes=CAP + 1 - len(gh.SCRIPT))),
    "non-record over the cap": ("size", lambda b: gh.build(b, track="non_record_16mb", model_bytes=CAP)),
    "log counts a smaller script": ("code-bytes", lambda b: gh.build(b, code_bytes=300)),
    "bytes_code of another file": ("code-bytes", lambda b: changed_json(b, bytes_code=31_999)),
    "imported helper not counted": ("helpers", lambda b: with_helper(b, "import helper\n")),
    "helper loaded by importlib": ("helpers", lambda b: with_helper(b, IMPORTLIB)),
    "executed helper not counted": ("helpers", lambda b: with_helper(b, EXEC, "tail.txt.gz")),
    "executed data not counted": ("helpers", lambda b: with_helper(b, EXEC.replace("tail.txt.gz", "h.bin"), "h.bin")),
    "artifact of another run": ("model-file", other_artifact),
    "no official score": ("finished", without_sliding),
    "scored only": ("finished", lambda b: gh.build(b, eval_only="final_model.int6.ptz")),
    "unofficial split": ("official", lambda b: in_each_log(
        b, "model_params:", "val_bytes: 151080000 (normalised; UNOFFICIAL SPLIT)\nmodel_params:")),
    "compiled helper not counted": ("helpers", lambda b: with_helper(b, COMPILE, "ngram.c", "int x;\n")),
    "bytes_total is nothing that ships": ("bytes-total", lambda b: changed_json(b, bytes_total=15_000_000)),
    "one byte of the script edited": ("source", lambda b: changed_file(b, "train_gpt.py", "4096", "4095")),
    "no author": ("schema", lambda b: changed_json(b, author=None)),
    "score as text": ("schema", lambda b: changed_json(b, val_bpb_std="small")),
    "impossible date": ("schema", lambda b: changed_json(b, date="2026-02-30")),
    "broken JSON": ("readable", lambda b: changed_file(b, "submission.json", "{", "")),
    "a log that is none": ("readable", lambda b: changed_file(b, "train_seed7.log", FIRST_LOG, "hello\n")),
    "best seed instead of the mean": ("numbers", lambda b: changed_json(b, val_bpb=BEST)),
    "one seed's size for all": ("numbers", copied_artifact_size),
    "wrong deviation": ("spread", lambda b: changed_json(b, val_bpb_std=0.0001)),
    "seed claimed without a log": ("seeds", lambda b: changed_json(b, seeds=[1337, 42, 7, 9])),
    "best three of four": ("seeds", seed_left_out),
    "seed 0 is seed 7": ("seeds", wrong_seed_in_name),
    "seeds with other settings": ("settings", settings_differ),
    "unfinished run": ("finished readme-table", unfinished),
    "Hessians after 600 s": ("train-time", lambda b: gh.build(b, train_ms=599_500, hessian_seconds=3.5)),
    "slow evaluation": ("eval-time", lambda b: gh.build(b, eval_ms=600_100)),
    "one GPU in the record track": ("hardware", lambda b: gh.build(b, world_size=1)),
    "truncated validation split": ("validation", lambda b: gh.build(b, val_tokens=9_660_000)),
    "no README": ("files", lambda b: removed(b, "README.md")),
    "folder name": ("names", lambda b: gh.build(b, name="2026_04_01_Good")),
    "another track": ("track", lambda b: changed_json(b, track="non_record_16mb")),
    "README of another run": ("readme-table", lambda b: changed_file(b, "README.md", "| 42 | 5,962", "| 42 | 5,088")),
    "README without the score": ("readme-score", lambda b: changed_file(b, "README.md", f"**{SCORE}**", "1.0")),
    "README command with another rate": ("readme-settings", lambda b: changed_file(b, "README.md", "SEED=1337", RATE)),
    "README table with another rate": ("readme-settings", lambda b: changed_file(
        b, "README.md", TITLE, "| `matrix_lr` | 0.022 |")),
    "command of a missing script": ("readme-command", lambda b: changed_file(b, "README.md", *SWEEP)),
    "home path": ("home-paths", lambda b: changed_file(b, "README.md", "# Good", "# Good\n\ncd /home/person/work")),
    "no Python accepts it": ("compiles", lambda b: gh.build(b, script=gh.SCRIPT + "print 'x'\n")),
    "reads its working folder at import": ("imports", lambda b: gh.build(b, script=gh.SCRIPT + "open('data.json')\n")),
    "sibling left outside": ("imports packages", lambda b: gh.build(b, script=gh.SCRIPT + "import my_helper_module\n")),
}


@pytest.mark.parametrize("case", CASES)
def test_each_broken_rule_is_the_only_error(case, tmp_path):
    expected, make = CASES[case]
    assert rules(make(tmp_path), may_import="imports" in expected) == set(expected.split())


WARNINGS = {
    "non-ASCII script": ("ascii", lambda b: gh.build(b, script=gh.SCRIPT + "marker = '\u2581'\n")),
    "other date": ("date", lambda b: changed_json(b, date="2026-04-02")),
    "two seeds": ("seed-count", lambda b: gh.build(b, results={1337: 2.5261, 42: 2.5275})),
    "untraced number": ("readme-untraced", lambda b: changed_file(b, "README.md", TITLE, "Parent: 1.2345")),
    "other machine": ("machines", lambda b: changed_file(b, "train_seed7.log", "PyTorch 2.11.0", "PyTorch 2.10.0")),
    "quantisation that broke the model": ("quantisation-gap", collapsed),
    "matrices without GPTQ": ("gptq-fallback", lambda b: in_each_log(
        b, "Code size:", "GPTQ quantization: 59 layers with full GPTQ, 7 fallback to clip-search\nCode size:")),
    "setting that nobody is told of": ("readme-settings-missing", lambda b: gh.build(b, matrix_lr=0.03)),
    "home path in settings": ("home-paths-logged", lambda b: changed_file(b, "train_seed7.log", *HOME)),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_warnings_are_apart_from_errors(case, tmp_path):
    expected, make = WARNINGS[case]
    folder = make(tmp_path)
    assert rules(folder, "warning") == {expected}
    assert rules(folder) == set()


# -- good folders ------------------------------------------------------------------------------------------------------

def test_a_good_folder_has_no_findings(tmp_path):
    assert_good(gh.build(tmp_path))


def test_a_setting_that_the_command_states_is_fine(tmp_path):
    folder = gh.build(tmp_path, matrix_lr=0.03)
    gh.edit(folder / "README.md", "SEED=1337", "SEED=1337 MATRIX_LR=0.03")
    assert_good(folder)


@pytest.mark.parametrize("over", [-1, 0, 1])
def test_the_cap_is_16_000_000_bytes_and_allowed_itself(over, tmp_path):
    folder = gh.build(tmp_path, model_bytes=CAP + over - len(gh.SCRIPT))
    sizes = [finding.value for finding in check_folder(folder) if finding.rule == "size"]
    assert bool(sizes) == (over > 0)
    assert all("16,000,001" in value and "1 over" in value for value in sizes)


def test_public_shape_without_requirements(tmp_path):
    """`seeds` as a dict of results, mean_bpb, code_bytes and fields of others: notes, nothing else."""
    folder = gh.build(tmp_path)
    values = json.loads((folder / "submission.json").read_text())
    gh.edit_json(folder, seeds=values["seed_results"], seed_results=None, mean_bpb=values["val_bpb"], val_bpb=None,
                 code_bytes=values["bytes_code"], bytes_code=None, base_pr=1218, date="2026-04-01T12:00:00Z")
    (folder / "requirements.txt").unlink()
    assert_good(folder)
    notes = {finding.value for finding in check_folder(folder) if finding.rule in ("variants", "requirements")}
    assert {"mean_bpb read as val_bpb", "code_bytes read as bytes_code", "seeds holds the results of each seed",
            "unknown fields: base_pr", "requirements.txt is missing"} <= notes


def test_a_wrong_number_in_a_variant_is_still_found(tmp_path):
    folder = gh.build(tmp_path)
    gh.edit_json(folder, seeds={"1337": 1.0, "42": 1.0, "7": 1.0}, seed_results=None)
    assert rules(folder) == {"numbers"}


def test_non_record_runs_on_any_machine_and_longer(tmp_path):
    folder = gh.build(tmp_path, track="non_record_16mb", world_size=1, gpu="NVIDIA H200", train_ms=3_600_000)
    assert_good(folder)
    assert "train-time" in rules(folder, "note")


def test_a_helper_that_is_counted_is_fine_and_counts(tmp_path):
    script = gh.SCRIPT + "import helper\n"
    folder = gh.build(tmp_path, script=script, code_bytes=len(script) + 6)
    (folder / "helper.py").write_text("x = 1\n")
    assert_good(folder)
    (folder / "helper.py").write_text("#" * 200_000)
    assert "size" in rules(folder)


def test_files_that_nothing_opens_do_not_count(tmp_path):
    folder = gh.build(tmp_path)
    (folder / "train_gpt_human.py").write_text("#" * 200_000)
    assert_good(folder)


@pytest.mark.parametrize("inner, expected", [("import os\n", set()), ("import os\nimport helper\n", {"helpers"})])
def test_a_packed_script_is_read_inside(inner, expected, tmp_path):
    packed = base64.b85encode(lzma.compress(inner.encode() + b"# " + random.Random(0).randbytes(400).hex().encode()))
    packed = packed.decode()
    script = f"import lzma, base64\nexec(lzma.decompress(base64.b85decode({packed!r})))\n"
    folder = gh.build(tmp_path, script=script)
    (folder / "helper.py").write_text("y = 2\n")
    assert rules(folder) == expected


def test_what_golf_packs_is_read_inside(tmp_path):
    script, _ = pack_source((gh.SCRIPT + LATE).encode(), "train_gpt.py")
    folder = gh.build(tmp_path, script=script)
    assert_good(folder)
    assert scripts.defaults(script) == scripts.defaults(gh.SCRIPT)
    (folder / "helper.py").write_text("y = 2\n")
    assert rules(folder) == {"helpers"}


def test_work_at_import_means_reading_only(tmp_path):
    folder = gh.build(tmp_path, script=gh.SCRIPT + "import torch\ntorch.cuda.set_device(0)\n")
    assert_good(folder)
    notes = [finding.value for finding in check_folder(folder) if finding.rule == "imports-static"]
    assert len(notes) == 1 and "torch.cuda.set_device()" in notes[0]


def test_syntax_of_a_newer_python_is_named(tmp_path):
    old = [version for version in ("3.10", "3.11") if scripts.find_python(version)]
    if not old:
        pytest.skip("neither Python 3.10 nor 3.11 is on this machine")
    folder = gh.build(tmp_path, script=gh.SCRIPT + "d = {'a': 1}\nprint(f'{d['a']}')\n")
    values = [finding.value for finding in check_folder(folder) if finding.rule == "compiles"]
    assert [value.split(":")[0] for value in values] == [f"Python {version}" for version in old]


def test_missing_pythons_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(scripts, "compile_everywhere", lambda source: {"3.10": scripts.NOT_FOUND, "3.11": ""})
    findings = [finding for finding in check_folder(gh.build(tmp_path)) if finding.rule == "pythons"]
    assert [finding.value for finding in findings] == ["not on this machine: Python 3.10"]


@pytest.mark.parametrize("changes", [
    {"seeds": [1.5, "x", True]}, {"seeds": "three"}, {"seeds": {}}, {"seed_results": {"a": False, "42": [], "7": "x"}},
    {"seed_results": [1, {"seed": "7"}, {}]}, {"track": 5, "date": 20260401}, {"bytes_total": "many"},
    {"bytes_code": 1.5}, {"val_bpb": "1.1", "val_bpb_std": [1]}, {"val_loss": 1e400}, {"hardware": 8},
])
def test_odd_json_is_an_error_not_a_crash(changes, tmp_path):
    assert rules(changed_json(tmp_path, **changes))


@pytest.mark.parametrize("name", ["README.md", "submission.json", "train_gpt.py", "train_seed7.log"])
def test_odd_bytes_are_an_error_not_a_crash(name, tmp_path):
    folder = gh.build(tmp_path)
    (folder / name).write_bytes(b"\xff\xfe\x00\n(" * 200)
    assert rules(folder)
    (folder / "submission.json").write_text("[1, 2]")
    assert "schema" in rules(folder)


def test_an_empty_folder_is_reported_not_crashed_on(tmp_path):
    assert {"files", "names"} <= rules(tmp_path)


def test_text_that_no_terminal_can_show_is_shown_as_an_escape(tmp_path):
    folder = changed_json(tmp_path, track="half \ud800")
    result = gh.golf("check", folder)
    assert result.returncode == 1 and "Traceback" not in result.stderr and "\\ud800" in result.stdout
