"""The autograd Functions of linear layers that overlap communication with computation, and the ways to communicate.

A layer sends its result (row parallel, or an all-to-all after the product) or its input (column parallel, or an all-to-all
before it). A way to communicate can be a sum over ranks, whole or in shares of the sequence, or an all-to-all: rows (tokens) or
features change ranks. Groups are groups of the product's rows, and at the other end of an all-to-all each rank's rows are in
one piece.

Shape letters: R rows (tokens) of this rank's product, Q rows at the other end of an exchange, P ranks, L rows of one rank's
shard of the sequence, K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from holotrain.overlap.groups import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    REDUCE_SCATTER,
    Holding,
    Job,
    Work,
    group_sizes,
    in_proportion,
    spans,
    wait_for,
)
from holotrain.overlap.signals import Overlap, product, products, send_signalled


class SendResult(torch.autograd.Function):
    """x [.., K], weight [N, K], bias [N] or None to what the way sends of their product.

    Forward: a group is sent while the next is computed. Backward: dy comes back in groups, all launched at once; dx of a group
    is computed while the next ones travel.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, way: AllReduce) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.way = way
        y, works = way.send(x, weight.t(), bias)
        wait_for(works)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        whole, grad_x = ctx.way.receive(grad, weight if needs_x else None, None, weight.shape[1])
        whole = whole.flatten(0, -2)
        grad_weight = whole.t() @ x.flatten(0, -2) if needs_weight else None
        return grad_x, grad_weight, whole.sum(0) if needs_bias else None, None


class SendInput(torch.autograd.Function):
    """x, weight [N, K], bias [N] or None to the product [.., N] of what the way receives of x.

    Forward: all groups are launched at once; a group is computed while the next ones travel. Backward: a group of dx is sent
    while the next is computed, and the last ones travel while the weight gradient is computed.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, way: AllReduce) -> Tensor:
        share, y = way.receive(x, weight.t(), bias, len(weight), again=True)
        ctx.save_for_backward(share, weight)
        ctx.way = way
        assert y is not None  # with a matrix there is a product
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        share, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad = grad.contiguous()
        x, gathering = ctx.way.again(share) if needs_weight else (share, [])
        grad_x, works = ctx.way.send(grad, weight, None, covered=needs_weight) if needs_x else (None, [])
        wait_for(gathering)
        grad = grad.flatten(0, -2)
        grad_weight = grad.t() @ x.flatten(0, -2) if needs_weight else None
        grad_bias = grad.sum(0) if needs_bias else None
        wait_for(works)
        return grad_x, grad_weight, grad_bias, None


@dataclass
class AllReduce:
    """Rows [R, ..] are whole on every rank: what is sent is a sum over ranks, and there is nothing to receive."""

    overlap: Overlap
    collective = ALL_REDUCE

    def send(self, x: Tensor, matrix: Tensor, bias: Tensor | None, covered: bool = False) -> tuple[Tensor, list[Work]]:
        """x [R, K] times matrix [K, N] (+ bias [N], once): returns the sum over ranks [R, N], and what to wait for."""
        link, (rows, inputs) = self.overlap.collectives, x.shape[-2:]
        job = Job(rows, inputs, matrix.shape[1], self.collective, link.ranks, x.dtype, x.device, covered)
        sizes, columns = group_sizes(self.overlap.groups, job, link)
        cut, out = spans(sizes), x.new_empty(rows, matrix.shape[1])
        if not columns:
            summand = bias if link.rank == 0 else None  # added once, in the product: no extra pass over the output
            return out, self._send_sum(x, matrix, summand, cut, out)
        # Columns of a product are rows of the transposed product, where each group is contiguous.
        turned = out.new_empty(out.shape[::-1])
        works = self._send_sum(matrix.t().expand(*x.shape[:-2], -1, -1), x.mT, None, cut, turned)
        for number, group in enumerate(cut):
            summand = 0 if bias is None else bias[group]
            put = partial(torch.add, turned[group].t(), summand, out=out[:, group])
            works[number] = Holding(works[number], turned, put)
        return out, works

    def _send_sum(self, x: Tensor, matrix: Tensor, bias: Tensor | None, cut: list[slice], out: Tensor) -> list[Work]:
        """Computes the product in groups, and launches the sum of each over ranks into its rows of out [R, N]."""
        link = self.overlap.collectives
        if self.overlap.signals_of(x, matrix) and cut:
            return send_signalled(x, matrix, bias, [[rows] for rows in cut], lambda group, rows: link.all_reduce(rows), out)
        works = []
        for rows in cut:
            product(x[rows], matrix, bias, out=out[rows])
            works.append(link.all_reduce(out[rows]))
        return works

    def receive(
        self, x: Tensor, matrix: Tensor | None, bias: Tensor | None, outputs: int, again: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the rows of all ranks, and their product with matrix [K, ``outputs``] (+ bias), if there is one.

        With ``again`` it returns in place of the rows what :meth:`again` needs to bring them back.
        """
        return x, None if matrix is None else product(x, matrix, bias)

    def again(self, share: Tensor) -> tuple[Tensor, list[Work]]:
        """The rows that :meth:`receive` has received, and what to wait for before they are read."""
        return share, []


class ReduceScatter(AllReduce):
    """Each rank has a share [L, ..] of the sequence: a sum is scattered, and shares are gathered to [P, L, ..].

    The rows that are gathered are not kept: only the share is, and is gathered again.
    """

    collective = REDUCE_SCATTER

    def _send_sum(self, x: Tensor, matrix: Tensor, bias: Tensor | None, cut: list[slice], out: Tensor) -> list[Work]:
        scatter = self.overlap.collectives.reduce_scatter
        return self.overlap.send(x, matrix, bias, cut, lambda group, parts: scatter(out[cut[group]], parts))

    def receive(
        self, x: Tensor, matrix: Tensor | None, bias: Tensor | None, outputs: int, again: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        x, collectives = x.contiguous(), self.overlap.collectives
        rows, inputs = x.shape
        job = Job(rows, inputs, outputs, ALL_GATHER, collectives.ranks, x.dtype, x.device)
        whole = None if again else x.new_empty(collectives.ranks, *x.shape)
        under_way = []
        for rows in spans(group_sizes(self.overlap.groups, job, collectives)[0]):
            parts = x.new_empty(collectives.ranks, *x[rows].shape) if whole is None else whole[:, rows]
            under_way.append((rows, parts, collectives.all_gather(parts, x[rows])))
        out = None if matrix is None else x.new_empty(collectives.ranks, len(x), outputs)
        _multiply(under_way, matrix, bias, out)
        return x if whole is None else whole, out

    def again(self, share: Tensor) -> tuple[Tensor, list[Work]]:
        whole = share.new_empty(self.overlap.collectives.ranks, *share.shape)
        return whole, [self.overlap.collectives.all_gather(whole, share)] if len(share) else []


def _multiply(
    arriving: Iterable[tuple[slice, Tensor, Work]], matrix: Tensor | None, bias: Tensor | None, out: Tensor | None
) -> None:
    """Waits for each group, and multiplies it into its rows of out [P, L, N], if there is a matrix."""
    for rows, parts, work in arriving:
        work.wait()
        if matrix is not None and out is not None:
            products(parts, matrix, bias, out=out[:, rows])


class Rows:
    """Rows [R, F], ``lengths[rank]`` of them for each rank, each rank's rows cut in the proportion of ``sizes``.

    ``arranged`` puts the rows of a group next to each other: a view if all ranks have equally many, otherwise a copy.
    """

    def __init__(self, lengths: Sequence[int], sizes: Sequence[int]) -> None:
        self.counts = [in_proportion(sizes, length) for length in lengths]  # [rank][group]
        starts = accumulate(lengths, initial=0)
        self.pieces = [
            [slice(start + rows.start, start + rows.stop) for rows in spans(counts)]
            for start, counts in zip(starts, self.counts, strict=False)
        ]
        self.even = len(set(lengths)) == 1
        self.shape = (len(lengths), lengths[0]) if self.even else (1, sum(lengths))
        self.cut = spans(self.counts[0] if self.even else [sum(group) for group in zip(*self.counts, strict=True)])

    def arranged(self, x: Tensor) -> Tensor:
        """[R, F] to [P, R / P, F], or to [1, R, F] with the groups one after the other."""
        if not self.even and len(self.cut) > 1:
            x = torch.cat([x[piece] for group in zip(*self.pieces, strict=True) for piece in group])
        return x.unflatten(0, self.shape)

    def restored(self, x: Tensor) -> Tensor:
        """Undoes ``arranged``."""
        if self.even or len(self.cut) <= 1:
            return x.flatten(0, 1)
        parts = x[0].split([count for group in zip(*self.counts, strict=True) for count in group])
        return torch.cat([part for rank in range(len(self.counts)) for part in parts[rank :: len(self.counts)]])

    def parts(self, arranged: Tensor, group: int) -> Sequence[Tensor]:
        """Each rank's part of the arranged rows of a group."""
        return arranged.unbind(0) if self.even else self.split(arranged[0], group)

    def of_ranks(self, x: Tensor, group: int) -> list[Tensor]:
        """Each rank's part of a group of x [R, F]."""
        return [x[pieces[group]] for pieces in self.pieces]

    def pieces_of_groups(self) -> list[Sequence[slice]]:
        """The rows of each group, rank by rank."""
        return [*zip(*self.pieces, strict=True)]

    def split(self, rows: Tensor, group: int) -> Sequence[Tensor]:
        """Each rank's part of the rows of a group, which follow each other."""
        return rows.split([counts[group] for counts in self.counts])


class Features:
    """Rows [R, P * F], F features of each row for each rank."""

    def __init__(self, ranks: int, rows: int, sizes: Sequence[int]) -> None:
        self.ranks, self.shape, self.cut = ranks, (1, rows), spans(sizes)

    def arranged(self, x: Tensor) -> Tensor:
        return x[None]

    def restored(self, x: Tensor) -> Tensor:
        return x[0]

    def parts(self, arranged: Tensor, group: int) -> Sequence[Tensor]:
        return self.split(arranged[0], group)

    def pieces_of_groups(self) -> list[Sequence[slice]]:
        return [[rows] for rows in self.cut]

    def split(self, rows: Tensor, group: int) -> Sequence[Tensor]:
        return rows.chunk(self.ranks, 1)


ANY_ROWS = 2**20
"""Rows that are cut into a number of groups, where only the proportions of the groups matter."""


@dataclass
class AllToAll(AllReduce):
    """Rows or features change ranks: how a product and the rows at the other end belong to ranks.

    Args:
        overlap: the collectives and groups.
        near: rows of the product for each rank; None: each rank has features of every row.
        far: rows at the other end from or for each rank.
        rows: that are cut into groups, the same number on all ranks; None: the most that a rank has.
    """

    near: Sequence[int] | None
    far: Sequence[int]
    rows: int | None

    @property
    def shared(self) -> int:
        """The number of ranks that share the features of a row."""
        return self.overlap.collectives.ranks if self.near is None else 1

    def send(self, x: Tensor, matrix: Tensor, bias: Tensor | None, covered: bool = False) -> tuple[Tensor, list[Work]]:
        """x [R, K] times matrix [K, N] (+ bias [N]): returns the other end [Q, N / shared], and what to wait for."""
        near, far = self._groups(x, x.shape[1], matrix.shape[1], covered=covered)
        out = x.new_empty(sum(self.far), matrix.shape[1] // self.shared)

        fused = self.overlap.signals_of(x, matrix)
        parts_of = near.split if fused else near.parts

        def launch(group: int, computed: Tensor) -> Work:
            return self.overlap.collectives.all_to_all(far.of_ranks(out, group), parts_of(computed, group))

        if fused:
            return out, send_signalled(x, matrix, bias, near.pieces_of_groups(), launch)
        return out, self.overlap.send(near.arranged(x), matrix, bias, near.cut, launch)

    def receive(
        self, x: Tensor, matrix: Tensor | None, bias: Tensor | None, outputs: int, again: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the rows [R, K] of the other end x [Q, K / shared], and their product with matrix [K, N], if there is one.

        All groups are sent at once; a group is multiplied while the next ones travel.
        """
        near, far = self._groups(x, x.shape[1] * self.shared, outputs, before=True)
        whole = x.new_empty(*near.shape, x.shape[1] * self.shared)
        under_way = []
        for group, rows in enumerate(near.cut):
            parts = whole[:, rows]
            work = self.overlap.collectives.all_to_all(near.parts(parts, group), far.of_ranks(x, group))
            under_way.append((rows, parts, work))
        out = None if matrix is None else x.new_empty(*near.shape, outputs)
        _multiply(under_way, matrix, bias, out)
        return near.restored(whole), None if out is None else near.restored(out)

    def _groups(self, x: Tensor, inputs: int, outputs: int, **kind: bool) -> tuple[Rows | Features, Rows]:
        groups, link = self.overlap.groups, self.overlap.collectives
        if self.rows is None and callable(groups):
            self.rows = int(link.largest([max(sum(self.near or ()), sum(self.far))], x.device)[0])
        # For a number of groups proportions will do, which need no message between the ranks.
        rows = ANY_ROWS if self.rows is None else self.rows
        sizes, _ = group_sizes(groups, Job(rows, inputs, outputs, ALL_TO_ALL, link.ranks, x.dtype, x.device, **kind), link)
        near = Features(link.ranks, self.far[0], sizes) if self.near is None else Rows(self.near, sizes)
        return near, Rows(self.far, sizes)
