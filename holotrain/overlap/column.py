"""A linear layer whose output features are shared out: every rank's input gradient is a summand.

Shape letters: R rows (tokens), P ranks, L rows of one rank's share of the sequence, K input features, N this rank's output
features. In the backward a group's sum travels behind the next group, and the last ones behind the weight's gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from holotrain.overlap.collectives import Collectives, wait_for
from holotrain.overlap.groups import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Grouping, Job, group_sizes, spans
from holotrain.overlap.products import product, products, weight_gradients


class ColumnAllReduce(torch.autograd.Function):
    """x [R, K], whole on every rank, weight [N, K], bias [N] or None to y [R, N].

    Forward: no communication. Backward: an all-reduce of dx a group.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, link: Collectives, groups: Grouping) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.link, ctx.groups = link, groups
        return product(x, weight.t(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x, works = None, []
        if needs_x:
            grad_x = x.new_empty(x.shape)
            job = Job(*grad.shape, x.shape[1], ALL_REDUCE, ctx.link.ranks, grad.dtype, grad.device, covered=needs_weight)
            for rows in spans(group_sizes(ctx.groups, job, ctx.link)):
                product(grad[rows], weight, out=grad_x[rows])
                works.append(ctx.link.all_reduce(grad_x[rows]))
        rest = weight_gradients(grad, x, needs_weight, needs_bias)
        wait_for(works)
        return grad_x, *rest, None, None


class ColumnReduceScatter(torch.autograd.Function):
    """x [L, K], this rank's share of the sequence, weight [N, K], bias [N] or None to y [P, L, N].

    Forward: an all-gather of x a group, all launched at once; a group is computed while the next ones travel. Backward: x is
    gathered once more (only the share was kept) while dx is computed; a reduce-scatter of dx a group.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, link: Collectives, groups: Grouping) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.link, ctx.groups = link, groups
        job = Job(*x.shape, len(weight), ALL_GATHER, link.ranks, x.dtype, x.device)
        under_way = []
        for rows in spans(group_sizes(groups, job, link)):
            parts = x.new_empty(link.ranks, *x[rows].shape)
            under_way.append((rows, parts, link.all_gather(parts, x[rows])))
        y = x.new_empty(link.ranks, len(x), len(weight))
        for rows, parts, work in under_way:
            work.wait()
            products(parts, weight.t(), bias, out=y[:, rows])
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        link = ctx.link
        grad = grad.contiguous()
        whole = x.new_empty(link.ranks, *x.shape) if needs_weight else None
        gathering = [link.all_gather(whole, x)] if needs_weight and len(x) else []
        grad_x, under_way = None, []
        if needs_x:
            grad_x = x.new_empty(x.shape)
            job = Job(len(x), grad.shape[2], x.shape[1], REDUCE_SCATTER, link.ranks, grad.dtype, grad.device, needs_weight)
            for rows in spans(group_sizes(ctx.groups, job, link)):
                parts = products(grad[:, rows], weight)
                under_way.append((link.reduce_scatter(grad_x[rows], parts), parts))
        wait_for(gathering)
        inputs = whole.flatten(0, 1) if needs_weight else None
        rest = weight_gradients(grad.flatten(0, 1), inputs, needs_weight, needs_bias)
        wait_for(work for work, _ in under_way)
        return grad_x, *rest, None, None
