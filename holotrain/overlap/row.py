"""A linear layer whose input features are shared out: every rank's product is a summand of the output.

Shape letters: R rows (tokens), P ranks, L rows of one rank's share of the sequence, K this rank's input features, N output
features. A group's sum travels while the product of the next group is computed.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from holotrain.overlap.collectives import Collectives, wait_for
from holotrain.overlap.groups import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Grouping, Job, group_sizes, spans
from holotrain.overlap.products import product, products, weight_gradients


class RowAllReduce(torch.autograd.Function):
    """x [R, K], weight [N, K], bias [N] or None to y [R, N], whole on every rank.

    Forward: an all-reduce a group. Backward: none; dx = dy W is this rank's own.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, link: Collectives, groups: Grouping) -> Tensor:
        ctx.save_for_backward(x, weight)
        job = Job(*x.shape, len(weight), ALL_REDUCE, link.ranks, x.dtype, x.device)
        summand = bias if link.rank == 0 else None  # added once, within a product: no pass over the output of its own
        y = x.new_empty(len(x), len(weight))
        works = []
        for rows in spans(group_sizes(groups, job, link)):
            product(x[rows], weight.t(), summand, out=y[rows])
            works.append(link.all_reduce(y[rows]))
        wait_for(works)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x = grad @ weight if needs_x else None
        return grad_x, *weight_gradients(grad, x, needs_weight, needs_bias), None, None


class RowReduceScatter(torch.autograd.Function):
    """x [P, L, K], weight [N, K], bias [N] or None to this rank's share y [L, N].

    Forward: a reduce-scatter a group. Backward: an all-gather of dy a group, all launched at once; dx of a group is computed
    while the next ones travel.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, link: Collectives, groups: Grouping) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.link, ctx.groups = link, groups
        job = Job(*x.shape[1:], len(weight), REDUCE_SCATTER, link.ranks, x.dtype, x.device)
        summand = bias if link.rank == 0 else None
        y = x.new_empty(x.shape[1], len(weight))
        under_way = []
        for rows in spans(group_sizes(groups, job, link)):
            parts = products(x[:, rows], weight.t(), summand)
            under_way.append((link.reduce_scatter(y[rows], parts), parts))
        wait_for(work for work, _ in under_way)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        link = ctx.link
        grad = grad.contiguous()
        job = Job(*grad.shape, weight.shape[1], ALL_GATHER, link.ranks, grad.dtype, grad.device)
        whole = grad.new_empty(link.ranks, *grad.shape)
        cut = spans(group_sizes(ctx.groups, job, link))
        under_way = [(rows, link.all_gather(whole[:, rows], grad[rows])) for rows in cut]
        grad_x = x.new_empty(x.shape) if needs_x else None
        for rows, work in under_way:
            work.wait()
            if needs_x:
                products(whole[:, rows], weight, out=grad_x[:, rows])
        return grad_x, *weight_gradients(whole.flatten(0, 1), x.flatten(0, 1), needs_weight, needs_bias), None, None
