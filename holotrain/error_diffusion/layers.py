"""The forward pass, in signed activities.

A target of sign s has the output sigmoid(2 u / u0), where u = s v and v is the sum of the sources' signed activities times
magnitudes. The activities already contain the signs of the sources. Since sigmoid(-v) = 1 - sigmoid(v), the signed activity is
sigmoid(2 v / u0) for an excitatory cell and sigmoid(2 v / u0) - 1 for an inhibitory one, so weights need no sign.

Shapes: magnitudes are matrices from all source cells to all target cells: incoming (D, 2 I, C), hidden (L - 1, D, C, C),
outgoing (D, C, 1). S constant cells reach every layer: ``constants`` (S,) are their signed activities, thresholds (L, D, S, C)
and last (D, S, 1) their magnitudes. ``offset`` (C,) is 0 for excitatory and 1 for inhibitory cells; ``gain`` is 2 / u0.
"""

from __future__ import annotations

import torch
from torch import Tensor


def input_cells(x: Tensor, outputs: int) -> Tensor:
    """Every input drives an excitatory and an inhibitory cell: (B, I) -> signed activities (D, B, 2 I)."""
    return torch.cat([x, -x], dim=1).expand(outputs, -1, -1)


def propagate(
    x: Tensor, incoming: Tensor, hidden: Tensor, outgoing: Tensor, thresholds: Tensor, last: Tensor, constants: Tensor,
    offset: Tensor, gain: float,
) -> Tensor:  # fmt: skip
    """The outputs (B, D) of inputs (B, I), with plain autograd."""
    first, *rest, final = _at_rest(thresholds, last, constants)
    activities = torch.sigmoid(_drive(first, input_cells(x, len(incoming)), incoming, gain)) - offset
    for threshold, magnitudes in zip(rest, hidden, strict=True):
        activities = torch.sigmoid(_drive(threshold, activities, magnitudes, gain)) - offset
    return torch.sigmoid(_drive(final, activities, outgoing, gain))[..., 0].T


def record(
    x: Tensor, incoming: Tensor, hidden: Tensor, outgoing: Tensor, thresholds: Tensor, last: Tensor, constants: Tensor,
    offset: Tensor, gain: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same, and the signed activities of all hidden layers, (L, D, B, C), in one tensor."""
    outputs, batch = len(incoming), len(x)
    activities = x.new_empty(len(thresholds), outputs, batch, len(offset))
    first, *rest, final = _at_rest(thresholds, last, constants)
    _drive(first, input_cells(x, outputs), incoming, gain, out=activities[0]).sigmoid_().sub_(offset)
    # A thousand small layers are bound by kernel launches: three per layer, without allocations.
    for threshold, sources, magnitudes, targets in zip(rest, activities[:-1], hidden, activities[1:], strict=True):
        _drive(threshold, sources, magnitudes, gain, out=targets).sigmoid_().sub_(offset)
    return activities, torch.sigmoid_(_drive(final, activities[-1], outgoing, gain))[..., 0].T


def _at_rest(thresholds: Tensor, last: Tensor, constants: Tensor) -> list[Tensor]:
    """What constant cells add to the sums of each layer, (D, 1, C), and the outputs, (D, 1, 1); scalars if there are none."""
    if not len(constants):
        return [last.new_zeros(())] * (len(thresholds) + 1)
    return [*(constants @ thresholds).unsqueeze(-2), (constants @ last).unsqueeze(-2)]


def _drive(threshold: Tensor, activities: Tensor, magnitudes: Tensor, gain: float, out: Tensor | None = None) -> Tensor:
    """gain x (threshold + activities @ magnitudes). A scalar threshold is ignored, which saves a copy."""
    return torch.baddbmm(threshold, activities, magnitudes, beta=gain * bool(threshold.ndim), alpha=gain, out=out)
