"""A linear layer whose input features are sharded: the output is a sum over ranks.

Shape letters: R rows (tokens), P ranks, L rows of one rank's share of the sequence, K this rank's input features, N output
features. The sum of a group overlaps the product of the next group.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from holotrain.overlap.collectives import wait_for
from holotrain.overlap.groups import ALL_GATHER, Job
from holotrain.overlap.products import products, weight_gradients
from holotrain.overlap.sending import Sender


class RowAllReduce(torch.autograd.Function):
    """x [R, K], weight [N, K], bias [N] or None to y [R, N], whole on every rank.

    Forward: one all-reduce per group. Backward: no communication; dx = dy W is this rank's own.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, sender: Sender) -> Tensor:
        ctx.save_for_backward(x, weight)
        y = x.new_empty(len(x), len(weight))
        wait_for(sender.sum(x, weight.t(), bias, y))
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
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None, sender: Sender) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.sender = sender
        y = x.new_empty(x.shape[1], len(weight))
        wait_for(sender.shares(x, weight.t(), bias, y))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        link = ctx.sender.link
        grad = grad.contiguous()
        job = Job(*grad.shape, weight.shape[1], ALL_GATHER, link.ranks, grad.dtype, grad.device)
        whole = grad.new_empty(link.ranks, *grad.shape)
        under_way = [(rows, link.all_gather(whole[:, rows], grad[rows])) for rows in ctx.sender.spans(job)]
        grad_x = x.new_empty(x.shape) if needs_x else None
        for rows, work in under_way:
            work.wait()
            if needs_x:
                products(whole[:, rows], weight, out=grad_x[:, rows])
        return grad_x, *weight_gradients(whole.flatten(0, 1), x.flatten(0, 1), needs_weight, needs_bias), None
