"""The sequential reversible schedule: each block's backward rebuilds the block's input and hands it to the block before.

One autograd Function a block, with the parameters among its inputs: their gradients reach them one block after the other
during the backward, so whatever listens there (DDP's all-reduce, hooks, ``torch.autograd.grad``) works as in plain training.
The blocks of one call share a tape, on which the streams travel backwards; between calls nothing is shared.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from holotrain.reversible.ambient import Autocast
from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.half import Half, Kwargs


class Tape:
    """The streams of one call on their way back: ``streams[i]`` is the output of block i, rebuilt by block i + 1."""

    def __init__(self, depth: int) -> None:
        self.last = depth - 1
        self.streams: dict[int, tuple[Tensor, Tensor]] = {}


class _Step:
    """One block in one call: what its Function needs that is no tensor."""

    def __init__(self, tape: Tape, index: int, f: Half, g: Half) -> None:
        self.tape, self.index, self.f, self.g = tape, index, f, g

    @property
    def is_last(self) -> bool:
        return self.index == self.tape.last

    def split(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Parts the keyword tensors, f's first, then g's."""
        count = len(self.f.kwargs.slots)
        return list(tensors[:count]), list(tensors[count : count + len(self.g.kwargs.slots)])


class _ReversibleFunction(torch.autograd.Function):
    """Inputs: the step, x1, x2, the keyword tensors of f and g, the parameters of f and g. Outputs: y1, y2."""

    @staticmethod
    def forward(ctx, step: _Step, x1: Tensor, x2: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        f_tensors, g_tensors = step.split(rest)
        y1 = step.f.forward(x1, x2, f_tensors)
        y2 = step.g.forward(x2, y1, g_tensors)
        ctx.step = step
        # Only the last block keeps its streams; saving the keyword tensors lets autograd notice in-place edits of them.
        ctx.save_for_backward(*((y1, y2) if step.is_last else ()), *f_tensors, *g_tensors)
        return y1, y2

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_y1: Tensor, grad_y2: Tensor):
        step: _Step = ctx.step
        saved = ctx.saved_tensors
        y1, y2 = saved[:2] if step.is_last else step.tape.streams.pop(step.index)
        f_tensors, g_tensors = step.split(saved[2:] if step.is_last else saved)

        x2, through_g, of_g_tensors, of_g = step.g.backward(y2, y1, g_tensors, grad_y2)
        grad_x1 = grad_y1 if through_g is None else grad_y1 + through_g
        del y2, grad_y1, through_g
        x1, through_f, of_f_tensors, of_f = step.f.backward(y1, x2, f_tensors, grad_x1)
        grad_x2 = grad_y2 if through_f is None else grad_y2 + through_f

        if step.index > 0:
            step.tape.streams[step.index - 1] = (x1, x2)
        return None, grad_x1, grad_x2, *of_f_tensors, *of_g_tensors, *of_f, *of_g


def run_recomputing(
    blocks: Sequence[ReversibleBlock], x1: Tensor, x2: Tensor, f_kwargs: dict, g_kwargs: dict
) -> tuple[Tensor, Tensor]:
    """Runs the blocks and stores nothing between them; the backward recomputes one half block at a time."""
    tape = Tape(len(blocks))
    autocast = Autocast.capture(x1.device)
    f_call, f_tensors = Kwargs.take_apart(f_kwargs)
    g_call, g_tensors = Kwargs.take_apart(g_kwargs)
    for index, block in enumerate(blocks):
        f = Half(block.f, [p for p in block.f.parameters() if p.requires_grad], f_call, autocast)
        g = Half(block.g, [p for p in block.g.parameters() if p.requires_grad], g_call, autocast)
        step = _Step(tape, index, f, g)
        x1, x2 = _ReversibleFunction.apply(step, x1, x2, *f_tensors, *g_tensors, *f.parameters, *g.parameters)
    return x1, x2
