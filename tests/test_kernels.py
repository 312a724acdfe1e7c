"""The Triton kernels against their plain twins, under Triton's interpreter on the CPU, in fp32.

bench/kernels.py does the same in bf16 on a GPU and then times them.
"""
import pytest
import torch
from conftest import settings

import train_gpt as tg

pytest.importorskip("triton", reason="the kernels need triton, which PyTorch's CPU builds lack")

CPU = torch.device("cpu")
SHAPES = {
    "even": {},
    "odd head and vocabulary": {"model_dim": 72, "num_heads": 3, "num_kv_heads": 1, "rope_dims": 8, "vocab_size": 100},
    "whole head rotated": {"rope_dims": 0, "mlp_mult": 3.0},
    "one head group": {"num_kv_heads": 4, "logit_softcap": 15.0, "vocab_size": 1000},
}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Small matrices have several tiles and ragged ends."""
    monkeypatch.setattr(tg, "MLP_TILE", (32, 32, 16))


@pytest.fixture
def unwritten_is_nan(monkeypatch):
    """Every new tensor starts as NaN: an element that a kernel leaves out cannot go unseen."""
    new_empty, empty_like = torch.Tensor.new_empty, torch.empty_like

    def poisoned(tensor):
        return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *args, **kwargs: poisoned(new_empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: poisoned(empty_like(*args, **kwargs)))


def fused(attend=None) -> tg.Operations:
    return tg.Operations(attend, tg.SplitQKV.apply, tg.mlp_fused, tg.head_losses_fused)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ["split_qkv", "mlp", "head_losses"])
def test_outputs_and_gradients_equal_the_plain_twin(unwritten_is_nan, name, shape):
    case = tg.operation_cases(settings(**SHAPES[shape]), CPU, torch.float32, 2, 37)[name]
    assert tg.largest_error(getattr(fused(), name), getattr(tg, name), *case) < 2e-6


@pytest.mark.parametrize("name", ["mlp", "head_losses"])
def test_evaluation_equals_the_plain_twin(unwritten_is_nan, name):
    inputs, constants = tg.operation_cases(settings(), CPU, torch.float32, 2, 37)[name]
    with torch.no_grad():
        ours, twin = (function(*inputs, *constants) for function in (getattr(fused(), name), getattr(tg, name)))
    torch.testing.assert_close(ours, twin, rtol=1e-5, atol=1e-5)


def test_a_value_embedding_may_be_absent(unwritten_is_nan):
    (qkv, _, gain), constants = tg.operation_cases(settings(), CPU, torch.float32, 2, 37)["split_qkv"]
    for a, b in zip(tg.SplitQKV.apply(qkv, None, gain, *constants), tg.split_qkv(qkv, None, gain, *constants)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_the_last_bit_of_the_hidden_layer_is_the_sign_of_the_product():
    generator = torch.Generator().manual_seed(1)
    x, w = torch.randn(50, 48, generator=generator), torch.randn(40, 48, generator=generator)
    product = x @ w.T
    hidden = tg.run_mlp_kernel(x, w, None, "train")
    assert torch.equal((hidden.view(torch.int32) & 1).bool(), product < 0)
    plain = tg.run_mlp_kernel(x, w, None, "evaluate")
    torch.testing.assert_close(plain, tg.leaky_square(product), rtol=1e-3, atol=1e-9)
    assert ((hidden - plain).abs() <= 2 ** -23 * plain.abs()).all()  # one unit of the last bit at most


@pytest.mark.parametrize(("factor", "error"), [(1.1, "2.1e-01"), (float("nan"), "nan")])
def test_a_kernel_that_is_off_is_refused_with_the_reason(monkeypatch, factor, error):
    """On a machine that could run them; the choice itself is what is tested."""
    cases = tg.operation_cases(settings(), CPU, torch.float32, 2, 16)
    monkeypatch.setattr(tg, "operation_cases", lambda *args: cases)
    monkeypatch.setattr(tg, "hopper_or_newer", lambda device: True)
    monkeypatch.setattr(tg, "head_losses_fused", lambda *args: factor * tg.head_losses(*args))
    ops, reason = tg.choose_operations(settings(), None, torch.device("cuda"), torch.bfloat16)
    assert ops == tg.Operations(None) and reason.startswith(f"0 (WARNING: slow; head_losses is off by {error}")
    with pytest.raises(tg.SetupError, match=r"KERNELS=1 cannot be used here.*head_losses is off"):
        tg.choose_operations(settings(kernels="1"), None, torch.device("cuda"), torch.bfloat16)


def test_kernels_are_not_chosen_where_they_cannot_run():
    attend = tg.sdpa_attention
    ops, reason = tg.choose_operations(settings(), attend, CPU, torch.float32)
    assert ops == tg.Operations(attend) and reason == "0 (need CUDA and Triton; need Hopper or newer; need bf16)"
    assert tg.choose_operations(settings(kernels="0"), attend, CPU, torch.float32)[1] == "0 (KERNELS=0)"
    with pytest.raises(tg.SetupError, match="KERNELS=1 cannot be used here"):
        tg.choose_operations(settings(kernels="1"), attend, CPU, torch.float32)


def test_a_whole_model_with_kernels_equals_the_plain_one():
    hp = settings()
    plain, ours = (tg.build_model(hp, ops, CPU, torch.float32)
                   for ops in (tg.Operations(tg.sdpa_attention), fused(tg.sdpa_attention)))
    with torch.no_grad():
        for p in plain.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel())))
    ours.load_state_dict(plain.state_dict())
    tokens = torch.randint(hp.vocab_size, (2, 33), generator=torch.Generator().manual_seed(2))
    for model in (plain, ours):
        model(tokens[:, :-1], tokens[:, 1:]).backward()
    for (name, a), b in zip(ours.named_parameters(), plain.parameters()):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-3, atol=1e-6, msg=name)
    with torch.no_grad():
        losses, twins = (model(tokens[:, :-1], tokens[:, 1:], 20, "none") for model in (ours, plain))
    torch.testing.assert_close(losses, twins, rtol=1e-5, atol=1e-5)
