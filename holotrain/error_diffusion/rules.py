"""The learning rules: how much a source cell learns from an error, and the updates of all hidden layers at once.

Let z = s |o| be the *signed activity* of a cell: its sign times its output. The magnitude of a weight grows by alpha times what
the source learns times the slope |o| (1 - |o|) of the target. With d+ = max(e, 0) and d- = max(-e, 0), Kaneko's rule,

    dw = alpha x |o| (1 - |o|) d(s_source) s_source s_target,    d is d+ for an excitatory source, d- for an inhibitory one,

changes magnitudes by |x| d(s_source), which is max(z e, 0). This is never negative, so no sign can change. An input drives both
cells of a pair, z = x and z = -x. For negative inputs, which the published program does not have, the two cells swap roles. A
widely read article on GPUs uses dw = alpha x |o| (1 - |o|) s_target e for all sources; it changes magnitudes by z e, which can
be negative.

The sum of updates over the batch is the inner dimension of a batched matrix product. Computing each sample's update first and
adding them up afterwards would take B times the memory of the weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

BACKPROPAGATION = "backpropagation"
"""Not a diffusion rule: the gradient of autograd, for comparison."""


def kaneko(activities: Tensor, error: Tensor, out: Tensor | None = None) -> Tensor:
    """Excitatory sources learn from d+, inhibitory ones from d-."""
    return torch.mul(activities, error, out=out).relu_()


def article(activities: Tensor, error: Tensor, out: Tensor | None = None) -> Tensor:
    """Every source learns from d+ - d-."""
    return torch.mul(activities, error, out=out)


RULES: dict[str, Callable[..., Tensor]] = {"kaneko": kaneko, "article": article}
"""By name. Signed activities (..., B, C) and the error (..., B, 1) -> what sources learn, (..., B, C), in ``out`` if given."""


class Published(NamedTuple):
    """What goes with a rule where it was published, beside alpha = 0.8 at every step.

    constants: signed activities of the constant cells. initialization: of the weights. output_rate: alpha of the weights to the
    outputs divided by alpha elsewhere.
    """

    constants: tuple[float, ...]
    initialization: str
    output_rate: float


PUBLISHED = {
    "kaneko": Published((0.8, -0.8), "uniform", 1.0),
    "article": Published((1.0,), "normal", 1.25),
    BACKPROPAGATION: Published((), "scaled", 1.0),
}
"""By rule. Kaneko's program has a pair of constant cells with output 0.8; the bias of the article is a cell with output 1."""


def slope(activities: Tensor, out: Tensor | None = None) -> Tensor:
    """|o| (1 - |o|) of signed activities. Its constant factor is part of the learning rate, as in Kaneko's program."""
    sizes = torch.abs(activities, out=out)
    return sizes.addcmul_(sizes, sizes, value=-1)


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
