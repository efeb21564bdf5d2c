"""The rule as an autograd Function: its backward returns minus the update as the gradient of each weight.

An optimizer that subtracts learning rate times gradient then adds the update. Everything that works on gradients works here:
accumulation, clipping, schedules, scaled losses (the rules are positively homogeneous in the error), all-reduce under DDP.
"""

from __future__ import annotations

from typing import Any

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
        ctx: Any, x: Tensor, incoming: Tensor, hidden: Tensor, outgoing: Tensor, offset: Tensor, gain: float, rule: str
    ) -> Tensor:
        activities, outputs = record(x, incoming, hidden, outgoing, offset, gain)
        ctx.save_for_backward(x, activities, outputs)
        ctx.rule = rule
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, activities, outputs = ctx.saved_tensors
        learns = RULES[ctx.rule]
        error = -grad.T.unsqueeze(-1)
        needs_incoming, needs_hidden, needs_outgoing = ctx.needs_input_grad[1:4]
        incoming = hidden = outgoing = None
        if needs_incoming:
            incoming = learns(input_cells(x, len(error)), error).mT.bmm(slope(activities[0])).neg_()
        if needs_hidden:
            hidden = contract(activities, error, ctx.rule).neg_()
        if needs_outgoing:
            outgoing = learns(activities[-1], error).mT.bmm(slope(outputs).T.unsqueeze(-1)).neg_()
        return None, incoming, hidden, outgoing, None, None, None
