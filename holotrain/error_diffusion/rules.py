"""What a source cell learns from an error.

Let z = s |o| be a cell's *signed activity*: its sign times its output. A weight's magnitude grows by alpha times what the
source learns times the slope |o| (1 - |o|) of the target. With d+ = max(e, 0) and d- = max(-e, 0), Kaneko's rule,

    dw = alpha x |o| (1 - |o|) d(s_source) s_source s_target,    d of an excitatory source d+, of an inhibitory one d-,

changes magnitudes by |x| d(s_source), which is max(z e, 0): never negative, so that no sign can change. An input drives both
cells of a pair, z = x and z = -x; below 0, which the published program does not know, they change roles. The variant of a
widely read article on GPUs, dw = alpha x |o| (1 - |o|) s_target e for all sources, changes them by z e, of either sign.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BACKPROPAGATION = "backpropagation"
"""No rule of diffusion: the true gradient, for comparison."""


def kaneko(activities: Tensor, error: Tensor, out: Tensor | None = None) -> Tensor:
    """Excitatory sources learn from d+, inhibitory ones from d-."""
    return torch.mul(activities, error, out=out).relu_()


def article(activities: Tensor, error: Tensor, out: Tensor | None = None) -> Tensor:
    """Every source learns from d+ - d-."""
    return torch.mul(activities, error, out=out)


RULES: dict[str, Callable[..., Tensor]] = {"kaneko": kaneko, "article": article}
"""By name: signed activities (..., B, C) and the error (..., B, 1) -> what sources learn, (..., B, C), in ``out`` if given."""


def slope(activities: Tensor, out: Tensor | None = None) -> Tensor:
    """|o| (1 - |o|) of signed activities; its constant factor belongs to the learning rate, as in Kaneko's program."""
    sizes = torch.abs(activities, out=out)
    return sizes.addcmul_(sizes, sizes, value=-1)
