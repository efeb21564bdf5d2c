"""Every path on PyTorch's fake tensors of a CUDA device: devices and dtypes as they would be there.

Fake tensors refuse operands on different devices, and have the dtypes that autocast for CUDA gives. No operation may wait for
the device, and none may make a tensor on the host. Numbers are not computed, so these are compared in test_order_of_streams.py.
"""

from functools import partial
from itertools import product

import pytest
import torch
from covering import chosen
from fake_gpu import backward, fake_gpu
from small_models import CELLS, FAMILIES, TRANSFORMERS
from torch import nn

import holotrain.models
from holotrain.error_diffusion import ErrorDiffusionNetwork
from holotrain.optimizers import InBackward
from holotrain.optimizers.stepping import CombinedOptimizer
from holotrain.planning.fake_tensors import fake_parameters
from holotrain.reversible.checks import RebuildChecks
from holotrain.reversible.grid import FixedPointGrid
from holotrain.synthesis import HolographicSynthesis
from holotrain.tasks import optimizer_functions

CUDA = torch.device("cuda", 0)


@pytest.fixture
def work(monkeypatch):
    with fake_gpu(monkeypatch) as work:
        yield work


def on_cuda(make) -> nn.Module:
    with torch.device("meta"):
        module = make()
    return fake_parameters(module, CUDA)


def model_of(name: str, **options):
    sizes = FAMILIES[name.removeprefix("Rev")]
    model = on_cuda(partial(getattr(holotrain.models, name), **sizes, **options))
    if "vocab" in sizes:
        given = torch.zeros(2, sizes["context"], dtype=torch.int64, device=CUDA)
        if name.endswith("RoBERTa"):
            mask = torch.ones(2, sizes["context"], dtype=torch.bool, device=CUDA)
            return model, lambda: model(given, mask, given)
        return model, lambda: model(given, given)
    images, labels = torch.zeros(2, sizes["channels"], 8, 8, device=CUDA), torch.zeros(2, dtype=torch.int64, device=CUDA)
    return model, lambda: nn.functional.cross_entropy(model(images), labels)


def require_like_the_parameters(parameters, tensors=None):
    for parameter in parameters:
        if parameter.requires_grad:
            tensor = parameter.grad if tensors is None else tensors[parameter]
            assert (tensor.shape, tensor.dtype, tensor.device) == (parameter.shape, parameter.dtype, CUDA)


SCHEDULES = ["autograd", "checkpoint", "reversible", "pareprop"]
QUICK = {"RevViT": "reversible", "RevRoBERTa": "pareprop", "RevGPT": "checkpoint", "GPT": "autograd"}
CASES = [
    pytest.param(name, schedule, bool((number // 2 + shift) % 2), marks=() if QUICK.get(name) == schedule else pytest.mark.slow)
    for number, name in enumerate(TRANSFORMERS)
    for shift, schedule in enumerate(SCHEDULES if name.startswith("Rev") else SCHEDULES[:2])
]
"""Every model with every schedule, one half of them in bf16."""


@pytest.mark.parametrize(("name", "schedule", "half"), CASES, ids=str)
def test_a_step_of_every_model(work, name, schedule, half):
    model, loss = model_of(name, backward=schedule, drop_path=0.1)
    optimizer = InBackward(optimizer_functions.adamw(model)) if schedule == "pareprop" else optimizer_functions.adamw(model)
    seen = {}
    if schedule == "pareprop":
        optimizer.observe(lambda parameter: seen.update({parameter: parameter.grad}))
    for _ in range(2):
        work.on_host.clear()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            value = loss()
        assert value.device == CUDA and value.dtype == torch.float32
        backward(value)
        require_like_the_parameters(model.parameters(), seen or None)
        optimizer.step()
        optimizer.zero_grad()
    assert work.on_host == work.waits == []
    assert (torch.bfloat16 in work.dtypes) == half


SYNTHESES = [
    {"mode": "associative"},
    {"mode": "associative", "transform": "hadamard", "ema": 0.9, "dtype": "bf16"},
    {"mode": "shared", "match_norm": True, "cosine_floor": 0.1, "dtype": "fp16"},
    {"mode": "bind", "mix": 0.5, "dtype": "fp16"},
    {"mode": "associative", "split": "cpu"},
    {"mode": "bind", "mix": 0.5, "dtype": "bf16", "split": "cpu"},
]


@pytest.mark.parametrize("options", SYNTHESES, ids=str)
def test_synthesis(work, options):
    dtype = torch.bfloat16
    model = on_cuda(lambda: nn.Sequential(nn.Linear(64, 96, dtype=dtype), nn.Tanh(), nn.Linear(96, 10, dtype=dtype)))
    synthesis = HolographicSynthesis(model, block_length=64, **options)
    for number in range(3):
        backward(model(torch.zeros(4, 64, dtype=dtype, device=CUDA)).sum())
        work.on_host.clear()
        synthesis.measuring = number == 2
        assert synthesis.step()
        require_like_the_parameters(model.parameters(), None)
        assert "split" in options or work.on_host == [] or number == 0  # when constants are made
        assert work.waits == []
        model.zero_grad()
    assert synthesis.measured.device == CUDA
    here = [tensor.device for tensor in synthesis.state_tensors]
    assert "split" in options or set(here) <= {CUDA}


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("rule", ["kaneko", "article", "backpropagation"])
def test_error_diffusion(work, rule, half):
    net = on_cuda(partial(ErrorDiffusionNetwork, inputs=64, outputs=5, width=CELLS["width"], depth=CELLS["depth"], rule=rule))
    work.on_host.clear()
    with torch.autocast("cuda", torch.bfloat16, enabled=half):
        found = net(torch.zeros(3, 64, device=CUDA))
    assert found.shape == (3, 5) and found.device == CUDA and found.dtype == (torch.bfloat16 if half else torch.float32)
    backward(found.float().square().sum())
    require_like_the_parameters(net.parameters())
    net.clamp_signs()
    assert work.on_host == work.waits == []


OPTIMIZERS = {
    "adamw": optimizer_functions.adamw,
    "adafactor": optimizer_functions.adafactor,
    "muon": optimizer_functions.muon,
    "sgd": optimizer_functions.sgd,
    "fused": lambda model: torch.optim.AdamW(model.parameters(), fused=True),
    "two": lambda model: CombinedOptimizer(
        [torch.optim.SGD([parameter], 0.1, momentum=0.9) for parameter in model.parameters()]
    ),
}


@pytest.mark.parametrize(
    ("name", "inside"),
    chosen([*product(OPTIMIZERS, [False, True])], lambda _, case: case in (("adamw", True), ("adafactor", False))),
)
def test_optimizers(work, name, inside):
    model, loss = model_of("RevViT", backward="reversible")
    optimizer = OPTIMIZERS[name](model)
    if inside:
        optimizer = InBackward(optimizer, clip_value=1.0)
    for _ in range(2):
        backward(loss())
        assert all((parameter.grad is None) == inside for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    kept = [tensor for state in optimizer.state.values() for tensor in state.values() if isinstance(tensor, torch.Tensor)]
    assert all(tensor.device == CUDA for tensor in kept if tensor.dim()) and kept
    assert work.waits == [] or name == "adafactor"  # torch's own reads the norm of every parameter


def test_checks_and_grids_do_not_wait_for_the_device(work, monkeypatch):
    monkeypatch.setattr("holotrain.reversible.grid.has_no_data", lambda tensor: False)
    stream = torch.zeros(4, 8, device=CUDA)
    grid = FixedPointGrid().to(CUDA)
    grid.known = True
    call = grid.in_call(stream)
    checks = RebuildChecks("blocks")
    checks.begin()
    for each in (None, call):
        checks.of_blocks(call.entered(stream), each).compare(stream, stream)
    grid.follow(call)
    assert len(checks.errors) == 2 and not work.waits
    assert all(error.device == CUDA for error in checks.errors) and grid.step.device == CUDA
