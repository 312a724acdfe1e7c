"""The record's quantiser, entropy coder, artifact and byte budget."""
import hashlib
import importlib.util
import json
import sys
import tracemalloc
import types
import zlib

import numpy as np
import pytest
import torch
from conftest import LARGE, ROOT, assert_refused, new_folder, run_script, summary_block
from hypothesis import given
from hypothesis import settings as checks
from hypothesis import strategies as st

from golf import logs

SCRIPT = ROOT / "records/track_non_record_16mb/2026-11-30_SP8192_Entropy_Coded/train_gpt.py"
LARGE_RUN = {name.lower(): value for name, value in LARGE.items()}


def load_record():
    spec = importlib.util.spec_from_file_location("record_coder", SCRIPT)
    sys.modules["record_coder"] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


rec = load_record()
LIMIT = 2**24
STREAM_SHA256 = "1cb5f4650b658b234c6e0d73c4c54b4816aa52d5ab2d508df59fd4b72cff3401"


def codes_tensors(name: str, codes: np.ndarray, rng: np.random.Generator) -> dict[str, torch.Tensor]:
    step = torch.tensor(int(rng.integers(-12_000, 12_000)), dtype=torch.int32)
    return {f"{name}.q": torch.from_numpy(codes.astype(np.int8)), f"{name}.step": step}


def example(rows: int = 96, columns: int = 128) -> dict[str, torch.Tensor]:
    """Two matrices, a table and two small tensors."""
    rng = np.random.default_rng(3)
    spread = np.exp(rng.normal(size=(rows, 1)) / 3) * np.exp(rng.normal(size=(1, columns)) / 3) * 2.4
    tensors = {}
    for name, louder in (("a", 1), ("b", 1), ("table", 5)):
        codes = np.round(rng.normal(size=spread.shape) * spread * louder)
        tensors |= codes_tensors(name, np.clip(codes, -127, 127), rng)
    return tensors | {"gain": torch.randn(8).bfloat16(), "scalar": torch.tensor(0.1).bfloat16()}


def assert_same(found: dict[str, torch.Tensor], tensors: dict[str, torch.Tensor]) -> None:
    assert found.keys() == tensors.keys()
    for name, t in tensors.items():
        assert found[name].dtype == t.dtype and found[name].shape == t.shape, name
        kind = torch.int16 if t.dtype == torch.bfloat16 else t.dtype  # a NaN is its bits
        assert torch.equal(found[name].view(kind), t.view(kind)), name


# -- coder -------------------------------------------------------------------------------------------------------------

SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 300))
FILLS = st.sampled_from(["normal", "zeros", "one value", "one row", "one column", "one loud column", "extremes"])


def fill(kind: str, shape: tuple[int, int], largest: int, rng: np.random.Generator) -> np.ndarray:
    codes = np.zeros(shape, np.int64)
    if kind == "normal":
        codes = np.round(rng.normal(size=shape) * largest / 8)
    elif kind == "one value":
        codes[:] = largest
    elif kind == "one row":
        codes[:1] = rng.integers(-largest, largest + 1, shape[1])
    elif kind == "one column":
        codes[:, :1] = rng.integers(-largest, largest + 1, (shape[0], 1))
    elif kind == "one loud column":
        codes[:, :1] = largest
        codes[:1, 1:] = 1
    elif kind == "extremes":
        codes = rng.choice([-largest, largest], shape)
    return np.clip(codes, -largest, largest)


@checks(max_examples=150, deadline=None)
@given(st.lists(st.tuples(SHAPES, FILLS, st.sampled_from([1, 3, 31, 127])), max_size=4),
       st.lists(st.integers(0, 40), max_size=3), st.integers(0, 2**32 - 1))
def test_an_artifact_reads_back_exactly(matrices, raw, seed):
    rng, tensors = np.random.default_rng(seed), {}
    for i, (shape, kind, largest) in enumerate(matrices):
        tensors |= codes_tensors(f"m{i}", fill(kind, shape, largest, rng), rng)
    for i, size in enumerate(raw):
        tensors[f"r{i}"] = torch.from_numpy(rng.integers(-2**15, 2**15, size).astype(np.int16)).view(torch.bfloat16)
    found, settings = rec.unpack_artifact(rec.pack_artifact(tensors, {"rope_dims": "16"}), LIMIT)
    assert settings == {"rope_dims": "16"}
    assert list(found) == list(tensors)
    assert_same(found, tensors)


@pytest.mark.parametrize("count", [0, 1, 255, 256, 1023, 300_001])
def test_a_stream_costs_its_entropy(count):
    rng = np.random.default_rng(count)
    tables = rng.integers(0, 3, count).astype(np.uint8)
    symbols = np.clip(128 + rng.normal(size=count) * (1 + 4 * tables), 0, 255).astype(np.uint8)
    freqs = rec.frequencies(symbols, tables, 3)
    data = rec.rans_encode(symbols, tables, freqs)
    assert np.array_equal(rec.rans_decode(data, tables, freqs), symbols)
    counts = np.bincount(tables.astype(int) * 256 + symbols, minlength=768).reshape(3, 256)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    entropy = -(counts * np.log2(np.where(counts > 0, shares, 1))).sum() / 8
    assert entropy - 1 <= len(data) <= 1.001 * entropy + 4 * rec.lane_count(count) + 2


def test_the_stream_format_does_not_change():
    index = np.arange(20_000, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
    tables, symbols = (index >> np.uint64(31)).astype(np.uint8), ((index >> np.uint64(20)) % 7).astype(np.uint8)
    data = rec.rans_encode(symbols, tables, rec.frequencies(symbols, tables, 2))
    assert hashlib.sha256(data).hexdigest() == STREAM_SHA256


@checks(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.just(0), st.just(1), st.integers(0, 300), st.just(20_000)), min_size=256, max_size=256))
def test_every_symbol_that_occurs_has_a_frequency(counts):
    symbols = np.repeat(np.arange(256, dtype=np.uint8), counts)
    freqs = rec.frequencies(symbols, np.ones_like(symbols), 3)
    assert (freqs.sum(1) == 2**rec.PRECISION).all()
    if len(symbols):
        assert np.array_equal(freqs[1] > 0, np.array(counts) > 0)


def test_classes_beat_one_table_for_all():
    tensors = example(512, 512)
    codes = torch.cat([tensors["a.q"], tensors["b.q"]])
    shares = torch.bincount(codes.flatten().int() + 128).double() / codes.numel()
    plain = -(shares * shares.clamp_min(1e-30).log2()).sum() * codes.numel() / 8
    data = rec.pack_artifact({n: t for n, t in tensors.items() if n[0] in "ab"})
    assert len(data) < 0.97 * plain + 2 * 2 * 512 + 6000  # with rows, columns and tables


# -- damage ------------------------------------------------------------------------------------------------------------

def assert_damaged(data: bytes, limit: int = LIMIT) -> None:
    with pytest.raises(rec.ArtifactError) as error:
        rec.unpack_artifact(data, limit)
    assert "\n" not in str(error.value) and "damaged" in str(error.value)


def test_a_flipped_bit_a_cut_and_an_addition_are_refused():
    data = rec.pack_artifact(example())
    rng = np.random.default_rng(0)
    for position in [*range(12), *rng.integers(12, len(data), 300).tolist(), len(data) - 1]:
        broken = bytearray(data)
        broken[position] ^= 1 << int(rng.integers(8))
        assert_damaged(bytes(broken))
    for end in [*range(20), *rng.integers(20, len(data), 60).tolist(), len(data) - 1]:
        assert_damaged(data[:end])
    for tail in (b"\0", b"\0\0", data):
        assert_damaged(data + tail)


def with_head(data: bytes, change) -> bytes:
    """The artifact with its JSON changed in place and everything else as it was."""
    begin = len(rec.MAGIC) + 4
    end = begin + int.from_bytes(data[begin - 4:begin], "little")
    text, _, tables = zlib.decompress(data[begin:end]).partition(b"\n")
    entries = json.loads(text)
    change(entries)
    packed = zlib.compress(json.dumps(entries).encode() + b"\n" + tables)
    return rec.MAGIC + len(packed).to_bytes(4, "little") + packed + data[end:]


@pytest.mark.parametrize("change", [
    lambda entries: entries[0].__setitem__(1, [2**40, 2**40]),
    lambda entries: entries[0].__setitem__(1, [2**22, 2]),
    lambda entries: entries[0].__setitem__(1, [0, 2**40]),
    lambda entries: entries[0].__setitem__(1, [-1, -5]),
    lambda entries: entries[0].__setitem__(1, [1.5, 2]),
    lambda entries: entries[0].__setitem__(1, [128, 96]),
    lambda entries: entries[0].__setitem__(1, [96, 64, 2]),
    lambda entries: entries[0].__setitem__(1, "ab"),
    lambda entries: entries[0].__setitem__(1, 7),
    lambda entries: entries[0].__setitem__(0, 3),
    lambda entries: entries[0].__setitem__(2, "x"),
    lambda entries: entries[0].__setitem__(3, 2**70),
    lambda entries: entries[0].__setitem__(4, 2**40),
    lambda entries: entries[0].__setitem__(4, True),
    lambda entries: entries[0].pop(),
    lambda entries: entries[0].append(0),
    lambda entries: entries[0].__setitem__(0, "b"),
    lambda entries: entries.__setitem__(0, 5),
    lambda entries: entries.clear(),
    lambda entries: entries.append(entries[0]),
])
def test_a_head_that_lies_is_refused_within_bounded_memory(change):
    data = with_head(rec.pack_artifact(example()), change)
    tracemalloc.start()
    assert_damaged(data, 2**22)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**26


@pytest.mark.parametrize("settings", [b"[1]", b"7", b"{", b'"a"'])
def test_settings_that_are_none_are_refused(settings):
    data = rec.pack_artifact(example())
    begin = len(rec.MAGIC) + 4
    end = begin + int.from_bytes(data[begin - 4:begin], "little")
    text, _, tables = zlib.decompress(data[begin:end]).split(b"\n", 2)
    packed = zlib.compress(b"\n".join([text, settings, tables]))
    assert_damaged(rec.MAGIC + len(packed).to_bytes(4, "little") + packed + data[end:])


def test_a_head_that_unpacks_to_gigabytes_is_refused_within_bounded_memory():
    bomb = zlib.compress(bytes(2**28), 9)
    tracemalloc.start()
    assert_damaged(rec.MAGIC + len(bomb).to_bytes(4, "little") + bomb + bytes(4))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**23


def test_weights_of_another_model_are_refused():
    tensors = example()
    like = {"a": torch.empty(96, 128), "b": torch.empty(96, 128), "table": torch.empty(96, 128).bfloat16(),
            "gain": torch.empty(8), "scalar": torch.empty(())}
    state = rec.dequantize(tensors, like)
    scale = 2.0 ** (int(tensors["a.step"]) / 256)
    torch.testing.assert_close(state["a"].double(), tensors["a.q"].double() * scale, rtol=1e-6, atol=0)
    assert state["table"].dtype == torch.bfloat16
    with pytest.raises(rec.ArtifactError, match="another model"):
        rec.dequantize(tensors, like | {"more": torch.empty(1)})
    with pytest.raises(rec.ArtifactError, match="has shape"):
        rec.dequantize(tensors, like | {"a": torch.empty(128, 96)})


# -- quantisation ------------------------------------------------------------------------------------------------------

def reference_gptq(weight: np.ndarray, scale: float, hessian: np.ndarray, damping: float):
    """GPTQ from its definition, in float64: after each column the inverse Hessian of the columns that remain is taken
    anew, and the rounding error spread by its first row."""
    hessian = hessian + damping * np.diag(hessian).mean() * np.eye(len(hessian))
    order = np.argsort(-np.diag(hessian), kind="stable")
    w, hessian, codes = weight[:, order].copy(), hessian[np.ix_(order, order)], np.empty_like(weight)
    for j in range(w.shape[1]):
        inverse = np.linalg.inv(hessian[j:, j:])
        codes[:, j] = np.clip(np.round(w[:, j] / scale), -127, 127)
        error = (w[:, j] - codes[:, j] * scale) / inverse[0, 0]
        w[:, j:] -= error[:, None] * inverse[0]
    return codes[:, np.argsort(order)]


def random_hessian(columns: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(4 * columns, columns, generator=generator) * torch.rand(columns, generator=generator).add(0.2)
    x = x + x.roll(1, dims=1) * 0.5
    return x.T @ x / len(x)


@pytest.mark.parametrize("rows, columns, coarseness", [(40, 160, 1), (7, 300, 1), (64, 96, 0.1), (5, 1, 1)])
def test_gptq_is_its_definition_in_float64(rows, columns, coarseness):
    weight, hessian = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)), random_hessian(columns)
    scale = rec.step_scale(rec.code_steps({"mlp.fc": weight}, coarseness))[0]
    factor = rec.factor_hessian(hessian)
    codes = rec.gptq_codes(weight[None][:, :, factor.order], scale[None], factor.upper[None])[0]
    codes = codes[:, factor.order.argsort()].double().numpy()
    expected = reference_gptq(weight.double().numpy(), float(scale), hessian.double().numpy(), 0.01)
    assert (codes != expected).mean() < 2e-3  # fp32 falls on the other side of a half now and then
    def loss(q):
        error = weight.double().numpy() - q * float(scale)
        return np.einsum("rc,cd,rd->", error, hessian.double().numpy(), error)
    assert loss(codes) == pytest.approx(loss(expected), rel=5e-3)
    if columns > 1:
        assert loss(codes) < loss((weight / scale).round().clamp(-127, 127).double().numpy())


@pytest.mark.parametrize("name, coarseness, relative", [
    ("tok_emb.weight", 1.5, 1.5 * 0.065), ("blocks.3.attn.c_k.weight", 0.5, 0.2125),
    ("blocks.0.mlp.proj.weight", 2, 1.15), ("another.weight", 1, 0.4), ("tok_emb.weight", 0.1, 6 / 127)])
def test_a_step_is_a_share_of_the_root_mean_square(name, coarseness, relative):
    weight = 0.03 * torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    scale = float(rec.step_scale(rec.code_steps({name: weight}, coarseness))[0])
    assert scale == pytest.approx(relative * float(weight.square().mean().sqrt()), rel=2e-3)


def test_every_matrix_of_the_model_has_a_step_of_its_kind():
    hp = rec.Hyperparameters()
    with torch.device("meta"):
        state = rec.GPT(hp, None).state_dict()
    coded = [name for name, t in state.items() if rec.is_coded(name, t)]
    kinds = {next(part for part in rec.CODE_STEPS if part in name) for name in coded}
    assert len(coded) == 11 * 6 + 3 and kinds == {*rec.CODE_STEPS} - {""}


def test_a_matrix_of_zeros_has_a_finite_scale():
    step, = rec.code_steps({"mlp.fc": torch.zeros(3, 40)}, 1.0)
    assert bool(rec.step_scale(step).isfinite()) and abs(int(step)) < 2**15
    assert bool((rec.gptq_codes(torch.zeros(1, 3, 40), rec.step_scale(step)[None], torch.eye(40)[None]) == 0).all())


# -- byte budget -------------------------------------------------------------------------------------------------------

def quantizer_of(count: int, **changes):
    hp = rec.Hyperparameters.from_env({name.upper(): str(value) for name, value in changes.items()})
    generator = torch.Generator().manual_seed(0)
    state = {f"blocks.{i}.mlp.fc.weight": torch.randn(512, 512, generator=generator) for i in range(count)}
    return hp, rec.Quantizer(state, {name: random_hessian(512) for name in list(state)[1:]}, hp)


def fit(hp, quantizer):
    lines = []
    run = types.SimpleNamespace(hp=hp, world=rec.World(), source=b"x" * 1000, results={}, log=lines.append)
    return rec.Run.quantize_to_fit(run, quantizer), run.results, lines


@pytest.mark.parametrize("bits_per_weight", [1.7, 2.5, 3.3, 4.1])
def test_the_budget_is_used_up_to_its_margin(bits_per_weight):
    target = int(6 * 512 * 512 * bits_per_weight / 8)
    data, results, lines = fit(*quantizer_of(6, target_total_bytes=target))
    assert target - rec.BUDGET_MARGIN < len(data) + 1000 <= target, lines
    assert len(lines) <= 6, lines
    assert rec.unpack_artifact(data, LIMIT)
    assert results["step_factor"] > 0


def test_a_budget_that_cannot_be_used_up_gives_the_finest_steps():
    _, results, lines = fit(*quantizer_of(2, target_total_bytes=10**7))
    assert results["step_factor"] == pytest.approx(6 / 127 / max(rec.CODE_STEPS.values()))
    assert len(lines) == 2


def test_a_budget_that_is_too_small_gives_a_warning_and_the_coarsest_steps():
    data, _, lines = fit(*quantizer_of(2, target_total_bytes=1500))
    assert "WARNING" in lines[-1] and len(data) > 500


@pytest.mark.parametrize("factor", [1, 0.5])
def test_without_a_target_the_steps_stay(factor):
    _, results, lines = fit(*quantizer_of(2, target_total_bytes=0, quant_step_factor=factor))
    assert results["step_factor"] == factor and len(lines) == 1


def test_matrices_without_a_hessian_are_rounded_to_the_nearest():
    _, quantizer = quantizer_of(2)
    tensors, name = quantizer(1.0), "blocks.0.mlp.fc.weight"
    scale = rec.step_scale(tensors[f"{name}.step"])
    assert torch.equal(tensors[f"{name}.q"].float(), (quantizer.state[name] / scale).round().clamp(-127, 127))
    assert quantizer.gptq == ["blocks.1.mlp.fc.weight"]


# -- whole runs --------------------------------------------------------------------------------------------------------

def test_a_run_writes_an_artifact_that_scores_the_same_when_read_again(tmp_path):
    folder = new_folder(tmp_path, "one")
    result = run_script(folder, script=SCRIPT, run_id="train", **LARGE_RUN)
    assert result.returncode == 0, result.stderr
    block, size = summary_block(result.stdout), (folder / "final_model.int6.ptz").stat().st_size
    assert int(block["model_bytes"]) == size
    assert float(block["int6_val_bpb"]) < float(block["pre_quant_val_bpb"]) + 0.01
    found = logs.read_log(folder / "logs/train.txt")
    assert (found.model_bytes, found.total_bytes) == (size, size + SCRIPT.stat().st_size)
    again = run_script(folder, script=SCRIPT, run_id="again", eval_only="final_model.int6.ptz", **LARGE_RUN)
    assert again.returncode == 0, again.stderr
    assert summary_block(again.stdout)["val_bpb"] == block["val_bpb"]
    damaged = bytearray((folder / "final_model.int6.ptz").read_bytes())
    damaged[len(damaged) // 2] ^= 1
    (folder / "damaged.ptz").write_bytes(damaged)
    refused = run_script(folder, script=SCRIPT, run_id="damaged", eval_only="damaged.ptz", **LARGE_RUN)
    assert_refused(refused, 6, "damaged.ptz cannot be scored", "damaged")


def test_two_ranks_write_what_one_writes_but_for_the_order_of_sums(tmp_path):
    shared = {**LARGE_RUN, "micro_batch_tokens": "256", "gptq_calibration_batches": "4"}
    folders = {ranks: new_folder(tmp_path, str(ranks)) for ranks in (1, 2)}
    one = run_script(folders[1], script=SCRIPT, run_id="r", **shared)
    two = run_script(folders[2], script=SCRIPT, run_id="r", **{**shared, "micro_batch_tokens": "128"}, launcher=(
        "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"))
    assert one.returncode == two.returncode == 0, one.stderr + two.stderr
    tensors = [rec.unpack_artifact((folder / "final_model.int6.ptz").read_bytes(), LIMIT)[0]
               for folder in folders.values()]
    assert tensors[0].keys() == tensors[1].keys()
    for name in [key.removesuffix(".q") for key in tensors[0] if key.endswith(".q")]:
        one, two = (part[f"{name}.q"] * rec.step_scale(part[f"{name}.step"]) for part in tensors)
        assert (one - two).abs().mean() < 0.05 * one.square().mean().sqrt(), name
