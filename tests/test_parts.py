"""Properties and unit tests of the parts of train_gpt.py."""

import contextlib
import dataclasses
import errno
import io
import json
import os
import sys
import threading
import time
import types
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from conftest import GOLDEN, load_model, logits_of, settings
from hypothesis import example, given
from hypothesis import settings as examples
from hypothesis import strategies as st

import train_gpt as tg

CPU = torch.device("cpu")
quick = examples(max_examples=40, deadline=None)


def fresh_model(**changes):
    return tg.build_model(settings(**changes), tg.Operations(tg.sdpa_attention), CPU, torch.float32)


def batch_of(hp, sequences=2, length=32):
    tokens = torch.randint(0, hp.vocab_size, (sequences, length + 1), generator=torch.Generator().manual_seed(3))
    return tokens[:, :-1], tokens[:, 1:]


# -- windows: each target once -----------------------------------------------------------------------------------------


def count_scored(targets: int, window: int, stride: int, world: int) -> np.ndarray:
    """How often each target is scored when the windows are cut over the ranks."""
    windows, scored = tg.sliding_windows(targets, window, stride), np.zeros(targets, int)
    for rank in range(world):
        share = tg.rank_share(len(windows), rank, world)
        for start, first, end in windows[share.start : share.stop]:
            assert 0 <= first < end <= window
            scored[start + first : start + end] += 1
    return scored


@quick
@given(st.integers(1, 6000), st.integers(1, 300), st.data(), st.integers(1, 9))
def test_every_target_is_scored_exactly_once(targets, window, data, world):
    stride = data.draw(st.integers(1, window))
    assert (count_scored(targets, window, stride, world) == 1).all()


@pytest.mark.parametrize(("window", "stride"), [(64, 16), (128, 32), (2048, 64)])
@pytest.mark.parametrize("length", [2, 10, 100, 1000, 1003, 4096, 5000])
def test_no_target_of_the_tail_is_scored_twice(length, window, stride):
    for world in (1, 2, 8):
        assert (count_scored(length - 1, window, stride, world) == 1).all()


@quick
@given(st.integers(1, 50), st.integers(1, 70))
def test_sequences_side_by_side_cover_whole_sequences(sequences, seq_len):
    windows = tg.sliding_windows(sequences * seq_len, seq_len, seq_len)
    assert windows.tolist() == [[i * seq_len, 0, seq_len] for i in range(sequences)]


@quick
@given(st.integers(0, 1000), st.integers(1, 20))
def test_ranks_share_everything_in_order(count, world):
    assert [i for rank in range(world) for i in tg.rank_share(count, rank, world)] == list(range(count))


@pytest.mark.parametrize(("stride", "seq_len"), [(16, 64), (64, 64), (7, 64), (1, 16)])
def test_sliding_evaluation_equals_one_position_at_a_time(stride, seq_len, model_state):
    """Each target's loss comes from the window that scores it, computed here for itself."""
    hp = settings(eval_stride=stride, eval_seq_len=seq_len, train_seq_len=seq_len)
    tokens = np.random.default_rng(0).integers(0, 512, 3 * seq_len + 1).astype(np.uint16)
    model = load_model(hp, model_state)
    val = tg.ValidationSet(tokens, 1000, 0)
    score = tg.Evaluator(hp, tg.plan_batches(hp, 1), tg.World(), val, model).sliding()
    ids, total = torch.from_numpy(tokens.astype(np.int64)), 0.0
    windows = tg.sliding_windows(val.targets, seq_len, stride)
    with torch.no_grad():
        for start, first, end in windows.tolist():
            losses = model(ids[None, start : start + end], ids[None, start + 1 : start + end + 1], reduction="none")
            total += losses[0, first:].double().sum().item()
    assert score.val_loss == pytest.approx(total / val.targets, abs=1e-6)
    assert score.val_bpb == pytest.approx(score.val_loss / np.log(2) * val.targets / 1000)


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return sentencepiece.SentencePieceProcessor(model_file=str(GOLDEN / "tokenizer_512.model"))


@pytest.fixture(scope="module")
def tables(tokenizer):
    return tg.byte_tables(tokenizer)


def count_text(text, tokenizer, tables):
    return tables.count(np.array([tokenizer.bos_id(), *tokenizer.encode(text)]))


SCRIPTS = {
    "latin": "The quick brown fox, 42 times: na\u00efve caf\u00e9!",
    "greek": "\u03b1\u03b2\u03b3 \u03b4\u03b5\u03b6",
    "cyrillic": "\u0441\u044a\u0435\u0448\u044c \u0435\u0449\u0451",
    "hebrew": "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd",
    "arabic": "\u0633\u0644\u0627\u0645 \u0639\u0644\u064a\u0643\u0645",
    "devanagari": "\u0928\u092e\u0938\u094d\u0924\u0947",
    "thai": "\u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35",
    "chinese": "\u4f60\u597d \u4e16\u754c",
    "korean": "\uc548\ub155 \ud558\uc138\uc694",
    "japanese": "\u3053\u3093\u306b\u3061\u306f \u4e16\u754c",
    "emoji": "a \U0001f600\U0001f680 b",
    "gothic": "\U00010330\U00010331",
    "code": "def f(x):return x**2 # ok",
    "marks": "e\u0301 o\u0308",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_bytes_of_a_text_are_those_of_the_normalised_source(script, tokenizer, tables):
    normalised = tokenizer.normalize(SCRIPTS[script]).replace(tg.SPACE_MARKER, " ")
    assert count_text(SCRIPTS[script], tokenizer, tables) == len(normalised.encode("utf-8"))


def test_hello_world_is_eleven_bytes(tokenizer, tables):
    assert count_text("hello world", tokenizer, tables) == 11
    ids = np.array([1, *tokenizer.encode("hello world"), 1, *tokenizer.encode(" hello"), 1])
    assert tables.count(ids) == 11 + len(tokenizer.normalize(" hello")), "a space after a boundary is none of the text"


@quick
@given(st.text(max_size=60))
@example("a b")
def test_bytes_of_any_text(text):
    sp = sentencepiece.SentencePieceProcessor(model_file=str(GOLDEN / "tokenizer_512.model"))
    normalised = sp.normalize(text).replace(tg.SPACE_MARKER, " ")
    assert count_text(text, sp, tg.byte_tables(sp)) == len(normalised.encode("utf-8"))


def test_each_byte_piece_is_one_byte_and_controls_are_none(tokenizer, tables):
    pieces = [i for i in range(512) if tokenizer.is_byte(i)]
    assert len(pieces) == 256 and (tables.base_bytes[pieces] == 1).all() and not tables.has_leading_space[pieces].any()
    assert (tables.base_bytes[:4] == 0).all() and tables.is_boundary[:4].all() and not tables.is_boundary[4:].any()


def train_tokenizer(**options):
    model, text = io.BytesIO(), ["The Quick Brown Fox of the wood, 2 Dogs & I: 'OK?'"] * 50
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=model, vocab_size=320, model_type="bpe", byte_fallback=True,
        add_dummy_prefix=False, hard_vocab_limit=False, minloglevel=2, bos_id=1, pad_id=0, unk_id=3, eos_id=2,
        **options)
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize("options", [
    {"user_defined_symbols": ["of\u2581the"]}, {"user_defined_symbols": ["the\u2581"]},
    {"treat_whitespace_as_suffix": True}])
def test_pieces_with_a_space_inside_or_at_the_end_are_refused(options):
    """The metric would count the space as 3 bytes: scores came out 2 to 27 % too good."""
    unlike = train_tokenizer(**options)
    with pytest.raises(tg.SetupError, match="not its first character"):
        tg.byte_tables(unlike)
    assert len(tg.byte_tables(unlike, "caseops").base_bytes) == unlike.vocab_size()  # there files say the bytes


class WithUnusedPiece:
    def __init__(self, tokenizer, piece):
        self.tokenizer, self.is_unused = tokenizer, lambda i: i == piece

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)


def test_an_unused_piece_is_a_boundary_without_bytes(tokenizer, tables):
    changed = tg.byte_tables(WithUnusedPiece(tokenizer, 300))
    assert tables.base_bytes[300] > 0 and not tables.is_boundary[300]
    assert changed.base_bytes[300] == 0 and changed.is_boundary[300] and not changed.has_leading_space[300]


@pytest.mark.parametrize(("options", "noted"), [
    ({}, False), ({"normalization_rule_name": "nmt_nfkc_cf"}, True), ({"normalization_rule_name": "identity"}, False)])
def test_a_tokenizer_that_folds_case_marks_the_score(options, noted):
    assert ("UNOFFICIAL TOKENIZER" in tg.byte_tables(train_tokenizer(**options)).note) == noted


# -- data order --------------------------------------------------------------------------------------------------------


def write_shard(path: Path, tokens) -> Path:
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())
    return path


@pytest.fixture
def shards(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lengths = (3000, 1700, 4100, 33, 900)
    return [write_shard(Path(f"d/fineweb_train_{i:06d}.bin"), (np.arange(n) + i) % 512) for i, n in enumerate(lengths)]


def test_a_shard_ends_where_its_header_says_and_ids_end_below_the_vocabulary(tmp_path):
    path = write_shard(tmp_path / "fineweb_val_000000.bin", [1, 511, 512])
    tg.check_token_ids(tg.open_shard(path), 513, path)
    with pytest.raises(tg.SetupError, match="holds token 512"):
        tg.check_token_ids(tg.open_shard(path), 512, path)
    with path.open("ab") as f:
        f.write(b"\1\0")
    with pytest.raises(tg.SetupError, match="have 1030 bytes, not"):
        tg.open_shard(path)


def test_all_validation_shards_are_joined_in_the_order_of_their_names(tmp_path, tables):
    hp, tokens = settings(data_dir=tmp_path), np.random.default_rng(0).integers(4, 512, 300)
    for i in np.random.default_rng(1).permutation(10):
        write_shard(hp.dataset_dir / f"fineweb_val_{i:06d}.bin", tokens[30 * i:30 * i + 30])
    np.testing.assert_array_equal(tg.load_validation(hp, tables).tokens, tokens[:257])


@quick
@given(st.integers(2, 5000), st.integers(1, 80), st.integers(0, 2**32))
def test_a_walk_visits_each_block_once(tokens, seq_len, seed):
    blocks, walk = tg.draw_walk(np.random.default_rng(seed), max(tokens, seq_len + 1), seq_len)
    starts = list(walk)
    assert len(set(starts)) == len(starts) == blocks >= 1
    assert min(starts) >= 0 and max(starts) + seq_len + 1 <= max(tokens, seq_len + 1)


def test_no_window_comes_twice_before_its_walk_is_over(shards):
    loader = tg.CoprimeLoader(shards, 32, 4)
    seen, walks = {}, {}
    for _ in range(150):
        windows = loader.next_windows()
        for shard in {s for s, _ in windows}:
            if walks.get(shard) is not loader.walks[shard]:  # redrawn in this draw: start anew after it
                walks[shard], seen[shard] = loader.walks[shard], None
        for shard, start in windows:
            if seen[shard] is not None:
                assert start not in seen[shard]
                seen[shard].add(start)
        seen = {shard: set() if starts is None else starts for shard, starts in seen.items()}


@pytest.mark.parametrize("world", [2, 4, 8])
def test_ranks_read_disjoint_windows_that_make_up_the_draw(shards, world):
    loaders = [tg.CoprimeLoader(shards, 32, 16, rank, world) for rank in range(world)]
    whole = tg.CoprimeLoader(shards, 32, 16, 0, world)
    for _ in range(20):
        parts = [loader.next_batch()[0] for loader in loaders]
        windows = whole.next_windows()
        assert len(set(windows)) >= len(windows) - 4  # a walk that is over may be redrawn within the draw
        expected = [tg.open_shard(whole.paths[s])[start : start + 32] for s, start in windows]
        for rank, part in enumerate(parts):
            np.testing.assert_array_equal(part, np.stack(expected[rank::world]))


def test_targets_are_the_next_tokens(shards):
    inputs, targets = tg.CoprimeLoader(shards, 32, 16).next_batch()
    np.testing.assert_array_equal(targets, (inputs + 1) % 512)
    assert inputs.dtype == targets.dtype == np.int64


def test_order_depends_on_names_alone(shards, tmp_path):
    def order(paths):
        loader = tg.CoprimeLoader(paths, 32, 16)
        return [loader.next_windows() for _ in range(10)]

    first = order(shards)
    for path in shards:  # other content, same lengths
        count = tg.shard_tokens(path)
        write_shard(path, np.random.default_rng(1).integers(0, 512, count))
    np.random.seed(5)
    torch.manual_seed(5)
    assert order(shards) == first
    assert order([path.absolute() for path in shards]) != first


def test_an_id_too_large_deep_in_a_shard_is_refused_when_it_is_read(tmp_path):
    tokens = np.zeros(70_000, int)
    tokens[69_000:] = 600
    path = write_shard(tmp_path / "fineweb_train_000000.bin", tokens)
    loader = tg.CoprimeLoader([path], 64, 16, vocab_size=512)
    with pytest.raises(tg.SetupError, match=r"fineweb_train_000000\.bin holds token 600"):
        for _ in range(200):
            loader.next_batch()


class Batches:
    """A stand-in for the loader: batch n holds n; `fail_at` raises instead."""

    def __init__(self, fail_at=None):
        self.count, self.fail_at = 0, fail_at

    def next_batch(self):
        self.count += 1
        if self.count == self.fail_at:
            raise tg.SetupError("the shard is gone")
        return np.full((1, 2), self.count), np.full((1, 2), self.count)


def test_prefetcher_keeps_the_order_and_closes():
    loader = Batches()
    data = tg.Prefetcher(loader, CPU, tg.Stopwatch(), 3)
    assert [int(data.next()[0][0, 0]) for _ in range(20)] == list(range(1, 21))
    before = threading.active_count()
    data.close()
    assert threading.active_count() == before - 1
    data.close()
    assert loader.count <= 20 + 4, "it reads only a few batches ahead"


def test_only_batches_in_use_count_as_read():
    """Those ahead at the end are read in the last step, which may end after the cap, and are never used."""
    clock, loader = types.SimpleNamespace(seconds=1.0), Batches()
    with contextlib.closing(tg.Prefetcher(loader, CPU, clock, 3)) as data:
        while loader.count < 3:
            time.sleep(0.01)
        time.sleep(0.05)
        clock.seconds = 9.0
        for expected in (1, 1, 1, 9):
            data.next()
            assert data.last_read_seconds == expected


def test_prefetcher_hands_an_error_to_its_consumer_in_turn():
    data = tg.Prefetcher(Batches(fail_at=3), CPU, tg.Stopwatch(), 3)
    assert [int(data.next()[0][0, 0]) for _ in range(2)] == [1, 2]
    with pytest.raises(tg.SetupError, match="the shard is gone"):
        data.next()
    data.close()


# -- averages and schedules --------------------------------------------------------------------------------------------


def test_ema_has_the_closed_form():
    model = torch.nn.Linear(4, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    ema = tg.EMA(model, 0.997)
    torch.nn.init.ones_(model.weight)
    for _ in range(1000):
        ema.update()
    ema.copy_to_model()
    torch.testing.assert_close(model.weight.detach(), torch.full((1, 4), 1 - 0.997**1000), rtol=0, atol=1e-5)
    assert abs(model.weight[0, 0].item() - 0.9504) < 1e-3


def test_ema_of_bf16_weights_moves_in_fp32():
    model = torch.nn.Linear(4, 1, bias=False).bfloat16()
    torch.nn.init.ones_(model.weight)
    ema = tg.EMA(model, 0.997)
    torch.nn.init.constant_(model.weight, 1.0078125)  # the next bf16 number: one update is far below a bf16 step
    for _ in range(1000):
        ema.update()
    assert all(s.dtype == torch.float32 for s in ema.shadow)
    torch.testing.assert_close(ema.shadow[0], torch.full((1, 4), 1 + 0.0078125 * (1 - 0.997**1000)), rtol=0, atol=1e-4)


@quick
@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 0.5))
def test_rate_is_flat_then_linear_and_never_below_its_floor(progress, warmdown, floor):
    factor = tg.lr_factor(progress, warmdown, floor)
    if warmdown == 0 or progress < 1 - warmdown:
        assert factor == 1
    else:
        assert factor == pytest.approx(max((1 - progress) / warmdown, floor))
        assert floor <= factor <= 1 + 1e-9


def test_momentum_warms_up_linearly():
    hp = settings(muon_momentum_warmup_steps=10, muon_momentum_warmup_start=0.5, muon_momentum=0.9)
    assert [tg.muon_momentum(step, hp) for step in (0, 5, 10, 99)] == pytest.approx([0.5, 0.7, 0.9, 0.9])
    assert tg.muon_momentum(0, settings(muon_momentum_warmup_steps=0)) == 0.99


# -- Muon and the optimizer groups -------------------------------------------------------------------------------------


def muon_step(weights, gradients, **changes):
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    muon = tg.Muon(params, lr=changes.get("lr", 1.0), weight_decay=changes.get("decay", 0.0), steps=5, world=tg.World())
    for p, g in zip(params, gradients):
        p.grad = g
    for group in muon.param_groups:
        group["momentum"] = 0.9
    muon.step()
    return [p.detach() for p in params]


def test_zero_gradient_gives_a_zero_update():
    weights = [torch.randn(8, 12), torch.randn(8, 12), torch.randn(12, 8)]
    moved = muon_step(weights, [torch.zeros(8, 12), torch.randn(8, 12), torch.zeros(12, 8)])
    assert torch.equal(moved[0], weights[0]) and torch.equal(moved[2], weights[2])
    assert not torch.equal(moved[1], weights[1]) and all(bool(m.isfinite().all()) for m in moved)


@pytest.mark.parametrize("shape", [(64, 64), (64, 200), (200, 64), (33, 17), (1, 40)])
def test_update_has_singular_values_near_one(shape):
    weight = torch.zeros(shape)
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    update = -muon_step([weight], [gradient])[0] / max(1, shape[0] / shape[1]) ** 0.5
    values = torch.linalg.svdvals(update)
    assert values.min() > 0.5 and values.max() < 1.5


def test_decay_is_decoupled():
    weight = torch.randn(8, 8)
    assert torch.allclose(muon_step([weight], [torch.zeros(8, 8)], lr=0.1, decay=0.5)[0], weight * 0.95)


def test_each_group_has_its_own_rate_and_decay_and_both_follow_the_schedule():
    model = fresh_model(tie_embeddings=0, embed_lr=0.11, head_lr=0.12, scalar_lr=0.13, matrix_lr=0.14, embed_wd=0.21,
                        adam_wd=0.23, muon_wd=0.24, beta1=0.5, beta2=0.6, adam_eps=1e-3, muon_backend_steps=2)
    optimizers, named = tg.Optimizers(model, tg.World()), dict(model.named_parameters())
    assert optimizers.adam.defaults["betas"] == (0.5, 0.6) and optimizers.adam.defaults["eps"] == 1e-3
    assert optimizers.muon.steps == 2
    before = {name: p.detach().clone() for name, p in named.items()}
    for p in named.values():
        p.grad = torch.zeros_like(p)
    optimizers.step(0.5, 0.9)
    rates = {"embed": (0.11, 0.21), "head": (0.12, 0.0), "scalar": (0.13, 0.23), "muon": (0.14, 0.24)}
    for key, names in tg.parameter_groups(model).items():
        for name in names:
            lr, decay = rates[key]
            torch.testing.assert_close(named[name].detach(), before[name] * (1 - 0.5 * lr * decay), msg=name)
    for p in named.values():
        p.grad = torch.ones_like(p)
    optimizers.step(1.0, 0.9)
    for group in optimizers.adam.param_groups:
        assert (group["lr"], group["weight_decay"]) in rates.values()


def test_the_untied_head_starts_at_zero_and_its_table_at_one():
    named = dict(fresh_model(tie_embeddings=0, qk_gain_init=2.5).named_parameters())
    assert named["tok_emb.weight"].std().item() == pytest.approx(1, abs=0.02)
    assert named["ve_shared.embed.weight"].std().item() == pytest.approx(0.01, rel=0.1)
    zero = [name for name, p in named.items() if p.ndim == 2 and not p.any()]
    matrices = [f"blocks.{i}.{part}.proj.weight" for i in range(5) for part in ("attn", "mlp")]
    assert zero == ["skip_gates", *matrices, "ve_shared.proj.weight", "lm_head.weight"]
    assert (named["blocks.0.attn.q_gain"] == 2.5).all()


SHAPES = {
    "default": {},
    "untied head": {"tie_embeddings": 0},
    "narrow table": {"embedding_dim": 16},
    "narrow untied table": {"embedding_dim": 16, "tie_embeddings": 0},
    "no skip gates": {"skip_gates_enabled": 0},
    "no value embedding": {"ve_enabled": 0},
    "value width without projection": {"ve_dim": 16},
    "one layer": {"num_layers": 1, "xsa_last_n": 1, "ve_layers": "0"},
    "two layers": {"num_layers": 2, "xsa_last_n": 0, "ve_layers": "1"},
    "three layers": {"num_layers": 3, "xsa_last_n": 1, "ve_layers": "0,2"},
    "whole head rotates": {"rope_dims": 0},
    "one kv head": {"num_kv_heads": 1},
    "no layer scale": {"ln_scale": 0},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_each_weight_is_in_exactly_one_group_and_is_trained(shape):
    model = fresh_model(**SHAPES[shape])
    named = dict(model.named_parameters())
    groups = tg.parameter_groups(model)
    assert sorted(name for names in groups.values() for name in names) == sorted(named)
    assert all(named[name].ndim == 2 for name in groups["muon"])
    for name in ("embed_proj.weight", "head_proj.weight"):
        assert name not in named or name in groups["muon"]
    assert groups["head"] == (["lm_head.weight"] if "lm_head.weight" in named else [])
    optimizers = tg.Optimizers(model, tg.World())
    held = [
        id(p) for optimizer in (optimizers.adam, optimizers.muon) for g in optimizer.param_groups for p in g["params"]
    ]
    assert sorted(held) == sorted(map(id, named.values()))
    before = {name: p.detach().clone() for name, p in named.items()}
    for step in range(4):  # some weights get a gradient only once others have left zero
        for p in named.values():
            p.grad = None
        loss = model(*batch_of(model.hp))
        loss.backward()
        assert bool(loss.isfinite())
        assert all(bool(p.grad.isfinite().all()) for p in named.values() if p.numel()), step
        optimizers.step(1.0, 0.9)
    still = [name for name, p in named.items() if torch.equal(p, before[name])]
    assert still == [name for name, p in named.items() if p.numel() == 0]


@pytest.mark.parametrize("shape", SHAPES)
def test_each_shape_survives_quantisation_and_artifact(shape):
    model = fresh_model(**SHAPES[shape])
    done = tg.quantize_state(model.state_dict(), {}, model.hp)
    state = tg.dequantize(*tg.unpack_artifact(tg.pack_artifact(done, "lzma")), model.state_dict())
    assert list(state) == list(model.state_dict())
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-3, atol=1e-4, msg=name)


# -- the model as the recipe defines it, for settings that the golden vectors leave out --------------------------------


def norm(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()


def rotated(x, hp, length):
    """The first dims of each head (B, T, H, D), one pair at a time."""
    dims, out = hp.rope_dims or hp.head_dim, x.clone()
    base = hp.rope_base * max(1, length / hp.train_seq_len) ** (dims / (dims - 2))
    for j in range(dims // 2):
        angle = torch.arange(length)[:, None] * base ** (-2 * j / dims)
        a, b = x[..., j], x[..., j + dims // 2]
        out[..., j], out[..., j + dims // 2] = a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin()
    return out


def reference_losses(hp, w, ids, targets):
    """Nats of each target (B, T) from weights `w` by name."""
    def linear(x, name):
        return x @ w[f"{name}.weight"].T if f"{name}.weight" in w else x

    length, heads = ids.size(1), lambda x: x.unflatten(-1, (-1, hp.head_dim))
    x = x0 = linear(norm(w["tok_emb.weight"][ids]), "embed_proj")
    skips, half = [], hp.num_layers // 2
    for n in range(hp.num_layers):
        at = f"blocks.{n}."
        if n >= half and skips:
            skip = w["skip_weights"][n - half] * skips.pop()
            x = skip.lerp(x, w["skip_gates"][n - half].sigmoid()) if hp.skip_gates_enabled else x + skip
        x = w[at + "resid_mix"][0] * x + w[at + "resid_mix"][1] * x0
        factor = (n + 1) ** -0.5 if hp.ln_scale else 1
        inner = norm(x) * factor
        q, k, v = (linear(inner, f"{at}attn.c_{name}") for name in "qkv")
        if n in hp.ve_layer_list:
            value = linear(w["ve_shared.embed.weight"][ids], "ve_shared.proj") * w["ve_shared.scale"]
            v = v + value * w[f"ve_layer_scales.{hp.ve_layer_list.index(n)}"]
        q, k, v = rotated(norm(heads(q)), hp, length), rotated(norm(heads(k)), hp, length), heads(v)
        q = q * w[at + "attn.q_gain"][:, None]
        y = reference_attention(q, k, v).float()
        if n >= hp.num_layers - hp.xsa_last_n:
            own = F.normalize(v, dim=-1).repeat_interleave(hp.num_heads // hp.num_kv_heads, dim=2)
            y = y - (y * own).sum(-1, keepdim=True) * own
        x = x + w[at + "attn_scale"] * linear(y.flatten(2), at + "attn.proj")
        hidden = F.leaky_relu(linear(norm(x) * factor, at + "mlp.fc"), 0.5) ** 2
        x = x + w[at + "mlp_scale"] * linear(hidden, at + "mlp.proj")
        if n < half:
            skips.append(x)
    z = linear(norm(x), "head_proj") @ w["tok_emb.weight" if hp.tie_embeddings else "lm_head.weight"].T
    logits = hp.logit_softcap * torch.tanh(z / hp.logit_softcap)
    return F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")


VARIANTS = {
    **SHAPES,
    "XSA in the last two layers": {"xsa_last_n": 2},
    "shorter than in training": {"train_seq_len": 128},
    "longer than in training": {"train_seq_len": 16},
    "other numbers": {"rope_base": 50, "logit_softcap": 3, "qk_gain_init": 1.5, "mlp_mult": 2.5, "rope_dims": 6},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_are_those_of_the_definition(variant):
    model = fresh_model(**VARIANTS[variant])
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=generator))
        ids, targets = batch_of(model.hp)
        expected = reference_losses(model.hp, dict(model.named_parameters()), ids, targets)
        torch.testing.assert_close(model(ids, targets, 0, "none"), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(model(ids, targets, 20, "none"), expected[:, 20:], rtol=1e-4, atol=1e-4)


# -- causality ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", [1, 17, 62])
def test_a_changed_future_token_leaves_earlier_losses_as_they_are(model_state, place):
    model = load_model(settings(), model_state)
    tokens = torch.randint(0, 512, (1, 65), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[0, place] = (changed[0, place] + 1) % 512
    with torch.no_grad():
        first, second = (model(t[:, :-1], t[:, 1:], reduction="none") for t in (tokens, changed))
    assert torch.equal(first[0, : place - 1], second[0, : place - 1])
    assert not torch.equal(first[0, place - 1 :], second[0, place - 1 :])


def test_scoring_changes_no_weight_and_needs_no_gradient(model_state):
    hp = settings()
    model = load_model(hp, model_state)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    tokens = np.random.default_rng(0).integers(0, 512, 129).astype(np.uint16)
    evaluator = tg.Evaluator(hp, tg.plan_batches(hp, 1), tg.World(), tg.ValidationSet(tokens, 300, 0), model)
    assert evaluator.sliding().val_loss == evaluator.sliding().val_loss
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


# -- quantisation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compressor", ["brotli", "lzma"])
def test_quantised_state_survives_the_artifact(compressor):
    generator = torch.Generator().manual_seed(0)
    hp = settings()
    state = {
        "tok_emb.weight": torch.randn(512, 200, generator=generator),
        "blocks.0.attn_scale": torch.randn(32),
        "blocks.0.mlp.fc.weight": torch.randn(400, 200, generator=generator),
        "blocks.0.mlp.proj.weight": torch.randn(32, 32),
        "skip_weights": torch.randn(300, 300),
    }
    done = tg.quantize_state(state, {}, hp)
    tensors, meta = tg.unpack_artifact(tg.pack_artifact(done, compressor))
    assert meta == done.meta and list(tensors) == list(done.tensors)
    assert all(torch.equal(tensors[name], t) and tensors[name].dtype == t.dtype for name, t in done.tensors.items())
    assert meta["tok_emb.weight"] == {"type": "int8"} and meta["skip_weights"] == "passthrough_ctrl"
    assert meta["blocks.0.mlp.fc.weight"]["type"] == "int6" and meta["blocks.0.mlp.proj.weight"] == "passthrough"
    back = tg.dequantize(tensors, meta, state)
    for name, allowed in (
        ("tok_emb.weight", 0.03),
        ("blocks.0.mlp.fc.weight", 0.2),
        ("skip_weights", 0),
        ("blocks.0.attn_scale", 0.01),
    ):
        assert (back[name] - state[name]).abs().max() <= allowed, name


@quick
@given(st.binary(max_size=1000))
@example(b"BSHF")
@example(b"BSHF\x02abc")
def test_byte_shuffle_round_trip(data):
    assert tg.byte_unshuffle(tg.byte_shuffle(data)) == data


def test_byte_shuffle_round_trip_of_every_size():
    data = np.random.default_rng(0).bytes(1000)
    assert all(tg.byte_unshuffle(tg.byte_shuffle(data[:n])) == data[:n] for n in range(1001))


@quick
@given(st.integers(1, 12), st.integers(1, 300), st.sampled_from([1e-6, 0.02, 1.0, 50.0]), st.booleans())
def test_row_quantisers_stay_in_range_and_close(rows, cols, size, zero_row):
    weight = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * 1000 + cols)) * size
    if zero_row:
        weight[0] = 0
    for quantise, top in ((tg.quantize_int6_rows, 31), (tg.quantize_int8_rows, 127)):
        codes, scale = quantise(weight)
        assert codes.dtype == torch.int8 and scale.dtype == torch.float16
        assert codes.abs().max() <= top and bool((scale > 0).all())
        error = (weight - codes.float() * scale.float()[:, None]).abs()
        limit = weight.abs().amax(1, keepdim=True) / top
        assert bool((error.median(1, keepdim=True).values <= 0.51 * limit.clamp_min(1 / top) + 1e-3 * size).all())


def correlated(count: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    factors = torch.randn(count, 8, generator=generator) @ torch.randn(8, width, generator=generator)
    return factors + 0.1 * torch.randn(count, width, generator=generator)


def test_gptq_beats_rounding_on_correlated_inputs():
    x = correlated(2000, 160)
    weight = torch.randn(96, 160, generator=torch.Generator().manual_seed(1))

    def output_error(pair):
        return ((weight - pair[0].float() * pair[1].float()[:, None]) @ x.T).square().mean()

    factor = tg.factor_hessian(x.T @ x / 10)
    (gptq,) = tg.quantize_int6_gptq([weight], [factor])
    assert output_error(gptq) < 0.5 * output_error(tg.quantize_int6_rows(weight))


def bad_hessians():
    x = correlated(500, 256)
    good = x.T @ x
    zero_column = good.clone()
    zero_column[5] = zero_column[:, 5] = 0
    nan = good.clone()
    nan[3, 4] = nan[4, 3] = float("nan")
    nan_diagonal = good.clone()
    nan_diagonal[3, 3] = float("nan")
    infinite = good.clone()
    infinite[2, 2] = float("inf")
    rank_one = torch.outer(x[0], x[0])
    return {
        "rank one": rank_one,
        "zero column": zero_column,
        "NaN": nan,
        "NaN on the diagonal": nan_diagonal,
        "infinite": infinite,
        "minus one": -torch.eye(256),
        "all zero": torch.zeros(256, 256),
        "good": good,
    }


@pytest.mark.parametrize(
    ("case", "fallback"),
    [
        ("rank one", False),
        ("zero column", False),
        ("all zero", True),  # GPTQ would set all codes to 0
        ("good", False),
        ("NaN", True),
        ("NaN on the diagonal", True),
        ("infinite", True),
        ("minus one", True),
    ],
)
def test_difficult_hessians_never_raise_and_are_reported(case, fallback):
    name = "blocks.0.mlp.fc.weight"
    weight = torch.randn(300, 256, generator=torch.Generator().manual_seed(0))
    done = tg.quantize_state({name: weight}, {name: bad_hessians()[case]}, settings())
    assert (name in done.fallback) == fallback and (name in done.gptq) != fallback
    assert done.meta[name]["method"] == ("clip_search" if fallback else "gptq")
    value = done.tensors[f"{name}.q"].float() * done.tensors[f"{name}.scale"].float()[:, None]
    assert bool(value.isfinite().all()) and (done.tensors[f"{name}.q"].abs() <= 31).all()
    if fallback:
        assert torch.equal(done.tensors[f"{name}.q"], tg.quantize_int6_rows(weight)[0])


def test_a_slightly_indefinite_hessian_is_used_and_reported():
    name, x = "blocks.0.mlp.fc.weight", correlated(500, 256)
    hessian = x.T @ x
    hessian -= 0.03 * hessian.diagonal().mean() * torch.eye(256)  # more than the usual damping makes up for
    done = tg.quantize_state({name: torch.randn(300, 256)}, {name: hessian}, settings())
    assert done.damped == done.gptq == [name] and done.fallback == []


LARGE = {"model_dim": 160, "embedding_dim": 160, "num_layers": 1, "xsa_last_n": 1, "ve_layers": "0", "mlp_mult": 5}


def test_calibration_that_never_runs_is_noticed():
    model = fresh_model(**LARGE)
    collector = tg.HessianCollector(model)
    with pytest.raises(AssertionError, match="no activation"):
        collector.finish(1, tg.World())


def test_hessians_are_sums_of_products_of_inputs_over_batches():
    model = fresh_model(**LARGE)
    inputs = []
    hook = model.blocks[0].mlp.fc.register_forward_pre_hook(
        lambda _m, args: inputs.append(args[0].detach().flatten(0, 1))
    )
    collector = tg.HessianCollector(model)
    with torch.no_grad():
        for _ in range(2):
            model.hidden(batch_of(model.hp)[0])
    hook.remove()
    hessians = collector.finish(2, tg.World())
    assert set(hessians) == {"blocks.0.mlp.fc.weight", "blocks.0.mlp.proj.weight"}
    torch.testing.assert_close(hessians["blocks.0.mlp.fc.weight"], sum(x.T @ x for x in inputs) / 2)
    with torch.no_grad():
        model.hidden(batch_of(model.hp)[0])  # the hooks are gone


def test_attention_matrices_get_their_inputs_hessians_and_int6_codes(monkeypatch):
    monkeypatch.setattr(tg, "PASSTHROUGH_MAX_ELEMENTS", 500)
    model, inputs = fresh_model(num_layers=1, xsa_last_n=1, ve_layers="0"), {}
    for name in ("attn", "attn.proj"):
        model.get_submodule(f"blocks.0.{name}").register_forward_pre_hook(
            lambda _m, args, name=name: inputs.update({name: args[0].detach().flatten(0, 1)}))
    collector = tg.HessianCollector(model)
    with torch.no_grad():
        model.hidden(batch_of(model.hp)[0])
    hessians = collector.finish(1, tg.World())
    for part, source in (("c_q", "attn"), ("c_k", "attn"), ("c_v", "attn"), ("proj", "attn.proj")):
        torch.testing.assert_close(hessians[f"blocks.0.attn.{part}.weight"], inputs[source].T @ inputs[source])
    meta = tg.quantize_state(model.state_dict(), hessians, model.hp).meta
    assert {name for name, kind in meta.items() if kind == {"type": "int6", "method": "gptq"}} == set(hessians)
    assert len(hessians) == 6 and meta["tok_emb.weight"] == {"type": "int8"}
    monkeypatch.setattr(tg, "PASSTHROUGH_MAX_ELEMENTS", 32 * 32)
    assert tg.storage_class("blocks.0.attn.c_q.weight", torch.zeros(32, 32), model.hp) == "passthrough"


class SlowBatches:
    """Calibration data of which each batch takes two seconds of a pretended clock."""

    def __init__(self, hp, monkeypatch):
        self.ids, self.now, self.count = batch_of(hp)[0], 0.0, 0
        monkeypatch.setattr(tg, "time", types.SimpleNamespace(perf_counter=lambda: self.now))

    def next(self):
        self.now, self.count = self.now + 2, self.count + 1
        return [self.ids]


@pytest.mark.parametrize(("cap", "batches"), [(10, 3), (10.5, 3), (100, 6), (0, 6)])
def test_calibration_ends_before_the_batch_that_would_pass_the_cap(monkeypatch, cap, batches):
    model, lines = fresh_model(**LARGE, gptq_calibration_batches=6, max_wallclock_seconds=cap,
                               gptq_reserve_seconds=1), []
    data, clock = SlowBatches(model.hp, monkeypatch), tg.Stopwatch(4.0)
    clock.start()
    trainer = types.SimpleNamespace(model=model, hp=model.hp, clock=clock, log=lines.append, world=tg.World(), parts=1)
    tg.collect_hessians(trainer, data)
    assert data.count == batches and any("calibration batches fit" in line for line in lines) == (batches < 6)


@pytest.mark.parametrize("parts", [2, 3])  # of two sequences
def test_hessians_in_parts_are_those_of_whole_batches(monkeypatch, parts):
    hessians = []
    for cut in (1, parts):
        torch.manual_seed(5)
        model, rows = fresh_model(**LARGE, gptq_calibration_batches=2), []
        model.register_forward_pre_hook(lambda _, inputs: pytest.fail("the compiled forward is for training"))
        model.blocks[0].register_forward_pre_hook(lambda _, inputs, rows=rows: rows.append(len(inputs[0])))
        data = SlowBatches(model.hp, monkeypatch)
        trainer = types.SimpleNamespace(model=model, hp=model.hp, clock=tg.Stopwatch(), log=print, world=tg.World(),
                                        parts=cut)
        trainer.clock.start()
        hessians.append(tg.collect_hessians(trainer, data))
        assert rows == ([2, 2] if cut == 1 else [1, 1, 1, 1])
    whole, in_parts = hessians
    assert whole.keys() == in_parts.keys()
    for name, expected in whole.items():
        torch.testing.assert_close(in_parts[name], expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_without_gptq_no_method_is_stored():
    name = "blocks.0.mlp.fc.weight"
    meta = tg.quantize_state({name: torch.randn(300, 256)}, {}, settings(gptq_enabled=0)).meta
    assert meta == {name: {"type": "int6"}}


def test_quantisation_puts_the_precision_of_products_back():
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("high")
        tg.quantize_state({"blocks.0.mlp.fc.weight": torch.randn(300, 256)}, {}, settings())
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision(before)


# -- the artifact's seal -----------------------------------------------------------------------------------------------


def packed(content: dict) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return tg.compress(tg.byte_shuffle(buffer.getvalue()), "lzma")


def test_an_artifact_is_sealed_and_one_without_seal_is_read_too():
    model = fresh_model(gptq_enabled=0)
    quantized = tg.quantize_state(model.state_dict(), {}, model.hp)
    content = torch.load(io.BytesIO(tg.byte_unshuffle(tg.decompress(tg.pack_artifact(quantized, "lzma")))))
    seal = content["m"].pop(tg.SEAL)
    assert (seal["format"], seal["settings"]) == (1, {}) and content["m"] == quantized.meta
    tensors, meta = tg.unpack_artifact(packed(content))
    assert meta == quantized.meta and tg.fingerprint(tensors) == tg.fingerprint(quantized.tensors)


def test_settings_that_no_shape_tells_are_in_the_artifact():
    model = fresh_model(gptq_enabled=0)
    settings_here = tg.forward_settings(model.hp)
    data = tg.pack_artifact(tg.quantize_state(model.state_dict(), {}, model.hp), "lzma", settings_here)
    tg.unpack_artifact(data)
    tg.unpack_artifact(data, settings=settings_here)
    for name, value in settings_here.items():
        with pytest.raises(tg.ArtifactError, match=f"^it was trained with {name.upper()}={value}; set that$"):
            tg.unpack_artifact(data, settings=settings_here | {name: "other"})


@pytest.mark.parametrize("said", [5, ["rope_base"], "rope_base", {"rope_base": "1\n" * 99}, {"rope_base": [1]}, {1: 2}])
def test_odd_settings_in_an_artifact_are_refused_in_one_line_or_not_ours(said):
    model = fresh_model(gptq_enabled=0)
    quantized = tg.quantize_state(model.state_dict(), {}, model.hp)
    seal = {"format": 1, "sha256": tg.fingerprint(quantized.tensors), "settings": said}
    data = packed({"w": quantized.tensors, "m": quantized.meta | {tg.SEAL: seal}})
    if said == {1: 2}:
        tg.unpack_artifact(data, settings=tg.forward_settings(model.hp))
    else:
        with pytest.raises(tg.ArtifactError, match=r"^[^\n]{1,120}\Z"):
            tg.unpack_artifact(data, settings=tg.forward_settings(model.hp))


@pytest.mark.parametrize("change", ["value", "name", "format"])
def test_a_broken_seal_is_refused(change):
    model = fresh_model(gptq_enabled=0)
    quantized = tg.quantize_state(model.state_dict(), {}, model.hp)
    seal = {"format": 2 if change == "format" else 1, "sha256": tg.fingerprint(quantized.tensors)}
    tensors = {f"{name}{'.' * (change == 'name')}": t.clone() for name, t in quantized.tensors.items()}
    if change == "value":
        next(iter(tensors.values())).view(-1)[0] += 1
    with pytest.raises(tg.ArtifactError, match="not those that were written"):
        tg.unpack_artifact(packed({"w": tensors, "m": quantized.meta | {tg.SEAL: seal}}))


# -- gradients ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("largest_norm", [0.05, 1e9])
def test_gradients_add_up_in_place_and_are_clipped_as_pytorch_does(largest_norm):
    ours, twin = fresh_model(), fresh_model()
    gradients = tg.Gradients(ours.parameters())
    addresses = [p.grad.data_ptr() for p in ours.parameters()]
    for seed in (1, 2):
        ids, targets = batch_of(ours.hp, sequences=1 + seed)
        gradients.add(ours(ids, targets))
        twin(ids, targets).backward()
    gradients.average(tg.World())
    gradients.clip(largest_norm)
    torch.nn.utils.clip_grad_norm_(twin.parameters(), largest_norm)
    assert addresses == [p.grad.data_ptr() for p in ours.parameters()]
    for (name, a), b in zip(ours.named_parameters(), twin.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-7, msg=name)
    gradients.zero()
    assert not any(p.grad.any() for p in ours.parameters())


def test_gradients_of_several_dtypes_are_kept_apart():
    model = tg.build_model(settings(), tg.Operations(tg.sdpa_attention), CPU, torch.bfloat16)
    gradients = tg.Gradients(model.parameters())
    assert {flat.dtype for flat, _ in gradients.groups} == {torch.float32, torch.bfloat16}
    assert sum(flat.numel() for flat, _ in gradients.groups) == sum(p.numel() for p in model.parameters())
    assert all(p.grad.dtype == p.dtype and p.grad.shape == p.shape for p in model.parameters())


class Twin(tg.World):
    """One of two ranks; the other's numbers are `factor` times this one's and its clock is four seconds ahead."""
    factor = 1.0

    def sum(self, tensor):
        return tensor.mul_(1 + self.factor)

    def gather(self, values):
        return [values, [value + 4 for value in values]]


def test_gradients_of_ranks_are_averaged():
    model = fresh_model()
    gradients = tg.Gradients(model.parameters())
    gradients.add(model(*batch_of(model.hp)))
    before = [p.grad.clone() for p in model.parameters()]
    gradients.average(Twin(size=2))
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), before))


def test_the_slowest_rank_and_the_mean_loss_count_on_every_rank():
    one = types.SimpleNamespace(world=Twin(size=2), clock=tg.Stopwatch(3.0))
    assert tg.Trainer._agree(one, lambda: 2.0, "") == (7.0, 4.0)


# -- the loop on a pretended clock -------------------------------------------------------------------------------------


class Lines(list):
    """A log that keeps its lines and its records of steps."""

    def __init__(self):
        self.steps = []

    def __call__(self, line):
        self.append(line)

    def record(self, kind, **values):
        self.steps += [values] if kind == "step" else []


@pytest.fixture
def make_trainer(data_here, tables, monkeypatch):
    """A trainer whose steps take a second each and its validations a hundred, while no watchdog may be on."""
    now, watchdog = [0.0], []
    monkeypatch.setattr(tg, "time", types.SimpleNamespace(perf_counter=lambda: now[0]))
    monkeypatch.setattr(tg.faulthandler, "dump_traceback_later", lambda *args, **kwargs: watchdog.append(1))
    monkeypatch.setattr(tg.faulthandler, "cancel_dump_traceback_later", watchdog.clear)

    def make(**changes):
        hp = settings(train_batch_tokens=128, micro_batch_tokens=128, muon_momentum_warmup_steps=9, **changes)
        model, plan = tg.build_model(hp, tg.Operations(tg.sdpa_attention), CPU, torch.float32), tg.plan_batches(hp, 1)
        evaluator = tg.Evaluator(hp, plan, tg.World(), tg.load_validation(hp, tables), model)
        trainer = tg.Trainer(model, evaluator, tg.find_shards(hp, "train"), Lines(), tg.newton_schulz)
        step, trainer.factors, trainer.momenta = trainer.optimizers.step, [], []

        def timed_step(factor, momentum):
            now[0] += 1
            trainer.factors.append(factor)
            trainer.momenta.append(momentum)
            step(factor, momentum)

        def timed_validation():
            assert not watchdog, "a validation longer than STALL_SECONDS would end the run"
            now[0] += 100
            return tg.Score(1.0, 1.0, 100.0)

        trainer.optimizers.step, evaluator.full = timed_step, timed_validation
        return trainer

    yield make
    assert not watchdog, "what follows training would end after STALL_SECONDS"


def test_the_clock_counts_steps_but_neither_warm_up_nor_validation(make_trainer):
    trainer = make_trainer(iterations=7, val_loss_every=2, warmup_steps=2, max_wallclock_seconds=0, train_log_every=6)
    trainer.warm_up()
    assert trainer.clock.seconds == 0 and trainer.momenta == [tg.muon_momentum(n, trainer.hp) for n in (0, 1)]
    trainer.momenta.clear()
    trainer.fit()
    assert [(row["step"], row["train_seconds"]) for row in trainer.log.steps] == [(n, n) for n in range(1, 7)]
    assert trainer.momenta == [tg.muon_momentum(n, trainer.hp) for n in range(7)]
    assert trainer.clock.seconds == 7
    with trainer.on_the_clock():
        pass
    assert trainer.clock.seconds == 7


def test_a_resumed_run_goes_on_with_the_rate_of_its_clock(make_trainer, monkeypatch):
    trainer = make_trainer(max_wallclock_seconds=10, gptq_enabled=0)

    def resume(snapshots):
        snapshots.trainer.steps_done, snapshots.trainer.clock = 3, tg.Stopwatch(6.0)
        return True

    finished = []
    monkeypatch.setattr(tg.Snapshots, "resume", resume)
    monkeypatch.setattr(tg.Snapshots, "finish", lambda snapshots: finished.append(snapshots.trainer.steps_done))
    trainer.fit()
    assert finished == [7], "a snapshot under way is waited for"
    assert trainer.factors == pytest.approx([tg.lr_factor(seconds / 10, 0.667, 0) for seconds in (6, 7, 8, 9)])
    assert trainer.steps_done == 7 and any("stopping_early" in line for line in trainer.log)


def test_warm_up_leaves_weights_moments_and_rates_as_they_were(make_trainer):
    trainer = make_trainer(warmup_steps=2)
    before = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    trainer.warm_up()
    assert all(torch.equal(t, before[name]) for name, t in trainer.model.state_dict().items())
    assert not trainer.optimizers.adam.state and not trainer.optimizers.muon.state


def test_the_gradient_is_clipped_after_it_was_averaged_over_ranks(make_trainer, monkeypatch):
    monkeypatch.setattr(Twin, "factor", 99.0)
    trainer = make_trainer(grad_clip_norm=0.01)
    trainer.world = Twin(size=2)
    with trainer.on_the_clock() as data:
        trainer.step(data, 0, 1.0)
    norm = torch.stack([flat.norm() for flat, _ in trainer.gradients.groups]).norm()
    assert norm.item() == pytest.approx(0.01, rel=1e-3)


def test_a_whole_step_is_read_ahead(make_trainer, monkeypatch):
    """Its micro-batches are queued at once; nothing may wait for the reader then."""
    trainer, loader = make_trainer(), Batches()
    trainer.plan = dataclasses.replace(trainer.plan, grad_accum_steps=8)
    monkeypatch.setattr(tg, "CoprimeLoader", lambda *args: loader)
    with trainer.on_the_clock() as data:
        deadline = time.monotonic() + 10
        while loader.count < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert loader.count == 8
        data.next()
    assert loader.count in (8, 9)


def test_short_averages_and_slow_readers_are_said(make_trainer):
    trainer = make_trainer(ema_decay=0.9, iterations=60)
    for steps, waited, warnings in ((51, 1, 0), (49, 1, 1), (51, 3, 1)):
        trainer.steps_done = steps
        trainer.log.clear()
        trainer._report_end(100.0, waited)
        assert sum("WARNING" in line for line in trainer.log) == warnings


class Events(list):
    """A stand-in for all that Run.train calls, which notes the order; clocks are those of two ranks."""
    plan = types.SimpleNamespace(grad_accum_steps=8)
    steps_done, began, hessian_seconds = 5, 0.0, 0.0
    failure, evaluator, train_paths, model = None, None, [], torch.nn.Linear(1, 1)

    def __init__(self, hp, seconds, last, other):
        self.hp, self.clock, self.last_read_seconds, self.results = hp, tg.Stopwatch(seconds), last, {}
        self.world = types.SimpleNamespace(gather=lambda values: [values, other])

    def log(self, line):
        pass

    def compile(self, function):
        return function

    def warm_up(self):
        self.append("warm-up")

    def fit(self):
        self.append("fit")
        return self

    def release(self):
        self.append("release")

    def copy_to_model(self):
        self.append("average")

    def write_checkpoint(self):
        self.append("checkpoint")

    def write_artifact(self, hessians):
        self.append("artifact")

    def collect(self, trainer, data):
        assert trainer is self
        self.append("hessians")
        self.clock = tg.Stopwatch(self.clock.seconds + self.hessian_seconds)

    @contextlib.contextmanager
    def on_the_clock(self, skip=0):
        assert skip == 0, "calibration begins the data anew"
        yield

    def run(self, monkeypatch):
        monkeypatch.setattr(tg, "Trainer", lambda *args: self)
        monkeypatch.setattr(tg, "collect_hessians", self.collect)
        tg.Run.train(self)
        return self


def test_the_average_is_what_is_calibrated_and_quantised(monkeypatch):
    events = Events(settings(), 9.0, 9.0, [9.0, 9.0])
    events.hessian_seconds = 2.0
    assert events.run(monkeypatch) == ["warm-up", "fit", "release", "average", "checkpoint", "hessians", "artifact"]
    expected = {"train_seconds": 11, "hessian_seconds": 2, "tokens": 5 * 1024, "tokens_per_second": 5 * 1024 / 9}
    assert {key: events.results[key] for key in expected} == expected



@pytest.mark.parametrize(("gptq", "last", "spent", "other", "late"), [
    (1, 9, 9.5, [9, 9.5], False), (1, 9, 10.5, [9, 9], True), (1, 9, 9, [9, 10.5], True),
    (0, 9, 10.5, [9, 10.5], False), (0, 10.5, 10.5, [9, 9], True), (0, 9, 9, [10.5, 11], True)])
def test_data_in_use_after_the_cap_on_any_rank_fails_the_run(monkeypatch, gptq, last, spent, other, late):
    """With Hessians all that they take counts; without them only reading does: the last step may end after the cap."""
    hp = settings(max_wallclock_seconds=10, gptq_reserve_seconds=1, gptq_enabled=gptq)
    run = Events(hp, spent, last, other).run(monkeypatch)
    assert isinstance(run.failure, tg.ClockError) == late
    assert run.results["train_data_last_read_seconds"] == max(last, other[0])


def test_a_disk_without_room_for_the_model_is_refused_at_once(monkeypatch, tmp_path):
    run = types.SimpleNamespace(model=fresh_model(), run_id="r", world=tg.World(), output=tmp_path,
                                logs=tmp_path / "logs", hp=settings())
    size = 5 * sum(t.nbytes for t in run.model.state_dict().values()) // 4
    for free in (size, size - 1):
        monkeypatch.setattr(tg.shutil, "disk_usage", lambda _, free=free: types.SimpleNamespace(free=free))
        if free < size:
            with pytest.raises(tg.SetupError, match="bytes are free"):
                tg.Run.open_log(run)
        else:
            tg.Run.open_log(run)
        run.run_id += "2"


# -- artifacts of others -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_artifact():
    model = fresh_model(num_layers=1, xsa_last_n=0, ve_enabled=0)
    return model, tg.pack_artifact(tg.quantize_state(model.state_dict(), {}, model.hp), "brotli")


def content_of(data: bytes) -> dict:
    tensors, meta = tg.unpack_artifact(data)
    return {"w": tensors, "m": meta}


def load(content, model):
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return tg.dequantize(
        *tg.unpack_artifact(tg.compress(tg.byte_shuffle(buffer.getvalue()), "lzma")), model.state_dict()
    )


CHANGES = {
    "no w": lambda c: c.pop("w"),
    "no m": lambda c: c.pop("m"),
    "w is a list": lambda c: c.update(w=[1]),
    "m is a list": lambda c: c.update(m=[1]),
    "w holds text": lambda c: c["w"].update(skip_weights="x"),
    "a name is missing": lambda c: c["m"].pop("skip_weights"),
    "a tensor is missing": lambda c: c["w"].pop("tok_emb.weight"),
    "a name is foreign": lambda c: c["m"].update(other="passthrough"),
    "a name is a number": lambda c: c["m"].update({1: "passthrough", "other": "passthrough"}),
    "another shape": lambda c: c["w"].update({"tok_emb.weight": torch.zeros(3, 3)}),
    "not a number": lambda c: c["w"]["tok_emb.weight"].fill_(float("nan")),
    "a sparse tensor": lambda c: c["w"].update({"tok_emb.weight": torch.zeros(512, 32).to_sparse()}),
    "codes without scale": lambda c: c["m"].update({"tok_emb.weight": {"type": "int8"}}),
}


@pytest.mark.parametrize("change", CHANGES)
def test_foreign_content_is_an_artifact_error(small_artifact, change):
    model, data = small_artifact
    content = content_of(data)
    load(content, model)
    CHANGES[change](content)
    with pytest.raises(tg.ArtifactError):
        load(content, model)


def recompressed(data: bytes, compressor: str) -> bytes:
    return tg.compress(tg.decompress(data), compressor)


@pytest.mark.parametrize("compressor", ["brotli", "lzma"])
def test_a_flipped_bit_never_gives_other_weights(small_artifact, compressor):
    data, silent = recompressed(small_artifact[1], compressor), []
    expected = content_of(data)
    for place in np.linspace(0, len(data) - 1, 40).astype(int).tolist():
        changed = bytearray(data)
        changed[place] ^= 1 << place % 8
        try:
            content = content_of(bytes(changed))
        except tg.ArtifactError:
            continue
        equal = content["m"] == expected["m"] and all(
            torch.equal(content["w"][name], t) for name, t in expected["w"].items()
        )
        silent += [] if equal else [place]
    assert silent == []


@pytest.mark.parametrize(
    ("cut", "compressor"),
    [
        ("less", "brotli"),
        ("less", "lzma"),
        ("head", "brotli"),
        ("head", "lzma"),
        ("more", "brotli"),
        ("more", "lzma"),
    ],
)
def test_missing_and_trailing_bytes_are_artifact_errors(small_artifact, compressor, cut):
    data = recompressed(small_artifact[1], compressor)
    with pytest.raises(tg.ArtifactError):
        tg.unpack_artifact({"less": data[:-1], "head": data[:9], "more": data + b"garbage"}[cut])


@pytest.mark.parametrize("spare", [0, -1])
def test_the_size_cap_itself_is_allowed(monkeypatch, tmp_path, small_artifact, spare):
    model, data = small_artifact
    (tmp_path / "given.ptz").write_bytes(data)
    monkeypatch.setattr(tg, "SIZE_CAP_BYTES", len(data) + 100 + spare)
    run = types.SimpleNamespace(world=tg.World(), model=model, hp=model.hp, source=bytes(100), results={}, failure=None)
    tg.Run.load_artifact(run, tmp_path / "given.ptz")
    assert run.results["headroom_bytes"] == spare and isinstance(run.failure, tg.OversizeError) == (spare < 0)


# -- attention ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def any_backend():
    """Puts PyTorch's attention switches back after a test."""
    switches = {
        name: getattr(torch.backends.cuda, f"{name}_sdp_enabled")()
        for name in ("flash", "math", "mem_efficient", "cudnn")
    }
    yield
    for name, on in switches.items():
        getattr(torch.backends.cuda, f"enable_{name}_sdp")(on)


def qkv(length, heads=4, kv_heads=2, dim=8):
    generator = torch.Generator().manual_seed(length)
    return [torch.randn(2, length, n, dim, generator=generator).requires_grad_() for n in (heads, kv_heads, kv_heads)]


def reference_attention(q, k, v):
    """Row by row in fp64, from the definition."""
    group, rows = q.size(2) // k.size(2), []
    k, v = k.double().repeat_interleave(group, 2), v.double().repeat_interleave(group, 2)
    for t in range(q.size(1)):
        scores = torch.einsum("bhd,bkhd->bhk", q[:, t].double(), k[:, : t + 1]) / q.size(-1) ** 0.5
        rows.append(torch.einsum("bhk,bkhd->bhd", scores.softmax(-1), v[:, : t + 1]))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("length", [1, 2, 7, 33, 65])
@pytest.mark.parametrize("backend", ["flash", "math", "definition"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_equals_the_definition_forward_and_backward(any_backend, backend, length, kv_heads):
    inputs = qkv(length, kv_heads=kv_heads)
    if backend != "definition":
        tg.use_sdpa_backend(backend)
    function = tg.math_attention if backend == "definition" else tg.sdpa_attention
    out, expected = function(*inputs), reference_attention(*inputs)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    weights = torch.randn_like(out)
    ours = torch.autograd.grad((out * weights).sum(), inputs)
    theirs = torch.autograd.grad((expected * weights).sum(), inputs)
    for a, b in zip(ours, theirs):
        assert bool(a.isfinite().all())
        torch.testing.assert_close(a, b, rtol=0, atol=1e-4)


def fa3_stand_in(kind: str):
    def flash_attn_func(q, k, v, causal=False):
        assert causal
        if kind == "raises":
            raise RuntimeError("no kernel image is available for execution on the device\nmore")
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=kind != "wrong", enable_gqa=True).transpose(1, 2)
        if kind == "wrong gradient":
            return 2 * out - out.detach()
        if kind == "nan":
            return out * float("nan")
        return (out, None) if kind == "tuple" else out

    module = types.ModuleType("flash_attn_interface")
    module.flash_attn_func = flash_attn_func
    return module


@pytest.mark.parametrize("kind", ["tensor", "tuple"])
@pytest.mark.parametrize("wanted", ["auto", "fa3"])
def test_flash_attention_3_is_chosen_when_it_works(any_backend, monkeypatch, model_state, kind, wanted):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fa3_stand_in(kind))
    hp = settings(attention=wanted)
    attend, reason = tg.choose_attention(hp, CPU, torch.float32)
    assert reason.startswith("fa3 (")
    ids = batch_of(hp)[0]
    ours, theirs = (load_model(hp, model_state, function) for function in (attend, tg.math_attention))
    with torch.no_grad():
        torch.testing.assert_close(logits_of(ours, ids), logits_of(theirs, ids), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("kind", "reason"), [
    ("raises", "no kernel image"), ("wrong", "off by"), ("wrong gradient", "off by"), ("nan", "off by nan")])
def test_a_flash_attention_3_that_fails_its_probe_is_refused_with_the_reason(any_backend, monkeypatch, kind, reason):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", fa3_stand_in(kind))
    chosen = tg.choose_attention(settings(), CPU, torch.float32)[1]
    assert chosen.startswith("flash (") and "fa3: " in chosen and reason in chosen
    with pytest.raises(tg.SetupError, match=reason):
        tg.choose_attention(settings(attention="fa3"), CPU, torch.float32)


def test_attention_falls_back_without_the_package_and_cannot_be_forced(any_backend, monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    assert tg.choose_attention(settings(), CPU, torch.float32)[1].startswith("flash (")
    with pytest.raises(tg.SetupError, match=r"ATTENTION=fa3.*flash_attn_interface"):
        tg.choose_attention(settings(attention="fa3"), CPU, torch.float32)
    with pytest.raises(tg.SetupError, match=r"ATTENTION=cudnn.*CUDA"):
        tg.choose_attention(settings(attention="cudnn"), CPU, torch.float32)


@pytest.mark.parametrize("name", ["flash", "math"])
def test_a_kernel_can_be_forced(any_backend, name):
    assert tg.choose_attention(settings(attention=name), CPU, torch.float32)[1] == f"{name} (ATTENTION={name})"


# -- machine -----------------------------------------------------------------------------------------------------------


def pretend_gpus(monkeypatch, count=1, bf16=True, mps=False):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation=True: bf16 or including_emulation)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)


def test_device_is_cuda_else_mps_else_cpu(monkeypatch):
    for count, mps, expected in ((2, True, "cuda:1"), (0, True, "mps"), (0, False, "cpu")):
        pretend_gpus(monkeypatch, count, mps=mps)
        assert str(tg.choose_device("auto", 1)) == expected
    assert tg.choose_device("cpu", 0).type == "cpu"


def test_a_device_that_is_not_there_is_refused(monkeypatch):
    pretend_gpus(monkeypatch, 0)
    with pytest.raises(tg.SetupError, match="DEVICE=cuda"):
        tg.choose_device("cuda", 0)
    pretend_gpus(monkeypatch, 2)
    with pytest.raises(tg.SetupError, match="nproc_per_node=2"):
        tg.choose_device("auto", 2)


def test_a_gpu_without_bf16_runs_in_fp32_with_a_warning(monkeypatch):
    gpu = torch.device("cuda", 0)
    pretend_gpus(monkeypatch, bf16=False)
    dtype, reason = tg.choose_dtype("auto", gpu)
    assert dtype == torch.float32 and "WARNING" in reason
    pretend_gpus(monkeypatch, bf16=True)
    assert tg.choose_dtype("auto", gpu)[0] == torch.bfloat16
    assert tg.choose_dtype("auto", CPU)[0] == torch.float32
    assert tg.choose_dtype("bf16", CPU)[0] == torch.bfloat16 and tg.choose_dtype("fp32", gpu)[0] == torch.float32


def test_compile_is_automatic_with_cuda_and_triton_only(monkeypatch):
    gpu = torch.device("cuda", 0)
    monkeypatch.setitem(sys.modules, "triton", types.ModuleType("triton"))
    assert tg.choose_compile("auto", gpu)[0] is True and tg.choose_compile("auto", CPU)[0] is False
    assert tg.choose_compile("0", gpu)[0] is False and tg.choose_compile("1", CPU)[0] is True
    monkeypatch.setitem(sys.modules, "triton", None)
    compiled, reason = tg.choose_compile("auto", gpu)
    assert compiled is False and "WARNING" in reason


def test_bf16_keeps_linears_and_scales_in_fp32_and_tables_in_bf16():
    model = tg.build_model(settings(), tg.Operations(tg.sdpa_attention), CPU, torch.bfloat16)
    for name, p in model.named_parameters():
        assert p.dtype == (torch.bfloat16 if name in ("tok_emb.weight", "ve_shared.embed.weight") else torch.float32), (
            name
        )
        assert torch.equal(p, p.bfloat16().to(p.dtype)), f"{name} starts bf16-rounded"


def test_same_seed_same_weights():
    first, same, other = (fresh_model(seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["tok_emb.weight"], other["tok_emb.weight"])


@quick
@given(st.integers(1, 12), st.integers(1, 64), st.integers(0, 40), st.sampled_from([16, 64]))
def test_a_batch_plan_covers_the_batch_or_names_sizes_that_do(world, sequences, micro, seq_len):
    changes = {"train_seq_len": seq_len, "train_batch_tokens": sequences * seq_len}

    def plan(**more):
        return tg.plan_batches(settings(**{**changes, **more}), world)

    try:
        done = plan(micro_batch_tokens=micro * seq_len)
        assert done.grad_accum_steps * done.micro_sequences * world == sequences
        assert done.draw_windows == done.micro_sequences * world and done.eval_sequences >= 1
        assert micro in (0, done.micro_sequences)
    except tg.SetupError as error:
        message = str(error)
        if "MICRO_BATCH_TOKENS to one of" in message:
            for size in json.loads(message.rsplit("one of ", 1)[1]):
                plan(micro_batch_tokens=size)
        else:
            for size in message.rsplit("use ", 1)[1].split(" or "):
                tg.plan_batches(
                    settings(**{**changes, "train_batch_tokens": int(size), "micro_batch_tokens": seq_len}), world
                )


def test_the_default_batch_is_that_of_the_recipe():
    hp = tg.Hyperparameters.from_env({})
    for world in (1, 2, 4, 8):
        plan = tg.plan_batches(hp, world)
        assert (plan.grad_accum_steps, plan.micro_sequences, plan.draw_windows) == (8 // world, 48, 48 * world)
        assert plan.eval_sequences == 32
    assert tg.plan_batches(hp, 16) == tg.BatchPlan(1, 24, 384, 16)


# -- files -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("there_before", [True, False])
def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, there_before):
    def full_disk(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "model.ptz"
    if there_before:
        path.write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        tg.write_file(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == (["model.ptz"] if there_before else [])
    assert not there_before or path.read_bytes() == b"old"


def test_a_write_replaces_the_file(tmp_path):
    path = tmp_path / "model.ptz"
    for data in (b"old", b"new", b""):
        tg.write_file(path, data)
        assert path.read_bytes() == data and len(list(tmp_path.iterdir())) == 1


def test_each_setting_is_read_from_the_environment():
    hp = tg.Hyperparameters.from_env(
        {"SEED": "7", "TIE_EMBEDDINGS": "0", "MATRIX_LR": "0.5", "COMPRESSOR": "lzma", "VE_LAYERS": "1"}
    )
    assert (hp.seed, hp.tie_embeddings, hp.matrix_lr, hp.compressor, hp.ve_layers) == (7, False, 0.5, "lzma", "1")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ITERATIONS", "1.5"),
        ("ITERATIONS", ""),
        ("ITERATIONS", "0"),
        ("MATRIX_LR", "nan"),
        ("MATRIX_LR", "inf"),
        ("MATRIX_LR", "-1"),
        ("TIE_EMBEDDINGS", "true"),
        ("EMA_DECAY", "1"),
        ("BETA1", "-0.1"),
        ("VOCAB_SIZE", "70000"),
        ("WARMDOWN_FRAC", "1.5"),
        ("ATTENTION", "fa2"),
        ("VE_LAYERS", "9;10"),
        ("VE_LAYERS", "9,9"),
        ("ROPE_DIMS", "15"),
        ("ROPE_DIMS", "66"),
        ("XSA_LAST_N", "12"),
        ("NUM_KV_HEADS", "3"),
        ("EVAL_STRIDE", "4096"),
    ],
)
def test_a_bad_value_is_refused_by_name(name, value):
    with pytest.raises(tg.SetupError, match=name):
        tg.Hyperparameters.from_env({name: value})


def test_limits_themselves_are_allowed_and_a_cap_that_the_reserve_uses_up_is_not():
    hp = tg.Hyperparameters.from_env({"WARMDOWN_FRAC": "1", "VOCAB_SIZE": "65536", "SEED": "0"})
    assert (hp.warmdown_frac, hp.vocab_size, hp.seed) == (1, 65536, 0)
    environ = {"MAX_WALLCLOCK_SECONDS": "10", "GPTQ_RESERVE_SECONDS": "10"}
    with pytest.raises(tg.SetupError, match="MAX_WALLCLOCK_SECONDS"):
        tg.Hyperparameters.from_env(environ)
    assert tg.Hyperparameters.from_env({**environ, "GPTQ_ENABLED": "0"}).train_cap_seconds == 10


def test_variables_of_others_are_not_taken_for_settings():
    tg.Hyperparameters.from_env(
        {
            "PATH": "/bin",
            "HOME": "/",
            "CUDA_VISIBLE_DEVICES": "0",
            "OMP_NUM_THREADS": "1",
            "RANK": "0",
            "LOCAL_RANK": "0",
            "WORLD_SIZE": "1",
            "MASTER_ADDR": "x",
            "MASTER_PORT": "1",
            "LANG": "C",
            "ROPE_TRAIN_SEQ_LEN": "2048",
            "MUON_BETA2": "0.95",
            "NCCL_DEBUG": "INFO",
        }
    )


@pytest.mark.parametrize(("environ", "part"), [
    ({"RANK": "x"}, "RANK, WORLD_SIZE and LOCAL_RANK are torchrun's"),
    ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 without MASTER_ADDR; start with torchrun")])
def test_ranks_that_torchrun_did_not_set_are_refused(environ, part):
    with pytest.raises(tg.SetupError, match=part):
        tg.read_ranks(environ)
    whole = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "MASTER_ADDR": "x"}
    assert tg.read_ranks({}) == (0, 1, 0) and tg.read_ranks(whole) == (3, 8, 1)


@pytest.mark.parametrize(("name", "meant"), [
    ("VE_DIN", "VE_DIM"), ("SEDE", "SEED"), ("MIN_LE", "MIN_LR"), ("KERNALS", "KERNELS"), ("DEVISE", "DEVICE"),
    ("EMBEDING_DIM", "EMBEDDING_DIM"), ("iterations", "ITERATIONS")])
def test_a_slip_in_a_name_is_an_error_however_short(name, meant):
    with pytest.raises(tg.SetupError, match=f"{name} is no setting; did you mean {meant}"):
        tg.Hyperparameters.from_env({name: "1"})


def test_tables_larger_than_quantile_takes_are_quantised():
    weight = torch.randn(40_000, 512, generator=torch.Generator().manual_seed(0))
    codes, scale = tg.quantize_int8_rows(weight)
    assert codes.shape == weight.shape and scale.shape == (40_000,)
    assert (codes.float() * scale.float()[:, None] - weight).abs().max() < 0.03
