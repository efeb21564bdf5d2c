"""The updates of all hidden layers at once: what sources learn times the slopes of targets, summed over the batch.

The sum over the batch is the inner dimension of a batched product of matrices. To form each sample's update first and add
them up afterwards, as a loop over the formula suggests, takes B times the memory of the weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from holotrain.error_diffusion.rules import RULES, slope

WORKSPACE = {"cpu": 2 * 2**20, "cuda": 256 * 2**20}
"""Bytes for what sources learn and slopes: on a CPU they stay in its cache, on a GPU a launch has enough to do."""


def contract(activities: Tensor, error: Tensor, rule: str = "kaneko") -> Tensor:
    """How the magnitudes between hidden layers shall change, but for the learning rate.

    Args:
        activities: (L, D, B, C), signed, of all hidden layers.
        error: (D, B, 1), target less output.
        rule: one of :data:`~holotrain.error_diffusion.rules.RULES`.

    Returns:
        (L - 1, D, C, C), from source to target. Beyond it this takes ``WORKSPACE`` bytes, or one layer's share where that is
        more, whatever the batch and the depth.
    """
    layers, outputs, batch, cells = activities.shape
    updates = activities.new_empty(layers - 1, outputs, cells, cells)
    bytes_a_layer = 2 * outputs * batch * cells * activities.element_size()
    step = max(1, WORKSPACE.get(activities.device.type, WORKSPACE["cuda"]) // max(bytes_a_layer, 1))
    # One allocation for all steps: on a CPU, fresh memory would cost as much as what is written to it.
    learnt, slopes = activities.new_empty(2, min(step, layers - 1), outputs, batch, cells)
    for begin in range(0, layers - 1, step):
        end = min(begin + step, layers - 1)
        sources = RULES[rule](activities[begin:end], error, out=learnt[: end - begin])
        targets = slope(activities[begin + 1 : end + 1], out=slopes[: end - begin])
        torch.bmm(sources.flatten(0, 1).mT, targets.flatten(0, 1), out=updates[begin:end].flatten(0, 1))
    return updates
