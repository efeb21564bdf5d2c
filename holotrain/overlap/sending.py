"""Sums over ranks, sent in groups of rows while the next group is computed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor

from holotrain.overlap import signals
from holotrain.overlap.collectives import Collectives, Work
from holotrain.overlap.groups import ALL_REDUCE, REDUCE_SCATTER, Grouping, Job, group_sizes, spans
from holotrain.overlap.products import product, products


@dataclass(frozen=True)
class Sender:
    """How a layer communicates: its collectives, its groups, and whether one product signals its groups where possible."""

    link: Collectives
    groups: Grouping
    signals: bool = False

    def spans(self, job: Job) -> Iterable[slice]:
        return spans(group_sizes(self.groups, job, self.link))

    def sum(self, x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, covered: bool = False) -> list[Work]:
        """Computes x [R, K] times matrix [K, N] (+ bias [N]) into out [R, N] and launches its sum over ranks."""
        job = Job(*x.shape, matrix.shape[1], ALL_REDUCE, self.link.ranks, x.dtype, x.device, covered)
        cut = list(self.spans(job))
        if self.signals and cut and signals.supported(x):
            return signals.send_sum(x, matrix, bias, out, cut, self.link)
        works = []
        for rows in cut:
            product(x[rows], matrix, bias, out=out[rows])
            works.append(self.link.all_reduce(out[rows]))
        return works

    def shares(self, x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, covered: bool = False) -> list[Work]:
        """Computes x [P, L, K] times matrix [K, N] (+ bias [N]) and launches the sum of this rank's share into out [L, N]."""
        job = Job(*x.shape[1:], matrix.shape[1], REDUCE_SCATTER, self.link.ranks, x.dtype, x.device, covered)
        cut = list(self.spans(job))
        if self.signals and cut and signals.supported(x):
            return signals.send_shares(x, matrix, bias, out, cut, self.link)
        works = []
        for rows in cut:
            parts = products(x[:, rows], matrix, bias)
            works.append(Holding(self.link.reduce_scatter(out[rows], parts), parts))
        return works


@dataclass
class Holding:
    """Keeps the input of a collective alive until it has been waited for."""

    work: Work
    read: Tensor

    def wait(self) -> None:
        self.work.wait()
        del self.read
