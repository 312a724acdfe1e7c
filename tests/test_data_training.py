"""Data sets made by data/ as train_gpt.py reads them: bytes against the manifest, the split guard, CaseOps."""
import hashlib
import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from conftest import ROOT, SCRIPT, new_folder, run_environment, run_script, summary_block

import train_gpt as tg

SPECS = {"tokenizers": [
    {"name": "sp_bpe_512", "kind": "sentencepiece", "vocab_size": 512},
    {"name": "sp_bpe_512_caseops", "kind": "sentencepiece", "vocab_size": 512, "transform": "caseops"},
]}
TEXTS = [f"The {word} Engine No. {i} of NASA met O'Brien in New York; it was {word.upper()}, said Dr. {word.title()}. "
         f"Then the small engines of the {word} went home, and nobody minded the rain at all. " * 4
         for i, word in enumerate("steam diesel rocket water wind paper sugar cotton copper silver".split() * 12)]


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Folder with data/: 120 documents, 20 of them validation, as SP512 and as SP512 with CaseOps."""
    folder = tmp_path_factory.mktemp("exported")
    docs = folder / "docs_selected.jsonl"
    docs.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS), encoding="utf-8")
    sidecar = {"num_docs": len(TEXTS), "docs_val": 20, "shuffle_seed": 0,
               "docs_sha256": hashlib.sha256(docs.read_bytes()).hexdigest()}
    (folder / "docs_selected.source_manifest.json").write_text(json.dumps(sidecar))
    (folder / "specs.json").write_text(json.dumps(SPECS))
    command = [sys.executable, str(ROOT / "data/download_hf_docs_and_tokenize.py"), "--docs-jsonl", str(docs),
               "--tokenizer-config", str(folder / "specs.json"), "--output-root", "data", "--workers", "1"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.parametrize("transform", ["", "caseops"])
def test_an_export_trains_and_its_bytes_match_the_manifest(exported, transform):
    source_bytes = sum(len(text.encode()) for text in TEXTS[:20])
    result = run_script(exported, run_id=f"r{transform}", transform=transform, iterations=2,
                        output_dir=f"out{transform}")
    assert result.returncode == 0, result.stderr
    assert "matches manifest: yes" in result.stdout and "UNOFFICIAL" not in result.stdout
    assert f"{source_bytes} source bytes" in result.stdout
    assert float(summary_block(result.stdout)["val_bpb"]) > 0


def test_both_exports_stand_for_the_same_bytes(exported):
    entries = {d["name"]: d["stats"] for d in json.loads((exported / "data/manifest.json").read_text())["datasets"]}
    plain, caseops = entries["fineweb10B_sp512"], entries["fineweb10B_sp512_caseops"]
    assert plain["bytes_val_normalised"] == caseops["bytes_val_normalised"]
    assert plain["docs_val"] == caseops["docs_val"] == 20


@pytest.mark.parametrize("lost", ["sidecar", "manifest"])
def test_caseops_without_its_sidecar_is_refused(exported, tmp_path, lost, monkeypatch):
    folder = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(exported / "data"), str(folder)], check=True)
    files = [folder / "manifest.json"] if lost == "manifest" else list(folder.rglob("*.bytes"))
    for path in files:
        path.unlink()
    hp = tg.Hyperparameters.from_env({"DATA_DIR": str(folder), "VOCAB_SIZE": "512", "TRANSFORM": "caseops",
                                      "EVAL_SEQ_LEN": "64", "EVAL_STRIDE": "16"})
    with pytest.raises(tg.SetupError, match="bytes file beside each val shard"):
        tg.load_validation(hp, tg.byte_tables(tg.load_tokenizer(hp)))


def test_the_sidecar_counts_the_scored_targets_and_must_be_as_long_as_the_shards(tmp_path):
    hp, path = replace(tg.Hyperparameters(), transform="caseops"), tmp_path / "fineweb_val_000000.bin"
    path.with_suffix(".bytes").write_bytes(bytes([9, 1, 2, 3]))
    count = tg.sidecar_count(hp, {"bytes_sidecar": {"dtype": "uint8"}}, [path], 4)
    assert (count(np.zeros(3)), count(np.zeros(4))) == (3, 6)
    with pytest.raises(tg.SetupError, match="5 val tokens, but 4 in"):
        tg.sidecar_count(hp, {"bytes_sidecar": {"dtype": "uint8"}}, [path], 5)


def test_preflight_cuts_the_sidecar_with_the_validation_tokens(exported):
    changes = {"transform": "caseops", "model_dim": 160, "embedding_dim": 160}
    result = subprocess.run([sys.executable, "-m", "golf", "preflight", str(SCRIPT), "--val-tokens", "1000"],
                            cwd=exported, env={**run_environment(**changes), "PYTHONPATH": str(ROOT)},
                            capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0 and "of an untrained model on 1,000 tokens" in result.stdout, result.stdout


WHOLE = {"docs_val": 3, "tokens_val": 100, "bytes_val_normalised": 300}


def ranges(*bounds):
    keys = ("val", "train")
    return {key: {"first_doc": bounds[2 * i], "last_doc": bounds[2 * i + 1]} for i, key in enumerate(keys)}


def test_the_verdict_on_a_manifest_says_what_was_compared():
    hp = tg.Hyperparameters()
    assert "matches manifest: yes" in tg.check_manifest(hp, {"stats": WHOLE, "splits": ranges(0, 2, 3, 9)}, WHOLE)
    assert "as far as it says" in tg.check_manifest(hp, {"stats": {"tokens_val": 100}}, WHOLE)
    assert "it says nothing" in tg.check_manifest(hp, {}, WHOLE)
    assert "UNOFFICIAL SPLIT" in tg.check_manifest(hp, {"stats": WHOLE, "unofficial_split": True}, WHOLE)


@pytest.mark.parametrize("key", WHOLE)
def test_any_total_that_differs_is_refused(key):
    with pytest.raises(tg.SetupError, match=f"{key} {WHOLE[key] + 1}, found {WHOLE[key]}"):
        tg.check_manifest(tg.Hyperparameters(), {"stats": {**WHOLE, key: WHOLE[key] + 1}}, WHOLE)


def test_validation_tokens_in_another_order_are_refused(exported, tmp_path):
    """Same count, same bytes, same documents' starts: only the hash in the manifest tells."""
    folder = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(exported / "data"), str(folder)], check=True)
    hp = tg.Hyperparameters.from_env({"DATA_DIR": str(folder), "VOCAB_SIZE": "512", "EVAL_SEQ_LEN": "64",
                                      "EVAL_STRIDE": "16"})
    tables = tg.byte_tables(tg.load_tokenizer(hp))
    assert tg.load_validation(hp, replace(tables, note="; MARK")).note.endswith("matches manifest: yes; MARK")
    path, = hp.dataset_dir.glob("fineweb_val_*.bin")
    shard = np.fromfile(path, "<u2")
    assert shard[-1] != shard[-2]
    shard[[-2, -1]] = shard[[-1, -2]]
    shard.tofile(path)
    with pytest.raises(tg.SetupError, match=r"is not that of manifest.json .sha256."):
        tg.load_validation(hp, tables)


def test_the_remedy_for_missing_data_names_the_variant(tmp_path):
    hp = tg.Hyperparameters.from_env({"DATA_DIR": str(tmp_path), "VOCAB_SIZE": "8192", "TRANSFORM": "caseops"})
    with pytest.raises(tg.SetupError, match="--variant sp8192_caseops`"):
        tg.load_tokenizer(hp)


@pytest.mark.parametrize("bounds", [(0, 4, 3, 9), (0, 9, 3, 5), (3, 9, 0, 3)])
def test_overlapping_document_ranges_are_refused(bounds):
    with pytest.raises(tg.SetupError, match="overlap"):
        tg.check_manifest(tg.Hyperparameters(), {"stats": WHOLE, "splits": ranges(*bounds)}, WHOLE)


def test_a_run_on_a_manifest_of_another_split_stops(tmp_path):
    folder = new_folder(tmp_path, "split")
    entry = {"name": "fineweb10B_sp512", "stats": {"docs_val": 999}}
    (folder / "data/manifest.json").write_text(json.dumps({"datasets": [entry]}))
    result = run_script(folder)
    assert result.returncode == 2 and "docs_val 999" in result.stderr
