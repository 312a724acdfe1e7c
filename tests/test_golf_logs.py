"""golf reads our own logs, published ones, older layouts, and says what is wrong with files that are none."""
import json

import conftest
import golf_helpers as gh
import pytest

from golf.logs import final, read_log


@pytest.fixture
def real_runs(tmp_path_factory):
    return gh.real_runs(tmp_path_factory.getbasetemp())


def write(tmp_path, text, name="run.txt"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_our_own_log_with_its_records(real_runs):
    log = read_log(real_runs[1])
    records = [json.loads(line) for line in real_runs[1].with_suffix(".jsonl").read_text().splitlines()]
    summary = records[-1]
    assert log.source == conftest.SCRIPT.read_text(encoding="utf-8") and len(log.source) == log.code_bytes
    assert (log.seed, log.world_size, log.iterations, log.steps_done) == (1, 1, 6, 6)
    assert log.steps == [(r["step"], r["train_loss"], r["train_seconds"], r["tokens_per_second"])
                         for r in records if r["type"] == "step"]
    assert log.lr_factors == {r["step"]: r["lr_factor"] for r in records if r["type"] == "step"}
    assert final(log)[:2] == (summary["val_loss"], summary["val_bpb"])
    assert set(log.evaluations) == {"pre_quant", "int6", "sliding"}
    for name in ("train_seconds", "eval_seconds", "code_bytes", "model_bytes", "total_bytes"):
        assert getattr(log, name) == summary[name]
    assert log.gpu is None and log.hardware == "1 x cpu" and log.valid and log.settings["model_dim"] == "32"
    assert log.train_shards == 4 and log.attention


def test_the_text_alone_says_the_same_rounded(real_runs):
    exact, text = read_log(real_runs[2]), read_log(real_runs[2], records=False)
    assert final(text)[0] == pytest.approx(final(exact)[0], abs=1e-8)
    assert [row[:2] for row in text.steps] == [(step, pytest.approx(loss, abs=1e-4)) for step, loss, *_ in exact.steps]
    for rounded, precise in zip(text.steps, exact.steps):
        assert rounded[2] == pytest.approx(precise[2], rel=1e-3)  # from tokens and tokens/s, not from tenths of minutes
    assert not text.lr_factors


def test_published_layout(tmp_path):
    log = read_log(write(tmp_path, gh.log_text(42, 2.5275)))
    assert log.source == gh.SCRIPT
    assert log.settings["matrix_lr"] == "0.02" and (log.seed, log.world_size) == (42, 8)
    assert (log.torch_version, log.gpu) == ("2.11.0+cu130", "NVIDIA H100 80GB HBM3")
    assert log.hardware == "8 x NVIDIA H100 80GB HBM3"
    assert log.steps[1] == (500, 3.0237, pytest.approx(500 * 786_432 / 7_997_340), 7_997_340)
    assert log.validations[0] == (0, 8.3169, 3.6144) and log.steps_done == 5962
    assert log.train_seconds == pytest.approx(598.209) and log.hessian_seconds == 8.2
    assert log.eval_seconds == pytest.approx(71.002)
    assert (log.model_bytes, log.code_bytes) == (15_837_214, len(gh.SCRIPT))
    assert log.total_bytes == log.model_bytes + log.code_bytes
    assert log.peak_memory_mib == 25_769 and log.summary == {} and log.valid is None
    assert final(log) == (2.5275, gh.bpb(2.5275), 64.001)


def test_a_rule_between_settings_and_source_is_not_source(tmp_path):
    text = gh.log_text(42, 2.5275)
    start = text.index('"""A script')
    log = read_log(write(tmp_path, text[:start] + gh.RULE + "\n" + text[start:]))
    assert log.source == gh.SCRIPT and log.settings["vocab_size"] == "4096"


def test_a_source_that_holds_a_whole_log(tmp_path):
    script = gh.SCRIPT.replace("A script", f"Sample:\n{gh.log_text(1, 9.0)}\nA script")
    log = read_log(write(tmp_path, gh.log_text(42, 2.5275, script=script)))
    assert log.source == script and log.seed == 42 and final(log)[0] == 2.5275


def test_older_layout_without_settings(tmp_path):
    lines = ["import os", "print(1)", "", gh.RULE, "Running Python 3.12.3", "Running PyTorch 2.6.0", "no gpu", gh.RULE,
             "train_loader:dataset:fineweb10B_sp1024 train_shards:25",
             "val_loader:shards pattern=./data/fineweb_val_*.bin tokens:62021632", "world_size:8 grad_accum_steps:1",
             "seed:1337", "model_params:17059912",
             "step:0/20000 val_loss:6.9357 val_bpb:4.1077 train_time:0ms step_avg:0.02ms",
             "step:200/20000 train_loss:2.7 train_time:9000ms step_avg:45ms",
             "stopping_early: wallclock_cap train_time:600038ms step:13780/20000",
             "Serialized model int8+zlib: 15815847 bytes (payload:17178912)",
             "Total submission size int8+zlib: 15863489 bytes",
             "final_int8_zlib_roundtrip val_loss:2.0727 val_bpb:1.2276 eval_time:1403ms",
             "final_int8_zlib_roundtrip_exact val_loss:2.07269931 val_bpb:1.22756440",
             "final_int8_sliding_window val_loss:2.01 val_bpb:1.1904 stride:64 eval_time:62326ms",
             "final_int8_sliding_window_exact val_loss:2.01012345 val_bpb:1.19051234"]
    log = read_log(write(tmp_path, "\n".join(lines)))
    assert log.source == "import os\nprint(1)\n" and (log.seed, log.world_size) == (1337, 8)
    assert log.steps == [(200, 2.7, 9.0, None)] and log.steps_done == 13_780
    assert log.train_seconds == pytest.approx(600.038) and log.model_bytes == 15_815_847
    assert (log.train_shards, log.val_tokens) == (25, 62_021_632)
    assert log.evaluations["int6"] == (2.07269931, 1.2275644, 1.403)
    assert final(log) == (2.01012345, 1.19051234, 62.326)


def test_console_output_has_no_source(tmp_path):
    text = gh.log_text(42, 2.5275)
    log = read_log(write(tmp_path, text[text.index("train_shards"):]))
    assert log.source is None and log.settings == {} and final(log)[0] == 2.5275


def test_scores_after_test_time_training_are_the_official_ones(tmp_path):
    text = gh.log_text(42, 2.5275).replace("\npre-quant", "\ndiagnostic pre-quant")
    text = text.replace("Code size", "Code size (raw)")
    text = text.replace("\nfinal_int6_roundtrip", "\ndiagnostic quantized").replace("\nfinal_int6_sl", "\nquantized_sl")
    text = text.replace("Total submission size int6+brotli: ", "Total submission size quantized+pergroup: 1")
    text = text.replace("Serialized model int6+brotli: ", "Serialized model quantized+pergroup: 1")
    text += "quantized_ttt_phased val_loss:2.5 val_bpb:1.08 eval_time:400000ms\ntotal_eval_time:455.5s\n"
    log = read_log(write(tmp_path, text))
    assert final(log) == (2.5, 1.08, 400.0) and log.eval_seconds == 455.5 and log.model_bytes == 115_837_214
    assert set(log.evaluations) == {"pre_quant", "int6", "sliding", "ttt"}
    assert log.code_bytes == log.total_bytes - log.model_bytes


def test_warnings_are_kept(tmp_path):
    log = read_log(write(tmp_path, gh.log_text(42, 2.5275) + "WARNING: evaluation took 500s\n"))
    assert log.warnings == ["WARNING: evaluation took 500s"]


@pytest.mark.parametrize("text, part", [
    ("", ":1: no step"),
    ("hello\nworld\n", ":1: no step"),
    (gh.log_text(42, 2.5)[:600], "cut short"),
    ("0/5 val_loss: 1.0 val_bpb: 1.0\n---\nsteps: many\n", "must be a number: .*'many'"),
    (f"0/5 val_loss: 1.0 val_bpb: 1.0\n---\nsteps: {'9' * 400}\n", "must be a number: .*'999"),
])
def test_no_log_is_a_clear_error(tmp_path, text, part):
    path = write(tmp_path, text)
    with pytest.raises(ValueError, match=part) as caught:
        read_log(path)
    assert str(path) in str(caught.value)


def test_bytes_are_no_log(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="not UTF-8"):
        read_log(tmp_path / "x.txt")


def test_a_run_without_a_score_has_no_final(tmp_path):
    log = read_log(write(tmp_path, "1/5 train_loss: 3.0 train_time: 0.1m tok/s: 5\n"))
    with pytest.raises(ValueError, match="let the run finish"):
        final(log)


@pytest.mark.parametrize("records, error", [
    ('{"type": "step"\n{"type": "x"}\n', "jsonl:1: no record"),
    ('{"type": "settings", "run_id": "other"}\n', "belongs to run 'other'"),
])
def test_foreign_or_broken_records(tmp_path, records, error):
    path = write(tmp_path, gh.log_text(42, 2.5275))
    path.with_suffix(".jsonl").write_text(records)
    with pytest.raises(ValueError, match=error):
        read_log(path)
    assert read_log(path, records=False).seed == 42


def test_records_cut_by_a_crash_are_used_up_to_there(tmp_path):
    path = write(tmp_path, gh.log_text(42, 2.5275))
    step = {"type": "step", "step": 1, "train_loss": 8.25, "train_seconds": 0.5, "tokens_per_second": 9.0,
            "lr_factor": 1.0}
    path.with_suffix(".jsonl").write_text(json.dumps(step) + '\n{"type": "st')
    log = read_log(path)
    assert log.steps == [(1, 8.25, 0.5, 9.0)] and log.lr_factors == {1: 1.0} and "cut short" in log.warnings[0]
