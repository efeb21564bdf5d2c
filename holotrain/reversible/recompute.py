"""The recomputing schedules: the backward of each block rebuilds the block's input and passes it to the previous block.

Each block is one autograd Function, and its parameters are inputs of the Function. So parameters get their gradients block by
block during the backward, and DDP's all-reduce, FSDP2's reduce-scatter, hooks and ``torch.autograd.grad`` work as usual. The
Function runs inside the block's call, so hooks of the block run before and after it.

The blocks of one call share a tape, which passes the rebuilt streams on; calls share nothing. With lanes that overlap
(:mod:`holotrain.reversible.lanes`) the half blocks form a pipeline: the next half is recomputed while gradients of one half are
computed, and at most two of their graphs are alive. This is PaReprop (arXiv 2306.09342) in units of half blocks; the published
form works in whole blocks and keeps four graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.drift import Witness
from holotrain.reversible.half import Call, Half, parts_of
from holotrain.reversible.keywords import Keywords
from holotrain.reversible.lanes import Lanes, Started
from holotrain.reversible.ranges import in_trace
from holotrain.reversible.refusals import Seen, require_untouched, shards_itself
from holotrain.reversible.trial import Overlap


class Tape:
    """What the blocks of one call share.

    ``streams[i]`` is (y1, y2) of block i, rebuilt by block i + 1; ``ahead[i]`` is the recomputation of its g, where one was
    started before block i's turn.
    """

    def __init__(self, blocks: Sequence[ReversibleBlock], call: Call, overlap: Overlap | None, witness: Witness | None) -> None:
        self.last = len(blocks) - 1
        self.work = (len(blocks), id(blocks[0]), call.kept is not None, call.grid is not None)
        self.streams: dict[int, tuple[Tensor, Tensor]] = {}
        self.ahead: dict[int, Started] = {}
        self.lanes = Lanes()
        self.stop_clock: Callable[[], None] | None = None
        self.overlap = overlap
        self.witness = witness

    def begin(self, stream: Tensor, movable: bool) -> None:
        """At the last block's backward: forgets what an earlier one left, chooses the lanes."""
        self.streams.clear()
        self.ahead.clear()
        self.lanes, self.stop_clock = Lanes(), None
        if self.overlap is not None:
            self.lanes, self.stop_clock = self.overlap.begin(stream, movable, self.work)

    def end(self) -> None:
        """At the end of the backward of the first block that has one."""
        if self.stop_clock is not None:
            self.stop_clock()


class _Step:
    """One block in one call; what its Function needs that is no tensor.

    ``number`` is the block's in its sequence, of which the call may run a part. The step knows the one before it and not the
    other way round: a graph that is never differentiated then frees all at once.
    """

    def __init__(self, tape: Tape, block: ReversibleBlock, call: Call, before: _Step | None, number: int) -> None:
        self.tape, self.block, self.call, self.before, self.number = tape, block, call, before, number
        self.index = 0 if before is None else before.index + 1
        self.f_parts, self.g_parts = parts_of(block.f), parts_of(block.g)
        stays = shards_itself(block, (*self.f_parts, *self.g_parts))
        self.movable = not stays and (before is None or before.movable)

    @property
    def is_last(self) -> bool:
        return self.index == self.tape.last

    def __call__(self, x1: Tensor, x2: Tensor, f_kwargs: dict, g_kwargs: dict) -> tuple[Tensor, Tensor]:
        """Runs the block: called from within its ``forward``."""
        f_keywords, f_tensors = Keywords.take_apart(f_kwargs)
        g_keywords, g_tensors = Keywords.take_apart(g_kwargs)
        self.f = Half(f"{self.number}.f", self.block.f, self.f_parts, f_keywords, self.call)
        self.g = Half(f"{self.number}.g", self.block.g, self.g_parts, g_keywords, self.call)
        self.entered = Seen(x1, x2)
        parameters = (*self.f.parameters, *self.g.parameters)
        y1, y2 = self.block.placed(*_ReversibleFunction.apply(self, x1, x2, *f_tensors, *g_tensors, *parameters))
        self.left = Seen(y1, y2)
        return y1, y2

    def split(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Parts the keyword tensors, f's first, then g's."""
        count = len(self.f.keywords.slots)
        return list(tensors[:count]), list(tensors[count : count + len(self.g.keywords.slots)])


class _ReversibleFunction(torch.autograd.Function):
    """Inputs: the step, x1, x2, the keyword tensors of f and g, the parameters of f and g. Outputs: y1, y2."""

    @staticmethod
    def forward(ctx, step: _Step, x1: Tensor, x2: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        f_tensors, g_tensors = step.split(rest)
        y1 = step.f.forward(x1, x2, f_tensors)
        y2 = step.g.forward(x2, y1, g_tensors)
        ctx.step = step
        ctx.set_materialize_grads(False)
        # Only the last block keeps its streams; saving the keyword tensors lets autograd notice in-place edits of them.
        ctx.save_for_backward(*((y1, y2) if step.is_last else ()), *f_tensors, *g_tensors)
        return y1, y2

    @staticmethod
    def backward(ctx, grad_y1: Tensor | None, grad_y2: Tensor | None):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "a recomputed block does not support second derivatives (create_graph=True); "
                'use backward="autograd" or "checkpoint"'
            )
        with torch.no_grad():
            return _backward(ctx, grad_y1, grad_y2)


def _backward(ctx, grad_y1: Tensor | None, grad_y2: Tensor | None):
    step: _Step = ctx.step
    tape, saved = step.tape, ctx.saved_tensors
    if step.is_last:
        y1, y2, *saved = saved
        tape.begin(y1, step.movable)
    elif step.index in tape.streams:
        y1, y2 = tape.streams.pop(step.index)
    else:
        raise RuntimeError(
            f"the loss depends on the output of block {step.index} but not on that of the last block, so the output cannot "
            f"be rebuilt; make block {step.index} the last block of a separate sequence"
        )
    f_tensors, g_tensors = step.split(saved)
    lanes = tape.lanes
    first = step.index == 0 or not any(ctx.needs_input_grad[1:3])

    of_g = tape.ahead.pop(step.index, None) or lanes.start_g(step.g, partial(step.g.recompute, y2, y1, g_tensors))
    g = of_g.result()
    x2 = g.target
    of_f = lanes.start_f(step.f, partial(step.f.recompute, y1, x2, f_tensors))
    del of_g, y2
    with in_trace("gradients", step.g.name):
        g_gradients = g.differentiate(grad_y2)
        grad_x1 = _sum(grad_y1, g_gradients.source)
    mark = lanes.mark()
    del g
    f = of_f.result()
    x1 = f.target
    del of_f, y1

    if not first:
        before = step.before
        of_before = tape.streams[before.index] = before.block.placed(x1, x2)
        if lanes.overlapped:
            again = partial(before.g.recompute, *reversed(of_before), g_tensors)  # all blocks share the keyword tensors
            tape.ahead[before.index] = lanes.start_g(before.g, again)
    with lanes.differentiating_f(mark), in_trace("gradients", step.f.name):
        f_gradients = f.differentiate(grad_x1)
        grad_x2 = _sum(grad_y2, f_gradients.source)
    if first:
        tape.end()
    if step.index == 0 and tape.witness is not None:
        tape.witness.compare(x1, x2)

    gradients = (*f_gradients.tensors, *g_gradients.tensors, *f_gradients.parameters, *g_gradients.parameters)
    return None, grad_x1, grad_x2, *gradients


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return a if b is None else b
    return a + b


def run_recomputing(
    blocks: Sequence[ReversibleBlock],
    x1: Tensor,
    x2: Tensor,
    f_kwargs: dict,
    g_kwargs: dict,
    call: Call,
    overlap: Overlap | None = None,
    witness: Witness | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Runs the blocks without storing activations between them. The backward recomputes one half at a time.

    ``first`` is the number of the first block, for traces.
    """
    tape = Tape(blocks, call, overlap, witness)
    steps: list[_Step] = []
    for number, block in enumerate(blocks, first):
        steps.append(_Step(tape, block, call, steps[-1] if steps else None, number))
    if witness is not None:
        witness.remember(x1, x2)
    for step in steps:
        given = Seen(x1, x2)
        with in_trace("forward", step.number):
            x1, x2 = step.block(x1, x2, f_kwargs, g_kwargs, through=step)
        require_untouched(step.block, given, step.entered, step.left, Seen(x1, x2))
        del step.entered, step.left
    return x1, x2
