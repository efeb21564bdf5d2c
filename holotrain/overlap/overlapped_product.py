"""Products whose results are communicated in groups: a group is under way while the next one is computed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from holotrain.overlap import signals
from holotrain.overlap.collectives import Collectives, Holding, Work
from holotrain.overlap.groups import ALL_REDUCE, REDUCE_SCATTER, Grouping, Job, group_sizes, spans


def product(x: Tensor, matrix: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """[R, K] x [K, N] (+ [N]) to [R, N]."""
    return torch.mm(x, matrix, out=out) if bias is None else torch.addmm(bias, x, matrix, out=out)


def products(x: Tensor, matrix: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """[P, R, K] x [K, N] (+ [N]) to [P, R, N]. x and out may be slices of larger tensors along R; they are not copied."""
    matrices = matrix.expand(len(x), -1, -1)
    return torch.bmm(x, matrices, out=out) if bias is None else torch.baddbmm(bias, x, matrices, out=out)


def weight_gradients(
    grad: Tensor, x: Tensor | None, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weight and bias: dy [R, N], x [R, K] to [N, K] and [N]; None if not needed."""
    return grad.t() @ x if needs_weight and x is not None else None, grad.sum(0) if needs_bias else None


@dataclass(frozen=True)
class Overlap:
    """How a layer communicates: its collectives, its groups, and whether one product signals its groups where possible."""

    collectives: Collectives
    groups: Grouping
    signals: bool = False

    def spans(self, job: Job) -> Iterable[slice]:
        return spans(group_sizes(self.groups, job, self.collectives)[0])

    def all_reduce(self, x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, covered: bool = False) -> list[Work]:
        """Computes x [R, K] times matrix [K, N] and launches its sum over ranks into out [R, N]; bias [N] is added once."""
        return self._reduced(ALL_REDUCE, self._reduced_in_turn, x, matrix, bias, out, covered)

    def reduce_scatter(self, x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, covered: bool = False) -> list[Work]:
        """As :meth:`all_reduce`, with x [P, L, K]: launches the sum of this rank's share into out [L, N]."""
        return self._reduced(REDUCE_SCATTER, self._scattered, x, matrix, bias, out, covered)

    def send(
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
        rows, inputs = x.shape[-2:]
        job = Job(rows, inputs, matrix.shape[1], collective, self.collectives.ranks, x.dtype, x.device, covered)
        sizes, columns = group_sizes(self.groups, job, self.collectives)
        cut = list(spans(sizes))
        if not columns:
            summand = bias if self.collectives.rank == 0 else None  # added once, in the product: no extra pass over the output
            return launch(x, matrix, summand, out, cut)
        # Columns of a product are rows of the transposed product, where each group is contiguous.
        turned = out.new_empty(out.shape[::-1])
        works = launch(matrix.t().expand(*x.shape[:-2], -1, -1), x.mT, None, turned, cut)
        return [
            Holding(work, turned, partial(_put, turned[group].t(), None if bias is None else bias[group], out[:, group]))
            for work, group in zip(works, cut, strict=True)
        ]

    def _reduced_in_turn(self, x, matrix, bias, out, cut) -> list[Work]:
        if self.signals and cut and signals.supported(x):
            return signals.send_sum(x, matrix, bias, out, cut, self.collectives)
        works = []
        for rows in cut:
            product(x[rows], matrix, bias, out=out[rows])
            works.append(self.collectives.all_reduce(out[rows]))
        return works

    def _scattered(self, x, matrix, bias, out, cut) -> list[Work]:
        return self.send(x, matrix, bias, cut, lambda group, parts: self.collectives.reduce_scatter(out[cut[group]], parts))


def _put(result: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        out.copy_(result)
    else:
        torch.add(result, bias, out=out)
