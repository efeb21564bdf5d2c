"""A linear layer whose output features are sharded: the input gradient is a sum over ranks.

Shape letters: R rows (tokens), P ranks, L rows of one rank's share of the sequence, K input features, N this rank's output
features. In the backward the sum of a group overlaps the next group, and the last sums overlap the weight gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from holotrain.overlap.collectives import wait_for
from holotrain.overlap.groups import ALL_GATHER, Job
from holotrain.overlap.products import product, products, weight_gradients
from holotrain.overlap.sending import Sender


class ColumnAllReduce(torch.autograd.Function):
    """x [R, K], whole on every rank, weight [N, K], bias [N] or None to y [R, N].

    Forward: no communication. Backward: one all-reduce of dx per group.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, sender: Sender) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sender = sender
        return product(x, weight.t(), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_x, works = None, []
        if needs_x:
            grad_x = x.new_empty(x.shape)
            works = ctx.sender.sum(grad, weight, None, grad_x, covered=needs_weight)
        rest = weight_gradients(grad, x, needs_weight, needs_bias)
        wait_for(works)
        return grad_x, *rest, None


class ColumnReduceScatter(torch.autograd.Function):
    """x [L, K], this rank's share of the sequence, weight [N, K], bias [N] or None to y [P, L, N].

    Forward: one all-gather of x per group, all launched at once; a group is computed while the next ones are gathered.
    Backward: x is gathered again (only the share was kept) while dx is computed; one reduce-scatter of dx per group.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, sender: Sender) -> Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.sender = sender
        link = sender.link
        job = Job(*x.shape, len(weight), ALL_GATHER, link.ranks, x.dtype, x.device)
        under_way = []
        for rows in sender.spans(job):
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
        link = ctx.sender.link
        grad = grad.contiguous()
        whole = x.new_empty(link.ranks, *x.shape) if needs_weight else None
        gathering = [link.all_gather(whole, x)] if needs_weight and len(x) else []
        grad_x, works = None, []
        if needs_x:
            grad_x = x.new_empty(x.shape)
            works = ctx.sender.shares(grad, weight, None, grad_x, covered=needs_weight)
        wait_for(gathering)
        inputs = whole.flatten(0, 1) if needs_weight else None
        rest = weight_gradients(grad.flatten(0, 1), inputs, needs_weight, needs_bias)
        wait_for(works)
        return grad_x, *rest, None
