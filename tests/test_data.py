"""Tests of the data scripts. Run: python -m pytest tests/test_data.py"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import lzma
import os
import random
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "data")]

import data_helpers as helpers  # noqa: E402
import documents  # noqa: E402
import download_hf_docs_and_tokenize as exporter  # noqa: E402
import export as engines  # noqa: E402
import sample_docs  # noqa: E402
import shards  # noqa: E402
import tokenizer_build  # noqa: E402
from data_helpers import DATA, GOLDEN, assert_refused, read_split, run_script, shard_bytes, snapshot  # noqa: E402

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
    encoder = engines.SentencePieceEncoder((GOLDEN / "tokenizer_512.model").read_bytes())
    for case in cases:
        tokens, _, normalised = encoder.encode([case["text"].encode("utf-8")])
        assert (tokens.tolist(), normalised) == (case["ids"], case["normalized_utf8_bytes"])
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
    assert_refused(run_script("sample_docs", "--max-mb", "nan", "--out", tmp_path / "out"), "--max-mb nan")
    assert not (tmp_path / "out").exists()


def test_sample_of_everything_passes_by_pipes(tmp_path, fake_installation):
    os.mkfifo(fake_installation / "pipe.txt")
    texts, _ = sample(tmp_path / "out", "--source", fake_installation, "--val-docs", 2, "--max-mb", "inf")
    assert any("A.go(x)" in text for text in texts)


@pytest.mark.parametrize("has_sidecar", [True, False])
def test_a_sample_replaces_only_a_sample(tmp_path, fake_installation, has_sidecar):
    arguments = ("--source", fake_installation, "--val-docs", 2)
    sample(tmp_path / "sample", *arguments)
    sample(tmp_path / "sample", *arguments)
    helpers.write_docs(tmp_path, ["mine"] * 9, docs_val=2)
    if not has_sidecar:
        (tmp_path / "docs_selected.source_manifest.json").unlink()
    before = snapshot(tmp_path)
    assert_refused(run_script("sample_docs", "--out", tmp_path, *arguments), "docs_selected.jsonl is not of a sample")
    assert snapshot(tmp_path) == before


def test_a_sample_that_cannot_be_written_leaves_nothing_behind(tmp_path):
    with pytest.raises(UnicodeEncodeError):
        sample_docs.write_corpus(tmp_path, ["text", "\ud800"], 1)
    with pytest.raises(TypeError):
        shards.write_json(tmp_path / "a.json", {"a": b""})
    assert not list(tmp_path.iterdir())


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
    return run_script("download_hf_docs_and_tokenize", *export_arguments(docs, out, specs), *args)


def export_arguments(docs, out, specs):
    return "--docs-jsonl", docs, "--output-root", out, "--tokenizer-config", specs, "--workers", 1


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
    for suffix, workers in ((".gz", 1), (".xz", 3)):
        docs = tmp_path / f"docs_selected.jsonl{suffix}"
        docs.write_bytes(compress(exported.docs.read_bytes(), suffix))
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
    lines = tokenizer_build.TrainingLines([], 100)
    lines.text_bytes, lines.used_bytes = 1000, 949
    with pytest.raises(shards.DataError, match=r"94\.9%"):
        lines.check_share("t")


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet=st.sampled_from(" \nab\u00e9\u65e5\U0001f642"), max_size=200), st.integers(4, 30))
def test_cut_text_is_lossless_and_short_enough(text, limit):
    pieces = list(tokenizer_build.cut_text(text, limit))
    assert "".join(pieces) == text
    assert all(len(piece.encode("utf-8")) <= limit for piece in pieces)


def train_tokenizer(**options):
    """A tokenizer of another make than the recipe's."""
    model = io.BytesIO()
    settings = {"vocab_size": 280, "model_type": "bpe", "byte_fallback": True, "hard_vocab_limit": False, **options}
    ids = {"pad_id": 0, "bos_id": 1, "eos_id": 2, "unk_id": 3}
    sentences = iter(["of the wood"] * 50)
    spm.SentencePieceTrainer.train(
        sentence_iterator=sentences, model_writer=model, minloglevel=2, **ids, **settings
    )
    return spm.SentencePieceProcessor(model_proto=model.getvalue())


def test_a_tokenizer_without_byte_pieces_is_refused():
    """Its unknown characters would count no bytes, so that bits per byte came out wrong."""
    tokenizer = train_tokenizer(byte_fallback=False, vocab_size=30)
    with pytest.raises(shards.DataError, match=r"x: the tokenizer has 0 byte pieces, not 256.*byte_fallback"):
        shards.check_tokenizer(tokenizer, tokenizer.get_piece_size(), "x")


def test_pieces_with_a_space_inside_are_refused_unless_files_say_the_bytes():
    tokenizer = train_tokenizer(user_defined_symbols=["of\u2581the"])
    with pytest.raises(shards.DataError, match=r"x: piece 'of.u2581the' has a space that is not its first character"):
        shards.check_tokenizer(tokenizer, tokenizer.get_piece_size(), "x")
    shards.check_tokenizer(tokenizer, tokenizer.get_piece_size(), "x", byte_files=True)


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
        ({}, ("--unofficial-split",), ("--unofficial-split needs --val-docs",)),
        ({}, ("--repo-id", "a/b"), ("--repo-id is for a download", "leave one")),
        ({}, ("--remote-root", "x"), ("--remote-root is for a download",)),
        ({}, ("--revision", "x"), ("--revision is for a download",)),
        ({}, [f"--reuse-sp-model={v}={GOLDEN / 'tokenizer_512.model'}" for v in ("320", "sp320")], ("two models",)),
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


@pytest.mark.parametrize("line", ['{"text": "' + "a" * 10**5 + '\\ud800"}', '{"a": ' + "[" * 10**5 + "]" * 10**5 + "}"])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_document_without_a_text_is_told_in_one_short_line(exported, tmp_path, line, workers):
    (tmp_path / "d.jsonl").write_text(f'{{"text": "a"}}\n{line}\n')
    specs, options = exported.folder / "specs.json", ("--val-docs", 1, "--unofficial-split", "--workers", workers)
    reuse = ("--reuse-sp-model", f"320={exported.out / 'tokenizers/fineweb_320_bpe.model'}")
    result = export(tmp_path / "d.jsonl", tmp_path / "out", specs, *options, *reuse)
    assert_refused(result, "d.jsonl, line 2: expected a JSON object")
    assert len(result.stderr) < 500


def test_a_deeply_nested_json_file_is_refused(tmp_path):
    (tmp_path / "s.json").write_text("[" * 100_000)
    with pytest.raises(shards.DataError, match="not valid JSON"):
        shards.read_json(tmp_path / "s.json")


class KilledError(BaseException):
    """Stands for a SIGKILL: nothing catches it and nothing cleans up."""


def make_set(base, content):
    for name in ("datasets/fineweb10B_sp1", "datasets/fineweb10B_sp2", "tokenizers"):
        (base / name).mkdir(parents=True)
        (base / name / "fineweb_val_000000.bin").write_text(json.dumps({"version": content}))
    (base / "manifest.json").write_text(json.dumps({"version": content, "datasets": [{"name": content}]}))


def version_of(path):
    return json.loads(path.read_text())["version"]


def test_swap_cut_off_anywhere_is_whole_and_can_be_finished(tmp_path, monkeypatch):
    moves = {name: getattr(Path, name) for name in ("rename", "replace", "unlink")}
    for cut in range(12):
        root = tmp_path / str(cut)
        make_set(root, "old")
        make_set(root / ".staging", "new")
        (root / ".staging/COMPLETE").touch()
        left = [cut]

        def counted(move, left=left):
            def moved(*args, **options):
                if left[0] == 0:
                    raise KilledError
                left[0] -= 1
                return move(*args, **options)

            return moved

        for name, move in moves.items():
            monkeypatch.setattr(Path, name, counted(move))
        try:
            exporter.swap_in(root / ".staging", root)
            finished = True
        except KilledError:
            finished = False
        monkeypatch.undo()
        seen = {version_of(path) for name in ("sp1", "sp2") for path in root.glob(f"datasets/fineweb10B_{name}/*.bin")}
        seen |= {version_of(path) for path in (root / "manifest.json", *root.glob("tokenizers/*")) if seen}
        assert len(seen) <= 1 or not list(root.glob("datasets/*/*"))
        staging = exporter.recover(root)
        assert not staging.exists()
        assert {version_of(path) for path in root.rglob("*") if path.is_file()} == {"new"}
        assert [row["name"] for row in shards.read_manifest(root / "manifest.json")["datasets"]] == ["new", "old"]
    assert finished


def test_finishing_an_export_keeps_what_was_added_to_the_manifest_meanwhile(tmp_path):
    make_set(tmp_path / ".staging", "new")
    (tmp_path / ".staging/COMPLETE").touch()
    (tmp_path / "manifest.json").write_text(json.dumps({"datasets": [{"name": "downloaded"}]}))
    exporter.recover(tmp_path)
    datasets = shards.read_manifest(tmp_path / "manifest.json")["datasets"]
    assert [row["name"] for row in datasets] == ["downloaded", "new"]


def test_export_killed_at_random_moments_never_leaves_half_a_set(exported, tmp_path):
    out, rng = tmp_path / "out", random.Random(5)
    specs = exported.folder / "specs.json"
    other = helpers.write_docs(tmp_path, helpers.make_texts(70, seed=3), docs_val=9)
    assert export(other, out, specs, "--byte260", "--shard-tokens", 700).returncode == 0
    old = snapshot(out)
    arguments = (*export_arguments(exported.docs, out, specs), "--byte260", "--shard-tokens", 700, "--workers", 2)
    command = [sys.executable, DATA / "download_hf_docs_and_tokenize.py", *arguments]
    for _ in range(5):
        process = subprocess.Popen(list(map(str, command)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.2, 1.2))
        process.kill()
        process.wait()
        here = {name: digest for name, digest in snapshot(out).items() if not name.startswith(".")}
        missing = not any(name.startswith("datasets") for name in here)
        assert missing or here in (without_hidden(old), without_hidden(snapshot(exported.out)))
    result = run_script("download_hf_docs_and_tokenize", *arguments)
    assert result.returncode == 0, result.stderr
    assert snapshot(out) == snapshot(exported.out)


def without_hidden(files):
    return {name: digest for name, digest in files.items() if not name.startswith(".")}


def test_two_exports_into_one_folder_are_refused(exported, tmp_path):
    with exporter.locked(tmp_path):
        assert_refused(export(exported.docs, tmp_path, exported.folder / "specs.json"), "another export", str(tmp_path))
    assert export(exported.docs, tmp_path, exported.folder / "specs.json").returncode == 0


@pytest.mark.parametrize("name", ["datasets", "tokenizers"])
def test_places_that_nothing_can_be_moved_to_stop_before_any_work(exported, tmp_path, name):
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / name).write_text("mine")
    result = export(exported.docs, tmp_path / "file", exported.folder / "specs.json")
    assert_refused(result, f"{name} is a file where a folder belongs")
    elsewhere = Path("/dev/shm")
    if not elsewhere.is_dir() or elsewhere.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("no other disk here")
    (tmp_path / "link").mkdir()
    (tmp_path / "link" / name).symlink_to(elsewhere)
    result = export(exported.docs, tmp_path / "link", exported.folder / "specs.json")
    assert_refused(result, f"{name} is on another disk than", "--output-root")
    assert "documents" not in result.stdout


@pytest.mark.parametrize("junk", ['{"datasets": null}', '{"datasets": [{"x": 1}]}', '{"tokenizers": [5]}', "[]", "{"])
def test_a_manifest_that_nothing_can_be_added_to_stops_before_any_work(exported, tmp_path, junk):
    (tmp_path / "manifest.json").write_text(junk)
    result = export(exported.docs, tmp_path, exported.folder / "specs.json")
    assert_refused(result, f"{tmp_path}/manifest.json: ", "remove")
    assert "documents" not in result.stdout and (tmp_path / "manifest.json").read_text() == junk


def test_two_tokenizers_of_one_name_are_refused(exported, tmp_path):
    path = helpers.write_specs(tmp_path / "s.json", 330, name="sp_bpe_320")
    manifest = (exported.out / "manifest.json").read_bytes()
    refused = export(exported.docs, exported.out, path)
    assert_refused(refused, "tokenizer 'sp_bpe_320' is tokenizers/fineweb_320_bpe.model there", "another name")
    assert "documents" not in refused.stdout and (exported.out / "manifest.json").read_bytes() == manifest
    (entry,) = json.loads(path.read_text())["tokenizers"]
    path.write_text(json.dumps({"tokenizers": [entry, {**entry, "vocab_size": 340}]}))
    with pytest.raises(shards.DataError, match="a name of its own"):
        tokenizer_build.load_specs(path, [], byte260=False)


# ---------------------------------------------------------------- engines and input formats


def golden_plan():
    return engines.Plan("sentencepiece", (GOLDEN / "tokenizer_512.model").read_bytes(), "docs")


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(documents, "BLOCK_BYTES", 2000)


def test_worker_processes_keep_the_order_and_end(exported, small_blocks):
    source = documents.find_jsonl(exported.docs)
    results = []
    for workers in (1, 3):
        engine = engines.make_engine(golden_plan(), "local", workers, None)
        parts = list(engine.run(source.blocks(8)))
        engine.close()
        results.append([(part.split, part.docs, part.tokens.tolist(), part.normalised, part.source) for part in parts])
    assert len(results[0]) > 5 and results[0] == results[1]
    assert not any(process.is_alive() for process, _ in engine.workers)


def test_documents_that_change_during_an_export_are_refused(tmp_path):
    """As many of them as before: else the manifest would state hashes of documents that are in no shard."""
    path = helpers.write_docs(tmp_path, helpers.make_texts(20), docs_val=4)
    found = documents.scan_documents(documents.find_jsonl(path), 4, False, {})
    helpers.write_docs(tmp_path, [text.upper() for text in helpers.make_texts(20)], docs_val=4)
    spec = tokenizer_build.TokenizerSpec("pure_byte_260", "byte", 260)
    with pytest.raises(shards.DataError, match=f"but {found.docs_sha256} before; it changed"):
        engines.export_dataset(spec, found, tmp_path / "staging", 700, engines.SerialEngine)


def test_death_of_a_worker_is_reported(exported, small_blocks):
    engine = engines.make_engine(golden_plan(), "local", 2, None)
    for process, _ in engine.workers:
        process.kill()
        process.join()
    with pytest.raises(shards.DataError, match="fewer --workers"):
        list(engine.run(documents.find_jsonl(exported.docs).blocks(8)))
    engine.close()


def test_few_blocks_are_under_way():
    started, taken = [], []
    for result in engines.in_order(lambda n: started.append(n) or n, lambda n: n * n, range(50), 6):
        taken.append(result)
        assert len(started) - len(taken) < 6
    assert taken == [n * n for n in range(50)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text(st.characters(codec="utf-8"), max_size=20), min_size=1, max_size=20), st.integers(0, 22),
       st.integers(1, 90), st.booleans())  # fmt: skip
def test_blocks_hold_every_document_once_and_one_split(tmp_path_factory, texts, docs_val, block_bytes, final_newline):
    path = tmp_path_factory.mktemp("docs") / "d.jsonl"
    lines = "\n".join(json.dumps({"text": text}) for text in texts) + "\n" * final_newline
    path.write_text(lines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "BLOCK_BYTES", block_bytes)
        source = documents.find_jsonl(path)
        blocks = list(source.blocks(docs_val))
        assert [text.decode() for block in blocks for text in source.parse(block)] == texts
    assert b"".join(block.lines for block in blocks) == lines.encode()
    for block in blocks:
        assert (block.split == "val") == (block.first_doc + block.docs <= docs_val) and block.docs > 0


@pytest.mark.parametrize("suffix", [".gz", ".xz", ".zst"])
def test_damaged_compression_is_refused(exported, tmp_path, suffix):
    packed = compress(exported.docs.read_bytes(), suffix)
    (tmp_path / f"docs.jsonl{suffix}").write_bytes(packed[: len(packed) // 2] + b"\xff" * 50)
    result = export(tmp_path / f"docs.jsonl{suffix}", tmp_path / "out", exported.folder / "specs.json")
    assert_refused(result, f"docs.jsonl{suffix}")


def compress(raw, suffix):
    if suffix == ".zst":
        try:
            from compression import zstd
        except ImportError:
            zstd = pytest.importorskip("zstandard")
        return zstd.compress(raw)
    return {".gz": gzip, ".xz": lzma}[suffix].compress(raw)


@pytest.mark.parametrize(
    ("module", "option", "name"),
    [("zstandard", "--docs-jsonl", "docs.jsonl.zst"), ("pyarrow", "--docs-parquet", "docs.parquet"), ("ray", "", "")],
)
def test_missing_extras_are_named(exported, tmp_path, monkeypatch, module, option, name):
    if module == "zstandard" and sys.version_info >= (3, 14):
        pytest.skip("part of this Python")
    (tmp_path / f"{module}.py").write_text("raise ImportError")  # hides an installed one
    if name:
        (tmp_path / name).write_bytes(b"x")
    inputs = (option, tmp_path / name) if option else ("--docs-jsonl", exported.docs, "--engine", "ray")
    specs = ("--tokenizer-config", exported.folder / "specs.json", "--output-root", tmp_path / "out")
    result = run_script("download_hf_docs_and_tokenize", *inputs, *specs, PYTHONPATH=str(tmp_path))
    assert_refused(result, f"pip install {module}")


def test_parquet_gives_the_same_tokens(exported, tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    for index, texts in enumerate((exported.texts[:25], exported.texts[25:])):
        parquet.write_table(pyarrow.table({"text": texts, "id": texts}), tmp_path / f"part_{index}.parquet")
    inputs = ("--docs-parquet", tmp_path, "--val-docs", 8, "--unofficial-split", "--byte260", "--shard-tokens", 700)
    specs = ("--tokenizer-config", exported.folder / "specs.json", "--output-root", tmp_path / "out", "--workers", 1)
    result = run_script("download_hf_docs_and_tokenize", *inputs, *specs)
    assert result.returncode == 0, result.stderr
    assert snapshot(tmp_path / "out" / "datasets") == snapshot(exported.out / "datasets")
    parquet.write_table(pyarrow.table({"body": ["x"]}), tmp_path / "part_2.parquet")
    assert_refused(run_script("download_hf_docs_and_tokenize", *inputs, *specs), "part_2.parquet", "'text'")


def test_parquet_files_are_found_by_every_name_and_once(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow.parquet")
    names = ("a/m/x[1].parquet", "a/x.parquet", "b.parquet")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    for patterns in ([str(tmp_path)], ["**/*.parquet"], ["a/m/x[1].parquet", str(tmp_path / "a"), "a/../a", "b.p*"]):
        found = documents.find_parquet(patterns).paths
        assert [path.resolve() for path in found] == [tmp_path / name for name in names]


@pytest.mark.parametrize("kind", ["binary", "int64", "timestamp[s]", "list<string>"])
def test_parquet_of_another_type_is_refused(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    types = {"list<string>": pyarrow.list_(pyarrow.string()), "timestamp[s]": pyarrow.timestamp("s")}
    table = pyarrow.table({"text": pyarrow.array([None], types.get(kind) or pyarrow.type_for_alias(kind))})
    parquet.write_table(table, tmp_path / "d.parquet")
    with pytest.raises(shards.DataError, match=r"d\.parquet: expected one column 'text' of strings, found text \("):
        list(documents.find_parquet([str(tmp_path)]).line_blocks())


def test_ray_gives_the_same_bytes_although_a_node_dies(exported, tmp_path):
    ray = pytest.importorskip("ray", reason="ray is an optional extra and not installed")
    cluster_utils = pytest.importorskip("ray.cluster_utils")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]
    docs = helpers.write_docs(tmp_path, helpers.make_texts(60) * 800, docs_val=8)
    outs = {engine: tmp_path / engine for engine in ("ray", "local")}
    specs = exported.folder / "specs.json"
    reuse = ("--reuse-sp-model", f"320={exported.out / 'tokenizers/fineweb_320_bpe.model'}", "--shard-tokens", 500_000)
    assert export(docs, outs["local"], specs, *reuse).returncode == 0
    on_ray = ("--engine", "ray", "--ray-address", cluster.address)
    arguments = (*export_arguments(docs, outs["ray"], specs), *reuse, *on_ray)
    command = [sys.executable, str(DATA / "download_hf_docs_and_tokenize.py"), *map(str, arguments)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        folder = outs["ray"] / ".staging/datasets/fineweb10B_sp320"
        deadline = time.monotonic() + 90
        while not list(folder.glob("fineweb_train*")) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        cluster.remove_node(nodes[0], allow_graceful=False)
        assert process.poll() is None  # it was at work, and has to do without that node
        output, _ = process.communicate(timeout=90)
    finally:
        process.kill()
        ray.shutdown()
        cluster.shutdown()
    assert process.returncode == 0, output
    assert snapshot(outs["ray"]) == snapshot(outs["local"])


@pytest.mark.parametrize(
    ("spec", "part"),
    [
        ({"vocab_size": 70_000}, "65536"),
        ({"kind": "words"}, "'words'"),
        ({"colour": 1}, "colour"),
        ({"trainer": {"bos_id": 7}}, "bos_id"),
        ({"train_docs": 0}, "train_docs 0"),
        *[({"name": name}, "the name must be a text") for name in (5, None, ["a"], {}, "", " ", "a\nb", "\ud800")],
        *[({"trainer": {"max_sentence_length": value}}, "from 10 to") for value in ("abc", None, 0, -1, 3, 99.5, True)],
        *[({"trainer": {"character_coverage": value}}, "from 0.98 to 1.0") for value in ("x", None, 5, float("nan"))],
        *[({"trainer": {"normalization_rule_name": value}}, "one of .'nmt_nfkc'") for value in ("bogus", 3, None, [])],
        ({"trainer": {"split_digits": "maybe"}}, "one of .False, True"),
        ({"trainer": {"max_sentencepiece_length": [1]}}, "from 1 to 512"),
        ({"trainer": None}, "trainer None"),
    ],
)
def test_bad_specs_are_refused(tmp_path, spec, part):
    path = helpers.write_specs(tmp_path / "s.json", **{"vocab_size": 320, **spec})
    with pytest.raises(shards.DataError, match=part):
        tokenizer_build.load_specs(path, [], byte260=False)


def test_shipped_specs():
    (spec,) = tokenizer_build.load_specs(DATA / "tokenizer_specs.json", [], byte260=False)
    assert (spec.variant, spec.train_docs) == ("sp4096", 5_000_000)
    (spec,) = tokenizer_build.load_specs(DATA / "tokenizer_specs_sample.json", [], byte260=False)
    assert spec.variant == "sp1024"
    (spec,) = tokenizer_build.load_specs(DATA / "tokenizer_specs_caseops.json", [], byte260=False)
    assert (spec.variant, spec.transform) == ("sp8192_caseops", "caseops")


def test_skip_byte_leaves_out_byte_tokenizers(tmp_path):
    path = helpers.write_specs(tmp_path / "s.json")
    entries = json.loads(path.read_text())["tokenizers"]
    path.write_text(json.dumps({"tokenizers": [*entries, {"name": "b", "kind": "byte", "vocab_size": 260}]}))
    for skip, variants in ((False, ["sp320", "byte260"]), (True, ["sp320"])):
        assert [spec.variant for spec in tokenizer_build.load_specs(path, [], False, skip)] == variants
    path.write_text(json.dumps({"tokenizers": [{"name": "b", "kind": "byte", "vocab_size": 260}]}))
    with pytest.raises(shards.DataError, match="at least one"):
        tokenizer_build.load_specs(path, [], False, True)


def test_zst_gives_the_same_documents_in_any_number_of_frames(tmp_path):
    texts = [f"{random.Random(number).getrandbits(8000):x}" for number in range(1200)]  # more than one block
    raw = helpers.write_docs(tmp_path, texts, docs_val=4).read_bytes()
    path, cut = tmp_path / "d.jsonl.zst", len(raw) // 3
    for packed in (compress(raw, ".zst"), compress(raw[:cut], ".zst") + compress(raw[cut:], ".zst")):
        path.write_bytes(packed)
        assert list(documents.find_jsonl(path).texts()) == texts
        for length in (len(packed) // 5, len(packed) - 1):
            path.write_bytes(packed[:length])
            with pytest.raises(shards.DataError, match=r"d\.jsonl\.zst: damaged or cut short"):
                list(documents.find_jsonl(path).line_blocks())


def test_an_error_without_words_is_named(capsys):
    def main():
        raise io.UnsupportedOperation

    with pytest.raises(SystemExit):
        shards.run_cli(main)
    assert capsys.readouterr().err == "error: UnsupportedOperation\n"


def test_train_docs_and_trainer_settings_change_the_model(exported, tmp_path):
    models = set()
    for more in ({}, {"train_docs": 30}, {"trainer": {"split_digits": False, "character_coverage": 0.98}}):
        spec = tokenizer_build.TokenizerSpec("t", "sentencepiece", 300, **more)
        models.add(tokenizer_build.train_sentencepiece(spec, exported.texts[: spec.train_docs]))
    assert len(models) == 3


def test_memory_is_checked_before_training(monkeypatch, capsys):
    monkeypatch.setattr(tokenizer_build, "available_memory_bytes", lambda: 10**9)
    spec = tokenizer_build.TokenizerSpec("t", "sentencepiece", 300)
    with pytest.raises(shards.DataError, match="--force-memory"):
        tokenizer_build.check_memory(spec, 10**9, force=False)
    tokenizer_build.check_memory(spec, 10**9, force=True)
    assert "about 5.1 GB" in capsys.readouterr().out


def test_sources_are_ascii():
    for path in [*DATA.glob("*.py"), *DATA.glob("*.json"), Path(__file__), Path(helpers.__file__)]:
        assert path.name == "manifest.json" or path.read_bytes().isascii(), path
