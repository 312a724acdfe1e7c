"""`golf doctor` and `golf preflight`: verdicts with remedies, on the CPU."""
import argparse
import json
import os
import re
import subprocess
import sys
import time

import pytest
from conftest import ROOT, SCRIPT, make_data, run_environment, settings

import train_gpt as tg
from golf import machine, scripts, trial


def golf(folder, *arguments, **changes):
    environment = {**run_environment(**changes), "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, "-m", "golf", *map(str, arguments)], cwd=folder, env=environment,
                          capture_output=True, text=True, check=False, timeout=120)


def by_name(result):
    return {f["check"]: f for f in json.loads(result.stdout)["findings"]}


def test_doctor_finds_machine_and_data_fit(tmp_path):
    make_data(tmp_path)
    result = golf(tmp_path, "doctor", "--seconds", "0.4", "--json")
    assert result.returncode == 0, result.stdout + result.stderr
    found = by_name(result)
    assert found["Python"]["value"] == ".".join(map(str, sys.version_info[:3]))
    assert found["attention"]["value"].split()[0] in ("flash", "fa3", "cudnn", "math")
    assert found["train shards"]["value"].startswith("4, 9,978 tokens")
    assert found["val shards"]["value"].startswith("1, 3,000 tokens")
    assert "TFLOP/s" in found["matrix products"]["value"] and "MB/s" in found["disk read"]["value"]


def test_doctor_names_damaged_and_missing_data(tmp_path):
    data = make_data(tmp_path)
    (data / "datasets/fineweb10B_sp512/fineweb_train_000001.bin").write_bytes(b"short")
    (data / "tokenizers/fineweb_512_bpe.model").unlink()
    result = golf(tmp_path, "doctor", "--seconds", "0")
    assert result.returncode == 1 and "Traceback" not in result.stderr
    for part in ("fineweb_train_000001.bin must begin with", "--variant sp512", "not ready"):
        assert part in result.stdout
    found = {f.check: f for f in machine.check_data(settings(data_dir=tmp_path / "nowhere"))}
    assert found["val shards"].verdict == found["tokenizer"].verdict == "fail"


def test_attention_reasons_name_each_backend_before_the_chosen_one(monkeypatch):
    def only_math(name):
        if name != "math":
            raise RuntimeError(f"no {name} here\nsecond line")

    monkeypatch.setattr(tg, "use_sdpa_backend", only_math)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    reason = machine.check_attention(tg.Hyperparameters()).value
    assert re.fullmatch(r"math \(fa3: .*flash_attn_interface.*; cudnn: .*; flash: no flash here\)", reason)


def test_slow_machine_is_said(monkeypatch, tmp_path):
    data = make_data(tmp_path)
    monkeypatch.setattr(machine, "matmul_tflops", lambda _seconds: (410.0, "NVIDIA H100 80GB HBM3"))
    monkeypatch.setattr(machine, "read_mb_s", lambda _paths, _seconds: 12.0)
    products, disk = machine.check_speed(1, settings(data_dir=data))
    assert (products.verdict, disk.verdict) == ("warn", "warn")
    assert "410 TFLOP/s" in products.value and "reference: 630" in products.value and "local disk" in disk.remedy


@pytest.fixture(scope="module")
def flight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("flight")
    make_data(folder)
    return folder, golf(folder, "preflight", SCRIPT, "--val-tokens", "1000", "--json", model_dim=160, embedding_dim=160)


def test_preflight_runs_every_stage(flight):
    folder, result = flight
    assert result.returncode == 0, result.stdout + result.stderr
    found = by_name(result)
    assert found["training"]["value"].count(".") == 5 and "tokens/s" in found["speed"]["value"]
    assert "for 4 batches" in found["Hessians"]["value"] and "reserve 10 s" in found["Hessians"]["value"]
    assert {"evaluation pre_quant", "evaluation int6", "evaluation sliding"} <= set(found)
    assert "3,000 tokens" in found["evaluation time"]["value"] and "script's estimate" in found["size"]["value"]
    assert sorted(p.name for p in folder.iterdir()) == ["data"]  # nothing of the run stays


def test_preflight_passes_settings_on_and_shows_why_a_run_failed(tmp_path):
    make_data(tmp_path)
    result = golf(tmp_path, "preflight", SCRIPT, num_kv_heads=3)
    assert result.returncode == 1 and "NUM_KV_HEADS=3" in result.stdout and "exit status 2" in result.stdout


def test_preflight_without_data_starts_nothing(tmp_path):
    result = golf(tmp_path, "preflight", SCRIPT, "--json")
    assert result.returncode == 1 and "run" not in by_name(result)
    missing = golf(tmp_path, "preflight", "nowhere.py", vocab_size="many")
    assert missing.returncode == 2 and "nowhere.py" in missing.stderr and "Traceback" not in missing.stderr


def test_preflight_refuses_data_that_the_run_would_refuse(tmp_path):
    data = make_data(tmp_path)
    (data / "manifest.json").write_text(json.dumps({"datasets": [
        {"name": "fineweb10B_sp512", "stats": {"tokens_val": 9_660_000}}]}))
    result = golf(tmp_path, "preflight", SCRIPT, "--json")
    assert result.returncode == 1 and "run" not in by_name(result)
    assert "tokens_val 9660000, found 3000" in by_name(result)["validation data"]["value"]
    few = golf(tmp_path, "preflight", SCRIPT, "--val-tokens", "0")
    assert few.returncode == 2 and "--val-tokens: 0 must be from 1 to inf" in few.stderr


def test_preflight_takes_what_is_not_set_from_the_script(tmp_path):
    """The record's script has another vocabulary, fewer Hessian batches and a shorter cap than the root script."""
    record = ROOT / "records/track_non_record_16mb/2026-11-30_SP8192_Entropy_Coded/train_gpt.py"
    result = subprocess.run([sys.executable, "-m", "golf", "preflight", str(record), "--json"], cwd=tmp_path, text=True,
                            env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, check=False)
    assert "fineweb10B_sp8192" in by_name(result)["train shards"]["value"]
    (tmp_path / "a.txt").write_text(LOG.replace("0.0m", "0.5m").replace("2/5 train_loss: 8.1 train_time: 0.5m",
                                                                       "2/5 train_loss: 8.1 train_time: 1.0m"))
    defaults = scripts.defaults(record.read_text())
    found = {f.check: f for f in machine.judge(tmp_path / "a.txt", 1000, 10_000, defaults)}
    assert "for 20; reserve" in found["Hessians"].value and "10 steps in 300 s" in found["speed"].value


LOG = """attention: fa3 (first choice)
artifact estimate: 17.2 MB of 16.0 (weight decay decides)
1/5 train_loss: 8.0 train_time: 0.0m tok/s: 1000000
2/5 train_loss: 8.1 train_time: 0.0m tok/s: 1000000
GPTQ:collected 66 Hessians in 2.0s
GPTQ quantization: 66 layers with full GPTQ, 3 fallback to clip-search
final_int6_roundtrip val_loss:8.0 val_bpb:3.0 eval_time:100000ms
"""


def test_projections_over_the_limits_are_flagged(tmp_path):
    (tmp_path / "a.txt").write_text(LOG, encoding="utf-8")
    found = {f.check: f for f in machine.judge(tmp_path / "a.txt", 1000, 10_000, {})}
    assert found["Hessians"].verdict == "warn" and "GPTQ_RESERVE_SECONDS=33" in found["Hessians"].remedy
    assert found["evaluation time"].verdict == "warn" and "1,000 s" in found["evaluation time"].value
    assert found["size"].verdict == "fail" and found["training"].verdict == "warn" and found["GPTQ"].verdict == "warn"
    assert "bpb" not in found["size"].remedy


@pytest.mark.parametrize(("target", "verdict"), [(15_990_000, "warn"), (0, "fail"), (17_000_000, "fail")])
def test_scripts_that_fit_the_size_by_themselves_are_warned(tmp_path, target, verdict):
    rule = "=" * 100
    head = f"{rule}\nHyperparameters:\n  target_total_bytes: {target}\nprint(1)\n{rule}\nRunning Python 3.12\n{rule}\n"
    (tmp_path / "a.txt").write_text(head + LOG, encoding="utf-8")
    size = {f.check: f for f in machine.judge(tmp_path / "a.txt", 1000, 10_000, {})}["size"]
    assert size.verdict == verdict and ("down to 15,990,000 bytes cost bpb" in size.remedy) == (verdict == "warn")


def test_command_that_hangs_is_ended_with_its_children(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "GRACE_SECONDS", 0.3)
    code = "import signal, subprocess, sys, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); " \
           "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); " \
           "open('pid', 'w').write(str(child.pid)); time.sleep(60)"
    began = time.monotonic()
    status, output = trial.run_limited([sys.executable, "-c", code], tmp_path, dict(os.environ), 2)
    assert status == 124 and "stopped after 2 s" in output and time.monotonic() - began < 20
    state = subprocess.run(["ps", "-o", "stat=", "-p", (tmp_path / "pid").read_text()], capture_output=True, text=True,
                           check=False).stdout
    assert state.strip()[:1] in ("", "Z")


def test_time_limit_holds_for_children_in_a_session_of_their_own(tmp_path):
    """As torchrun's workers are: they keep the output open when only the group of the command is ended."""
    code = "import subprocess, sys, time; print('begun', flush=True); " \
           "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True); " \
           "time.sleep(60)"
    began = time.monotonic()
    status, output = trial.run_limited([sys.executable, "-c", code], tmp_path, os.environ, 1)
    assert status == 124 and output.startswith("begun") and time.monotonic() - began < 20


def test_tiny_data_is_what_a_run_reads(tmp_path):
    trial.make_tiny_data(tmp_path / "data", 512)
    found = list(machine.check_data(settings(data_dir=tmp_path / "data")))
    assert [f.verdict for f in found] == ["ok"] * 3
    with pytest.raises(ValueError, match="VOCAB_SIZE=60000"):
        trial.make_tiny_data(tmp_path / "other", 60000)


def test_options_have_defaults():
    parser = argparse.ArgumentParser()
    machine.add_parser(parser.add_subparsers())
    assert parser.parse_args(["preflight"]).script.name == "train_gpt.py"
