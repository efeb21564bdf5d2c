"""The forward pass, in signed activities.

A target of sign s has the output sigmoid(2 u / u0), where u = s v and v is the sum of the sources' signed activities times
magnitudes. The activities already contain the signs of the sources. Since sigmoid(-v) = 1 - sigmoid(v), the signed activity is
sigmoid(2 v / u0) for an excitatory cell and sigmoid(2 v / u0) - 1 for an inhibitory one, so weights need no sign.

Shapes: magnitudes are matrices from all source cells to all target cells: incoming (D, 2 I, C), hidden (L - 1, D, C, C),
outgoing (D, C, 1); ``offset`` (C,) is 0 for excitatory and 1 for inhibitory cells; ``gain`` is 2 / u0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def input_cells(x: Tensor, outputs: int) -> Tensor:
    """Every input drives an excitatory and an inhibitory cell: (B, I) -> signed activities (D, B, 2 I)."""
    return torch.cat([x, -x], dim=1).expand(outputs, -1, -1)


def propagate(x: Tensor, incoming: Tensor, hidden: Tensor, outgoing: Tensor, offset: Tensor, gain: float) -> Tensor:
    """The outputs (B, D) of inputs (B, I), with plain autograd."""
    zero = x.new_zeros(())
    activities = torch.sigmoid(_drive(zero, input_cells(x, len(incoming)), incoming, gain)) - offset
    for magnitudes in hidden:
        activities = torch.sigmoid(_drive(zero, activities, magnitudes, gain)) - offset
    return torch.sigmoid(_drive(zero, activities, outgoing, gain))[..., 0].T


def record(x: Tensor, incoming: Tensor, hidden: Tensor, outgoing: Tensor, offset: Tensor, gain: float) -> tuple[Tensor, Tensor]:
    """The same, and the signed activities of all hidden layers, (L, D, B, C), in one tensor."""
    outputs, batch = len(incoming), len(x)
    activities, zero = x.new_empty(1 + len(hidden), outputs, batch, len(offset)), x.new_zeros(())
    _drive(zero, input_cells(x, outputs), incoming, gain, out=activities[0]).sigmoid_().sub_(offset)
    # A thousand small layers are bound by kernel launches: three per layer, without allocations.
    for sources, magnitudes, targets in zip(activities[:-1], hidden, activities[1:], strict=True):
        _drive(zero, sources, magnitudes, gain, out=targets).sigmoid_().sub_(offset)
    return activities, torch.sigmoid_(_drive(zero, activities[-1], outgoing, gain))[..., 0].T


def _drive(zero: Tensor, activities: Tensor, magnitudes: Tensor, gain: float, out: Tensor | None = None) -> Tensor:
    """gain x activities @ magnitudes. ``zero``: the first argument of baddbmm, ignored because of beta=0."""
    return torch.baddbmm(zero, activities, magnitudes, beta=0, alpha=gain, out=out)
