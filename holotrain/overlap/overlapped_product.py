"""Products whose results are communicated in groups: a group is under way while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from holotrain.overlap import signals
from holotrain.overlap.collectives import Collectives, Holding, Work
from holotrain.overlap.groups import Grouping, require_grouping


def product(x: Tensor, matrix: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """[R, K] x [K, N] (+ [N]) to [R, N]."""
    return torch.mm(x, matrix, out=out) if bias is None else torch.addmm(bias, x, matrix, out=out)


def products(x: Tensor, matrix: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """[P, R, K] x [K, N] (+ [N]) to [P, R, N]. x and out may be slices of larger tensors along R; they are not copied."""
    matrices = matrix.expand(len(x), -1, -1)
    return torch.bmm(x, matrices, out=out) if bias is None else torch.baddbmm(bias, x, matrices, out=out)


@dataclass(frozen=True)
class Overlap:
    """How a layer communicates: its collectives, its groups, and whether one product signals its groups where possible.

    Raises:
        TypeError: groups are neither a number, nor columns, nor a callable.
        ValueError: less than one group.
    """

    collectives: Collectives
    groups: Grouping
    signals: bool = False

    def __post_init__(self) -> None:
        require_grouping(self.groups)

    def signals_of(self, x: Tensor, matrix: Tensor) -> bool:
        """Whether one kernel computes a product, and signals its groups."""
        return self.signals and matrix.dim() == 2 and signals.supported(x)

    def send(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None, cut: Sequence[slice], send: Callable[[int, Tensor], Work]
    ) -> list[Work]:
        """Computes x [P, L, K] times matrix [K, N] or [P, K, N] (+ bias [N]) in groups of the rows ``cut`` of L.

        ``send`` gets the number of each finished group and its result [P, rows, N], contiguous. It launches the collective.
        """
        if self.signals_of(x, matrix) and cut:
            ranks, rows, _ = x.shape
            groups = [[slice(r * rows + each.start, r * rows + each.stop) for r in range(ranks)] for each in cut]

            def launch(group: int, finished: Tensor) -> Work:
                return send(group, finished.unflatten(0, (ranks, -1)))

            return signals.send(x.flatten(0, 1), matrix, bias, groups, launch)
        works = []
        for group, rows in enumerate(cut):
            parts = products(x[:, rows], matrix, bias)
            works.append(Holding(send(group, parts), parts))
        return works
