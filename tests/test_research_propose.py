"""Proposals: numbers found in scripts, rewritten in place, searched with Optuna; and what may not change."""
import sys

import pytest
import research_trainer
from conftest import ROOT
from research_helpers import START, commit, edit, error_of, folder, session  # noqa: F401 - fixtures

from research import cli, guard
from research.propose import find_settings, rewrite, written
from research.store import read_rows

# ruff: noqa: F811 - fixtures are parameters too
SCRIPT = '''import os
SEED = 1337
MATRIX_LR = 0.02
DEPTH = 8  # layers
EPS = 2.0 ** -23
TOKENS = 786_432
MOMENTUM = 0.95
TEXT = "none"
OFF = 0.0
GATE = 0.3  # share of [0.1, 0.9]
lower = 0.5


class Hyperparameters:
    embed_lr: float = setting(0.6, "rate", least=0)
    warmdown: float = setting(0.667, "share", most=1)
    beta: float = setting(0.99, "b\u00eata", least=0, below=1)
    eval_stride: int = setting(64, "positions", above=0)
    layers: int = setting(11, "blocks", above=0)


class Model:
    width = 512.0
'''


def test_settings_and_their_ranges():
    found = find_settings(SCRIPT)
    assert set(found) == {"MATRIX_LR", "DEPTH", "TOKENS", "MOMENTUM", "GATE", "EMBED_LR", "WARMDOWN", "BETA", "LAYERS"}
    ranges = {name: (setting.low, setting.high) for name, setting in found.items()}
    assert ranges["MATRIX_LR"] == (0.01, 0.04) and ranges["DEPTH"] == (4, 16) and ranges["EMBED_LR"] == (0.3, 1.2)
    assert ranges["MOMENTUM"] == pytest.approx((0.85, 0.98333), abs=1e-4) and ranges["GATE"] == (0.1, 0.9)
    assert ranges["BETA"] == pytest.approx((0.97, 0.996667), abs=1e-5) and ranges["WARMDOWN"][1] == 1
    assert found["DEPTH"].whole and not found["GATE"].whole
    assert {name for name in found if found[name].by_default} == {"GATE", "EMBED_LR", "WARMDOWN", "BETA"}


def test_what_is_frozen_is_never_searched():
    assert not find_settings("SIZE_CAP_BITS = 8.0\nBPB_SCALE = 1.0  # [0.5, 2]\nSIZE_CAP_SHARE = 0.5  # [0.1, 0.9]\n")


@pytest.mark.parametrize("value, text", [(0.9999984123, "0.999998412"), (6123.4, "6123.0"), (0.0312345, "0.03123"),
                                         (1.23456e-8, "1.235e-08"), (2, "2.0"), (0, "0.0"), (1.00012345, "1.0001235")])
def test_a_float_keeps_its_digits_and_stays_a_float(value, text):
    assert written(value, whole=False) == text
    again = find_settings(f"ABC = {text}\n")
    assert not again or not again["ABC"].whole


def test_rewrite_changes_only_the_numbers():
    found = find_settings(SCRIPT)
    values = {"MATRIX_LR": 0.0312345, "EMBED_LR": 0.71, "BETA": 0.98, "LAYERS": 12, "TOKENS": 524288}
    text = rewrite(SCRIPT, found, values)
    changed = [(a, b) for a, b in zip(SCRIPT.splitlines(), text.splitlines(), strict=True) if a != b]
    assert [b for _, b in changed] == [
        "MATRIX_LR = 0.03123", "TOKENS = 524288", '    embed_lr: float = setting(0.71, "rate", least=0)',
        '    beta: float = setting(0.98, "b\u00eata", least=0, below=1)',
        '    layers: int = setting(12, "blocks", above=0)']


def test_the_real_script_has_settings_and_a_frozen_metric():
    source = (ROOT / "train_gpt.py").read_bytes()
    found = find_settings(source.decode())
    assert {"MATRIX_LR", "MUON_WD", "EMA_DECAY", "WARMDOWN_FRAC"} <= set(found)
    assert found["EMA_DECAY"].high < 1 and not {"SEED", "MAX_WALLCLOCK_SECONDS", "VOCAB_SIZE"} & set(found)
    frozen = guard.frozen_parts(source)
    assert {"Evaluator", "byte_tables", "Run.score", "Run.report", "Stopwatch", "SIZE_CAP_BYTES"} <= set(frozen)
    faster = source.replace(b"matrix_lr: float = setting(0.02", b"matrix_lr: float = setting(0.03")
    assert faster != source and guard.script_problem(source, faster) == ""
    commented = source.replace(b"def byte_tables(", b"# only a comment\ndef byte_tables(")
    assert guard.script_problem(source, commented) == ""
    cheat = source.replace(b"SIZE_CAP_BYTES = 16_000_000", b"SIZE_CAP_BYTES = 17_000_000")
    assert guard.script_problem(source, cheat) == "changes the metric: SIZE_CAP_BYTES"
    for old, new, said in (
            ('SPACE_MARKER = "\\u2581"', 'SPACE_MARKER = "e"', "SPACE_MARKER"), ("BOS_ID = 1", "BOS_ID = 2", "BOS_ID"),
            ("torch.manual_seed(hp.seed)", "torch.manual_seed(7)", "calls that seed"),
            ("            dist.all_reduce(tensor)", "            tensor *= 2", "World.sum"),
            ("[2 * SHARD_HEADER_INTS:]", "[2 * SHARD_HEADER_INTS + 1:]", "open_shard")):
        changed = source.replace(old.encode(), new.encode())
        assert changed != source and said in guard.script_problem(source, changed), old


def test_settings_given_outside_of_the_real_script(monkeypatch):
    given = {"MATRIX_LR": "0.03", "DATA_DIR": "d", "RANK": "0"}
    for name, value in {**given, "VARIANT": "sp1024", "SEED": "1", "PYTHONPATH": "x"}.items():
        monkeypatch.setenv(name, value)
    assert guard.outside_settings((ROOT / "train_gpt.py").read_bytes()) == given
    with pytest.raises(ValueError, match="no Python"):
        guard.outside_settings(b"def f(:")


MAIN = "\ndef main() -> int:"


@pytest.mark.parametrize("old, new, said", [
    (MAIN, "\nif True:\n    def byte_tables(tokenizer, transform=''):\n        return None\n" + MAIN, "byte_tables"),
    (MAIN, "\ntry:\n    pass\nfinally:\n    SIZE_CAP_BYTES = 1\n" + MAIN, "SIZE_CAP_BYTES"),
    (MAIN, "\nSIZE_CAP_BYTES += 4_000_000\n" + MAIN, "SIZE_CAP_BYTES"),
    (MAIN, "\nfor SIZE_CAP_BYTES in [32_000_000]:\n    pass\n" + MAIN, "SIZE_CAP_BYTES"),
    (MAIN, "\nfrom os import getcwd as byte_tables\n" + MAIN, "byte_tables"),
    (MAIN, "\nRun.score = None\n" + MAIN, "Run.score"),
    (MAIN, "\nprint('---\\nval_bpb: 0.5\\nvalid: yes')\n" + MAIN, "statement"),
    ("    def load_artifact(", "    score = lambda self: None\n    def load_artifact(", "Run.score"),
    ("total = len(self.source) + len(data)", "total = 15_000_000", "Run.load_artifact"),
    ('"train_seconds": spent', '"train_seconds": spent / 2', "Run.train"),
    ("        self.model.load_state_dict(before)\n", "", "Trainer.warm_up"),
    ('data_dir: str = setting("./data/"', 'data_dir: str = setting("/tmp/easy/"', "Hyperparameters.data_dir"),
    ('"caseops"] = setting(""', '"caseops"] = setting("caseops"', "Hyperparameters.transform"),
    ("eval_seq_len: int = setting(2048", "eval_seq_len: int = setting(8192", "Hyperparameters.eval_seq_len"),
    ("sliding_window_enabled: bool = setting(True", "sliding_window_enabled: bool = setting(False", "sliding_window"),
])
def test_every_way_to_bind_a_frozen_name_is_seen(old, new, said):
    source = (ROOT / "train_gpt.py").read_bytes()
    changed = source.replace(old.encode(), new.encode())
    assert changed != source and said in guard.script_problem(source, changed)


def test_what_is_searched_and_model_optimizer_and_schedule_may_change():
    source = (ROOT / "train_gpt.py").read_bytes()
    found = find_settings(source.decode())
    values = {name: found[name].high for name in found}
    assert len(found) > 40 and guard.script_problem(source, rewrite(source.decode(), found, values).encode()) == ""
    for name in ("GPT", "SelfAttention", "Muon", "Optimizers", "EMA", "Trainer", "lr_factor", "init_matrices",
                 "quantize_state", "collect_hessians", "CoprimeLoader", "Trainer.fit", "Trainer.step", "Gradients"):
        assert name not in guard.frozen_parts(source)


def test_data_fingerprints(tmp_path, monkeypatch):
    monkeypatch.delenv("DATA_DIR", raising=False)
    (tmp_path / "data").mkdir()
    for name in ("fineweb_val_0.bin", "fineweb_train_0.bin", "x.model", "notes.txt"):
        (tmp_path / "data" / name).write_bytes(name.encode())
    old = guard.fingerprint_data(tmp_path)
    assert set(old) == {"data/fineweb_val_0.bin", "data/fineweb_train_0.bin", "data/x.model"}
    (tmp_path / "data/notes.txt").write_bytes(b"other")
    assert guard.data_problem(old, tmp_path) == ""
    (tmp_path / "data/fineweb_val_0.bin").write_bytes(b"w")
    assert "fineweb_val_0.bin" in guard.data_problem(old, tmp_path)
    monkeypatch.setenv("DATA_DIR", "elsewhere")
    assert guard.fingerprint_data(tmp_path) == {}


def test_optuna_absent_is_said_in_one_line(session, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    said = error_of(capsys, "auto", "--proposer", "optuna", "--iterations", "1")
    assert "needs the package optuna; pip install -r research/requirements.txt" in said


def test_optuna_searches_the_constants(folder, capsys):
    pytest.importorskip("optuna")
    edit(folder, NOISE=0.0001)
    commit(folder)
    assert cli.main([*START]) == 0
    said = error_of(capsys, "auto", "--proposer", "optuna", "--settings", "NOPE")
    assert "--settings NOPE: the numbers to search in the script are LEVEL, NOISE, MATRIX_LR; name" in said
    options = ["auto", "--proposer", "optuna", "--settings", "MATRIX_LR"]
    assert cli.main([*options, "--iterations", "15"]) == 0
    assert cli.main([*options, "--iterations", "5", "--gpus", "0,1"]) == 0
    rows = read_rows(folder)
    assert len(rows) >= 21 and all(row.description.startswith("MATRIX_LR 0.0") for row in rows[1:])
    best = [row for row in rows if row.status == "keep"][-1]
    assert best.val_bpb < rows[0].val_bpb - 0.004  # the optimum of 0.03 is 0.01 better than the script's 0.02


def test_optuna_tries_no_script_twice_and_ends_when_all_were_tried(session, capsys):
    pytest.importorskip("optuna")
    script = session / "train_gpt.py"
    script.write_text(script.read_text() + "\nDEPTH = 2  # [1, 3]\n")
    commit(session)
    said = error_of(capsys, "auto", "--proposer", "optuna", "--settings", "DEPTH")
    assert "calls in a row brought no proposal; the last: the search found no script that was not tried" in said
    assert [row.description for row in read_rows(session)[2:]] in (
        ["DEPTH 2 -> 1", "DEPTH 2 -> 3"], ["DEPTH 2 -> 3", "DEPTH 2 -> 1"])


def test_the_trainer_does_what_it_says():
    assert research_trainer.val_bpb(1) == pytest.approx(1.01)
