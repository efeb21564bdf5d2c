"""The updates of all hidden layers at once: what sources learn times the slopes of targets, summed over the batch.

The sum over the batch is the inner dimension of a batched matrix product. Computing each sample's update first and adding
them up afterwards would take B times the memory of the weights.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from holotrain.error_diffusion.rules import RULES, slope

WORKSPACE = {"cpu": 2 * 2**20, "cuda": 256 * 2**20}
"""Bytes of the temporary buffers: small enough for the cache of a CPU, large enough to keep a GPU busy with one launch."""


def contract(activities: Tensor, error: Tensor, rule: str = "kaneko") -> Tensor:
    """Returns the change of the magnitudes between hidden layers, without the learning rate.

    Args:
        activities: (L, D, B, C), the signed activities of all hidden layers.
        error: (D, B, 1), target minus output.
        rule: one of :data:`~holotrain.error_diffusion.rules.RULES`.

    Returns:
        (L - 1, D, C, C), from source to target. Temporary memory is ``WORKSPACE`` bytes for any batch and depth (or what one
        sample needs in one layer, if that is more).
    """
    layers, outputs, batch, cells = activities.shape
    updates = activities.new_empty(layers - 1, outputs, cells, cells)
    room = WORKSPACE.get(activities.device.type, WORKSPACE["cuda"]) // (2 * outputs * cells * activities.element_size())
    rows = max(1, min(batch, room))
    depth = max(1, min(layers - 1, room // rows))
    # One allocation for all parts: on a CPU, new memory costs as much time as writing to it.
    learnt, slopes = activities.new_empty(2, depth * outputs * rows * cells)
    for begin in range(0, layers - 1, depth):
        end = min(begin + depth, layers - 1)
        into = updates[begin:end].flatten(0, 1)
        for first in range(0, batch, rows):
            part = slice(first, first + rows)
            shape = (end - begin, outputs, len(range(batch)[part]), cells)
            sources, targets = (space[: math.prod(shape)].view(shape) for space in (learnt, slopes))
            RULES[rule](activities[begin:end, :, part], error[:, part], out=sources)
            slope(activities[begin + 1 : end + 1, :, part], out=targets)
            torch.baddbmm(into, sources.flatten(0, 1).mT, targets.flatten(0, 1), beta=min(first, 1), out=into)
    return updates
