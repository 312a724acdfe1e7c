"""The SP8192 record's training: techniques against a few lines of plain PyTorch, the rest against the root script."""
import fcntl
import importlib.util
import inspect
import json
import math
import re
import shutil
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import sentencepiece
import torch
import torch.nn.functional as F
from conftest import (
    GOLDEN,
    ROOT,
    TINY,
    assert_refused,
    golden_tensors,
    new_folder,
    records,
    run_script,
    settings,
    summary_block,
    train_losses,
)

import train_gpt as tg
from golf import logs, trial

SCRIPT = ROOT / "records/track_non_record_16mb/2026-11-30_SP8192_Entropy_Coded/train_gpt.py"
AS_ROOT = {"warmdown_frac": 0.667, "min_lr": 0, "muon_momentum": 0.99, "qk_gain_init": 4, "loop_start": 1,
           "parallel_from": 0}
LOOP, LANES = {"loop_layers": "1-2", "loop_start": 0.5}, {"parallel_from": 3}
EVERYTHING = {**LOOP, **LANES}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def rec():
    spec = importlib.util.spec_from_file_location("record_train_gpt", SCRIPT)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


def tiny(rec, **changes):
    changes = {name.upper(): str(value) for name, value in changes.items()}
    return rec.Hyperparameters.from_env({**TINY, "CONTEXT_RAMP": "0", **changes})


def build(rec, **changes):
    return rec.build_model(tiny(rec, **changes), rec.Operations(rec.sdpa_attention), CPU, torch.float32)


def disturbed(rec, looping=False, **changes):
    """A model whose parameters all differ from their start: none is 0 or 1, so that each has an effect."""
    model = build(rec, **changes)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p += torch.randn(p.shape, generator=generator) * 0.15
    model.set_looping(looping)
    return model


def batch(rows=2, length=64):
    ids = torch.randint(0, 512, (rows, length + 1), generator=torch.Generator().manual_seed(1))
    return ids[:, :-1], ids[:, 1:]


def load(model, state):
    """The root's weights; the record's gates stay as they start."""
    gates = {name: t for name, t in model.state_dict().items() if name.endswith("attn.gate")}
    model.load_state_dict({**gates, **state})


def make_trainer(module, hp, folder, state=None):
    tables = module.byte_tables(sentencepiece.SentencePieceProcessor(model_file=str(GOLDEN / "tokenizer_512.model")))
    model = module.build_model(hp, module.Operations(module.sdpa_attention), CPU, torch.float32)
    if state:
        load(model, state)
    plan, log = module.plan_batches(hp, 1), module.RunLog(folder, "trace")
    evaluator = module.Evaluator(hp, plan, module.World(), module.load_validation(hp, tables), model)
    return module.Trainer(model, evaluator, module.find_shards(hp, "train"), log, module.newton_schulz)


# -- with gates at their start and the root's orthogonalisation, it is the root script ---------------------------------


def roots_newton_schulz(g, *_):
    """The root's orthogonalisation: its quintic, and no norms of rows."""
    return tg.newton_schulz(g, 5)


def test_old_values_give_the_roots_trajectory_bit_for_bit(rec, data_here):
    short = {"iterations": 6, "max_wallclock_seconds": 0, "warmup_steps": 2, "train_log_every": 1,
             "muon_momentum_warmup_steps": 4, "micro_batch_tokens": 128,
             "grad_clip_norm": 0}  # the norm of all would be another sum
    start, weights, averages, losses = golden_tensors("train_trace_start.npz"), [], [], []
    for module, hp in ((tg, settings(**short, val_loss_every=0, ema_decay=0.5)),
                       (rec, tiny(rec, **AS_ROOT, **short, ema_steps_fraction=1 / 3))):
        folder = data_here / module.__name__
        folder.mkdir()
        trainer = make_trainer(module, hp, folder, start)
        trainer.optimizers.muon.orthogonalize = roots_newton_schulz
        gates = [p for name, p in trainer.model.named_parameters() if name.endswith("attn.gate")]
        trainer.gradients.average = lambda _, gates=gates: [gate.grad.zero_() for gate in gates]  # they stay
        trainer.warm_up()
        ema = trainer.fit()
        names = [name for name, _ in trainer.model.named_parameters()]
        weights.append({name: t.clone() for name, t in trainer.model.state_dict().items()})
        averages.append(dict(zip(names, ema.shadow)))
        losses.append(train_losses_of(folder))
    assert losses[0] == losses[1]
    assert {*weights[1]} == {*weights[0], *(f"blocks.{n}.attn.gate" for n in range(5))}
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert all(torch.equal(averages[0][name], averages[1][name]) for name in averages[0])


def test_gradients_are_clipped_as_the_roots(rec):
    found = []
    for module in (tg, rec):
        generator = torch.Generator().manual_seed(0)
        parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((7, 5), (3,), (40, 20))]
        gradients = module.Gradients(parameters)
        gradients.add(sum(p.square().sum() for p in parameters))
        gradients.clip(0.3)
        found.append([p.grad for p in parameters])
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_old_values_give_the_roots_gradients_bit_for_bit(rec, model_state):
    found = []
    for module, hp in ((tg, settings()), (rec, tiny(rec, **AS_ROOT))):
        model = module.build_model(hp, module.Operations(module.sdpa_attention), CPU, torch.float32)
        load(model, model_state)
        model(*batch()).backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert {*found[1]} == {*found[0], *(f"blocks.{n}.attn.gate" for n in range(5))}
    assert all(torch.equal(found[0][n], found[1][n]) for n in found[0])


def test_new_parameters_change_neither_the_start_nor_the_draws_of_the_others(rec):
    root = tg.build_model(settings(qk_gain_init=4), tg.Operations(tg.sdpa_attention), CPU, torch.float32)
    for changes in (AS_ROOT, {**AS_ROOT, **LOOP}):
        model = build(rec, **changes)
        for name, t in root.state_dict().items():
            if not name.startswith("skip_"):
                assert torch.equal(model.state_dict()[name], t), name
        assert torch.equal(model(*batch()), root(*batch()))


# -- optimizers --------------------------------------------------------------------------------------------------------


def iterate(g, quintics):
    """Newton-Schulz of one matrix in fp64, rows normalised first."""
    x = g.double()
    x = x / x.norm(dim=1, keepdim=True)
    x = x / (1.02 * x.norm())
    for a, b, c in quintics:
        x = a * x + b * (x @ x.T) @ x + c * (x @ x.T) @ (x @ x.T) @ x
    return x


@pytest.mark.parametrize("shape", [(48, 80), (80, 48), (64, 64)])
def test_orthogonalization(rec, shape):
    g = torch.randn(3, *shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 0, shape[0])[:, None]
    for one, matrix in zip(rec.newton_schulz(g).double(), g):
        expected = iterate(matrix, rec.POLAR_EXPRESS)
        assert F.cosine_similarity(one.flatten(), expected.flatten(), dim=0) > 0.998
        assert (one - expected).norm() <= 6e-2 * expected.norm()


def test_polar_express_is_nearer_to_orthogonal(rec):
    g = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(0))
    rows = g / g.norm(dim=-1, keepdim=True)
    factors = [tg.newton_schulz(rows, 5).float(), rec.newton_schulz(g).float()]
    spreads = [torch.linalg.svdvals(factor).sub(1).abs().max() for factor in factors]
    assert spreads[1] < 0.16 < 0.25 < spreads[0], spreads


def test_zero_rows_and_matrices_stay_zero(rec):
    g = torch.randn(2, 8, 16)
    g[0], g[1, 3] = 0, 0
    out = rec.newton_schulz(g)
    assert out.isfinite().all() and not out[0].any() and not out[1, 3].any()


def test_muon_normalises_rows_after_nesterov(rec):
    model, seen = build(rec, **EVERYTHING), []

    def spy(g):
        seen.append(g.clone())
        return rec.newton_schulz(g)

    optimizers = rec.Optimizers(model, rec.World(), spy)
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    group = optimizers.muon.param_groups[0]
    before, gradient = group["params"][0].detach().clone(), group["params"][0].grad
    optimizers.step(1.0, 0.9)
    nesterov = seen[0]
    torch.testing.assert_close(nesterov[0], gradient * 1.9)
    rows, cols = before.shape
    update = iterate(nesterov[0], rec.POLAR_EXPRESS) * max(1, rows / cols) ** 0.5
    expected = before * (1 - 0.02 * 0.085) - 0.02 * update.float()
    assert (group["params"][0].detach() - expected).abs().max() < 2e-3


def test_new_parameters_are_control_tensors(rec):
    model = build(rec, **EVERYTHING)
    new = {"lane_mix", *(f"blocks.{n}.attn.gate" for n in range(5))}
    assert new <= {*rec.parameter_groups(model)["scalar"]} and all(rec.is_control(name) for name in new)
    half = rec.build_model(model.hp, model.ops, CPU, torch.bfloat16)
    assert all(p.dtype == torch.float32 for name, p in half.named_parameters() if name in new)


# -- the average's horizon ---------------------------------------------------------------------------------------------


def test_horizon_follows_the_iterations_without_a_cap(rec, data_here):
    hp = tiny(rec, iterations=500, max_wallclock_seconds=0, ema_steps_fraction=0.1)
    assert make_trainer(rec, hp, data_here).ema_decay() == pytest.approx(1 - 1 / 50)
    assert "decay 0.98000 for 500 expected steps" in (data_here / "trace.txt").read_text()


def test_horizon_follows_the_cap_and_the_speeds_of_the_warm_up(rec, data_here):
    hp = tiny(rec, **LOOP, max_wallclock_seconds=110, gptq_reserve_seconds=10, ema_steps_fraction=0.1,
              context_ramp=0.1)
    trainer = make_trainer(rec, hp, data_here)
    trainer.step_seconds = {(False, 32): 0.08, (False, 64): 0.1, (True, 64): 0.2}
    steps = 10 / 0.08 + 40 / 0.1 + 50 / 0.2
    assert trainer.expected_steps() == pytest.approx(steps, rel=1e-3)
    assert trainer.ema_decay() == pytest.approx(1 - 1 / (0.1 * steps), rel=1e-4)


class SteppedTime:
    """The time module with a clock that only `trainer`'s steps move: the first of a graph takes long, others do not."""

    def __init__(self, trainer):
        self.now, self.trainer, self.step, self.seen = 0.0, trainer, trainer.step, set()
        trainer.step = self.timed_step

    def perf_counter(self):
        return self.now

    def timed_step(self, *args):
        result, mode = self.step(*args), self.trainer.mode
        self.now += 0.02 * (1 + mode[0]) * mode[1] / 64 + (mode not in self.seen)
        self.seen.add(mode)
        return result

    def __getattr__(self, name):
        return getattr(time, name)


def test_warm_up_times_all_graphs_and_leaves_no_trace(rec, data_here, monkeypatch):
    hp = tiny(rec, **EVERYTHING, context_ramp=0.25, max_wallclock_seconds=60, warmup_steps=4)
    trainer = make_trainer(rec, hp, data_here)
    monkeypatch.setattr(rec, "time", SteppedTime(trainer))
    before = {name: t.clone() for name, t in trainer.model.state_dict().items()}
    trainer.warm_up()
    assert trainer.step_seconds == pytest.approx(  # without the first, which compiles
        {(False, 32): 0.01, (False, 64): 0.02, (True, 64): 0.04})
    assert all(torch.equal(t, before[name]) for name, t in trainer.model.state_dict().items())
    assert not trainer.model.looping and not trainer.optimizers.muon.state and trainer.clock.seconds == 0


# -- the model against its definition ----------------------------------------------------------------------------------


def definition(model, ids, order):
    """The last hidden states, from the published formulas, a pass after another."""
    hp, p = model.hp, dict(model.named_parameters())
    batch, length = ids.shape
    heads, kv_heads, width = hp.num_heads, hp.num_kv_heads, hp.head_dim

    def norm(x):
        return x * (x.square().mean(-1, keepdim=True) + 2**-23).rsqrt()

    def rotated(x):
        half = hp.rope_dims // 2
        angle = torch.arange(length)[:, None, None] * 10000.0 ** (-torch.arange(half) / half)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * angle.cos() + b * angle.sin(), b * angle.cos() - a * angle.sin(), rest], -1)

    def attention(x, layer):
        name = f"blocks.{layer}.attn."
        q, k, v = ((x @ p[f"{name}c_{part}.weight"].T).view(batch, length, -1, width) for part in "qkv")
        if layer in hp.ve_layer_list:
            values = p["ve_shared.embed.weight"][ids] @ p["ve_shared.proj.weight"].T * p["ve_shared.scale"]
            v = v + (values * p[f"ve_layer_scales.{hp.ve_layer_list.index(layer)}"]).view_as(v)
        q, k = rotated(norm(q)) * p[f"{name}q_gain"][:, None], rotated(norm(k))
        out = []
        for head in range(heads):
            key, value = k[:, :, head // (heads // kv_heads)], v[:, :, head // (heads // kv_heads)]
            scores = q[:, :, head] @ key.mT / math.sqrt(width)
            y = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf).softmax(-1) @ value
            along = value / value.norm(dim=-1, keepdim=True)
            y = y - (y * along).sum(-1, keepdim=True) * along
            out.append(y * 2 * torch.sigmoid(x[..., :12] @ p[f"{name}gate"][head])[..., None])
        return torch.cat(out, -1) @ p[f"{name}proj.weight"].T * p[f"blocks.{layer}.attn_scale"]

    def feed_forward(x, layer):
        hidden = F.leaky_relu(x @ p[f"blocks.{layer}.mlp.fc.weight"].T, 0.5) ** 2
        return hidden @ p[f"blocks.{layer}.mlp.proj.weight"].T * p[f"blocks.{layer}.mlp_scale"]

    x = x0 = norm(p["tok_emb.weight"][ids])
    stack, half, other = [], len(order) // 2, None
    for place, layer in enumerate(order):
        keep, add = p[f"blocks.{layer}.resid_mix"]
        scale, parallel = 1 / math.sqrt(layer + 1), hp.parallel_from and layer >= hp.parallel_from
        if parallel and other is None:
            other = x  # skips go into the first lane only
        if place >= half and stack:
            row = len(p["skip_weights"]) - len(stack)
            x = torch.lerp(p["skip_weights"][row] * stack.pop(), x, torch.sigmoid(p["skip_gates"][row]))
        if parallel:
            a, m = attention(norm(keep * x + add * x0) * scale, layer), feed_forward(norm(other) * scale, layer)
            first, second = p["lane_mix"][layer - hp.parallel_from]
            x = first[0] * x + first[1] * a + first[2] * m
            other = second[0] * other + second[1] * a + second[2] * m
            continue
        x = keep * x + add * x0
        x = x + attention(norm(x) * scale, layer)
        x = x + feed_forward(norm(x) * scale, layer)
        if place < half:
            stack.append(x)
    return norm(x if other is None else (x + other) / 2)


ORDERS = {False: [0, 1, 2, 3, 4], True: [0, 1, 2, 1, 2, 1, 2, 3, 4]}


@pytest.mark.parametrize(("changes", "looping"), [
    (AS_ROOT, False), ({**AS_ROOT, **LOOP}, False), ({**AS_ROOT, **LOOP}, True),
    ({**AS_ROOT, **LANES}, False), (EVERYTHING, False), (EVERYTHING, True)])
def test_forward_and_gradients_equal_the_definition(rec, changes, looping):
    model = disturbed(rec, looping, **changes)
    ids, targets = batch()
    names, parameters = zip(*model.named_parameters())
    logits = 30 * torch.tanh(definition(model, ids, ORDERS[looping]) @ model.tok_emb.weight.T / 30)
    expected_loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss = model(ids, targets)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-5, atol=1e-5)
    expected = torch.autograd.grad(expected_loss, parameters, materialize_grads=True)
    ours = torch.autograd.grad(loss, parameters, materialize_grads=True)
    for name, one, other in zip(names, ours, expected):
        assert (one - other).norm() <= 2e-4 * other.norm() + 1e-7, name
        assert other.abs().max() > 0 or (name.startswith("skip_") and not looping), name


def test_published_order_of_the_default_loop(rec):
    model = build(rec, num_layers=11, preset="8xh100")
    assert model.orders[True] == [0, 1, 2, 3, 4, 5, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 10]
    assert model.skip_weights.shape == (8, 32) and model.lane_mix.shape == (3, 2, 3)
    assert torch.equal(model.lane_mix[0], torch.tensor([[1.1, 1, 1], [1.1, 1, 1]]).float())


@pytest.mark.parametrize("looping", [False, True])
def test_outer_blocks_keep_their_skips_when_the_loop_comes_on(rec, looping):
    model, seen = build(rec, num_layers=11, preset="8xh100"), {}
    take = model.take_skip

    def spy(keep, x, skips):
        if skips:
            seen[len(skips)] = len(model.skip_weights) - len(skips)
        return take(keep, x, skips)

    model.take_skip = spy
    model.set_looping(looping)
    model(*batch())
    assert seen == {left: 8 - left for left in range(1, 9 if looping else 6)}


@pytest.mark.parametrize("looping", [False, True])
def test_compiled_without_a_break_it_gives_the_same(rec, looping):
    model = disturbed(rec, not looping, **EVERYTHING)
    compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=False)
    other = compiled(*batch())
    model.set_looping(looping)  # the graph of the other mode must not be used again
    torch.testing.assert_close(compiled(*batch()), model(*batch()))
    assert compiled(*batch()) != other


def test_bf16_forward_and_backward(rec):
    model = rec.build_model(tiny(rec, **EVERYTHING), rec.Operations(rec.sdpa_attention), CPU, torch.bfloat16)
    model.set_looping(True)
    loss = model(*batch())
    loss.backward()
    assert loss.dtype == torch.float32 and abs(loss.item() - math.log(512)) < 0.1
    assert model.blocks[0].attn.gate.grad.dtype == torch.float32 and model.lane_mix.grad.isfinite().all()


# -- causality and evaluation ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("looping", [False, True])
def test_no_position_sees_the_future(rec, looping):
    model = disturbed(rec, looping, **EVERYTHING)
    ids, _ = batch()
    poisoned = ids.clone()
    poisoned[:, 40:] = (poisoned[:, 40:] + 17) % 512
    with torch.no_grad():
        one, other = model.hidden(ids), model.hidden(poisoned)
    torch.testing.assert_close(one[:, :40], other[:, :40], rtol=0, atol=1e-6)
    assert ((one - other)[:, 40:].abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("looping", [False, True])
@pytest.mark.parametrize("changes", [{**AS_ROOT, **LOOP}, EVERYTHING])
def test_scored_positions_alone_equal_the_full_forward(rec, looping, changes):
    model = disturbed(rec, looping, **changes)
    with torch.no_grad():
        torch.testing.assert_close(model.hidden(batch()[0], 48), model.hidden(batch()[0])[:, 48:], rtol=0, atol=1e-5)


def test_sliding_evaluation_equals_a_full_forward_per_window(rec, data_here):
    hp = tiny(rec, **EVERYTHING)
    evaluator = make_trainer(rec, hp, data_here).evaluator
    evaluator.loss_function = model = disturbed(rec, True, **EVERYTHING)
    tokens, total = torch.from_numpy(evaluator.val.tokens.astype(np.int64)), 0.0
    starts = range(0, evaluator.val.targets - 64 + 16, 16)
    with torch.no_grad():
        for start in starts:
            window = tokens[start : start + 65][None]
            losses = model(window[:, :-1], window[:, 1:], reduction="none")[0]
            total += losses[0 if start == 0 else 48 :].double().sum().item()
    assert evaluator.score(16)["val_loss"] == pytest.approx(total / evaluator.val.targets, rel=1e-6)


# -- training ----------------------------------------------------------------------------------------------------------


def losses_of(rec, folder, **changes):
    """Losses and modes of six steps, and the model after them."""
    folder.mkdir()
    hp = tiny(rec, **{**EVERYTHING, "iterations": 6, "max_wallclock_seconds": 0, "warmup_steps": 1,
                      "train_log_every": 1, "matrix_lr": 0.2, **changes})
    trainer, modes = make_trainer(rec, hp, folder), []
    trainer.warm_up()
    step = trainer.step
    trainer.step = lambda *args: modes.append(trainer.model.looping) or step(*args)
    trainer.fit()
    return train_losses_of(folder), modes, trainer


def train_losses_of(folder):
    steps = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    return [r["train_loss"] for r in steps if r["type"] == "step"]


def test_loop_comes_on_at_its_share_of_the_run(rec, data_here):
    losses, modes, trainer = losses_of(rec, data_here / "half")
    never, _, plain = losses_of(rec, data_here / "never", loop_start=0.99)
    always, all_modes, _ = losses_of(rec, data_here / "always", loop_start=0)
    assert modes == [False] * 3 + [True] * 3 and all_modes == [True] * 6
    assert losses[:3] == never[:3] and losses[3] != never[3] and always[1] != losses[1]
    assert "looping: on from step 4, at 50.0% of the run" in (data_here / "half/trace.txt").read_text()
    assert "before LOOP_START=0.99" in (data_here / "never/trace.txt").read_text()
    assert trainer.model.loop_on.item() == 1 and plain.model.loop_on.item() == 0


def test_weights_say_whether_the_loop_was_on(rec):
    for on in (True, False):
        model, other = disturbed(rec, on, **EVERYTHING), disturbed(rec, not on, **EVERYTHING)
        other.load_state_dict(model.state_dict())
        assert other.looping is on and torch.equal(other(*batch()), model(*batch()))


def test_loop_comes_on_by_the_clock(rec, data_here, monkeypatch):
    hp = tiny(rec, **EVERYTHING, max_wallclock_seconds=1, gptq_reserve_seconds=0, warmup_steps=2, train_log_every=1)
    trainer = make_trainer(rec, hp, data_here)
    monkeypatch.setattr(rec, "time", SteppedTime(trainer))
    trainer.warm_up()
    trainer.fit()
    share = float(re.search(r"looping: on from step \d+, at ([\d.]+)%", (data_here / "trace.txt").read_text())[1])
    assert 50 <= share < 53 and trainer.model.looping and 25 + 12 <= trainer.steps_done <= 25 + 14


def test_context_ramp_cuts_its_sequences(rec, data_here):
    hp = tiny(rec, **EVERYTHING, train_batch_tokens=1024, micro_batch_tokens=512, context_ramp=0.5, grad_clip_norm=0)
    trainer = make_trainer(rec, hp, data_here)
    model = build(rec, **EVERYTHING)
    loader = rec.CoprimeLoader(trainer.train_paths, 64, trainer.plan.draw_windows, vocab_size=512)
    batches = [[torch.from_numpy(part) for part in loader.next_batch()] for _ in range(2)]
    parts = [model(ids[:, half], targets[:, half]) for ids, targets in batches for half in (slice(32), slice(32, 64))]
    expected = torch.autograd.grad(sum(parts) / 4, [*model.parameters()], materialize_grads=True)
    trainer.optimizers.step = lambda *_: None
    trainer.enter(0.49, 1)
    with trainer.on_the_clock() as data:
        assert trainer.step(data, 0, 1.0)() == pytest.approx(sum(parts).item() / 4, abs=1e-6)
    for (name, p), gradient in zip(trainer.model.named_parameters(), expected):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_context_grows_at_its_share_of_the_run(rec, data_here):
    ramped, _, trainer = losses_of(rec, data_here / "ramp", context_ramp=0.5, loop_start=1)
    whole, _, _ = losses_of(rec, data_here / "whole", loop_start=1)
    assert all(a != b for a, b in zip(ramped[1:], whole[1:]))  # at the start no position reads another
    assert trainer.tokens_done == 6 * 1024
    log = (data_here / "ramp/trace.txt").read_text()
    assert "context: 64 tokens from step 4, at 50.0% of the run" in log and log.count("context: ") == 1
    assert trainer.context == 64 and {*trainer.step_seconds} == {(False, 32), (False, 64)}


@pytest.mark.parametrize(("changes", "part"), [
    ({"loop_layers": "5"}, "LOOP_LAYERS='5' must be FIRST-LAST"),
    ({"loop_layers": "2-1"}, "LOOP_LAYERS='2-1' must be FIRST-LAST"),
    ({"loop_layers": "1-3", "loop_start": 0.5, "parallel_from": 3}, "before PARALLEL_FROM=3"),
    ({"context_parts": 3}, "CONTEXT_PARTS=3 must divide TRAIN_SEQ_LEN=64"),
    ({"parallel_from": 1}, "PARALLEL_FROM=1 must be 0 or in the second half of NUM_LAYERS=5, from 2 on"),
    ({"ema_steps_fraction": 0}, "EMA_STEPS_FRACTION='0' must be greater than 0"),
    ({"rope_dims": 0}, "ROPE_DIMS='0' must be at least 4"),
    ({"rope_dims": 10}, "ROPE_DIMS=10 must be an even number from 4 to the head size 8"),
    ({"preset": "16xh100"}, "PRESET='16xh100' must be one of lab, 8xh100"),
    ({"device": "mps"}, "DEVICE='mps' must be one of auto, cuda, cpu"),
    ({"warmup_steps": 1}, "WARMUP_STEPS=1 must be at least 2")])
def test_settings_that_do_not_fit_are_refused(rec, changes, part):
    with pytest.raises(rec.SetupError, match=re.escape(part)):
        tiny(rec, **changes)


def test_presets_are_defaults_that_the_environment_overrides(rec):
    lab, real, mine = (rec.Hyperparameters.from_env(env) for env in (
        {}, {"PRESET": "8xh100"}, {"PRESET": "8xh100", "LOOP_START": "1", "TRAIN_BATCH_TOKENS": "393216"}))
    assert (lab.loop_start, real.loop_start, mine.loop_start) == (1, 0.35, 1)
    assert (lab.train_batch_tokens, real.train_batch_tokens, mine.train_batch_tokens) == (98_304, 786_432, 393_216)
    assert real.max_wallclock_seconds == mine.max_wallclock_seconds == 600 and real.num_heads == lab.num_heads
    for hp, ranks, accum in ((lab, 1, 1), (lab, 2, 1), (real, 8, 1), (real, 2, 4), (real, 1, 8)):
        assert rec.plan_batches(hp, ranks).grad_accum_steps == accum


def test_settings_of_the_root_script_that_have_no_effect_are_known_and_warned_of(rec, runs):
    removed = {item.upper() for item in tg.Hyperparameters.__dataclass_fields__}
    removed -= {item.upper() for item in rec.Hyperparameters.__dataclass_fields__}
    gone = {"TRANSFORM", "CHECKPOINT_EVERY_SECONDS", "RESUME", "COMPRESSOR", "SKIP_GATES_ENABLED", "LN_SCALE",
            "VE_ENABLED"}  # the draft never had them
    assert removed - {*rec.IGNORED_SETTINGS} <= gone
    rec.Hyperparameters.from_env({"EMBEDDING_DIM": "512"})  # a lab's command sets it
    assert "WARNING: EMBEDDING_DIM is set, but nothing reads it here" in runs["one"][1].stdout
    with pytest.raises(rec.SetupError, match="did you mean EMBEDDING_DIM"):
        rec.Hyperparameters.from_env({"EMBEDING_DIM": "512"})


def test_a_shallow_model_says_what_it_has_no_blocks_for(rec):
    assert [note.split("=")[0] for note in tiny(rec, loop_start=0.5).unused] == ["LOOP_LAYERS", "PARALLEL_FROM"]
    assert tiny(rec, loop_start=1, parallel_from=0).unused == tiny(rec, **EVERYTHING).unused == []


# -- whole runs --------------------------------------------------------------------------------------------------------

FULL = {**EVERYTHING, "run_id": "r", "train_batch_tokens": 4096, "iterations": 8, "context_ramp": 0.25,
        "ema_steps_fraction": 0.25}
WIDE = {**FULL, "model_dim": 160}  # its MLP has matrices that GPTQ does


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    base = tmp_path_factory.mktemp("record")
    folders = {name: new_folder(base, name) for name in ("one", "two", "wide")}
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    calls = {"one": partial(run_script, folders["one"], **FULL, micro_batch_tokens=512),
             "two": partial(run_script, folders["two"], launcher=launcher, **FULL, micro_batch_tokens=256),
             "wide": partial(run_script, folders["wide"], **WIDE, micro_batch_tokens=512)}
    return {name: (folders[name], call(script=SCRIPT)) for name, call in calls.items()}


def test_two_ranks_agree_with_one(runs):
    for _, result in runs.values():
        assert result.returncode == 0, result.stdout + result.stderr
    one, two = (train_losses(runs[name][0], "r") for name in ("one", "two"))
    assert len(one) == 8
    np.testing.assert_allclose(two, one, rtol=0, atol=1e-4)
    scores = [{r["name"]: r["val_loss"] for r in records(runs[n][0], "r", "evaluation")} for n in ("one", "two")]
    assert scores[0] == pytest.approx(scores[1], abs=2e-4)
    switches = [re.search(r"looping: on from step (\d+)", result.stdout)[1] for _, result in runs.values()]
    assert switches == ["5"] * 3


def test_artifact_scores_alone_as_after_training(runs):
    folder, result = runs["wide"]
    again = run_script(folder, script=SCRIPT, **{**WIDE, "run_id": "again"}, eval_only="final_model.int6.ptz")
    assert again.returncode == 0, again.stderr
    first, second = summary_block(result.stdout), summary_block(again.stdout)
    assert first["val_bpb"] == second["val_bpb"] and first["int6_val_bpb"] == second["int6_val_bpb"]


@pytest.mark.parametrize(("changes", "part"), [
    ({"rope_dims": 8}, "it was trained with ROPE_DIMS=4; set that"), ({"logit_softcap": 5}, "LOGIT_SOFTCAP=30.0"),
    ({"ve_layers": "0,2"}, "VE_LAYERS="), ({"loop_layers": "0-1"}, "LOOP_LAYERS=1-2")])
def test_an_artifact_is_not_scored_with_settings_that_make_another_model_of_its_weights(runs, changes, part):
    changed = {**WIDE, "run_id": f"other_{next(iter(changes))}", **changes}
    refused = run_script(runs["wide"][0], script=SCRIPT, **changed, eval_only="final_model.int6.ptz")
    assert_refused(refused, 6, part)


def test_artifact_of_another_loop_is_refused(runs):
    changes = {**WIDE, "run_id": "other", "loop_start": 1}
    refused = run_script(runs["wide"][0], script=SCRIPT, **changes, eval_only="final_model.int6.ptz")
    assert_refused(refused, 6, "of another model", "set the variables that it was trained with")


def test_defaults_run_in_a_shallow_model(tmp_path):
    short = {name.lower(): value for name, value in {**trial.TINY, **trial.SHORT}.items()}
    result = run_script(new_folder(tmp_path, "shallow"), script=SCRIPT, **short, preset="8xh100")
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("LOOP_LAYERS=3-5", "PARALLEL_FROM=8"):
        assert f"WARNING: {name} is set, but the model has only 3 blocks" in result.stdout
    assert summary_block(result.stdout)["valid"] == "yes"


SHORT = {"iterations": 2, "parallel_from": 3, "ema_steps_fraction": 1, "run_id": "r"}


def test_two_runs_cannot_share_an_output_folder(tmp_path):
    folder = new_folder(tmp_path, "shared")
    (folder / "logs").mkdir()
    with (folder / "logs/.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_refused(run_script(folder, script=SCRIPT, **SHORT), 2, "another run writes to it")
    assert sorted(path.name for path in folder.iterdir()) == ["data", "logs"]


def test_an_artifact_that_something_else_replaced_is_not_scored(rec, tmp_path):
    run = object.__new__(rec.Run)
    run.world, run.written = rec.World(), "0" * 64
    (tmp_path / "a.ptz").write_bytes(b"another")
    with pytest.raises(rec.ArtifactError, match="is not what this run wrote"):
        run.load_artifact(tmp_path / "a.ptz")


def test_hessians_that_end_after_the_cap_make_the_run_invalid(tmp_path):
    cap = {"max_wallclock_seconds": 0.011, "gptq_reserve_seconds": 0.01, "warmup_steps": 2}
    result = run_script(new_folder(tmp_path, "late"), script=SCRIPT, **{**SHORT, **cap, "iterations": 50})
    assert_refused(result, 5, "Hessians ended at", "raise GPTQ_RESERVE_SECONDS")
    assert summary_block(result.stdout)["valid"].startswith("no")


@pytest.mark.parametrize(("said", "part"), [
    ({"stats": {"tokens_val": 7}}, "manifest.json .tokens_val 7, found"),
    ({"stats": {"bytes_val_normalised": 7}}, "manifest.json .bytes_val_normalised 7, found"),
    ({"splits": {"val": {"first_doc": 0, "last_doc": 9}, "train": {"first_doc": 5, "last_doc": 20}}}, "overlap"),
    ({"files": [{"name": "fineweb_val_000000.bin", "sha256": "0" * 64}]}, "is not that of manifest.json .sha256."),
    ({"files": 7}, "manifest.json is damaged")])
def test_validation_data_that_the_manifest_does_not_know_is_refused(rec, data_here, said, part):
    hp = tiny(rec, data_dir=data_here / "copy")
    shutil.copytree(data_here / "data", data_here / "copy")
    tables = rec.byte_tables(rec.load_tokenizer(hp))
    assert rec.load_validation(hp, tables).targets > 0
    manifest = data_here / "copy/manifest.json"
    manifest.write_text(json.dumps({"datasets": [{"name": "fineweb10B_sp512", **said}]}))
    with pytest.raises(rec.SetupError, match=part):
        rec.load_validation(hp, tables)
    manifest.write_text('{"datasets": [{"name": "fineweb10B_sp512", "unofficial_split": true}]}')
    note = rec.load_validation(hp, replace(tables, note="; MARK")).note
    assert note.endswith("matches manifest: it says nothing; UNOFFICIAL SPLIT; MARK")


@pytest.mark.parametrize("name", ["ByteTables", "byte_tables", "check_manifest", "close_settings", "read_ranks"])
def test_checks_of_data_and_names_are_the_root_scripts(rec, name):
    """Written twice, since a record stands alone; what they refuse is tested with the root script."""
    assert inspect.getsource(getattr(rec, name)) == inspect.getsource(getattr(tg, name))


@pytest.mark.parametrize(("name", "value"), [
    ("RESUME", "auto"), ("TRANSFORM", "caseops"), ("CHECKPOINT_EVERY_SECONDS", "60")])
def test_settings_of_the_root_script_that_must_not_be_lost_are_refused(rec, name, value):
    with pytest.raises(rec.SetupError, match=f"{name}='{value}' is not possible with this script"):
        rec.Hyperparameters.from_env({name: value})
    rec.Hyperparameters.from_env({name: "0" if name.startswith("CHECK") else ""})


def test_a_full_console_does_not_end_the_run(rec, tmp_path, monkeypatch):
    with Path("/dev/full").open("w") as console:
        monkeypatch.setattr(sys, "stdout", console)
        log = rec.RunLog(tmp_path, "r")
        log("a line " * 2000)
        monkeypatch.undo()
    assert (tmp_path / "r.txt").read_text() == "a line " * 2000 + "\n"


def test_short_modes_are_warmed_up_too(rec, data_here):
    hp = tiny(rec, **EVERYTHING, iterations=1, max_wallclock_seconds=0, warmup_steps=1)
    trainer = make_trainer(rec, replace(hp, context_ramp=0.0004, loop_start=0.9997), data_here)
    trainer.warm_up()
    assert {*trainer.step_seconds} == {(False, 32), (False, 64), (True, 64)}


def test_batches_that_cut_into_small_parts_only_are_refused(rec):
    hp = rec.Hyperparameters(train_batch_tokens=53 * 2048)
    with pytest.raises(rec.SetupError, match="MICRO_BATCH_TOKENS to one of"):
        rec.plan_batches(hp, 1)
    assert rec.plan_batches(rec.Hyperparameters(train_batch_tokens=53 * 2048, micro_batch_tokens=53 * 2048), 1)


def test_golf_reads_the_log_and_the_tokens_are_counted(runs):
    folder, _ = runs["one"]
    log, summary = logs.read_log(folder / "logs/r.txt"), records(folder, "r", "summary")[0]
    assert log.valid and log.code_bytes == len(SCRIPT.read_bytes()) and log.settings["loop_layers"] == "1-2"
    assert summary["tokens"] == 8 * 4096
