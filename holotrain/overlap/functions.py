"""The autograd Functions of linear layers that overlap communication with computation.

Row parallel: input features are sharded, so the output is a sum over ranks; the sum of a group overlaps the next group's
product. Column parallel: output features are sharded, so the input gradient is a sum over ranks; in the backward the sum of a
group overlaps the next group, and the last sums overlap the weight gradient. All-to-all: rows (tokens) or features change ranks
before or after the product; groups are groups of the product's rows, and at the other end each rank's rows are in one piece.

Shape letters: R rows (tokens) of this rank's product, Q rows at the other end of an exchange, P ranks, L rows of one rank's
shard of the sequence, K input features, N output features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from holotrain.overlap.collectives import Work, wait_for
from holotrain.overlap.groups import ALL_GATHER, ALL_TO_ALL, Columns, Job, group_sizes, in_proportion, spans
from holotrain.overlap.overlapped_product import Overlap, product, products, weight_gradients


class RowAllReduce(torch.autograd.Function):
    """x [R, K], weight [N, K], bias [N] or None to y [R, N], whole on every rank.

    Forward: one all-reduce per group. Backward: no communication; dx = dy W is this rank's own.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, overlap: Overlap) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = x.new_empty(len(x), len(weight))
        wait_for(overlap.all_reduce(x, weight.t(), bias, y))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad @ weight if needs_x else None
        return grad_x, *weight_gradients(grad, x, needs_weight, needs_bias), None


class RowReduceScatter(torch.autograd.Function):
    """x [P, L, K], weight [N, K], bias [N] or None to this rank's share y [L, N].

    Forward: one reduce-scatter per group. Backward: one all-gather of dy per group, all launched at once; dx of a group is
    computed while the next ones are gathered.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, overlap: Overlap) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.overlap = overlap
        y = x.new_empty(x.shape[1], len(weight))
        wait_for(overlap.reduce_scatter(x, weight.t(), bias, y))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        collectives = ctx.overlap.collectives
        grad = grad.contiguous()
        rows, inputs = grad.shape
        job = Job(rows, inputs, weight.shape[1], ALL_GATHER, collectives.ranks, grad.dtype, grad.device)
        whole = grad.new_empty(collectives.ranks, *grad.shape)
        under_way = [(rows, collectives.all_gather(whole[:, rows], grad[rows])) for rows in ctx.overlap.spans(job)]
        grad_x = x.new_empty(x.shape) if needs_x else None
        for rows, work in under_way:
            work.wait()
            if grad_x is not None:
                products(whole[:, rows], weight, out=grad_x[:, rows])
        return grad_x, *weight_gradients(whole.flatten(0, 1), x.flatten(0, 1), needs_weight, needs_bias), None


class ColumnAllReduce(torch.autograd.Function):
    """x [R, K], whole on every rank, weight [N, K], bias [N] or None to y [R, N].

    Forward: no communication. Backward: one all-reduce of dx per group.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, overlap: Overlap) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.overlap = overlap
        return product(x, weight.t(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x, works = None, []
        if needs_x:
            grad_x = x.new_empty(x.shape)
            works = ctx.overlap.all_reduce(grad, weight, None, grad_x, covered=needs_weight)
        rest = weight_gradients(grad, x, needs_weight, needs_bias)
        wait_for(works)
        return grad_x, *rest, None


class ColumnReduceScatter(torch.autograd.Function):
    """x [L, K], this rank's share of the sequence, weight [N, K], bias [N] or None to y [P, L, N].

    Forward: one all-gather of x per group, all launched at once; a group is computed while the next ones are gathered.
    Backward: x is gathered again (only the share was kept) while dx is computed; one reduce-scatter of dx per group.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, overlap: Overlap) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.overlap = overlap
        collectives = overlap.collectives
        rows, inputs = x.shape
        job = Job(rows, inputs, len(weight), ALL_GATHER, collectives.ranks, x.dtype, x.device)
        under_way = []
        for rows in overlap.spans(job):
            parts = x.new_empty(collectives.ranks, *x[rows].shape)
            under_way.append((rows, parts, collectives.all_gather(parts, x[rows])))
        y = x.new_empty(collectives.ranks, len(x), len(weight))
        for rows, parts, work in under_way:
            work.wait()
            products(parts, weight.t(), bias, out=y[:, rows])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        collectives = ctx.overlap.collectives
        grad = grad.contiguous()
        whole = x.new_empty(collectives.ranks, *x.shape) if needs_weight else None
        gathering = [collectives.all_gather(whole, x)] if whole is not None and len(x) else []
        grad_x, works = None, []
        if needs_x:
            grad_x = x.new_empty(x.shape)
            works = ctx.overlap.reduce_scatter(grad, weight, None, grad_x, covered=needs_weight)
        wait_for(gathering)
        inputs = None if whole is None else whole.flatten(0, 1)
        rest = weight_gradients(grad.flatten(0, 1), inputs, needs_weight, needs_bias)
        wait_for(works)
        return grad_x, *rest, None


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
        self.cut = list(spans(self.counts[0] if self.even else [sum(group) for group in zip(*self.counts, strict=True)]))

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
        return arranged.unbind(0) if self.even else arranged[0].split([counts[group] for counts in self.counts])

    def of_ranks(self, x: Tensor, group: int) -> list[Tensor]:
        """Each rank's part of a group of x [R, F]."""
        return [x[pieces[group]] for pieces in self.pieces]


class Features:
    """Rows [R, P * F], F features of each row for each rank."""

    def __init__(self, ranks: int, rows: int, sizes: Sequence[int]) -> None:
        self.ranks, self.shape, self.cut = ranks, (1, rows), list(spans(sizes))

    def arranged(self, x: Tensor) -> Tensor:
        return x[None]

    def restored(self, x: Tensor) -> Tensor:
        return x[0]

    def parts(self, arranged: Tensor, group: int) -> Sequence[Tensor]:
        return arranged[0].chunk(self.ranks, 1)


@dataclass
class Exchange:
    """How a product and the rows at the other end belong to ranks.

    Args:
        overlap: the collectives and groups.
        near: rows of the product for each rank; None: each rank has features of every row.
        far: rows at the other end from or for each rank.
        rows: that are cut into groups, the same number on all ranks; None: the most that a rank has.
    """

    overlap: Overlap
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

        def launch(group: int, computed: Tensor) -> Work:
            return self.overlap.collectives.all_to_all(far.of_ranks(out, group), near.parts(computed, group))

        return out, self.overlap.send(near.arranged(x), matrix, bias, near.cut, launch)

    def receive(self, x: Tensor, matrix: Tensor | None, bias: Tensor | None, outputs: int) -> tuple[Tensor, Tensor | None]:
        """Returns the rows [R, K] of the other end x [Q, K / shared], and their product with matrix [K, N], if there is one.

        All groups are sent at once; a group is multiplied while the next ones travel.
        """
        near, far = self._groups(x, x.shape[1] * self.shared, outputs, before=True)
        whole = x.new_empty(*near.shape, x.shape[1] * self.shared)
        works = [
            self.overlap.collectives.all_to_all(near.parts(whole[:, rows], group), far.of_ranks(x, group))
            for group, rows in enumerate(near.cut)
        ]
        out = None if matrix is None else x.new_empty(*near.shape, outputs)
        for rows, work in zip(near.cut, works, strict=True):
            work.wait()
            if matrix is not None and out is not None:
                products(whole[:, rows], matrix, bias, out=out[:, rows])
        return near.restored(whole), None if out is None else near.restored(out)

    def _groups(self, x: Tensor, inputs: int, outputs: int, **kind: bool) -> tuple[Rows | Features, Rows]:
        overlap = self.overlap
        if self.rows is not None:
            rows = self.rows
        elif callable(overlap.groups):
            rows = int(overlap.collectives.largest([max(sum(self.near or ()), sum(self.far))], x.device)[0])
        else:  # proportions will do, which need no message between the ranks
            rows = len(overlap.groups) if isinstance(overlap.groups, Columns) else overlap.groups
        self.rows = rows
        job = Job(rows, inputs, outputs, ALL_TO_ALL, overlap.collectives.ranks, x.dtype, x.device, **kind)
        sizes, _ = group_sizes(overlap.groups, job, overlap.collectives)
        near = Features(overlap.collectives.ranks, self.far[0], sizes) if self.near is None else Rows(self.near, sizes)
        return near, Rows(self.far, sizes)


class LinearAllToAll(torch.autograd.Function):
    """x [R, K], weight [N, K], bias [N] or None to y [Q, N], or [Q, N / P] if features are exchanged.

    Forward: the all-to-all of a group overlaps the product of the next. Backward: dy is exchanged back in groups, all launched
    at once; dx of a group is computed while the next ones travel.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, exchange: Exchange) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.exchange = exchange
        y, works = exchange.send(x, weight.t(), bias)
        wait_for(works)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        whole, grad_x = ctx.exchange.receive(grad, weight if needs_x else None, None, weight.shape[1])
        return grad_x, *weight_gradients(whole, x, needs_weight, needs_bias), None


class AllToAllLinear(torch.autograd.Function):
    """x [Q, K], or [Q, K / P] if features are exchanged, weight [N, K], bias [N] or None to y [R, N].

    Forward: all groups are launched at once; a group is computed while the next ones travel. Backward: the all-to-all of a
    group of dx overlaps the product of the next, and the last ones travel while the weight gradient is computed.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, exchange: Exchange) -> Tensor:
        whole, y = exchange.receive(x, weight.t(), bias, len(weight))
        ctx.save_for_backward(whole, weight)
        ctx.exchange = exchange
        assert y is not None  # with a matrix there is a product
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        whole, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x, works = None, []
        if needs_x:
            grad_x, works = ctx.exchange.send(grad, weight, None, covered=needs_weight)
        rest = weight_gradients(grad, whole, needs_weight, needs_bias)
        wait_for(works)
        return grad_x, *rest, None
