"""Synthesis on a GPU and split between devices gives what it gives on the CPU; here also without a GPU."""

import pytest
import torch
from compared import assert_close, assert_equal
from torch import nn

from holotrain.synthesis import HolographicSynthesis, delayed, updates

F64 = torch.float64
PUBLISHED = {"mode": "bind", "representation": "flattened"}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def stepped(device: str, precision: torch.dtype, options: dict, skipped: int = 3) -> list[torch.Tensor]:
    """The last gradients of six steps: gradients stay in the same memory in some steps only, one is missing, one is NaN.

    Args:
        skipped: the step that is skipped for the NaN of step 3.
    """
    model = network().to(device, precision)
    x = torch.randn(6, 5, dtype=F64, generator=torch.Generator().manual_seed(1)) + 0.5
    synthesis = HolographicSynthesis(model, **{"block_length": 32} | options)
    for step in range(6):
        model.zero_grad(set_to_none=step % 3 == 0)
        model(x.to(device, precision) * (1 + step)).square().sum().backward()
        if step == 2:
            model[0].bias.grad = None
        if step == 3:
            model[0].weight.grad[0, 0] = torch.nan
        assert synthesis.step() == (step != skipped)
    assert (synthesis.steps, synthesis.skipped) == (5, 1)
    return [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("options", "skipped"),
    [
        ({"ema": 0.5, "key_ema": 0.5, "decay_warmup": 9}, 4),
        ({"mode": "shared", "cosine_floor": 0.2, "dtype": "fp16"}, 4),
        (PUBLISHED | {"block_length": None}, 4),
        ({"covers": lambda name, _: name.startswith("0")}, 3),
    ],
)
def test_with_a_split_the_thread_finds_nan_unless_a_gradient_is_used_at_once(options, skipped, monkeypatch):
    """The GPU's way of going about it, on a CPU: the step that would apply the update is skipped, and all else is the same."""
    options = options | {"split": "cpu"}
    expected = stepped("cpu", F64, options)
    monkeypatch.setattr(delayed, "SYNCHRONOUS", ())
    assert_equal(stepped("cpu", F64, options, skipped=skipped), expected)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graph": True},
        {"cuda_graph": True, "mode": "shared", "cosine_floor": 0.2},
        {"cuda_graph": True, "transform": "hadamard", "dtype": "bf16", "subsample": 0.5},
        {"cuda_graph": True, **PUBLISHED, "dtype": "fp16", "block_length": None},
        {"split": "cpu"},
        {"split": "cpu", "mode": "shared", "dtype": "fp16"},
        {"split": "cpu", **PUBLISHED, "dtype": "fp16"},
    ],
)
def test_on_cuda_graphs_and_splits_give_the_same(options, monkeypatch):
    """As without them, and as on the CPU."""
    monkeypatch.setitem(updates.MOST, "cuda", 256)
    plain = {name: value for name, value in options.items() if name != "cuda_graph"}
    expected = stepped("cpu", torch.float32, plain)
    skipped = 4 if "split" in options else 3
    for chosen in (plain, options):
        assert_close(stepped("cuda", torch.float32, chosen, skipped=skipped), expected, rtol=1e-4, atol=1e-5)
