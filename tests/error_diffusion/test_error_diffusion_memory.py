"""What an update takes: counted tensor by tensor."""

import pytest
import torch
from tracked_memory import TrackedMemory

from holotrain.error_diffusion import ErrorDiffusionNetwork
from holotrain.error_diffusion.rules import WORKSPACE, contract

FLOAT = 4


def beside_the_result(layers: int, batch: int, outputs: int = 1, cells: int = 64) -> int:
    given = torch.nn.Module()
    given.register_buffer("activities", torch.rand(layers, outputs, batch, cells))
    given.register_buffer("error", torch.randn(outputs, batch, 1))
    with TrackedMemory(given) as memory:
        updates = contract(given.activities, given.error)
    return memory.peak - updates.nbytes


@pytest.mark.parametrize(
    ("layers", "batch", "outputs"), [(256, 32, 1), (256, 1024, 1), (1024, 32, 1), (16, 4096, 1), (8, 64, 10), (4, 4096, 10)]
)
def test_the_contraction_takes_one_workspace_whatever_the_batch_and_the_depth(layers, batch, outputs):
    assert 0.9 * WORKSPACE["cpu"] < beside_the_result(layers, batch, outputs) <= WORKSPACE["cpu"]


def peak_of_a_step(batch: int) -> int:
    """At the least workspace, so that what grows with the batch is the network's own."""
    network = ErrorDiffusionNetwork(16, 1, 8, 40)
    x, targets = torch.rand(batch, 16), torch.rand(batch, 1)

    def step():
        (0.5 * (network(x) - targets).square().sum(1).mean()).backward()

    step()
    with TrackedMemory(network) as memory:
        step()
    return memory.peak


def test_a_step_keeps_activities_and_nothing_else_that_grows_with_the_batch(monkeypatch):
    monkeypatch.setitem(WORKSPACE, "cpu", 1)
    growth = (peak_of_a_step(64) - peak_of_a_step(32)) / 32
    activities, inputs = 40 * 16 * FLOAT, 2 * 16 * FLOAT
    assert activities < growth < activities + 5 * inputs
