"""Tests of data/audit.py. Run: python -m pytest tests/test_data_audit.py"""

from __future__ import annotations

import json
import shutil
import sys
import types
from pathlib import Path

import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "data")]

import audit  # noqa: E402
import data_helpers as helpers  # noqa: E402
import shards  # noqa: E402
from data_helpers import read_split, run_script, shard_bytes  # noqa: E402

pytest.importorskip("sentencepiece")
SP, CASE, BYTE = "fineweb10B_sp330", "fineweb10B_sp330_caseops", "fineweb10B_byte260"


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """One export with all three kinds of tokenizer, and its documents."""
    folder = tmp_path_factory.mktemp("audit")
    texts = [text.title() for text in helpers.make_texts(80)]
    texts[2:4] = [" Leading SPACE \ue001\ue003\ue002 \ue001A", "  \ufb01 \u00bd \u2581 X"]
    docs = helpers.write_docs(folder, texts, docs_val=20)
    spec = {"kind": "sentencepiece", "vocab_size": 330}
    specs = [{"name": "plain", **spec}, {"name": "case", "transform": "caseops", **spec}]
    (folder / "specs.json").write_text(json.dumps({"tokenizers": specs}))
    arguments = ("--docs-jsonl", docs, "--output-root", folder / "out", "--tokenizer-config", folder / "specs.json")
    options = ("--byte260", "--workers", 1, "--shard-tokens", 700)
    result = run_script("download_hf_docs_and_tokenize", *arguments, *options)
    assert result.returncode == 0, result.stderr
    return types.SimpleNamespace(out=folder / "out", docs=docs)


@pytest.fixture
def copy(exported, tmp_path):
    shutil.copytree(exported.out, tmp_path / "data")
    return tmp_path / "data"


def edit_manifest(root, change):
    path = root / "manifest.json"
    manifest = json.loads(path.read_text())
    change({dataset["name"]: dataset for dataset in manifest["datasets"]}, manifest)
    path.write_text(json.dumps(manifest))


def assert_mismatch(root, *parts, args=()):
    result = run_script("audit", root, *args)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr, result.stderr


@pytest.mark.parametrize("chunk", [1 << 22, 50])
def test_a_good_export_agrees_with_itself_and_its_documents(exported, monkeypatch, capsys, chunk):
    monkeypatch.setattr(audit, "CHUNK_TOKENS", chunk)
    monkeypatch.setattr(sys, "argv", ["audit.py", str(exported.out), "--docs-jsonl", str(exported.docs)])
    audit.main()
    output = capsys.readouterr().out
    assert "everything agrees" in output and "NO" not in output
    for name in (SP, CASE, BYTE):
        assert name in output
    assert "matches canonical: no, not the challenge's validation split (20 documents, not 50,000)" in output


def test_every_total_is_printed(exported):
    result = run_script("audit", exported.out, "--variant", "sp330")
    assert result.returncode == 0 and CASE not in result.stdout
    tokens = read_split(exported.out / "datasets" / SP, "val")
    rows = {tuple(line.split()[:2]): line for line in result.stdout.splitlines() if line.startswith("  ")}
    assert f"{len(tokens):,}" in rows["val", "tokens"] and " 20 " in rows["val", "documents"]


@pytest.mark.parametrize("key", ["tokens_val", "docs_val", "bytes_val_normalised", "files_train", "tokens_train"])
def test_a_wrong_total_in_the_manifest_is_found(copy, key):
    edit_manifest(copy, lambda sets, _: sets[SP]["stats"].update({key: sets[SP]["stats"][key] + 1}))
    assert_mismatch(copy, SP, "differ")


def test_wrong_source_bytes_need_the_documents(copy, exported):
    edit_manifest(copy, lambda sets, _: sets[SP]["stats"].update(bytes_val_source=1))
    assert run_script("audit", copy).returncode == 0
    assert_mismatch(copy, "val source bytes differ", args=("--docs-jsonl", exported.docs))


def test_other_documents_are_found(copy, tmp_path):
    docs = helpers.write_docs(tmp_path, helpers.make_texts(80, seed=9), docs_val=20)
    assert_mismatch(copy, "another val split", "scored bytes differ", args=("--docs-jsonl", docs))


def test_a_short_shard_that_agrees_with_its_header_is_found(copy):
    path = copy / f"datasets/{SP}/fineweb_val_000000.bin"
    path.write_bytes(shard_bytes(read_split(path.parent, "val")[:600].tolist()))
    assert_mismatch(copy, "val tokens differ", "fineweb_val_000000.bin is not the manifest's (sha256)")


def test_a_missing_shard_is_found(copy):
    (copy / f"datasets/{SP}/fineweb_train_000001.bin").unlink()
    assert_mismatch(copy, "train shards are not numbered", "fineweb_train_000001.bin is missing")


def test_foreign_ids_and_a_missing_start_are_found(copy):
    path = copy / f"datasets/{SP}/fineweb_val_000000.bin"
    path.write_bytes(shard_bytes([5000] * 700))
    assert_mismatch(copy, "id 5000", "ends at 329")
    path.write_bytes(shard_bytes([50] * 700))
    assert_mismatch(copy, "val starts with id 50, not with 1")


def test_overlapping_ranges_are_found(copy):
    edit_manifest(copy, lambda sets, _: sets[SP]["splits"]["train"].update(first_doc=10))
    assert_mismatch(copy, "val documents 0 to 19 and train documents 10 to 79 overlap")


@pytest.mark.parametrize("change", [lambda sizes: sizes[:-1], lambda sizes: sizes + (np.arange(len(sizes)) == 7)])
def test_a_wrong_sidecar_is_found(copy, change):
    path = copy / f"datasets/{CASE}/fineweb_val_000000.bytes"
    path.write_bytes(change(np.fromfile(path, dtype=np.uint8)).astype(np.uint8).tobytes())
    result = run_script("audit", copy)
    assert result.returncode in (1, 2) and "sidecar" in result.stderr and "Traceback" not in result.stderr


def test_another_tokenizer_is_found(copy):
    shutil.copy(copy / "tokenizers/fineweb_330_bpe_caseops.model", copy / "tokenizers/fineweb_330_bpe.model")
    assert_mismatch(copy, "fineweb_330_bpe.model is not the manifest's (sha256)")


def test_part_of_a_published_set_is_no_mismatch(copy, exported):
    for path in list((copy / f"datasets/{SP}").glob("fineweb_train_*.bin")):
        if path.name != "fineweb_train_000000.bin":
            path.unlink()
    assert_mismatch(copy, "fineweb_train_000001.bin is missing", args=("--variant", "sp330"))
    edit_manifest(copy, lambda sets, _: sets[SP].update(downloaded_from={"repo_id": "a/b"}))
    result = run_script("audit", copy, "--variant", "sp330")
    assert result.returncode == 0 and "train shards are here" in result.stdout, result.stderr
    documents = ("--variant", "sp330", "--docs-jsonl", exported.docs)
    result = run_script("audit", copy, *documents)
    assert result.returncode == 0 and result.stdout.count("  part\n") == 5, result.stdout + result.stderr
    edit_manifest(copy, lambda sets, _: sets[SP]["stats"].update(docs_train=61))
    assert_mismatch(copy, "train documents differ: [60, 61]", args=documents)


@pytest.mark.parametrize(
    ("name", "tokens", "published", "parts", "good"),
    [
        ("sp4096", 45_508_608 + 100, True, ("yes (45,508,608 evaluated tokens",), True),
        ("sp4096", 45_508_608 + 2049, True, ("no (45,510,656 evaluated tokens of 45,508,608)",), False),
        ("sp4096", 40_000_000, False, ("yes (about 151,078,222 scored bytes)",), True),
        ("sp8192_caseops", 47_000_000, True, ("yes (about",), True),
    ],
)
def test_canonical_totals(name, tokens, published, parts, good):
    found = audit.Audit(f"fineweb10B_{name}")
    found.shards = {("val", "docs"): 50_000, ("val", "tokens"): tokens, ("val", "normalised"): 151_075_000}
    line = audit.canonical_line(found, {} if published else {"splits": {}})
    assert all(part in line for part in parts) and (not found.problems) == good
    found.shards["val", "normalised"] = 176_300_000  # the leading space counted twice
    assert "no (about" in audit.canonical_line(found, {})
    found.shards["val", "docs"] = 10_000
    assert "not the challenge's" in audit.canonical_line(found, {}) and found.problems


def test_bad_folders_are_refused(tmp_path):
    helpers.assert_refused(run_script("audit", tmp_path), "manifest.json", "no such file")
    (tmp_path / "manifest.json").write_text('{"datasets": []}')
    helpers.assert_refused(run_script("audit", tmp_path, "--variant", "sp9"), "sp9")


@pytest.mark.parametrize(
    "change",
    [
        {"files": 5}, {"files": ["a"]}, {"files": [{"x": 1}]}, {"files": [{"name": 5}]}, {"sidecars": {"a": 1}},
        {"stats": [1]}, {"stats": {"tokens_val": "2718"}}, {"tokenizer_name": ["x"]}, {"splits": [1]},
        {"splits": {"val": 5}}, {"bytes_sidecar": "uint8"}, {"bytes_sidecar": {"dtype": "foo"}}, {"name": "../x"},
        {"name": 5},
    ],
)  # fmt: skip
def test_a_malformed_entry_of_the_manifest_is_one_line(copy, monkeypatch, change):
    edit_manifest(copy, lambda sets, _: sets[SP].update(change))
    monkeypatch.setattr(sys, "argv", ["audit.py", str(copy)])
    with pytest.raises(shards.DataError) as refused:
        audit.main()
    assert "\n" not in str(refused.value) or isinstance(refused.value, audit.MismatchError)


@pytest.mark.parametrize(
    "transform",
    ["caseops", {"name": "caseops"}, {"name": "caseops", "normalization": "nmt_nfkc"},
     {"name": "caseops", "normalization": "nmt_nfkc_cf"}],
)  # fmt: skip
def test_a_transform_that_the_tokenizer_does_not_have_is_refused(copy, transform):
    edit_manifest(copy, lambda _, manifest: [row.update(transform=transform) for row in manifest["tokenizers"]])
    helpers.assert_refused(run_script("audit", copy), "caseops")


@pytest.mark.parametrize("tail", [[1, 4], [1, 5], [6], [1, 6, 6, 6]])
def test_a_shard_cut_behind_a_marker_is_found(copy, tail):
    path = copy / f"datasets/{CASE}/fineweb_val_000000.bin"
    for other in path.parent.glob("fineweb_val_*"):
        if other.stem != path.stem:
            other.unlink()
    path.write_bytes(shard_bytes(tail))
    path.with_suffix(".bytes").write_bytes(b"\0" * len(tail))
    assert_mismatch(copy, f"{CASE}: val tokens differ")
