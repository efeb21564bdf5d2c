"""What is rebuilt is checked in every backward: blocks that repeat themselves wrongly are named, and then keep their inputs."""

import copy
import math
import pickle
import warnings
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from holotrain.reversible import ReversibleBlock, ReversibleSequence

DEPTH, WIDTH = 12, 32


class Branch(nn.Module):
    """A branch with a number that is no parameter."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.scale = 1.0

    def forward(self, x):
        return self.scale * self.outer(F.gelu(self.inner(self.norm(x))))


class Unsteady(Branch):
    """One element in a hundred is off by the last bit of bf16, other ones in each run, as with atomic additions."""

    source = torch.Generator().manual_seed(0)

    def forward(self, x):
        update = super().forward(x)
        mask = torch.rand(update.shape, generator=self.source) < 0.01
        return update * torch.where(mask, 1 + 2**-7, 1.0)


class First(Branch):
    """Another result in its first run, as a kernel that is tuned."""

    runs = 0

    def forward(self, x):
        self.runs += 1
        return super().forward(x) * (1.01 if self.runs == 1 else 1.0)


class Adapted(Branch):
    """With two adapters, of which one is active."""

    def __init__(self):
        super().__init__()
        self.adapters, self.active = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)), 0

    def forward(self, x):
        return self.adapters[self.active](super().forward(x))


def sequence(branch=Branch, **options):
    torch.manual_seed(0)
    return ReversibleSequence([ReversibleBlock(branch(), branch()) for _ in range(DEPTH)], **options)


def exact(branch=Branch, **options):
    return sequence(branch, exact=True, **options)


def forward(net, step, scale=1.0, amp=True, dtype=torch.float32):
    torch.manual_seed(step)
    x = (scale * torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(step))).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=amp):
        return sum(net(x, x.tanh())).float().square().mean()


def gradient(net, loss):
    return torch.cat([grad.flatten() for grad in torch.autograd.grad(loss, [*net.parameters()])])


def step(net, number, scale=1.0):
    return gradient(net, forward(net, number, scale))


def agreement(found, net, number, scale=1.0):
    """The cosine between a gradient and that of the same step of the same network, when it stores everything."""
    twin = copy.deepcopy(net)
    twin.backward = "autograd"
    return F.cosine_similarity(found.double(), step(twin, number, scale).double(), dim=0).item()


@contextmanager
def silent():
    with warnings.catch_warnings(action="error"):
        yield


def set_scale(net, scale):
    for part in net.modules():
        if isinstance(part, Branch):
            part.scale = scale


def test_blocks_that_repeat_themselves_say_nothing():
    net = exact()
    with silent():
        for number in range(4):
            step(net, number)
            assert [error.item() for error in net.checks.errors] == [0.0]
    for twin in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        assert twin.checks.name == net.checks.name != ""
        assert agreement(step(twin, 1), net, 1) > 0.999999 and not twin.checks.failed


def test_operations_that_are_not_deterministic_are_named_and_the_third_step_is_right():
    net = exact(Unsteady)
    with pytest.warns(UserWarning, match="gradient of this step is (wrong|inexact).*not deterministic.*If it happens in"):
        step(net, 0)
    with pytest.warns(UserWarning, match="From the next step on the blocks keep their inputs"):
        step(net, 1)
    with silent():
        third = step(net, 2)
    assert net.checks.failed and not net.checks.errors
    assert agreement(third, net, 2) > 0.9999


def test_a_kernel_that_is_tuned_when_it_first_runs_costs_no_memory_later():
    net = exact(First)
    net.grid.set(2.0**-16)  # which would be chosen by a first run
    with pytest.warns(UserWarning, match="tuned when it first runs.*If it happens in another step"):
        step(net, 0)
    for number in (1, 2):
        assert agreement(step(net, number), net, number) > 0.999999
    assert not net.checks.failed and [error.item() for error in net.checks.errors] == [0.0]


def test_an_attribute_that_changes_between_forward_and_backward_is_named():
    net = exact()
    step(net, 0)
    for number in (1, 2):
        loss = forward(net, number)
        set_scale(net, 0.99)
        if number == 1:
            with pytest.warns(UserWarning, match="attribute of a module changed"):
                gradient(net, loss)
        else:
            found = gradient(net, loss)
        set_scale(net, 1.0)
    assert agreement(found, net, 2) > 0.99  # as checkpointing does


@pytest.mark.parametrize(("backward", "amp"), [("reversible", True), ("checkpoint", False)])
def test_another_adapter_in_the_backward_is_refused(backward, amp):
    net, losses = exact(Adapted, backward=backward), []
    for number in (0, 1):
        for part in net.modules():
            part.active = number
        losses.append(forward(net, number, amp=amp))
    with pytest.raises(RuntimeError, match=r"other parameters .* those of another adapter"):
        sum(losses).backward()


def test_a_stream_beyond_its_grid_is_named_and_the_next_grid_is_coarser():
    net = exact()
    step(net, 0)
    with silent():
        before = net.grid.upcoming.item()
        step(net, 1, math.nan)  # says nothing and changes nothing, and what comes next is said
        step(net, 1, math.inf)
        assert net.grid.upcoming.item() == before
    with pytest.warns(UserWarning, match="beyond [0-9]+, the limit of their .* next step has a coarser grid"):
        step(net, 2, 1e5)
    with silent():
        assert agreement(step(net, 3, 1e5), net, 3, 1e5) > 0.999999
    assert not net.checks.failed


def test_a_grid_that_was_set_stays_and_blocks_keep_their_inputs():
    net = sequence(exact=18)
    with pytest.warns(UserWarning, match="beyond 64, .* From the next step on the blocks keep their inputs"):
        gradient(net, forward(net, 0, 1000.0, amp=False))
    assert net.grid.upcoming.item() == 2.0**-18
    with silent():
        found = step(net, 2, 1000.0)
    assert net.checks.failed and not net.checks.errors
    assert agreement(found, net, 2, 1000.0) > 0.999999


def test_streams_without_a_grid_have_a_bound():
    net = sequence(Unsteady)
    step(net, 0)
    assert 1e-5 < net.checks.errors[0].item() < 0.05 and not net.checks.failed
    steep = sequence().bfloat16()
    set_scale(steep, 30.0)
    with pytest.warns(UserWarning, match=r"Rounding adds up.*backward\.exact=true.*From the next step on"):
        gradient(steep, forward(steep, 0, amp=False, dtype=torch.bfloat16))
    with silent():
        gradient(steep, forward(steep, 1, amp=False, dtype=torch.bfloat16))
    assert steep.checks.failed and not steep.checks.errors


def test_a_wrong_stream_may_be_an_error():
    """In each step, which promises nothing."""
    net = exact(Unsteady, on_mismatch="error")
    for number in range(3):
        with pytest.raises(RuntimeError, match="not deterministic.* and the backward$"):
            step(net, number)
    assert not net.checks.failed


class Off(Branch):
    """Two entries of one recomputation are off, by as much up as down, or one is no number."""

    entries, by, recomputed = (0, 1), 2.0**-8, 0

    def forward(self, x):
        self.recomputed += 1
        update = super().forward(x)
        if self.recomputed != 2:
            return update
        off = torch.zeros_like(update).flatten()
        off[self.entries[0]], off[self.entries[1]] = self.by, -self.by
        return update + off.view_as(update)


@pytest.mark.parametrize("by", [2.0**-8, math.nan])
def test_errors_of_one_entry_up_and_one_down_are_seen(by, monkeypatch):
    """12 of 100 pairs would cancel in a plain sum."""
    monkeypatch.setattr(Off, "by", by)
    for number in range(0, 100, 12):
        monkeypatch.setattr(Off, "entries", (number, number + 100))
        net = sequence(Off, exact=12, on_mismatch="error")
        with pytest.raises(RuntimeError, match=r"relative error of \S+, so the gradient of this step is"):
            gradient(net, forward(net, 0, amp=False))
