"""Settings of libraries and of the process that a recomputation has as its forward had them: attention, convolutions."""

import pytest
import torch
from covering import paired
from engine_branches import F64, WIDTH
from engine_cases import loss_of, relative_error
from paper_gpu import paper_gpu
from torch import nn
from torch.backends import cuda as kernels
from torch.nn.attention import SDPBackend, sdpa_kernel

from holotrain.reversible import ReversibleBlock, ReversibleSequence

recomputing_engines = pytest.mark.parametrize("engine", ["checkpoint", "reversible"])


CUDNN, FLASH, EFFICIENT, MATH, OVERRIDEABLE = 3, 1, 2, 0, 4
PRIORITIES = torch._C._get_sdp_priority_order  # nothing public reads it


def put_cudnn_first():
    torch._C._set_sdp_priority_order([CUDNN, FLASH, EFFICIENT, MATH, OVERRIDEABLE])


CHANGES = {
    "order of attention": (put_cudnn_first, lambda: PRIORITIES()[0] == CUDNN),
    "flash attention": (lambda: kernels.enable_flash_sdp(False), lambda: not kernels.flash_sdp_enabled()),
    "cuDNN's attention": (lambda: kernels.enable_cudnn_sdp(False), lambda: not kernels.cudnn_sdp_enabled()),
    "default dtype": (lambda: torch.set_default_dtype(F64), lambda: torch.get_default_dtype() == F64),
}
"""What the first use of an operator may change, and whether it has."""


@pytest.fixture
def restored_settings():
    order = PRIORITIES()
    yield
    torch.set_default_dtype(torch.float32)
    torch._C._set_sdp_priority_order(order)
    kernels.enable_flash_sdp(True)
    kernels.enable_cudnn_sdp(True)


class Settings(nn.Module):
    """Notes what the library that computes it is told: in which order attention's kernels, which dtype."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(4)), []

    def forward(self, x):
        self.seen.append((PRIORITIES()[0], torch.get_default_dtype()))
        return (x * self.weight).sin()


@recomputing_engines
def test_libraries_choose_in_the_recomputation_as_in_the_forward(engine, restored_settings):
    branch = Settings()
    net = ReversibleSequence([ReversibleBlock(branch, branch)], engine)
    before = PRIORITIES()
    torch.set_default_dtype(F64)
    with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True):
        y1, y2 = net(*torch.rand(2, 2, 4, dtype=torch.float32))
    torch.set_default_dtype(torch.float32)
    (y1 * y2).sum().backward()
    assert branch.seen == [(SDPBackend.MATH.value, F64)] * 4
    assert torch.get_default_dtype() == torch.float32 and PRIORITIES() == before


@recomputing_engines
def test_no_convolution_is_chosen_by_a_race(engine, monkeypatch):
    """Each thread would have one of its own."""
    seen, cudnn = [], torch.backends.cudnn
    monkeypatch.setattr(cudnn, "benchmark", True)
    branch = nn.Linear(4, 4)
    branch.register_forward_hook(lambda *_: seen.append((cudnn.benchmark, cudnn.deterministic)))
    with paper_gpu(monkeypatch):
        net = ReversibleSequence([ReversibleBlock(branch, branch)], engine).to("cuda")
        sum(net(*torch.rand(2, 2, 4).to("cuda"))).sum().backward()
    assert seen == [(False, True)] * 4 and cudnn.benchmark


class FirstUse(nn.Module):
    """The first one that runs changes a setting, as attention does on Hopper. Each kernel saves tensors of its own."""

    def __init__(self, changes, kernel):
        super().__init__()
        self.inner, self.changes, self.kernel = nn.Linear(WIDTH, WIDTH, dtype=F64), changes, kernel

    def forward(self, x):
        if self.changes:
            self.changes.pop()()
        hidden = self.inner(x)
        return x + (hidden.sin() * hidden.cos() if self.kernel() else hidden.exp()) / 4


@pytest.mark.parametrize(("way", "change"), paired(["reversible", "checkpoint", "pareprop"], [*CHANGES]))
def test_the_first_use_of_an_operator_may_change_a_setting(way, change, restored_settings):
    change, kernel = CHANGES[change]

    def gradients(backward, *changes):
        changes = [*changes]
        torch.manual_seed(0)
        blocks = [FirstUse(changes, kernel) for _ in range(6)]
        net = ReversibleSequence([ReversibleBlock(*blocks[at : at + 2]) for at in (0, 2, 4)], backward)
        return torch.autograd.grad(loss_of(net), list(net.parameters()))

    ours = gradients(way, change)
    assert kernel()
    assert relative_error(ours, gradients("autograd")) <= 1e-12  # all of it as after the change


def test_each_branch_keeps_the_settings_with_which_it_has_run(restored_settings):
    def gradients(backward):
        kernels.enable_flash_sdp(True)
        torch.manual_seed(0)
        changes = [[], [lambda: kernels.enable_flash_sdp(False)], [], []]  # by the second of four branches
        branches = [FirstUse(each, kernels.flash_sdp_enabled) for each in changes]
        net = ReversibleSequence([ReversibleBlock(*branches[:2]), ReversibleBlock(*branches[2:])], backward)
        return torch.autograd.grad(loss_of(net), list(net.parameters()))

    assert relative_error(gradients("checkpoint"), gradients("autograd")) <= 1e-12
