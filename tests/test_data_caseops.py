"""Tests of the lossless case transform and of what an export does with it. Run: pytest tests/test_data_caseops.py"""

from __future__ import annotations

import hashlib
import io
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "data")]

import caseops  # noqa: E402
import data_helpers as helpers  # noqa: E402
import export as engines  # noqa: E402
import shards  # noqa: E402
import tokenizer_build  # noqa: E402
from data_helpers import assert_refused, read_split, run_script  # noqa: E402

spm = pytest.importorskip("sentencepiece")

CAP, CAPS, ESC = "\ue001\ue002\ue003"
TROUBLES = (
    " aAbBzZ\n\t0.'-\ue000\ue001\ue002\ue003\ue004\u2581\u2585\0\u00df\u1e9e\u0130\u0131i\u01c4\u01c5\u01c6\u01f1\u01f2"
    "\u01f3\u0300\u0301\u0307\u0331\u0345\u03a3\u03c3\u03c2\u00c9\u00e9"
    "E\u212a\u212b\u00b5\u039c\u03bc\u1e96\ufb01\ufb05\u0149\u1f88"
    "\u1f80\u10a0\u2d00\u13a0\uab70\u1c90\u10d0\u0264\ua7cb"
    "\u2c65\u023a\uff21\uff41\u0531\u0561\u0587\U00010400\U00010428"
    "\U0001f642\u3000"
)
ANY_TEXT = st.text(alphabet=st.characters(codec="utf-8"), max_size=60)
TROUBLED_TEXT = st.text(alphabet=st.sampled_from(TROUBLES), max_size=40)

# ---------------------------------------------------------------- the transform


@pytest.mark.parametrize(
    ("text", "encoded"),
    [
        ("the cat", "the cat"),
        ("The New York", f"{CAP}the{CAP} new{CAP} york"),
        ("an IBM office", f"an{CAPS} ibm office"),
        ("I am A", f"{CAP}i am{CAP} a"),
        ("iPhone McDonald XMLHttp iOSes", f"i{CAP}phone{CAP} mc{CAP}donald{CAPS} xml{CAP}http i{CAP}o{CAP}ses"),
        ("A  B\nC", f"{CAP}a {CAP} b\n{CAP}c"),
        ("Stra\u00dfe STRA\u00dfE", f"{CAP}stra\u00dfe{CAPS} stra\u00df{CAP}e"),
        ("\u039f\u0394\u039f\u03a3", f"{CAPS}\u03bf\u03b4\u03bf\u03c3"),  # not the final sigma, which is not reversible
        ("\u0130 \u01c5 \u01c4", "\u0130 \u01c5" + f"{CAP} \u01c6"),
        (f"{CAP}A{ESC}", f"{ESC}{CAP}{CAP}a{ESC}{ESC}"),
    ],
)
def test_examples(text, encoded):
    assert caseops.encode(text) == encoded
    assert caseops.decode(encoded) == text


@settings(max_examples=1500, deadline=None)
@given(ANY_TEXT | TROUBLED_TEXT)
@example("".join(chr(code) for code in range(0x20000) if not 0xD800 <= code < 0xE000))
def test_every_text_comes_back_exactly(text):
    encoded = caseops.encode(text)
    assert caseops.decode(encoded) == text
    escapes = sum(text.count(marker) for marker in caseops.MARKERS)
    added = sum(encoded.count(marker) for marker in caseops.MARKERS) - escapes
    assert len(encoded.encode("utf-8")) == len(text.encode("utf-8")) + 3 * added  # case changes keep the bytes


def test_every_single_character_comes_back_in_every_place():
    for start in range(0, 0x110000, 0x800):
        if start != 0xD800:
            text = "".join(f"{c} {c}A{c}{c}b" for c in map(chr, range(start, start + 0x800)))
            assert caseops.decode(caseops.encode(text)) == text


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="abC D", max_size=30))
def test_no_plain_capital_is_left(text):
    assert not any("A" <= character <= "Z" for character in caseops.encode(text))


@pytest.mark.parametrize("text", [CAP, f"{CAP}1", f"a{CAPS}", f"{ESC}a", f"{CAP}  a"])
def test_texts_that_no_encoding_gives_are_refused(text):
    with pytest.raises(ValueError, match="marker U\\+E00"):
        caseops.decode(text)


def test_the_letters_are_the_same_on_every_python():
    pairs = sorted(caseops.case_tables().to_lower.items())
    assert len(pairs) == 563
    assert hashlib.sha256(repr(pairs).encode()).hexdigest()[:16] == "ec62c10248f117e8"


# ---------------------------------------------------------------- tokens and their source bytes


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """An export with a plain and a caseops tokenizer of the same documents."""
    folder = tmp_path_factory.mktemp("caseops")
    texts = [text.title() if index % 3 else text for index, text in enumerate(helpers.make_texts(80))]
    texts[2:5] = [" Leading SPACE \ue001\ue003\ue002 \ue001A", "  \ufb01 \u00bd \u2581 X", TROUBLES]
    docs = helpers.write_docs(folder, texts, docs_val=20)
    spec = {"kind": "sentencepiece", "vocab_size": 330}
    specs = [{"name": "plain", **spec}, {"name": "case", "transform": "caseops", **spec}]
    (folder / "specs.json").write_text(json.dumps({"tokenizers": specs}))
    arguments = ("--docs-jsonl", docs, "--output-root", folder / "out", "--tokenizer-config", folder / "specs.json")
    result = run_script("download_hf_docs_and_tokenize", *arguments, "--workers", 2, "--shard-tokens", 700)
    assert result.returncode == 0, result.stderr
    model = (folder / "out/tokenizers/fineweb_330_bpe_caseops.model").read_bytes()
    manifest = json.loads((folder / "out/manifest.json").read_text())
    return types.SimpleNamespace(
        out=folder / "out", texts=texts, docs=docs, model=model, manifest=manifest, specs=folder / "specs.json"
    )


def test_shards_decode_to_the_normalised_text(exported):
    tokenizer = spm.SentencePieceProcessor(model_proto=exported.model)
    normal = tokenizer_build.Preparation("nmt_nfkc").normalize
    tokens = read_split(exported.out / "datasets/fineweb10B_sp330_caseops", "val")
    rows = np.split(tokens, np.flatnonzero(tokens == 1)[1:])
    decoded = [caseops.decode(tokenizer.decode(row[1:].tolist())) for row in rows]
    assert decoded == [normal(text) for text in exported.texts[:20]]


def test_scored_bytes_are_those_of_the_plain_tokenizer(exported):
    stats = {dataset["tokenizer_name"]: dataset["stats"] for dataset in exported.manifest["datasets"]}
    for key in ("bytes_val_normalised", "bytes_train_normalised", "bytes_val_source", "docs_val"):
        assert stats["case"][key] == stats["plain"][key], key


def test_sidecar_covers_every_token_and_adds_up(exported):
    (dataset,) = (entry for entry in exported.manifest["datasets"] if entry["tokenizer_name"] == "case")
    assert dataset["transform"] == "caseops" and dataset["bytes_sidecar"] == {"suffix": ".bytes", "dtype": "uint8"}
    folder = exported.out / dataset["path"]
    sizes = np.concatenate([np.fromfile(path, dtype=np.uint8) for path in sorted(folder.glob("*_val_*.bytes"))])
    tokens = read_split(folder, "val")
    assert len(sizes) == len(tokens) and sizes.sum() == dataset["stats"]["bytes_val_normalised"]
    tokenizer = spm.SentencePieceProcessor(model_proto=exported.model)
    assert [tokenizer.piece_to_id(marker) for marker in caseops.MARKERS] == [4, 5, 6]
    unescaped = np.append(False, tokens[:-1] != 6)
    assert not sizes[(tokens == 1) | (unescaped & (tokens >= 4) & (tokens <= 6))].any()
    assert set(sizes[~unescaped & (tokens >= 4) & (tokens <= 6)]) <= {0, 3}
    listed = {entry["name"] for entry in (*dataset["files"], *dataset["sidecars"])}
    assert listed == {path.name for path in folder.iterdir()} and not list(folder.glob("*_train_*.bytes"))


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(ANY_TEXT | TROUBLED_TEXT, min_size=1, max_size=4))
def test_every_text_survives_the_tokenizer_and_keeps_its_bytes(exported, texts):
    encoder = engines.CaseOpsEncoder(exported.model, "nmt_nfkc")
    tokens, token_bytes, scored = encoder.encode([text.encode("utf-8") for text in texts])
    normal = [encoder.prepare.normalize(text) for text in texts]
    expected = [len(text.encode("utf-8")) - text.startswith(" ") for text in normal]
    begins = np.flatnonzero(tokens == shards.BOS_ID)
    assert np.add.reduceat(token_bytes, begins).tolist() == expected and scored == sum(expected)
    rows = np.split(tokens, begins[1:])
    assert [caseops.decode(encoder.tokenizer.decode(row[1:].tolist())) for row in rows] == normal


@pytest.mark.parametrize("text", [" the tree", " The tree", " THE tree", f" {ESC}"])
def test_no_space_is_scored_behind_a_bos(exported, text):
    encoder = engines.CaseOpsEncoder(exported.model, "nmt_nfkc")
    row = [1, *encoder.tokenizer.encode(caseops.encode(text))]
    sizes = caseops.token_bytes(np.array(row * 2), encoder.case_tables)
    assert sizes.sum() == 2 * (len(text.encode("utf-8")) - 1) and (sizes >= 0).all()


def test_space_stays_with_its_word(exported):
    tokenizer = spm.SentencePieceProcessor(model_proto=exported.model)
    lower, title = (tokenizer.encode(caseops.encode(text)) for text in ("a tree", "a Tree"))
    assert [token for token in title if token != 4] == lower  # the same pieces, and a marker before the space


def test_manifest_names_the_transform(exported):
    (entry,) = (entry for entry in exported.manifest["tokenizers"] if entry["name"] == "case")
    assert entry["transform"] == {"name": "caseops", "version": 1, "normalization": "nmt_nfkc"}
    assert entry["model_path"] == "tokenizers/fineweb_330_bpe_caseops.model"


def test_a_model_is_reused_and_others_are_refused(exported, tmp_path):
    path = helpers.write_specs(tmp_path / "s.json", 330, transform="caseops")
    base = ("--docs-jsonl", exported.docs, "--output-root", tmp_path / "out", "--tokenizer-config", path)
    models = {name: exported.out / f"tokenizers/fineweb_330_bpe{name}.model" for name in ("", "_caseops")}
    good = ("--reuse-sp-model", f"sp330_caseops={models['_caseops']}", "--workers", 1)
    result = run_script("download_hf_docs_and_tokenize", *base, *good)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "out/tokenizers/fineweb_330_bpe_caseops.model").read_bytes() == exported.model
    bad = ("--reuse-sp-model", f"sp330_caseops={models['']}")
    assert_refused(run_script("download_hf_docs_and_tokenize", *base, *bad), "not a tokenizer for caseops", "U+E001")


@pytest.mark.parametrize(
    "changes", [{"transform": "upper"}, {"transform": "caseops", "kind": "byte", "vocab_size": 260}]
)
def test_bad_transforms_are_refused(changes):
    with pytest.raises(shards.DataError, match="only 'caseops' exists"):
        tokenizer_build.TokenizerSpec(**{"name": "t", "kind": "sentencepiece", "vocab_size": 330, **changes})


@pytest.mark.parametrize("rule", ["nmt_nfkc_cf", "nfkc_cf", "identity"])
def test_a_transform_takes_the_normalisation_of_the_recipe_only(rule):
    """One that folds case would throw the capitals away before a marker could stand for them."""
    trainer = {"normalization_rule_name": rule}
    with pytest.raises(shards.DataError, match=f"normalization_rule_name '{rule}'.*a transform needs 'nmt_nfkc'"):
        tokenizer_build.TokenizerSpec("t", "sentencepiece", 330, trainer=trainer, transform="caseops")


def test_a_model_that_folds_case_by_itself_is_no_caseops_model(tmp_path):
    (tmp_path / "fold.tsv").write_text("41\t61\n")  # A to a, all else stays
    model = io.BytesIO()
    spm.SentencePieceTrainer.train(
        sentence_iterator=iter(["the a cat"] * 50), model_writer=model, vocab_size=290, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, normalization_rule_tsv=str(tmp_path / "fold.tsv"), minloglevel=2,
        remove_extra_whitespaces=False, add_dummy_prefix=False, user_defined_symbols=list(caseops.MARKERS))
    with pytest.raises(shards.DataError, match="identity normalisation"):
        tokenizer_build.check_caseops_model(spm.SentencePieceProcessor(model_proto=model.getvalue()), "x")
