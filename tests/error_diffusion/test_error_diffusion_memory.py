"""What an update takes: counted tensor by tensor."""

import pytest
import torch
from tracked_memory import TrackedMemory

from holotrain.error_diffusion import ErrorDiffusionNetwork, contract
from holotrain.error_diffusion.contraction import WORKSPACE

FLOAT = 4


def beside_the_result(layers: int, batch: int, cells: int = 64) -> int:
    given = torch.nn.Module()
    given.register_buffer("activities", torch.rand(layers, 1, batch, cells))
    given.register_buffer("error", torch.randn(1, batch, 1))
    with TrackedMemory(given) as memory:
        updates = contract(given.activities, given.error)
    return memory.peak - updates.nbytes


@pytest.mark.parametrize(("layers", "batch"), [(256, 32), (256, 256), (256, 1024), (1024, 32)])
def test_the_contraction_takes_one_workspace_whatever_the_batch_and_the_depth(layers, batch):
    assert beside_the_result(layers, batch) == WORKSPACE["cpu"]


def test_a_small_contraction_takes_no_more_than_it_needs():
    assert beside_the_result(4, 16) == 2 * 3 * 16 * 64 * FLOAT


@pytest.mark.parametrize("batch", [8, 64])
def test_a_step_keeps_activities_and_nothing_else_that_grows_with_the_batch(batch):
    network = ErrorDiffusionNetwork(16, 1, 8, 40)
    x, targets = torch.rand(batch, 16), torch.rand(batch, 1)

    def step():
        (0.5 * (network(x) - targets).square().sum(1).mean()).backward()

    step()
    with TrackedMemory(network) as memory:
        step()
    activities = 40 * batch * 16 * FLOAT
    gradients = sum(parameter.nbytes for parameter in network.parameters())
    workspace = 2 * 40 * batch * 16 * FLOAT
    assert activities + gradients < memory.peak < 1.1 * (activities + gradients + workspace) + 16 * batch * 16 * FLOAT
