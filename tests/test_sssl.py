"""The second recipe (records/track_5min_1gpu): each feature against a reference written from its specification."""
import gc
import importlib.util
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, assert_refused, make_data, settings, summary_block

import train_gpt as tg
from golf import cli
from golf.check import check_folder
from golf.logs import final, read_log

SCRIPT = ROOT / "records/track_5min_1gpu/2026-11-30_SSSL_NorMuon_Baseline/train_gpt.py"
TINY = {"DATA_DIR": "data", "VOCAB_SIZE": "512", "DEPTH": "4", "ASPECT_RATIO": "16", "HEAD_DIM": "32",
        "TRAIN_SEQ_LEN": "64", "TRAIN_BATCH_TOKENS": "1024", "MICRO_BATCH_TOKENS": "512", "TRAIN_LOG_EVERY": "1",
        "DEVICE": "cpu"}
CPU = torch.device("cpu")


def load_script():
    spec = importlib.util.spec_from_file_location("sssl", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["sssl"] = module  # where dataclasses look up their annotations
    spec.loader.exec_module(module)
    return module


sssl = load_script()
MACHINE = sssl.Machine(CPU, torch.float32, compiled=False)


def tiny(**changes):
    return sssl.Hyperparameters.from_env({**TINY, **{name.upper(): str(value) for name, value in changes.items()}})


def shaken_model(hp, machine=MACHINE, attend=sssl.math_attention):
    """A model with every weight moved off its initial value, so that nothing is hidden behind a zero."""
    model = sssl.build_model(hp, attend, machine)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for p in model.parameters():
            p.add_((0.1 * torch.randn(p.shape, generator=generator)).to(p.dtype))
        model.lm_head.weight.mul_(20)  # logits well into the soft cap
    return model


@pytest.fixture(autouse=True)
def collector_as_it_was():
    yield
    gc.enable()
    gc.unfreeze()


@pytest.fixture
def here(tmp_path, monkeypatch):
    make_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_import_does_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    before = torch.get_rng_state()
    load_script()
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), before) and gc.isenabled()


def test_at_most_700_lines():
    assert len(SCRIPT.read_text(encoding="utf-8").splitlines()) <= 700


# -- sizes and windows -------------------------------------------------------------------------------------------------

def test_default_sizes_are_the_specified_ones():
    hp = sssl.Hyperparameters()
    with torch.device("meta"):
        model = sssl.GPT(hp, sssl.math_attention)
    assert (hp.model_dim, hp.model_dim // hp.head_dim, list(hp.value_layers)) == (512, 4, [1, 3, 5, 7])
    assert sum(p.numel() for p in model.parameters()) == 50_332_176
    assert sssl.flops_per_token(model) == 239_078_400
    assert hp.train_batch_tokens // hp.micro_batch_tokens == 2 and hp.micro_batch_tokens // hp.train_seq_len == 128


@pytest.mark.parametrize("depth, width", [(1, 128), (3, 256), (8, 512), (9, 640)])
def test_width_is_rounded_up_to_whole_heads(depth, width):
    assert sssl.Hyperparameters(depth=depth).model_dim == width


@pytest.mark.parametrize("pattern, depth, windows", [
    ("SSSL", 8, [1024, 1024, 1024, 2048, 1024, 1024, 1024, 2048]), ("SSSL", 6, [1024, 1024, 1024, 2048, 1024, 2048]),
    ("S", 1, [2048]), ("LS", 3, [2048, 1024, 2048])])
def test_pattern_is_tiled_and_ends_with_a_full_layer(pattern, depth, windows):
    assert sssl.Hyperparameters(window_pattern=pattern, depth=depth).windows == windows


def attention_by_hand(q, k, v, window):
    """float64, position by position: each sees itself and `window` positions before it."""
    out = torch.zeros_like(q, dtype=torch.float64)
    for b in range(q.size(0)):
        for h in range(q.size(2)):
            for t in range(q.size(1)):
                first = max(0, t - window)
                keys, values = k[b, first:t + 1, h].double(), v[b, first:t + 1, h].double()
                out[b, t, h] = (keys @ q[b, t, h].double() / math.sqrt(q.size(3))).softmax(0) @ values
    return out


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("kernel", ["math", "sdpa", "flex"])
@pytest.mark.parametrize("window", [32, 64])
def test_windows_of_every_kernel(kernel, window):
    hp = tiny()
    attend = sssl.math_attention if kernel == "math" else sssl.KERNELS[kernel](hp, CPU)
    q, k, v = torch.randn(3, 2, 64, 2, 32, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(attend(q, k, v, window).double(), attention_by_hand(q, k, v, window), atol=2e-6, rtol=0)


def test_fa3_gets_the_window_and_causality(monkeypatch):
    calls = []

    def flash_attn_func(q, k, v, **options):
        calls.append(options)
        return q, None

    monkeypatch.setitem(sys.modules, "flash_attn_interface", SimpleNamespace(flash_attn_func=flash_attn_func))
    q = torch.zeros(1, 64, 2, 32)
    assert sssl.fa3_attention(tiny(), CPU)(q, q, q, 32) is q
    assert calls == [{"causal": True, "window_size": (32, 0)}]


def test_flex_traces_into_one_graph_with_the_model():
    hp, ids = tiny(), torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(0))
    model, plain = shaken_model(hp, attend=sssl.flex_attention(hp, CPU)), shaken_model(hp)
    traced = torch.compile(model, dynamic=False, fullgraph=True, backend="eager")
    with torch.no_grad():  # on a CPU it has no backward
        torch.testing.assert_close(traced(ids, ids), plain(ids, ids), atol=1e-5, rtol=0)


def test_attention_is_chosen_by_a_probe_with_its_reasons(monkeypatch):
    reason = sssl.choose_attention(tiny(), MACHINE)[1]
    assert reason.startswith("sdpa (fa3: No module named") and "flex: needs CUDA and torch.compile" in reason
    monkeypatch.setitem(sssl.KERNELS, "fa3", lambda hp, device: lambda q, k, v, window: sssl.math_attention(q, k, v, 9))
    reason = sssl.choose_attention(tiny(), MACHINE)[1]  # imports, runs, and is wrong
    assert reason.startswith("sdpa (fa3: its result for window") and " is off by " in reason
    monkeypatch.setitem(sssl.KERNELS, "fa3", lambda hp, device: sssl.math_attention)
    assert sssl.choose_attention(tiny(), MACHINE)[1] == "fa3 (first choice)"
    assert sssl.choose_attention(tiny(attention="sdpa"), MACHINE)[1] == "sdpa (ATTENTION=sdpa)"
    with pytest.raises(sssl.SetupError, match="ATTENTION=flex cannot be used here: flex: needs CUDA"):
        sssl.choose_attention(tiny(attention="flex"), MACHINE)


# -- model -------------------------------------------------------------------------------------------------------------

def norm64(x):
    return x / (x.square().mean(-1, keepdim=True) + torch.finfo(torch.float32).eps).sqrt()


def logits_by_hand(model, ids):
    """The specification in float64, for one sequence of ids (T,)."""
    hp, state = model.hp, {name: t.double() for name, t in model.state_dict().items()}
    T, D, heads = len(ids), hp.head_dim, hp.model_dim // hp.head_dim
    angle = torch.arange(T).double()[:, None] * 10000.0 ** -(torch.arange(D // 2).double() * 2 / D)
    turn = torch.polar(torch.ones_like(angle), -angle)[:, None]  # by minus the angle

    def rope(x):
        z = torch.complex(x[..., :D // 2], x[..., D // 2:]) * turn
        return torch.cat([z.real, z.imag], -1)

    x = x0 = norm64(state["wte.weight"][ids])
    for i in range(hp.depth):
        x = state["resid_lambdas"][i] * x + state["x0_lambdas"][i] * x0
        w = {name.removeprefix(f"blocks.{i}.").removesuffix(".weight"): t for name, t in state.items()
             if name.startswith(f"blocks.{i}.")}
        h = norm64(x)
        q, k, v = ((h @ w[name].T).view(T, heads, D) for name in ("c_q", "c_k", "c_v"))
        if i % 2 == (hp.depth - 1) % 2:
            gate = 2 / (1 + torch.exp(-h[:, :32] @ w["ve_gate"].T))
            v = v + gate[:, :, None] * state[f"value_embeds.{i}.weight"][ids].view(T, heads, D)
        q, k = norm64(rope(q)), norm64(rope(k))
        window = T if i == hp.depth - 1 or "SSSL"[i % 4] == "L" else hp.train_seq_len // 2
        x = x + attention_by_hand(q[None], k[None], v[None], window)[0].flatten(1) @ w["c_proj"].T
        x = x + (norm64(x) @ w["mlp_fc"].T).clamp_min(0).square() @ w["mlp_proj"].T
    return 15 * torch.tanh(norm64(x) @ state["lm_head.weight"].T / 15)


@pytest.mark.parametrize("depth", [4, 5])
def test_model_is_the_specification(depth):
    model = shaken_model(tiny(depth=depth))
    ids = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(1))
    logits = model.logits(ids)
    expected = torch.stack([logits_by_hand(model, row) for row in ids])
    assert logits.dtype == torch.float32 and 10 < expected.abs().max() < 15
    torch.testing.assert_close(logits.double(), expected, atol=2e-3, rtol=0)
    losses = F.cross_entropy(expected.flatten(0, 1), ids.flatten(), reduction="none")
    torch.testing.assert_close(model(ids, ids, "none").double(), losses, atol=2e-3, rtol=0)
    torch.testing.assert_close(model(ids, ids).double(), losses.mean(), atol=2e-4, rtol=0)


def attention_inputs(hp, machine):
    """The last block, its normed input, and the q, k and v that reach the kernel."""
    seen = []

    def attend(q, k, v, window):
        seen.append((q, k, v, window))
        return q

    model = shaken_model(hp, machine, attend)
    x = sssl.rms_norm(torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(2)).to(machine.dtype))
    value = model.value_embeds[str(hp.depth - 1)](torch.arange(128).view(2, 64))
    model.blocks[-1].attention(x, value, model.cos, model.sin)
    return model, x, value, seen[0]


def test_queries_and_keys_are_normed_after_the_rotation():
    """Both orders agree up to rounding, so bf16 bits decide."""
    model, x, _, (q, k, _, window) = attention_inputs(tiny(), sssl.Machine(CPU, torch.bfloat16, compiled=False))
    assert window == 64
    for linear, ours in ((model.blocks[-1].c_q, q), (model.blocks[-1].c_k, k)):
        raw = F.linear(x, linear.weight.bfloat16()).view(2, 64, 2, 32)
        turned = sssl.rotate(raw, model.cos, model.sin)
        assert torch.equal(ours, F.rms_norm(turned, (32,)))
        assert not torch.equal(ours, sssl.rotate(F.rms_norm(raw, (32,)), model.cos, model.sin))


def test_value_embedding_is_gated_per_head_and_token():
    model, x, value, (_, _, v, _) = attention_inputs(tiny(), MACHINE)
    block = model.blocks[-1]
    for head in range(2):
        gate = 2 / (1 + torch.exp(-(x[..., :32] * block.ve_gate.weight[head]).sum(-1)))
        part = slice(32 * head, 32 * head + 32)
        expected = (x @ block.c_v.weight.T)[..., part] + gate[..., None] * value[..., part]
        torch.testing.assert_close(v[:, :, head], expected, atol=1e-5, rtol=0)
    assert [block.ve_gate is not None for block in model.blocks] == [False, True, False, True]


def test_no_position_sees_the_future():
    model = shaken_model(tiny(), attend=sssl.sdpa_attention(tiny(), CPU))
    ids = torch.randint(512, (1, 64), generator=torch.Generator().manual_seed(3))
    changed = ids.clone()
    changed[0, 40] += 1
    before, after = model.logits(ids), model.logits(changed)
    assert torch.equal(before[0, :40], after[0, :40]) and not torch.equal(before[0, 40], after[0, 40])


def test_initial_weights():
    hp = tiny(depth=6, aspect_ratio=64)
    state = sssl.build_model(hp, sssl.math_attention, MACHINE).state_dict()
    bound = math.sqrt(3) / math.sqrt(hp.model_dim)
    for name, t in state.items():
        if name.endswith(("c_proj.weight", "mlp_proj.weight", "ve_gate.weight")):
            assert not t.any()
        elif "lambdas" in name:
            assert (t == (1.0 if name == "resid_lambdas" else 0.1)).all()
        elif name in ("wte.weight", "lm_head.weight"):
            std = 1.0 if name == "wte.weight" else 0.001
            assert t.std() == pytest.approx(std, rel=0.02) and abs(t.mean()) < 0.02 * std and t.abs().max() > 3 * std
        else:
            assert t.abs().max() <= bound and t.std() == pytest.approx(bound / math.sqrt(3), rel=0.02)
    again = sssl.build_model(hp, sssl.math_attention, MACHINE).state_dict()
    other = sssl.build_model(tiny(depth=6, aspect_ratio=64, seed=1), sssl.math_attention, MACHINE).state_dict()
    assert all(torch.equal(t, again[name]) for name, t in state.items())
    assert not torch.equal(state["wte.weight"], other["wte.weight"])


def test_bf16_keeps_fp32_masters_and_bf16_tables():
    model = shaken_model(tiny(), sssl.Machine(CPU, torch.bfloat16, compiled=False))
    tables = {"wte.weight", "value_embeds.1.weight", "value_embeds.3.weight"}
    assert {name for name, p in model.named_parameters() if p.dtype == torch.bfloat16} == tables
    ids = torch.randint(512, (2, 64), generator=torch.Generator().manual_seed(4))
    loss = model(ids, ids)
    loss.backward()
    expected = shaken_model(tiny())(ids, ids).item()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected, abs=0.2)
    assert all(p.grad is not None and p.grad.dtype == p.dtype for p in model.parameters())


# -- optimizer ---------------------------------------------------------------------------------------------------------

COEFFICIENTS = [(8.156554524902461, -22.48329292557795, 15.878769915207462),
                (4.042929935166739, -2.808917465908714, 0.5000178451051316),
                (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
                (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
                (2.3465413258596377, -1.7097828382687081, 0.42323551169305323)]


def polar_by_singular_values(g):
    """float64: each step maps a singular value s to a s + b s^3 + c s^5."""
    u, s, vh = torch.linalg.svd(g.double(), full_matrices=False)
    s = s / (1.02 * s.square().sum(-1, keepdim=True).sqrt() + 1e-6)
    for a, b, c in COEFFICIENTS:
        s = a * s + b * s**3 + c * s**5
    return u @ torch.diag_embed(s) @ vh


class Muon64:
    """One matrix in float64, written from the specification."""

    def __init__(self, weight):
        self.weight, self.buffer, self.variance = weight.double(), torch.zeros_like(weight, dtype=torch.float64), 0.0

    def step(self, g, momentum, lr, decay):
        g = g.double()
        self.buffer = momentum * self.buffer + (1 - momentum) * g
        g = polar_by_singular_values((1 - momentum) * g + momentum * self.buffer)
        v = g.square().mean(1 if g.size(0) >= g.size(1) else 0, keepdim=True)
        self.variance = 0.95 * self.variance + 0.05 * v
        scaled = g / self.variance.clamp_min(1e-10).sqrt()
        g = scaled * g.norm() / scaled.norm().clamp_min(1e-10)
        mask = (g * self.weight >= 0).double()
        self.weight = self.weight - lr * g - lr * decay * self.weight * mask


SHAPES = pytest.mark.parametrize("shape", [(4, 32), (48, 48), (96, 24), (24, 96)])


@SHAPES
def test_polar_express(shape, monkeypatch):
    """Its polynomial is exact in float64, and bf16 costs no more than bf16 does."""
    g = torch.randn(3, *shape, generator=torch.Generator().manual_seed(5))
    ours, expected = sssl.polar_express(g), polar_by_singular_values(g)
    assert ours.dtype == torch.bfloat16 and (ours.double() - expected).norm() < 0.15 * expected.norm()
    assert not sssl.polar_express(torch.zeros(1, *shape)).any()
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x)
    torch.testing.assert_close(sssl.polar_express(g.double()), expected, atol=1e-9, rtol=0)


@SHAPES
def test_muon_step(shape, monkeypatch):
    """Four steps of two matrices, orthogonalised exactly, so that only fp32 rounding is left."""
    monkeypatch.setattr(sssl, "polar_express", polar_by_singular_values)
    generator = torch.Generator().manual_seed(6)
    weights = torch.randn(2, *shape, generator=generator)
    references = [Muon64(w) for w in weights]
    params = [torch.nn.Parameter(w.clone()) for w in weights]
    optimizer = sssl.MuonAdamW([{"kind": "muon", "params": params, "lr": 0.04}])
    for t in range(4):
        momentum, decay, factor = 0.85 + 0.01 * t, 0.2 * (1 - t / 8), 1 - t / 10
        for p, reference in zip(params, references):
            p.grad = torch.randn(shape, generator=generator)
            reference.step(p.grad, momentum, 0.04 * factor, decay)
        optimizer.step(factor, momentum, decay)
    for p, start, reference in zip(params, weights, references):
        moved = (reference.weight - start.double()).norm()
        assert (p.detach().double() - reference.weight).norm() < 2e-5 * moved
    buffer, variance = optimizer.groups[0]["state"]
    assert buffer.shape == (2, *shape)
    assert variance.shape == ((2, shape[0], 1) if shape[0] >= shape[1] else (2, 1, shape[1]))


def test_decay_is_cautious(monkeypatch):
    """It shrinks a weight only where the update does so too, or is zero."""
    monkeypatch.setattr(sssl, "polar_express", lambda g: torch.tensor([[[1.0, 1.0, 0.0]]]))
    monkeypatch.setattr(sssl, "reduce_variance", lambda update, variance: update)
    weights, zeros = torch.tensor([[[2.0, -2.0, 2.0]]]), torch.zeros(1, 1, 3)
    sssl.muon_step(weights, zeros, zeros.clone(), zeros, *map(torch.tensor, (0.9, 0.1, 0.5)))
    torch.testing.assert_close(weights, torch.tensor([[[2.0 - 0.1 - 0.1, -2.0 - 0.1, 2.0 - 0.1]]]))


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_adamw_step(dtype, tolerance):
    generator = torch.Generator().manual_seed(8)
    p = torch.nn.Parameter(torch.randn(16, 8, generator=generator).to(dtype))
    optimizer = sssl.MuonAdamW([{"kind": "adamw", "params": [p], "lr": 0.01, "beta1": 0.8}])
    weight, m, v = p.detach().double(), 0.0, 0.0
    for t in range(1, 6):
        p.grad = torch.randn(16, 8, generator=generator).to(dtype)
        optimizer.step(1 / t, 0.9, 0.2)
        g = p.grad.double()
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g * g
        weight = weight - 0.01 / t * (m / (1 - 0.8**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-10)
    torch.testing.assert_close(p.detach().double(), weight, atol=tolerance, rtol=tolerance)
    assert all(moment.dtype == dtype for moment in optimizer.groups[0]["state"][0])


def test_groups_and_rates_are_the_specified_ones():
    with torch.device("meta"):
        model = sssl.GPT(sssl.Hyperparameters(), sssl.math_attention)
    names = {id(p): name for name, p in model.named_parameters()}
    adam, muon = {}, {}
    for group in sssl.parameter_groups(model):
        for p in group["params"]:
            (adam if group["kind"] == "adamw" else muon)[names[id(p)]] = group
    assert set(adam) == {n for n in names.values() if not n.startswith("blocks.")}
    assert set(muon) == {n for n in names.values() if n.startswith("blocks.")}
    rates = {name: (round(group["lr"], 6), group["beta1"]) for name, group in adam.items()}
    tables = {f"value_embeds.{i}.weight": (0.734847, 0.8) for i in (1, 3, 5, 7)}
    assert rates == {"lm_head.weight": (0.004899, 0.8), "wte.weight": (0.734847, 0.8), **tables,
                     "resid_lambdas": (0.005, 0.8), "x0_lambdas": (0.5, 0.96)}
    shapes = {tuple(g["params"][0].shape): (len(g["params"]), g["lr"]) for g in muon.values()}
    assert shapes == {(4, 32): (4, 0.04), (512, 512): (32, 0.04), (512, 2048): (8, 0.04), (2048, 512): (8, 0.08)}


def test_nothing_is_compiled_twice():
    """One graph for the model, one for each shape and dtype of the two step functions, one more for evaluation."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    def compile(function):
        return torch.compile(function, dynamic=False, fullgraph=True, backend=backend)

    torch._dynamo.reset()
    hp, counts = tiny(), []
    model = shaken_model(hp, sssl.Machine(CPU, torch.bfloat16, compiled=True), sssl.sdpa_attention(hp, CPU))
    loss_function, optimizer = compile(model), sssl.MuonAdamW(sssl.parameter_groups(model), compile)
    for step in range(4):
        ids = torch.randint(512, (8, 64), generator=torch.Generator().manual_seed(step))
        loss_function(ids, ids).backward()
        optimizer.step(1 - step / 4, sssl.muon_momentum(step), 0.2 * (1 - step / 4))
        model.zero_grad(set_to_none=True)
        counts.append(len(graphs))
    muon = {tuple(p.shape) for p in model.blocks.parameters()}
    assert counts == [1 + len(muon) + 4] * 4  # AdamW: head, tables, and scalars with two betas
    for _ in range(2):
        with torch.no_grad():
            loss_function(ids, ids, "none")
    assert len(graphs) == counts[0] + 1


# -- schedules, clock, MFU, failures -----------------------------------------------------------------------------------

@pytest.mark.parametrize("progress, changes, factor", [
    (0.0, {}, 1.0), (0.5, {}, 1.0), (0.75, {}, 0.5), (1.0, {}, 0.0),
    (0.0, {"warmup_ratio": 0.1}, 0.0), (0.05, {"warmup_ratio": 0.1}, 0.5), (0.1, {"warmup_ratio": 0.1}, 1.0),
    (0.75, {"final_lr_frac": 0.2}, 0.6), (1.0, {"final_lr_frac": 0.2}, 0.2), (1.0, {"warmdown_ratio": 0}, 1.0)])
def test_rate_schedule(progress, changes, factor):
    assert sssl.lr_factor(progress, tiny(**changes)) == pytest.approx(factor)


@pytest.mark.parametrize("step, momentum", [(0, 0.85), (150, 0.9), (300, 0.95), (5000, 0.95)])
def test_momentum_schedule(step, momentum):
    assert sssl.muon_momentum(step) == pytest.approx(momentum)


def trainer_with_clock(monkeypatch, **changes):
    """A trainer whose every step takes one second, and the arguments of its optimizer's steps."""
    hp, ticks, steps = tiny(**changes), iter(range(10**6)), []
    model = sssl.build_model(hp, sssl.math_attention, MACHINE)
    trainer = sssl.Trainer(model, MACHINE, sssl.TrainData(hp, CPU), lambda *_: None)
    monkeypatch.setattr(sssl, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))
    monkeypatch.setattr(trainer.optimizer, "step", lambda *arguments: steps.append(arguments))
    return trainer, steps


def test_clock_excludes_eleven_steps_and_drives_the_schedules(here, monkeypatch):
    trainer, steps = trainer_with_clock(monkeypatch, max_wallclock_seconds=10)
    trainer.fit()
    assert (trainer.steps, trainer.seconds) == (21, 10.0)
    progress = [0.0] * 12 + [i / 10 for i in range(1, 10)]
    expected = [(min(1.0, 2 - 2 * p), 0.85 + i / 3000, 0.2 * (1 - p)) for i, p in enumerate(progress)]
    assert steps == [pytest.approx(row) for row in expected]
    assert not gc.isenabled() and gc.get_freeze_count() > 0


def test_mfu_counts_the_steps_that_the_clock_holds(here, monkeypatch):
    trainer, _ = trainer_with_clock(monkeypatch, max_wallclock_seconds=10)
    assert trainer.rates() == (0.0, 0.0)
    trainer.fit()
    rate, mfu = trainer.rates()
    assert rate == 1024  # ten timed steps of 1024 tokens in ten seconds, though 21 were made
    assert mfu == pytest.approx(100 * 1024 * sssl.flops_per_token(trainer.model) / 989.5e12)


def test_without_a_budget_the_steps_drive_the_schedules(here, monkeypatch):
    trainer, steps = trainer_with_clock(monkeypatch, max_wallclock_seconds=0, iterations=20)
    trainer.fit()
    assert trainer.steps == 20 and [row[0] for row in steps] == pytest.approx([min(1, 2 - i / 10) for i in range(20)])


@pytest.mark.parametrize("loss", [math.nan, math.inf, 100.5])
def test_a_lost_run_stops_at_once(here, monkeypatch, loss):
    trainer, _ = trainer_with_clock(monkeypatch)
    monkeypatch.setattr(trainer, "step", lambda: loss)
    with pytest.raises(sssl.DivergedError, match="at step 1 "):
        trainer.fit()


def test_accumulation_is_the_mean_over_micro_batches(here):
    gradients = []
    for micro in (256, 1024):
        hp = tiny(micro_batch_tokens=micro)
        model = shaken_model(hp)
        trainer = sssl.Trainer(model, MACHINE, sssl.TrainData(hp, CPU), print)
        seen = {}
        trainer.optimizer.step = lambda *_, seen=seen, model=model: seen.update(
            {name: p.grad.clone() for name, p in model.named_parameters()})
        gradients.append((trainer.step(), seen))
    (loss, ours), (whole_loss, whole) = gradients
    assert loss == pytest.approx(whole_loss, abs=1e-5)
    for name in whole:
        torch.testing.assert_close(ours[name], whole[name], atol=1e-5 * float(whole[name].abs().max()), rtol=1e-3)


# -- data and evaluation -----------------------------------------------------------------------------------------------

def test_bytes_are_those_of_the_main_script(here):
    ours, theirs = sssl.load_byte_tables(tiny()), tg.byte_tables(tg.load_tokenizer(settings(data_dir="data")))
    for name in ("base_bytes", "has_leading_space", "is_boundary"):
        a, b = getattr(ours, name), getattr(theirs, name)
        assert a.dtype == b.dtype and np.array_equal(a, b)
    rng = np.random.default_rng(0)
    for _ in range(20):
        tokens = rng.integers(512, size=50).astype(np.uint16)
        assert ours.count(tokens) == theirs.count(tokens)
    tokens, target_bytes, _ = sssl.load_validation(tiny())
    reference = tg.load_validation(settings(data_dir="data"), theirs)
    assert (len(tokens) - 1, target_bytes) == (reference.targets, reference.target_bytes) == (2944, 5655)


def test_every_window_comes_once_an_epoch(here):
    data = sssl.TrainData(tiny(micro_batch_tokens=64, train_batch_tokens=64), CPU)
    assert len(data.windows) == 40 + 90 + 24  # the 50-token shard holds none
    rows = [torch.cat([inputs, targets[:, -1:]], 1) for inputs, targets in (data.next() for _ in range(154))]
    shards = [np.fromfile(path, "<u2")[512:].astype(int) for path in sorted(Path().glob("data/datasets/*/*train*"))]
    expected = sorted(tuple(tokens[i:i + 65]) for tokens in shards for i in range(0, len(tokens) - 64, 64))
    assert sorted(tuple(row[0].tolist()) for row in rows) == expected
    again = sssl.TrainData(tiny(micro_batch_tokens=64, train_batch_tokens=64, seed=9), CPU)
    assert all(torch.equal(again.next()[0], row[:, :-1]) for row in rows)  # whatever the seed
    second = [data.next()[0] for _ in range(154)]
    assert data.epoch >= 2 and not all(torch.equal(a, row[:, :-1]) for a, row in zip(second, rows))


def test_evaluation_scores_each_target_once(here):
    hp = tiny(micro_batch_tokens=1024)  # 46 sequences in batches of 16: the last is padded
    model, (tokens, _, _) = shaken_model(hp), sssl.load_validation(hp)
    shapes = []

    def loss_function(ids, targets, reduction):
        shapes.append(ids.shape)
        return model(ids, targets, reduction)

    ours = sssl.evaluate(hp, CPU, loss_function, tokens)
    total, ids = 0.0, torch.from_numpy(tokens.astype(np.int64))
    with torch.no_grad():
        for at in range(0, len(ids) - 1, 64):
            logits = model.logits(ids[None, at:at + 64])[0].double()
            total -= float(logits.log_softmax(-1)[torch.arange(64), ids[at + 1:at + 65]].sum())
    assert ours == pytest.approx(total / 2944, abs=1e-6) and set(shapes) == {(16, 64)}


# -- whole runs --------------------------------------------------------------------------------------------------------

def environment(**changes):
    known = {name.upper() for name in sssl.Hyperparameters.__dataclass_fields__} | {"WORLD_SIZE"}
    outer = {key: value for key, value in os.environ.items() if key not in known}
    return {**outer, **TINY, "OMP_NUM_THREADS": "1", **{name.upper(): str(value) for name, value in changes.items()}}


def run_script(*arguments, **changes):
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], env=environment(**changes), capture_output=True,
                          text=True, check=False, timeout=120)


def test_a_whole_run_on_the_cpu(here):
    done = run_script(max_wallclock_seconds=2, run_id="r", output_dir="out")
    assert done.returncode == 0, done.stderr
    block, log = summary_block(done.stdout), read_log(here / "out/logs/r.txt")
    assert list(block) == ["val_bpb", "val_loss", "train_seconds", "eval_seconds", "total_seconds", "steps", "tokens",
                           "tokens_per_second", "mfu_percent", "peak_memory_mib", "parameters", "num_params_M",
                           "depth", "valid"]
    losses = [loss for _, loss, _, _ in log.steps[:40]]
    assert losses[0] == pytest.approx(math.log(512), abs=0.05) and losses[-1] < losses[0] - 1
    assert log.valid and log.summary == block and log.source == SCRIPT.read_text(encoding="utf-8")
    loss, bpb, _ = final(log)
    assert (loss, bpb) == (float(block["val_loss"]), float(block["val_bpb"])) and loss < math.log(512) - 1
    assert bpb == pytest.approx(loss / math.log(2) * log.val_tokens / 5655)
    assert re.search(r"(?m)^val_bytes: 5655 ", log.path.read_text(encoding="utf-8"))
    assert (log.val_tokens, log.train_shards, log.seed, log.attention) == (2944, 4, 42, "sdpa")
    assert log.hardware == "1 x cpu" and log.peak_memory_mib > 0
    assert log.train_seconds >= 2.0 and log.steps_done == len(log.steps)
    assert int(block["tokens"]) == 1024 * log.steps_done and block["depth"] == "4"
    timed = 1024 * (log.steps_done - 11) / log.train_seconds
    assert float(block["tokens_per_second"]) == pytest.approx(timed, rel=0.05)
    words = ["new", "5min_1gpu", "Tiny", "--logs", str(log.path), "--author=A", "--github-id=a", "--blurb=Small.",
             f"--parent={SCRIPT}", f"--records={here / 'records'}", "--date=2026-04-01"]
    assert cli.main(words) == 0  # a folder without a violation
    folder = here / "records/track_5min_1gpu/2026-04-01_Tiny"
    text = (folder / "train_seed42.log").read_text(encoding="utf-8")
    (folder / "train_seed42.log").write_text(text.replace("\ntrain_seconds: ", "\ntrain_seconds: 99"), encoding="utf-8")
    assert "budget" in {finding.rule for finding in check_folder(folder) if finding.severity == "error"}


def call_main(monkeypatch, capsys, *arguments, **changes):
    """main() in this process, as a finished subprocess."""
    for name in list(os.environ):
        monkeypatch.delenv(name)
    for name, value in environment(**changes).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["train_gpt.py", *arguments])
    code = sssl.main()
    return subprocess.CompletedProcess([], code, *capsys.readouterr())


@pytest.mark.parametrize("changes, parts", [
    ({"widow_pattern": "SL"}, ["WIDOW_PATTERN is no setting; did you mean WINDOW_PATTERN?"]),
    ({"matrix_lr": "fast"}, ["MATRIX_LR='fast' must be a number from 0 to"]),
    ({"depth": "2.5", "attention": "fa2"}, ["DEPTH='2.5' must be a whole number", "ATTENTION='fa2' must be one of"]),
    ({"weight_decay": "nan"}, ["WEIGHT_DECAY='nan' must be a number"]),
    ({"iterations": "11"}, ["ITERATIONS='11' must be a whole number from 12"]),
    ({"window_pattern": "SSX"}, ["WINDOW_PATTERN='SSX' must be letters S and L"]),
    ({"window_pattern": ""}, ["WINDOW_PATTERN='' must be letters S and L"]),
    ({"micro_batch_tokens": "384"}, ["MICRO_BATCH_TOKENS=384 must cut", "[64, 128, 256, 512, 1024]"]),
    ({"train_batch_tokens": "1000"}, ["TRAIN_BATCH_TOKENS=1000 must be a multiple of TRAIN_SEQ_LEN=64"]),
    ({"head_dim": "33"}, ["HEAD_DIM=33 must be even"]),
    ({"depth": "1", "head_dim": "16"}, ["DEPTH=1 x ASPECT_RATIO=16 is below 32"]),
    ({"warmup_ratio": "0.6"}, ["WARMUP_RATIO=0.6 + WARMDOWN_RATIO is above 1"]),
    ({"run_id": "a/b"}, ["RUN_ID='a/b' must be a file's name"]),
    ({"world_size": "2"}, ["WORLD_SIZE=2: this recipe trains on one GPU"]),
    ({"device": "cuda"}, ["DEVICE=cuda was asked for"] if not torch.cuda.is_available() else []),
    ({"data_dir": "nowhere"}, ["no tokenizer at nowhere/tokenizers/fineweb_512_bpe.model", "--variant sp512"]),
    ({"train_seq_len": "4096", "train_batch_tokens": "4096", "micro_batch_tokens": "4096"},
     ["3000 validation tokens", "fewer than one sequence"]),
    ({"train_batch_tokens": "10240", "micro_batch_tokens": "10240"}, ["154 train windows", "do not fill one"]),
])
def test_wrong_settings_cost_one_line(here, monkeypatch, capsys, changes, parts):
    if not parts:
        pytest.skip("needs a machine without GPU")
    assert_refused(call_main(monkeypatch, capsys, **changes), 2, *parts)
    assert not (here / "logs").exists()


def damage_header(path):
    path.write_bytes(b"\0" * 4 + path.read_bytes()[4:])


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-2])


def foreign_token(path):
    path.write_bytes(path.read_bytes()[:-2] + b"\xff\xff")


@pytest.mark.parametrize("name, damage, parts", [
    ("fineweb_val_000000.bin", Path.unlink, ["no val shards in data/datasets/fineweb10B_sp512", "--variant sp512"]),
    ("fineweb_val_000000.bin", cut_short, ["fineweb_val_000000.bin announces 3000 tokens", "fetch it again"]),
    ("fineweb_val_000000.bin", foreign_token, ["holds token 65535, but VOCAB_SIZE=512"]),
    ("fineweb_train_000001.bin", damage_header, ["fineweb_train_000001.bin is no token shard"]),
    ("fineweb_train_000003.bin", foreign_token, ["fineweb_train_000003.bin holds token 65535"]),
    ("../../tokenizers/fineweb_512_bpe.model", cut_short, ["is no SentencePiece model"]),
])
def test_wrong_data_costs_one_line(here, monkeypatch, capsys, name, damage, parts):
    damage(here / "data/datasets/fineweb10B_sp512" / name)
    assert_refused(call_main(monkeypatch, capsys), 2, *parts)


def test_a_bad_token_deep_in_a_shard_is_found_as_it_is_read(here):
    data = sssl.TrainData(tiny(), CPU)
    data.pending.clear()
    data.shards = [np.where(np.arange(len(tokens)) == 100, 600, tokens) for tokens in data.shards]
    with pytest.raises(sssl.SetupError, match="holds token 600, but VOCAB_SIZE=512"):
        for _ in range(20):
            data.read()


def test_a_run_that_explodes_exits_with_3(here, monkeypatch, capsys):
    done = call_main(monkeypatch, capsys, matrix_lr="1e25", run_id="r")
    assert_refused(done, 3, "is over 100 or not finite")
    assert_refused(call_main(monkeypatch, capsys, run_id="r"), 2, "logs/r.txt exists and is kept")


def test_too_little_memory_costs_one_line(here, monkeypatch, capsys):
    def execute(hp):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB.")

    monkeypatch.setattr(sssl, "execute", execute)
    assert_refused(call_main(monkeypatch, capsys), 2, "CUDA out of memory. Tried to allocate 8.00 GiB.")


def test_refusal_and_help_of_the_script_itself(here):
    assert_refused(run_script(embeding_lr=1), 2, "EMBEDING_LR is no setting; did you mean EMBEDDING_LR?")
    shown = run_script("--help").stdout
    assert all(f"  {name.upper()}=" in shown for name in sssl.Hyperparameters.__dataclass_fields__)
