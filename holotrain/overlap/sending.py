"""Products whose results are sent in groups while the next group is computed, and sums over ranks sent so."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from holotrain.overlap import signals
from holotrain.overlap.collectives import Collectives, Holding, Work
from holotrain.overlap.groups import ALL_REDUCE, REDUCE_SCATTER, Grouping, Job, group_sizes, spans
from holotrain.overlap.products import product, products


@dataclass(frozen=True)
class Sender:
    """How a layer communicates: its collectives, its groups, and whether one product signals its groups where possible."""

    link: Collectives
    groups: Grouping
    signals: bool = False

    def spans(self, job: Job) -> Iterable[slice]:
        return spans(group_sizes(self.groups, job, self.link)[0])

    def sum(self, x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, covered: bool = False) -> list[Work]:
        """Computes x [R, K] times matrix [K, N] and launches its sum over ranks into out [R, N]; bias [N] is added once."""
        return self._reduced(ALL_REDUCE, self._sum, x, matrix, bias, out, covered)

    def shares(self, x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, covered: bool = False) -> list[Work]:
        """As :meth:`sum`, with x [P, L, K]: launches the sum of this rank's share into out [L, N]."""
        return self._reduced(REDUCE_SCATTER, self._shares, x, matrix, bias, out, covered)

    def parts(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None, cut: Sequence[slice], send: Callable[[int, Tensor], Work]
    ) -> list[Work]:
        """Computes x [P, L, K] times matrix [K, N] or [P, K, N] (+ bias [N]), and calls ``send`` on each finished group.

        Args:
            cut: the rows of each group, of L.
            send: given the number of a group and its result [P, rows, N], contiguous; launches the collective.
        """
        if self.signals and cut and matrix.dim() == 2 and signals.supported(x):
            return signals.send_parts(x, matrix, bias, cut, send)
        works = []
        for group, rows in enumerate(cut):
            parts = products(x[:, rows], matrix, bias)
            works.append(Holding(send(group, parts), parts))
        return works

    def _reduced(self, collective: str, launch, x, matrix, bias, out, covered) -> list[Work]:
        job = Job(*x.shape[-2:], matrix.shape[1], collective, self.link.ranks, x.dtype, x.device, covered)
        sizes, columns = group_sizes(self.groups, job, self.link)
        cut = list(spans(sizes))
        if not columns:
            summand = bias if self.link.rank == 0 else None  # added once, in the product: no extra pass over the output
            return launch(x, matrix, summand, out, cut)
        # Columns of a product are rows of the transposed product, where each group is contiguous.
        turned = out.new_empty(out.shape[::-1])
        works = launch(matrix.t().expand(*x.shape[:-2], -1, -1), x.mT, None, turned, cut)
        return [
            Holding(work, turned, partial(_put, turned[group].t(), None if bias is None else bias[group], out[:, group]))
            for work, group in zip(works, cut, strict=True)
        ]

    def _sum(self, x, matrix, bias, out, cut) -> list[Work]:
        if self.signals and cut and signals.supported(x):
            return signals.send_sum(x, matrix, bias, out, cut, self.link)
        works = []
        for rows in cut:
            product(x[rows], matrix, bias, out=out[rows])
            works.append(self.link.all_reduce(out[rows]))
        return works

    def _shares(self, x, matrix, bias, out, cut) -> list[Work]:
        return self.parts(x, matrix, bias, cut, lambda group, parts: self.link.reduce_scatter(out[cut[group]], parts))


def _put(result: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        out.copy_(result)
    else:
        torch.add(result, bias, out=out)
