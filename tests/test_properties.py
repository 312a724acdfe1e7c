"""Properties of the parts where a silent error would change a score, for many lengths, settings and texts."""
import itertools
import math
import sys
import unicodedata
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
from conftest import GOLDEN, load_model, settings
from hypothesis import HealthCheck, assume, given
from hypothesis import settings as examples
from hypothesis import strategies as st

import train_gpt as tg

CPU = torch.device("cpu")
quick = examples(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
few = examples(max_examples=12, deadline=None)
lengths = st.integers(1, 400)
windows = st.integers(2, 48).map(lambda half: 2 * half)

# -- scoring through the Evaluator -------------------------------------------------------------------------------------


class OneOfManyRanks(tg.World):
    """A rank without the others: it keeps its own sums and says that together all targets were scored."""

    def sum(self, tensor):
        self.__dict__["kept"] = tensor.clone()
        return torch.tensor([tensor[0], self.targets], dtype=torch.float64)


def place_of(tokens):
    """Positions of tokens that are all different."""
    return {int(token): place for place, token in enumerate(tokens)}


def rank_sums(hp, tokens, loss_function, world_size, evaluation) -> np.ndarray:
    """(loss sum, scored targets) of each rank: (world_size, 2)."""
    val, sums = tg.ValidationSet(tokens, 1000, ""), []
    plan = tg.plan_batches(hp, world_size)
    for rank in range(world_size):
        world = OneOfManyRanks(rank, world_size)
        world.__dict__["targets"] = val.targets
        getattr(tg.Evaluator(hp, plan, world, val, loss_function), evaluation)()
        sums.append(world.kept.tolist())
    return np.array(sums)


@examples(quick, max_examples=100)
@given(lengths, windows, st.data(), st.integers(1, 5), st.sampled_from(["full", "sliding"]), st.integers(0, 3))
def test_the_evaluator_scores_each_target_exactly_once(targets, window, data, world_size, evaluation, sequences):
    """Tokens are their own positions, and each target weighs a number that no other sum of targets gives."""
    if evaluation == "full":  # load_validation cuts to whole sequences
        targets = max(1, targets // window) * window
    hp = settings(eval_seq_len=window, eval_stride=data.draw(st.integers(1, window)), micro_batch_tokens=64,
                  train_batch_tokens=64 * world_size, val_batch_tokens=1 + sequences * window * world_size)
    weights = torch.from_numpy(np.random.default_rng(targets).integers(1, 2**40, targets + 1).astype(np.float64))

    def losses(inputs, following, first, reduction):
        assert reduction == "none" and inputs.shape == following.shape == (len(inputs), window)
        assert bool(((following == inputs + 1) | (inputs == targets)).all()), "a target is the token after its input"
        return weights[following[:, first:]]

    sums = rank_sums(hp, np.arange(targets + 1).astype(np.uint16), losses, world_size, evaluation)
    assert sums[:, 1].sum() == targets
    assert sums[:, 0].sum() == weights[1:].sum().item()


def losses_by_target(model, hp, tokens, evaluation) -> dict[int, list[float]]:
    """Every loss that an evaluation computes from its first scored column on, by the target's position."""
    found, at = defaultdict(list), place_of(tokens)

    def losses(inputs, following, first, reduction):
        values = model(inputs, following, first, reduction)
        for row, loss_row in zip(inputs[:, first:].tolist(), values.tolist()):
            for token, loss in zip(row, loss_row):
                found[at[token] + 1].append(loss)
        return values

    evaluator = tg.Evaluator(hp, tg.plan_batches(hp, 1), tg.World(), tg.ValidationSet(tokens, 1000, ""), losses)
    getattr(evaluator, evaluation)()
    return found


@few
@given(st.integers(1, 5), st.integers(1, 64), st.integers(0, 2**32), st.data(), st.sampled_from(["full", "sliding"]))
def test_future_tokens_change_no_earlier_loss(model_state, sequences, stride, seed, data, evaluation):
    """Tokens are all different, so that a loss can be told from its input; from `poisoned` on they are shuffled."""
    length, rng = 64 * sequences, np.random.default_rng(seed)
    hp = settings(eval_stride=stride)
    tokens = rng.permutation(512)[:length + 1].astype(np.uint16)
    poisoned, other = data.draw(st.integers(1, length)), tokens.copy()
    other[poisoned:] = np.setdiff1d(np.arange(512, dtype=np.uint16), tokens[:poisoned])[rng.permutation(
        512 - poisoned)[:length + 1 - poisoned]]
    model = load_model(hp, model_state)
    before, after = (losses_by_target(model, hp, t, evaluation) for t in (tokens, other))
    assert set(range(1, length + 1)) <= set(before)
    for target in range(1, poisoned):
        assert before[target] == after[target], f"target {target} knows of token {poisoned} or later"
    assert before[poisoned] != after[poisoned] or tokens[poisoned] == other[poisoned]


# -- bytes -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer():
    return sentencepiece.SentencePieceProcessor(model_file=str(GOLDEN / "tokenizer_512.model"))


def scripts() -> dict[str, list[str]]:
    """Every assigned character by the first word of its name, for letters the script's, or else by its category."""
    found = defaultdict(list)
    for char in map(chr, range(sys.maxunicode + 1)):
        category = unicodedata.category(char)
        if category not in ("Cs", "Cn"):
            found[unicodedata.name(char, f"<{category}>").split()[0].split("-")[0]].append(char)
    return dict(found)


def test_bytes_of_every_character_are_those_of_the_source(tokenizer):
    """Runs of up to 200 characters of one script, cut into words, normalised as the tokenizer does (NFKC)."""
    tables, rng, characters = tg.byte_tables(tokenizer), np.random.default_rng(0), 0
    for script, members in scripts().items():
        for at in range(0, len(members), 200):
            part = members[at:at + 200]
            words = np.split(part, np.sort(rng.integers(0, len(part) + 1, rng.integers(0, 20))))
            text = " ".join("".join(word) for word in words) + rng.choice(["", " ", " 12 ", "\n", "a"])
            source = tokenizer.normalize(text).replace(tg.SPACE_MARKER, " ").removeprefix(" ")
            ids = np.array([tokenizer.bos_id(), *tokenizer.encode(source)])
            assert tables.count(ids) == len(source.encode("utf-8")), (script, at)
            assert tables.count(ids) == tables.count(np.array([1, *tokenizer.encode(text)])), (script, at)
            characters += len(part)
    assert characters > 150_000


EDGES = ["\u0301", "\u200d", "\u200f", "\u202e", "\ufe0f", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\u2581", "\0",
         "\x7f", "  ", "\t", "\n\n", " ", "\u3000", "\u00a0", "\ufb01", "\u0130", "\uac00", "\u1100\u1161",
         "\U000e0041", "a", "the"]


@quick
@given(st.lists(st.lists(st.sampled_from(EDGES) | st.characters(codec="utf-8"), max_size=20).map("".join), max_size=4))
def test_bytes_of_joined_documents_add_up(tokenizer, texts):
    """Nothing of one document counts in another: spaces behind a document's start are the only ones left out."""
    tables = tg.byte_tables(tokenizer)
    documents = [[tokenizer.bos_id(), *tokenizer.encode(text)] for text in texts]
    joined = np.array([token for document in documents for token in document] or [tokenizer.bos_id()])
    assert tables.count(joined) == sum(tables.count(np.array(document)) for document in documents)
    normal = [tokenizer.normalize(text).replace(tg.SPACE_MARKER, " ").encode("utf-8") for text in texts]
    assert tables.count(joined) == sum(len(text) - text.startswith(b" ") for text in normal)


@quick
@given(st.lists(st.integers(0, 511) | st.sampled_from([0, 1, 2, 3, 430]), max_size=30))
def test_bytes_of_any_tokens_follow_their_predecessors(tokenizer, ids):
    """Token by token: a byte is one, a control none, and a piece's space is none behind a control."""
    expected = 0
    for before, token in itertools.pairwise(ids):
        boundary, control = (tokenizer.is_control(t) or tokenizer.is_unknown(t) for t in (before, token))
        if tokenizer.is_byte(token):
            expected += 1
        elif not control:
            text = tokenizer.id_to_piece(token).replace(tg.SPACE_MARKER, " ")
            expected += len(text.removeprefix(" " if boundary else "").encode("utf-8"))
    assert tg.byte_tables(tokenizer).count(np.array(ids, np.uint16)) == expected


# -- data order --------------------------------------------------------------------------------------------------------


def write_shards(folder: Path, counts: list[int]) -> list[Path]:
    """Shards in which token i of shard s is (1000 s + i) mod 65,536."""
    paths = []
    for shard, count in enumerate(counts):
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, count
        paths.append(folder / f"fineweb_train_{shard:06d}.bin")
        tokens = ((np.arange(count) + 1000 * shard) % 65536).astype("<u2")
        paths[-1].write_bytes(header.tobytes() + tokens.tobytes())
    return paths


@quick
@given(st.lists(st.integers(0, 900), min_size=1, max_size=6), st.integers(1, 60))
def test_each_walk_over_a_shard_takes_each_of_its_blocks_once(tmp_path_factory, counts, seq_len):
    """One window a draw shows the order: a walk's first start tells its phase and so all its blocks."""
    assume(max(counts) > seq_len)
    loader = tg.CoprimeLoader(write_shards(tmp_path_factory.mktemp("shards"), counts), seq_len, 1)
    order, cycles = defaultdict(list), 0
    for _ in range(2 * sum(counts) // seq_len + 5):
        shard, start = loader.next_windows()[0]
        order[shard].append(start)
    for shard, starts in order.items():
        while starts:
            phase = starts[0] % seq_len
            blocks = set(range(phase, counts[shard] - seq_len, seq_len))
            walk, starts = starts[:len(blocks)], starts[len(blocks):]
            assert len(set(walk)) == len(walk) and set(walk) <= blocks
            cycles += set(walk) == blocks
    assert cycles


@quick
@given(st.lists(st.integers(0, 900), min_size=1, max_size=6), st.integers(1, 60), st.integers(1, 4), st.integers(1, 5))
def test_ranks_share_each_draw_and_read_whole_windows(tmp_path_factory, counts, seq_len, world_size, per_rank):
    assume(max(counts) > seq_len)
    paths = write_shards(tmp_path_factory.mktemp("shards"), counts)
    whole, *loaders = [tg.CoprimeLoader(paths, seq_len, per_rank * world_size, rank, world_size)
                       for rank in (0, *range(world_size))]
    for _ in range(30):
        draw = [(1000 * shard + start) % 65536 for shard, start in whole.next_windows()]
        batches = [loader.next_batch() for loader in loaders]
        rows = np.concatenate([inputs for inputs, _ in batches])
        assert sorted(rows[:, 0].tolist()) == sorted(draw) and len(draw) == per_rank * world_size
        assert ((rows - rows[:, :1]) % 65536 == np.arange(seq_len)).all(), "a window is one run of one shard"
        for inputs, targets in batches:
            np.testing.assert_array_equal(targets, (inputs + 1) % 65536)


# -- settings, optimizers, averages, artifacts -------------------------------------------------------------------------


SWITCHES = ("tie_embeddings", "skip_gates_enabled", "ve_enabled", "ln_scale")


@st.composite
def legal_settings(draw):
    """Small models of every shape that the rules between settings allow."""
    heads, kv_groups, half = draw(st.integers(1, 4)), draw(st.integers(1, 4)), draw(st.integers(2, 5))
    layers = draw(st.integers(1, 4))
    changes = {
        "num_heads": heads * kv_groups, "num_kv_heads": heads, "model_dim": heads * kv_groups * 2 * half,
        "embedding_dim": draw(st.sampled_from([heads * kv_groups * 2 * half, 8, 20])), "num_layers": layers,
        "xsa_last_n": draw(st.integers(0, layers)), "rope_dims": draw(st.sampled_from([0, 4, 2 * half])),
        "mlp_mult": draw(st.sampled_from([0.5, 1, 2.25, 4])), "vocab_size": draw(st.sampled_from([64, 300])),
        "ve_layers": ",".join(map(str, draw(st.sets(st.integers(0, layers - 1))))), "ve_dim": draw(st.integers(1, 12)),
        **{name: int(draw(st.booleans())) for name in SWITCHES}}
    return settings(**changes)


def fresh_model(hp) -> tg.GPT:
    return tg.build_model(hp, tg.Operations(tg.sdpa_attention), CPU, torch.float32)


@quick
@given(legal_settings())
def test_every_weight_of_any_model_is_in_one_group_of_one_optimizer(hp):
    model = fresh_model(hp)
    groups, named = tg.parameter_groups(model), dict(model.named_parameters())
    assert sorted(name for names in groups.values() for name in names) == sorted(named)
    assert all(named[name].ndim == 2 for name in groups["muon"])
    optimizers = tg.Optimizers(model, tg.World())
    held = [id(p) for o in (optimizers.adam, optimizers.muon) for group in o.param_groups for p in group["params"]]
    assert sorted(held) == sorted(map(id, named.values()))


@quick
@given(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=30), st.floats(0, 0.999), st.floats(-5, 5, width=32))
def test_ema_is_the_weighted_sum_of_all_weights(values, decay, start):
    """shadow_n = d^n w_0 + (1 - d) sum_i d^(n - i) w_i."""
    model = torch.nn.Linear(1, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(start)
        ema = tg.EMA(model, decay)
        for value in values:
            model.weight.fill_(value)
            ema.update()
    n = len(values)
    expected = decay**n * start + (1 - decay) * math.fsum(decay ** (n - i) * w for i, w in enumerate(values, 1))
    ema.copy_to_model()
    assert model.weight.item() == pytest.approx(expected, abs=1e-4)


def from_parts(tensors, meta, like) -> dict[str, torch.Tensor]:
    """What the stored numbers mean: code times its row's scale, or the number itself, in the parameter's dtype."""
    state = {}
    for name, target in like.items():
        if isinstance(meta[name], str):
            value = tensors[name].numpy().astype(np.float32)
        else:
            codes, scales = tensors[f"{name}.q"].numpy(), tensors[f"{name}.scale"].numpy()
            value = np.multiply(codes, scales[:, None], dtype=np.float32)
        state[name] = torch.from_numpy(value).to(target.dtype)
    return state


@few
@given(legal_settings(), st.integers(0, 2**32), st.sampled_from(["brotli", "lzma"]), st.booleans(),
       st.sampled_from([0.02, 1.0, 30.0]))
def test_what_is_scored_is_what_the_artifact_holds(hp, seed, compressor, bf16, size):
    """Random weights, quantised, packed, unpacked and loaded: the same numbers, and the same loss, bit for bit."""
    model, twin = (tg.build_model(hp, tg.Operations(tg.sdpa_attention), CPU, torch.bfloat16 if bf16 else torch.float32)
                   for _ in range(2))
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator) * size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tg, "PASSTHROUGH_MAX_ELEMENTS", 30)
        done = tg.quantize_state(model.state_dict(), {}, hp)
    kinds = {m if isinstance(m, str) else m["type"] for m in done.meta.values()}
    state = tg.dequantize(*tg.unpack_artifact(tg.pack_artifact(done, compressor)), model.state_dict())
    expected = from_parts(done.tensors, done.meta, model.state_dict())
    assert "int8" in kinds and list(state) == list(expected)
    assert all(torch.equal(state[name], t) and state[name].dtype == t.dtype for name, t in expected.items())
    model.load_state_dict(state)
    twin.load_state_dict(expected)
    tokens = torch.randint(0, hp.vocab_size, (2, 33), generator=generator)
    with torch.no_grad():
        ours, theirs = (m.float()(tokens[:, :-1], tokens[:, 1:]) for m in (model, twin))
    assert torch.equal(ours, theirs) and bool(ours.isfinite())
