"""The rule as an autograd Function: its backward returns minus the update as the gradient of each weight.

An optimizer that subtracts learning rate times gradient then adds the update. Everything that works on gradients works here:
accumulation, clipping, schedules, scaled losses (the rules are positively homogeneous in the error), all-reduce under DDP.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from holotrain.error_diffusion.contraction import contract
from holotrain.error_diffusion.layers import input_cells, record
from holotrain.error_diffusion.rules import RULES, slope


class Diffusion(Function):
    """Inputs (B, I) and magnitudes, as in ``layers`` -> outputs (B, D).

    The incoming gradient, (B, D), is minus the error: output minus target for half the squared error. It goes to every layer
    unchanged. The inputs get no gradient, because there is no backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, incoming: Tensor, hidden: Tensor, outgoing: Tensor, thresholds: Tensor, last: Tensor,
        constants: Tensor, offset: Tensor, gain: float, rule: str, output_rate: float,
    ) -> Tensor:  # fmt: skip
        activities, outputs = record(x, incoming, hidden, outgoing, thresholds, last, constants, offset, gain)
        ctx.save_for_backward(x, activities, outputs, constants)
        ctx.rule, ctx.output_rate = rule, output_rate
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, activities, outputs, constants = ctx.saved_tensors
        learns = RULES[ctx.rule]
        error = -grad.T.unsqueeze(-1)
        needs_incoming, needs_hidden, needs_outgoing, needs_thresholds, needs_last = ctx.needs_input_grad[1:6]
        incoming = hidden = outgoing = thresholds = last = None
        slopes = slope(outputs).T.unsqueeze(-1) * -ctx.output_rate
        steady = learns(constants.expand(*error.shape[:2], -1), error).mT
        if needs_incoming:
            incoming = learns(input_cells(x, len(error)), error).mT.bmm(slope(activities[0])).neg_()
        if needs_hidden:
            hidden = contract(activities, error, ctx.rule).neg_()
        if needs_outgoing:
            outgoing = learns(activities[-1], error).mT.bmm(slopes)
        if needs_thresholds:
            thresholds = torch.stack([steady.bmm(slope(layer)) for layer in activities]).neg_()
        if needs_last:
            last = steady.bmm(slopes)
        return None, incoming, hidden, outgoing, thresholds, last, *(None,) * 5
