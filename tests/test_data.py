"""Tests of the data scripts. Run: python -m pytest tests/test_data.py"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "data")]

import cached_challenge_fineweb as downloader  # noqa: E402
import data_helpers as helpers  # noqa: E402
import download_hf_docs_and_tokenize as exporter  # noqa: E402
import sample_docs  # noqa: E402
import shards  # noqa: E402
from data_helpers import DATA, GOLDEN, FakeHub, assert_refused, read_split, run_script, shard_bytes, snapshot  # noqa: E402

spm = pytest.importorskip("sentencepiece")

# ---------------------------------------------------------------- bytes of a token


@pytest.fixture(scope="module")
def golden_tokenizer():
    return spm.SentencePieceProcessor(model_file=str(GOLDEN / "tokenizer_512.model"))


@pytest.fixture(scope="module")
def golden_tables(golden_tokenizer):
    return shards.sentencepiece_byte_tables(golden_tokenizer)


def count_text(text, tokenizer, tables):
    return shards.count_bytes(np.array([shards.BOS_ID, *tokenizer.encode(text)]), tables)


def test_byte_tables_match_the_reference(golden_tables):
    with np.load(GOLDEN / "byte_luts.npz") as reference:
        for name in reference:
            np.testing.assert_array_equal(getattr(golden_tables, name), reference[name])


def test_encoding_and_byte_count_match_the_reference(golden_tables):
    cases = json.loads((GOLDEN / "tokenized.json").read_text())
    encoder = exporter.SentencePieceEncoder(GOLDEN / "tokenizer_512.model", workers=1)
    for case in cases:
        assert encoder.encode([case["text"]]).tolist() == case["ids"]
        assert shards.count_bytes(np.array(case["ids"]), golden_tables) == case["normalized_utf8_bytes"]


def test_every_byte_piece_counts_one(golden_tokenizer, golden_tables):
    byte_ids = [i for i in range(512) if golden_tokenizer.is_byte(i)]
    assert len(byte_ids) == 256
    assert set(golden_tables.base_bytes[byte_ids]) == {1}


@pytest.mark.parametrize(
    ("text", "normalised", "source"),
    [("hello world", 11, 11), ("a  b\n\nc", 5, 7), (" lead", 4, 5), ("\ufb01 \u00bd", 8, 6), ("x\0y", 3, 3)],
)
def test_normalised_and_source_bytes(text, normalised, source, golden_tokenizer, golden_tables):
    assert count_text(text, golden_tokenizer, golden_tables) == normalised
    assert len(text.encode("utf-8")) == source


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.characters(codec="utf-8"), max_size=60))
def test_count_equals_the_normalised_text(golden_tokenizer, golden_tables, text):
    normal = golden_tokenizer.normalize(text).replace(shards.SPACE_MARKER, " ")
    if " " in normal[:1]:  # a marker right behind BOS is not counted: the rule of the metric
        normal = normal[1:]
    assert count_text(text, golden_tokenizer, golden_tables) == len(normal.encode("utf-8"))


# ---------------------------------------------------------------- shards


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(st.lists(st.integers(0, 65535), max_size=30), max_size=8), shard_tokens=st.integers(1, 40))
def test_shard_writer_round_trip(tmp_path_factory, parts, shard_tokens):
    folder = tmp_path_factory.mktemp("shards")
    writer = shards.ShardWriter(folder, "train", shard_tokens)
    for part in parts:
        writer.write(np.array(part, dtype=np.uint16))
    writer.close()
    flat = [token for part in parts for token in part]
    assert writer.tokens == len(flat)
    stored = [shards.read_tokens(folder / entry["name"]).tolist() for entry in writer.files]
    assert [token for part in stored for token in part] == flat
    assert all(len(part) == shard_tokens for part in stored[:-1])
    for entry in writer.files:
        assert (folder / entry["name"]).read_bytes() == shard_bytes(shards.read_tokens(folder / entry["name"]).tolist())


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"x" * 100,
        shard_bytes([1, 2, 3])[:-1],
        shard_bytes([1, 2, 3]) + b"\0",
        shard_bytes([1], claimed=-5),
        b"\0" * 1024,
    ],
)
def test_damaged_shards_are_refused(tmp_path, raw):
    (tmp_path / "bad.bin").write_bytes(raw)
    with pytest.raises(shards.DamagedFileError, match=r"bad\.bin"):
        shards.read_token_count(tmp_path / "bad.bin")


# ---------------------------------------------------------------- the sample corpus


@pytest.fixture
def fake_installation(tmp_path):
    root = tmp_path / "lib"
    prose = "This function is one of the things that you can use to read the value of a setting from a file. "
    (root / "pkg").mkdir(parents=True)
    (root / "pkg" / "__init__.py").write_text(f'"""Package. {prose * 3}"""\nraise SystemExit("imported")\n')
    (root / "pkg" / "mod.py").write_text(
        f'class A:\n    """{prose * 2}"""\n    def go(self, x):\n        """Go. {prose}"""\n'
    )
    (root / "pkg" / "broken.py").write_text('def (: """oops"""')
    (root / "pkg" / "latin.txt").write_bytes(b"\xe9\xff" * 300)
    (root / "pkg" / "numbers.txt").write_text("1 2 3 4\n" * 200)
    (root / "pkg" / "tiny.md").write_text("too short")
    (root / "pkg" / "LICENSE.txt").write_text("You may do with this what is in the licence. " * 20)
    (root / "pkg" / "copy_of_mod.py").write_text((root / "pkg" / "mod.py").read_text())
    (root / "topics.py").write_text(f"topics = {{'if': {('The if statement. ' + prose * 2)!r}}}\nx = '''y'''\n")
    (root / "guide.rst").write_text("\n\n".join(f"Part {i} of the guide. {prose}" * 2 for i in range(20)))
    (root / "pkg-1.dist-info").mkdir()
    (root / "pkg-1.dist-info" / "METADATA").write_text(f"Name: pkg\nVersion: 1\n\nThe long description. {prose * 2}")
    return root


def sample(out, *args):
    result = run_script("sample_docs", "--out", out, *args)
    assert result.returncode == 0, result.stderr
    texts = [
        json.loads(line)["text"] for line in (out / "docs_selected.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    return texts, json.loads((out / "docs_selected.source_manifest.json").read_text())


def test_sample_of_a_small_tree(tmp_path, fake_installation):
    texts, sidecar = sample(tmp_path / "a", "--source", fake_installation, "--val-docs", 2)
    joined = "\n".join(texts)
    for expected in ("pkg\n\nPackage.", "A.go(x)", "The if statement", "Part 7 of the guide", "The long description"):
        assert expected in joined
    for unwanted in ("licence", "1 2 3 4", "too short", "Name: pkg"):
        assert unwanted not in joined
    assert min(map(len, texts)) >= 200
    assert joined.count("Go. This function") == 1  # the copied module gave nothing new
    raw = (tmp_path / "a" / "docs_selected.jsonl").read_bytes()
    assert sidecar["docs_sha256"] == hashlib.sha256(raw).hexdigest()
    assert (sidecar["num_docs"], sidecar["docs_val"], sidecar["shuffle_seed"]) == (len(texts), 2, 1337)
    sample(tmp_path / "b", "--source", fake_installation, "--val-docs", 2)
    assert snapshot(tmp_path / "a") == snapshot(tmp_path / "b")


def test_sample_of_the_real_installation(tmp_path):
    texts, sidecar = sample(tmp_path, "--max-mb", 1, "--val-docs", 5)
    assert 0.5e6 < sidecar["text_bytes"] <= 1e6
    assert sidecar["text_bytes"] == sum(len(text.encode("utf-8")) for text in texts)
    assert len(set(texts)) == len(texts)


def test_sample_refuses_bad_input(tmp_path, fake_installation):
    assert_refused(run_script("sample_docs", "--source", tmp_path / "nowhere"), "nowhere", "not a folder")
    few = run_script("sample_docs", "--source", fake_installation, "--val-docs", 90, "--out", tmp_path / "out")
    assert_refused(few, "--val-docs 90")
    assert not (tmp_path / "out").exists()


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=50), max_size=6), st.integers(1, 60))
def test_pack_loses_nothing(sections, max_chars):
    sections = [section.strip() for section in sections if section.strip()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_docs, "MAX_DOC_CHARS", max_chars)
        documents = list(sample_docs.pack(sections))
    assert "\n\n".join(documents) == "\n\n".join(sections)
    assert all(len(document) <= max_chars for document in documents if "\n\n" in document.strip())


# ---------------------------------------------------------------- documents to shards


def export(docs, out, specs, *args):
    return run_script(
        "download_hf_docs_and_tokenize", "--docs-jsonl", docs, "--output-root", out, "--tokenizer-config", specs, *args
    )


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A finished export of 60 small documents: its folder, texts and manifest."""
    folder = tmp_path_factory.mktemp("export")
    texts = helpers.make_texts(60)
    docs = helpers.write_docs(folder, texts, docs_val=8)
    result = export(
        docs, folder / "out", helpers.write_specs(folder / "specs.json"), "--shard-tokens", 700, "--byte260"
    )
    assert result.returncode == 0, result.stderr
    manifest = json.loads((folder / "out" / "manifest.json").read_text())
    return types.SimpleNamespace(folder=folder, out=folder / "out", docs=docs, texts=texts, manifest=manifest)


def test_shards_hold_exactly_the_documents(exported):
    tokenizer = spm.SentencePieceProcessor(model_file=str(exported.out / "tokenizers/fineweb_320_bpe.model"))
    for split, texts in (("val", exported.texts[:8]), ("train", exported.texts[8:])):
        expected = [token for text in texts for token in [1, *tokenizer.encode(text)]]
        assert read_split(exported.out / "datasets/fineweb10B_sp320", split).tolist() == expected
        expected = [token for text in texts for token in [1, *(byte + 4 for byte in text.encode("utf-8"))]]
        assert read_split(exported.out / "datasets/fineweb10B_byte260", split).tolist() == expected


def test_manifest_agrees_with_files_and_source(exported):
    manifest = exported.manifest
    assert (manifest["version"], manifest["num_docs"], manifest["num_val_docs"]) == ("10B", 60, 8)
    assert (manifest["shuffle_seed"], manifest["shard_size"], manifest["append_eos"]) == (7, 700, False)
    for dataset in manifest["datasets"]:
        folder = exported.out / dataset["path"]
        assert {entry["name"] for entry in dataset["files"]} == {path.name for path in folder.iterdir()}
        for entry in dataset["files"]:
            assert hashlib.sha256((folder / entry["name"]).read_bytes()).hexdigest() == entry["sha256"]
        for split, texts in (("val", exported.texts[:8]), ("train", exported.texts[8:])):
            stats = {key: dataset["stats"][f"{key}_{split}"] for key in ("docs", "files", "tokens")}
            tokens, files = read_split(folder, split), list(folder.glob(f"fineweb_{split}_*.bin"))
            assert stats == {"docs": len(texts), "files": len(files), "tokens": len(tokens)}
            assert dataset["stats"][f"bytes_{split}_source"] == sum(len(text.encode("utf-8")) for text in texts)


def test_manifest_counts_the_scored_bytes(exported):
    by_name = {dataset["name"]: dataset["stats"] for dataset in exported.manifest["datasets"]}
    tokenizer = spm.SentencePieceProcessor(model_file=str(exported.out / "tokenizers/fineweb_320_bpe.model"))
    normal = sum(
        len(tokenizer.normalize(text).replace(shards.SPACE_MARKER, " ").encode("utf-8")) for text in exported.texts[:8]
    )
    assert by_name["fineweb10B_sp320"]["bytes_val_normalised"] == normal
    assert by_name["fineweb10B_byte260"]["bytes_val_normalised"] == by_name["fineweb10B_byte260"]["bytes_val_source"]
    assert by_name["fineweb10B_sp320"]["bytes_val_normalised"] != by_name["fineweb10B_sp320"]["bytes_val_source"]


def test_manifest_names_the_split_and_the_tokenizer(exported):
    lines = exported.docs.read_bytes().splitlines(keepends=True)
    for dataset in exported.manifest["datasets"]:
        assert dataset["splits"]["val"]["sha256"] == hashlib.sha256(b"".join(lines[:8])).hexdigest()
        assert (dataset["splits"]["val"]["last_doc"], dataset["splits"]["train"]["first_doc"]) == (7, 8)
        assert dataset["splits"]["train"]["last_doc"] == 59 and dataset["unofficial_split"] is False
    entry = next(entry for entry in exported.manifest["tokenizers"] if entry["kind"] == "sentencepiece")
    model = (exported.out / entry["model_path"]).read_bytes()
    assert entry["sha256"] == hashlib.sha256(model).hexdigest() and entry["sentencepiece_version"] == spm.__version__
    assert len((exported.out / entry["vocab_path"]).read_text(encoding="utf-8").splitlines()) == 320


def test_same_bytes_on_every_run_from_any_compression_and_workers(exported, tmp_path):
    specs, sidecar = exported.folder / "specs.json", exported.folder / "docs_selected.source_manifest.json"
    for suffix, opener, workers in ((".gz", gzip.open, 1), (".xz", lzma.open, 3)):
        docs = tmp_path / f"docs_selected.jsonl{suffix}"
        with opener(docs, "wb") as file:
            file.write(exported.docs.read_bytes())
        (tmp_path / sidecar.name).write_bytes(sidecar.read_bytes())
        out = tmp_path / f"out{suffix}"
        result = export(docs, out, specs, "--shard-tokens", 700, "--byte260", "--workers", workers)
        assert result.returncode == 0, result.stderr
        assert snapshot(out) == snapshot(exported.out)


def test_variants_share_a_folder_and_a_model_is_reused(exported, tmp_path):
    specs = helpers.write_specs(tmp_path / "specs.json", 512)
    first = export(exported.docs, tmp_path / "out", exported.folder / "specs.json")
    second = export(exported.docs, tmp_path / "out", specs, "--reuse-sp-model", f"512={GOLDEN / 'tokenizer_512.model'}")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr + second.stderr
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert {dataset["name"] for dataset in manifest["datasets"]} == {"fineweb10B_sp320", "fineweb10B_sp512"}
    reused = (tmp_path / "out/tokenizers/fineweb_512_bpe.model").read_bytes()
    assert reused == (GOLDEN / "tokenizer_512.model").read_bytes()
    wrong = export(exported.docs, tmp_path / "o2", specs, "--reuse-sp-model", f"400={GOLDEN / 'tokenizer_512.model'}")
    assert_refused(wrong, "--reuse-sp-model 400", "sp_bpe_512")


def test_long_documents_are_used_in_full(tmp_path):
    texts = (
        helpers.make_texts(6) + [" ".join(helpers.make_texts(300, seed))[:10_000] for seed in range(10)] + ["x" * 9000]
    )
    docs = helpers.write_docs(tmp_path, texts, docs_val=2)
    result = export(docs, tmp_path / "out", helpers.write_specs(tmp_path / "s.json"))
    assert result.returncode == 0, result.stderr
    assert "trained on 100.00% of" in result.stdout


def test_share_of_used_text_is_guarded():
    lines = exporter.TrainingLines([], 100)
    lines.text_bytes, lines.used_bytes = 1000, 949
    with pytest.raises(shards.DataError, match=r"94\.9%"):
        lines.check_share("t")


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.sampled_from(" \nab\u00e9\u65e5\U0001f642"), max_size=200), st.integers(4, 30))
def test_cut_text_is_lossless_and_short_enough(text, limit):
    pieces = list(exporter.cut_text(text, limit))
    assert "".join(pieces) == text
    assert all(len(piece.encode("utf-8")) <= limit for piece in pieces)


def test_too_small_vocabulary_names_the_largest(tmp_path):
    docs = helpers.write_docs(tmp_path, ["a b c"] * 10, docs_val=2)
    result = export(docs, tmp_path / "out", helpers.write_specs(tmp_path / "s.json", 4096))
    assert_refused(result, "4096", "largest possible is 266")
    assert not (tmp_path / "out" / "manifest.json").exists()
    below = export(docs, tmp_path / "out", helpers.write_specs(tmp_path / "s.json", 100))
    assert_refused(below, "100")


def test_tokenizer_without_a_lone_space_is_refused(tmp_path):
    docs = helpers.write_docs(tmp_path, ["abcdefgh", "hgfedcba", "abcabc"] * 20, docs_val=2)
    specs = helpers.write_specs(tmp_path / "s.json", 268)
    assert_refused(export(docs, tmp_path / "out", specs), "lone space", "U+2581")


@pytest.mark.parametrize(
    ("falsified", "args", "parts"),
    [
        ({"num_docs": 61}, (), ("num_docs is 60", "61")),
        ({"docs_sha256": "0" * 64}, (), ("docs_sha256", "0" * 64)),
        ({"docs_val": "8"}, (), ("docs_val is '8'",)),
        ({"docs_val": 60}, (), ("60 documents cannot give 60",)),
        ({}, ("--val-docs", 5), ("--val-docs 5", "sidecar says 8", "--unofficial-split")),
        ({}, ("--shard-tokens", 0), ("--shard-tokens 0",)),
        ({}, ("--docs-manifest", "nowhere.json"), ("nowhere.json",)),
    ],
)
def test_mismatches_stop_before_any_work(tmp_path, falsified, args, parts):
    docs = helpers.write_docs(tmp_path, helpers.make_texts(60), **{"docs_val": 8, **falsified})
    result = export(docs, tmp_path / "out", helpers.write_specs(tmp_path / "s.json"), *args)
    assert_refused(result, *parts)
    assert "training on" not in result.stdout


def test_unofficial_split_is_recorded(exported, tmp_path):
    args = ("--val-docs", 5, "--unofficial-split")
    result = export(exported.docs, tmp_path, exported.folder / "specs.json", *args)
    assert result.returncode == 0, result.stderr
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["unofficial_split"] is True and manifest["num_val_docs"] == 5
    assert manifest["datasets"][0]["unofficial_split"] is True and manifest["datasets"][0]["stats"]["docs_val"] == 5


def test_without_a_sidecar_the_official_number_holds(tmp_path):
    docs = helpers.write_docs(tmp_path, helpers.make_texts(20), docs_val=4)
    (tmp_path / "docs_selected.source_manifest.json").unlink()
    result = export(docs, tmp_path / "out", helpers.write_specs(tmp_path / "s.json"), "--val-docs", 4)
    assert_refused(result, "--val-docs 4", "50000")
    assert "warning: no sidecar" in result.stdout


@pytest.mark.parametrize("line", ["not json", '{"no_text": 1}', '{"text": 5}', "[]", '{"text": "\\ud800"}'])
def test_failed_rebuild_leaves_the_old_data(exported, tmp_path, line):
    out = tmp_path / "out"
    specs = exported.folder / "specs.json"
    assert export(exported.docs, out, specs).returncode == 0
    before = snapshot(out)
    docs = helpers.write_docs(tmp_path, helpers.make_texts(40, seed=5), docs_val=8)
    docs.write_text(docs.read_text() + line + "\n")
    digest = hashlib.sha256(docs.read_bytes()).hexdigest()
    sidecar = {"num_docs": 41, "docs_val": 8, "docs_sha256": digest}
    (tmp_path / "docs_selected.source_manifest.json").write_text(json.dumps(sidecar))
    assert_refused(export(docs, out, specs), "line 41")
    assert snapshot(out) == before


def test_interrupted_swap_is_finished_by_the_next_run(tmp_path):
    root, staging = tmp_path, tmp_path / ".staging"
    for base, content in ((root, "old"), (staging, "new")):
        (base / "datasets/fineweb10B_sp320").mkdir(parents=True)
        (base / "datasets/fineweb10B_sp320/fineweb_val_000000.bin").write_text(content)
    (staging / "tokenizers").mkdir()
    (staging / "manifest.json").write_text("{}")
    (staging / "COMPLETE").touch()
    (root / "datasets/fineweb10B_sp320").rename(root / ".staging-old")  # killed between the two renames
    assert exporter.open_staging(root) == staging
    assert (root / "datasets/fineweb10B_sp320/fineweb_val_000000.bin").read_text() == "new"
    assert (root / "manifest.json").exists() and not (root / ".staging-old").exists()
    assert list(staging.iterdir()) == [staging / "tokenizers"]


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ({"vocab_size": 70_000}, "65536"),
        ({"kind": "words"}, "'words'"),
        ({"colour": 1}, "colour"),
        ({"trainer": {"bos_id": 7}}, "bos_id"),
        ({"train_docs": 0}, "train_docs 0"),
    ],
)
def test_bad_specs_are_refused(tmp_path, spec, part):
    path = helpers.write_specs(tmp_path / "s.json", **{"vocab_size": 320, **spec})
    with pytest.raises(shards.DataError, match=part):
        exporter.load_specs(path, [], byte260=False)


def test_shipped_specs():
    (spec,) = exporter.load_specs(DATA / "tokenizer_specs.json", [], byte260=False)
    assert (spec.variant, spec.train_docs) == ("sp4096", 5_000_000)
    (spec,) = exporter.load_specs(DATA / "tokenizer_specs_sample.json", [], byte260=False)
    assert spec.variant == "sp1024"


def test_train_docs_and_trainer_settings_change_the_model(exported, tmp_path):
    models = set()
    for more in ({}, {"train_docs": 30}, {"trainer": {"split_digits": False, "character_coverage": 0.98}}):
        spec = exporter.TokenizerSpec("t", "sentencepiece", 300, **more)
        models.add(exporter.train_sentencepiece(spec, exported.texts[: spec.train_docs]))
    assert len(models) == 3


def test_memory_is_checked_before_training(monkeypatch, capsys):
    monkeypatch.setattr(exporter, "available_memory_bytes", lambda: 10**9)
    spec = exporter.TokenizerSpec("t", "sentencepiece", 300)
    with pytest.raises(shards.DataError, match="--force-memory"):
        exporter.check_memory(spec, 10**9, force=False)
    exporter.check_memory(spec, 10**9, force=True)
    assert "about 5.1 GB" in capsys.readouterr().out


# ---------------------------------------------------------------- downloads


REPO = "some/repo"


@pytest.fixture
def hub():
    pytest.importorskip("huggingface_hub")
    hub = FakeHub()
    hub.publish(REPO, "sp512", train=[50, 60, 70], val=[40, 10])
    yield hub
    hub.close()


def download(hub, data_dir, *args, **environment):
    env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(data_dir / "hf"), "MATCHED_FINEWEB_REPO_ID": REPO, **environment}
    return run_script("cached_challenge_fineweb", "--data-dir", data_dir, "--variant", "sp512", *args, **env)


def check_complete(hub, data_dir, train_shards=3):
    folder = data_dir / "datasets/fineweb10B_sp512"
    remote = f"{REPO}/datasets/datasets/fineweb10B_sp512"
    names = [f"fineweb_val_{i:06d}.bin" for i in range(2)] + [f"fineweb_train_{i:06d}.bin" for i in range(train_shards)]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    for name in names:
        assert (folder / name).read_bytes() == hub.files[f"{remote}/{name}"]
        assert not (folder / name).is_symlink()
    assert (data_dir / "tokenizers/fineweb_512_bpe.model").stat().st_size > 1000


def test_download_into_an_empty_folder_and_again(hub, tmp_path):
    assert (first := download(hub, tmp_path, "--train-shards", 1)).returncode == 0, first.stdout + first.stderr
    check_complete(hub, tmp_path, train_shards=1)
    assert not (tmp_path / ".download").exists()
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    assert manifest["datasets"][0]["downloaded_from"]["repo_id"] == REPO
    hub.requests.clear()
    again = download(hub, tmp_path, "--train-shards", 1)
    assert again.returncode == 0 and "0 fetched" in again.stdout
    assert not any("fineweb" in request for request in hub.requests)  # nor the manifest, which is cached
    assert not any("manifest" in request for request in hub.requests)


def test_broken_files_are_repaired_and_only_those(hub, tmp_path):
    assert download(hub, tmp_path).returncode == 0
    folder = tmp_path / "datasets/fineweb10B_sp512"
    (folder / "fineweb_val_000000.bin").write_bytes(b"")
    (folder / "fineweb_train_000001.bin").write_bytes((folder / "fineweb_train_000001.bin").read_bytes()[:-9])
    (tmp_path / "tokenizers/fineweb_512_bpe.model").write_bytes(b"")
    (folder / "fineweb_train_000002.bin").rename(tmp_path / "elsewhere.bin")
    (folder / "fineweb_train_000002.bin").symlink_to(tmp_path / "elsewhere.bin")
    (folder / "fineweb_train_000000.bin").unlink()
    (folder / "fineweb_train_000000.bin").symlink_to(tmp_path / "dangling")
    result = download(hub, tmp_path)
    assert result.returncode == 0 and "4 fetched" in result.stdout, result.stdout + result.stderr
    check_complete(hub, tmp_path)


def test_throttling_and_truncation_end_well(hub, tmp_path):
    shard = f"{REPO}/datasets/datasets/fineweb10B_sp512/fineweb_train_000000.bin"
    hub.throttle[shard], hub.cut[shard] = 2, 1
    result = download(hub, tmp_path, "--train-shards", 1)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "attempt 2 of" in result.stdout
    check_complete(hub, tmp_path, train_shards=1)


def test_verify_compares_hashes(hub, tmp_path):
    manifest = json.loads(hub.files[f"{REPO}/datasets/manifest.json"])
    name = "fineweb_val_000000.bin"
    body = hub.files[f"{REPO}/datasets/datasets/fineweb10B_sp512/{name}"]
    manifest["datasets"][0]["files"] = [{"name": name, "sha256": hashlib.sha256(body).hexdigest()}]
    hub.files[f"{REPO}/datasets/manifest.json"] = json.dumps(manifest).encode()
    assert download(hub, tmp_path).returncode == 0
    (tmp_path / "datasets/fineweb10B_sp512" / name).write_bytes(body[:-1] + b"\1")
    assert "0 fetched" in download(hub, tmp_path).stdout
    assert "1 fetched" in download(hub, tmp_path, "--verify").stdout
    check_complete(hub, tmp_path)


def test_stale_manifest_is_refetched(hub, tmp_path):
    assert download(hub, tmp_path, "--train-shards", 0).returncode == 0
    hub.publish(REPO, "sp700", train=[5], val=[5])
    result = download(hub, tmp_path, "--variant", "sp700")
    assert result.returncode == 0, result.stdout + result.stderr
    hub.publish("other/repo", "sp701", train=[5], val=[5], root="x/y")
    other = download(hub, tmp_path, "--variant", "sp701", "--repo-id", "other/repo", "--remote-root", "x/y")
    assert other.returncode == 0, other.stdout + other.stderr
    names = [dataset["name"] for dataset in json.loads((tmp_path / "manifest.json").read_text())["datasets"]]
    assert names == ["fineweb10B_sp512", "fineweb10B_sp700", "fineweb10B_sp701"]


def test_old_manifest_of_unknown_origin_is_no_obstacle(hub, tmp_path):
    (tmp_path / "manifest.json").write_text('{"version": "10B", "datasets": [{"name": "fineweb10B_sp1024"}]}')
    assert download(hub, tmp_path, "--train-shards", 0).returncode == 0


def test_missing_things_are_named(hub, tmp_path):
    assert_refused(download(hub, tmp_path, "--variant", "sp999"), REPO, "no variant sp999", "it has: sp512")
    assert_refused(download(hub, tmp_path, "--train-shards", 4), "--train-shards 4", "has 3")
    assert_refused(download(hub, tmp_path, "--remote-root", "wrong"), "wrong/manifest.json is missing", "404")
    del hub.files[f"{REPO}/datasets/datasets/fineweb10B_sp512/fineweb_val_000001.bin"]
    secret = "hf_secret_token_value"
    result = download(hub, tmp_path, HF_TOKEN=secret)
    assert_refused(result, "fineweb_val_000001.bin is missing")
    assert secret not in result.stdout + result.stderr


def test_short_split_that_agrees_with_its_header_is_refused(hub, tmp_path):
    hub.files[f"{REPO}/datasets/datasets/fineweb10B_sp512/fineweb_val_000001.bin"] = shard_bytes([1] * 5)
    assert_refused(download(hub, tmp_path, "--train-shards", 0), "45 val tokens", "50")


@pytest.mark.parametrize("key", ["model_path", "vocab_path"])
@pytest.mark.parametrize(
    "path", ["../evil.model", "/tmp/evil.model", "tokenizers/../../evil", "shards.py", "tokenizers\\x"]
)
def test_hostile_tokenizer_paths_write_nothing(tmp_path, monkeypatch, key, path):
    manifest = {
        "datasets": [{"name": "fineweb10B_sp4", "tokenizer_name": "t", "stats": {"files_train": 0, "files_val": 0}}],
        "tokenizers": [{"name": "t", "model_path": "tokenizers/a.model", key: path}],
    }
    monkeypatch.setattr(downloader, "hub_download", lambda *args: pytest.fail("nothing may be fetched"))
    with pytest.raises(shards.DataError, match="only tokenizers/NAME is allowed"):
        downloader.wanted_files(manifest, manifest["datasets"][0], None)


@settings(max_examples=50, deadline=None)
@given(
    st.recursive(st.none() | st.integers() | st.text(max_size=5), lambda x: st.lists(x) | st.dictionaries(st.text(), x))
)
def test_malformed_manifests_give_a_clear_error(junk):
    repository = downloader.Repository("a/b", "", "main")
    good = {"name": "fineweb10B_sp4", "tokenizer_name": "t", "stats": {"files_train": 1, "files_val": 1}}
    for manifest in (
        {"datasets": junk},
        {"datasets": [good], "tokenizers": junk},
        {"datasets": [{**good, "stats": junk}]},
    ):
        with pytest.raises(shards.DataError):
            downloader.wanted_files(manifest, downloader.find_dataset(manifest, "sp4", repository), None)


class RefusalError(Exception):
    """What a hub client raises: an error with the server's answer attached."""

    def __init__(self, status: int, **headers: str) -> None:
        super().__init__("from the server")
        self.response = types.SimpleNamespace(status_code=status, headers=headers)


def test_back_off_honours_retry_after_and_tells_throttled_from_missing(tmp_path, monkeypatch, capsys):
    disguised = FileNotFoundError("not found")
    disguised.__cause__ = RefusalError(429)
    outcomes, waits = [RefusalError(429, **{"Retry-After": "7"}), disguised, ConnectionError("reset"), tmp_path], []

    def attempt(*args):
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(downloader, "hub_download", attempt)
    monkeypatch.setattr(downloader.time, "sleep", waits.append)
    repository = downloader.Repository("a/b", "", "main")
    assert downloader.fetch(repository, "x", tmp_path, lambda path: None) == tmp_path
    assert 7 <= waits[0] <= 8.75 and 2 <= waits[1] <= 2.5 and 4 <= waits[2] <= 5
    assert capsys.readouterr().out.count("throttled (HTTP 429)") == 2
    outcomes[:] = [RefusalError(404)]
    with pytest.raises(shards.DataError, match="is missing"):
        downloader.fetch(repository, "x", tmp_path, lambda path: None)
    outcomes[:] = [RefusalError(429)] * 20
    with pytest.raises(shards.DataError, match=r"gave up after .* throttled"):
        downloader.fetch(repository, "x", tmp_path, lambda path: None)


def test_list_names_variants_and_sizes(hub, tmp_path):
    result = download(hub, tmp_path, "--list")
    assert result.returncode == 0, result.stderr
    assert "sp512: 3 train shards (180 tokens), 2 val shards (50 tokens), tokenizer sp_bpe_512" in result.stdout
    assert not (tmp_path / "datasets").exists()


def test_documents_are_downloaded_and_exported(hub, tmp_path):
    docs = helpers.write_docs(tmp_path / "made", helpers.make_texts(30), docs_val=4)
    for name in ("docs_selected.jsonl", "docs_selected.source_manifest.json"):
        hub.files[f"{REPO}/datasets/{name}"] = docs.with_name(name).read_bytes()
    env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf")}
    specs = helpers.write_specs(tmp_path / "s.json")
    args = ("--output-root", tmp_path / "out", "--tokenizer-config", specs, "--repo-id", REPO)
    result = run_script("download_hf_docs_and_tokenize", *args, **env)
    assert result.returncode == 0, result.stdout + result.stderr
    assert (tmp_path / "out" / "docs_selected.jsonl").read_bytes() == docs.read_bytes()
    assert (tmp_path / "out" / "manifest.json").exists()
    with_docs = download(hub, tmp_path / "d", "--train-shards", 0, "--with-docs")
    assert with_docs.returncode == 0 and (tmp_path / "d" / "docs_selected.jsonl").read_bytes() == docs.read_bytes()


def test_default_repositories_and_their_overrides(monkeypatch):
    def arguments(**changes):
        return types.SimpleNamespace(**{"repo_id": None, "remote_root": None, "revision": "main", **changes})

    make = downloader.Repository.from_arguments
    for name in (downloader.REPOSITORY_VARIABLE, downloader.REMOTE_ROOT_VARIABLE):
        monkeypatch.delenv(name, raising=False)
    assert make(arguments(), "sp1024").repo_id == "willdepueoai/parameter-golf"
    assert str(make(arguments(), "sp8192")) == "kevclark/parameter-golf (folder datasets, revision main)"
    with pytest.raises(shards.DataError, match="--repo-id"):
        make(arguments(), "sp77")
    monkeypatch.setenv(downloader.REPOSITORY_VARIABLE, "env/repo")
    monkeypatch.setenv(downloader.REMOTE_ROOT_VARIABLE, "root/")
    assert make(arguments(), "sp77") == downloader.Repository("env/repo", "root", "main")
    assert make(arguments(repo_id="a/b", remote_root=""), "sp77").remote_path("x") == "x"


def test_sources_are_ascii():
    for path in [*DATA.glob("*.py"), *DATA.glob("*.json"), Path(__file__), Path(helpers.__file__)]:
        assert path.name == "manifest.json" or path.read_bytes().isascii(), path
