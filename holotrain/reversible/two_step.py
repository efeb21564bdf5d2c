"""The two-step coupling, which makes any stack of blocks ``x -> block(x)`` invertible without a change to the blocks.

    x[k+1] = x[k] + a[k] h(x[k]) - g[k] (x[k] - x[k-1])        h(x) = block(x) - x,  g = +-2^-m, one sign for each sample

With ``g = 0`` and ``a = 1`` this is the model itself. All x are multiples of one step (:mod:`holotrain.reversible.grid`). The
division of x[k-1] by 2^m drops its last m bits. They are kept, packed, so that the backward rebuilds x[k-1] from x[k] and
x[k+1] bit for bit.

The weights ``a`` (:func:`weights`) are such that the last stream is the sum that it is without g, ``x[0] + h(x[0]) + h(x[1]) +
...``: what a step takes from one update, later steps give back. Only the places where the blocks are evaluated are off, by
about ``g[k] h[k-1]``, to one side or the other. At both ends of the stack, where updates are large, m is larger
(:func:`tapered`).

The exact inverse with a random sign is that of BDIA-transformer (arXiv 2407.09093), which draws a sign for each sample and
block and has ``a[k] = 1 + g[k]``. There the sum is off by ``g (h[k] - h[k-1])`` in each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, islice, repeat
from statistics import mean
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holotrain.numeric import counted
from holotrain.reversible import coupling_ops
from holotrain.reversible.block import Coupling
from holotrain.reversible.context import has_no_data
from holotrain.reversible.coupling_ops import is_fused
from holotrain.reversible.grid import Grid
from holotrain.reversible.reads import version_of
from holotrain.reversible.replaced_forward import stream_in

LARGEST_BITS = 6
"""At the ends of a stack. For all blocks together that is at most 6 bits an element more than four for each, and 20 more than
two for each, however deep the stack is: less than one stream in fp32."""


def tapered(bits: int | Sequence[int], depth: int) -> list[int]:
    """The bits m of each of ``depth`` blocks but the first, which has no block before it: ``bits`` in the middle of the stack,
    and towards both ends up to 6, by one a block. A list has those of each block."""
    if isinstance(bits, bool | str) or not isinstance(bits, int | Sequence):
        raise ValueError(f"bits must be a number from 1 to 8, or a list of them, not {bits!r}")
    steps = max(0, depth - 1)
    each = [max(bits, LARGEST_BITS - min(k, steps - 1 - k)) for k in range(steps)] if isinstance(bits, int) else list(bits)
    if len(each) != steps:
        raise ValueError(
            f"bits lists {counted(len(each), 'number')}; {counted(depth, 'block')} take {steps}, since the first keeps none"
        )
    wrong = [m for m in (bits, *each) if not isinstance(m, Sequence) and m not in range(1, 9)]
    if wrong:
        raise ValueError(f"bits must be 1 to 8, not {wrong[0]!r}")
    return each


def bits_in_words(bits: Sequence[int]) -> str:
    """``"4.2 bits an element: 6, 5, 25 x 4, 5, 6"``: the mean of the bits of blocks, and those of each."""
    if not bits:
        return "no bits"
    average = f"{mean(bits):.1f}".removesuffix(".0")
    runs = [(m, len(list(run))) for m, run in groupby(bits)]
    each = ", ".join(str(m) if count == 1 else f"{m}, {m}" if count == 2 else f"{count} x {m}" for m, count in runs)
    return f"{average} bit{'' if average == '1' else 's'} an element: {each}"


def weights(bits: Sequence[int], sign: int) -> list[float]:
    """The weight ``a`` of each block's update.

    If x[k+1] changes by d, later steps take back part of it: the last stream changes by ``w[k] d``, where ``w[k] = 1 - g[k+1]
    w[k+1]``, and 1 for the last block. So ``a[k] = 1 / w[k]`` adds each update to the last stream just once. ``bits`` are m of
    each block but the first, and ``sign`` is that of g, 1 or -1.
    """
    shares = [1.0]
    for m in reversed(bits):
        shares.append(1 - sign * 2.0**-m * shares[-1])
    return [1 / share for share in reversed(shares)]


def packed(low: Tensor, bits: int) -> Tensor:
    """Packs ``bits`` bits of each element, 1 to 8 of them: uint8 of any shape, below 2^bits -> uint8 (n,), bits / 8 bytes
    an element."""
    flat, parts, shift = low.reshape(-1), [], 0
    for width in _widths(bits):
        many = 8 // width
        part = (flat >> shift) & (2**width - 1) if width < bits else flat
        part = torch.nn.functional.pad(part, (0, -len(part) % many)).view(many, -1)
        byte = part[0].clone()
        for place in range(1, many):
            byte |= part[place] << (place * width)
        parts.append(byte)
        shift += width
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpacked(kept: Tensor, bits: int, count: int) -> Tensor:
    """Reverses :func:`packed`. Returns uint8 (count,)."""
    low, start, shift = kept.new_zeros(()), 0, 0
    for width in _widths(bits):
        many = 8 // width
        size = -(-count // many)
        byte = kept[start : start + size]
        part = torch.stack([(byte >> (place * width)) & (2**width - 1) for place in range(many)]).view(-1)[:count]
        low = part if shift == 0 else low | (part << shift)
        start, shift = start + size, shift + width
    return low


def _widths(bits: int) -> list[int]:
    """Parts of 8, 4, 2 and 1 bits, of which whole numbers fill a byte."""
    return [width for width in (8, 4, 2, 1) if bits & width]


PIECES, LEAST_PIECE = 8, 2**20
"""Large streams are coupled in up to 8 pieces of at least 2^20 elements, which makes temporary tensors smaller."""


def in_pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Views of tensors of the same shape, cut along one dimension, where theirs is not 1. A plan takes one piece; the others
    need no more."""
    first = tensors[0]
    count = min(PIECES, first.numel() // LEAST_PIECE)
    dim = next((place for place, size in enumerate(first.shape) if size >= count), None)
    if count < 2 or dim is None or is_traceable_wrapper_subclass(first):
        yield tensors
        return
    length = -(-first.shape[dim] // count)
    pieces = zip(*(each.split(length, dim) if each.shape[dim] > 1 else repeat(each) for each in tensors), strict=False)
    yield from islice(pieces, 1 if has_no_data(first) else None)


class TwoStep(Coupling):
    """The coupling of one block. The target is x[k-1] and becomes x[k+1]; the source is x[k].

    The streams are outside of autograd. Other tensors of the same shapes carry their gradients. They may be in a narrower dtype
    than the streams, so the gradients are in that dtype.

    Args:
        grid: of the streams.
        x: the source as the model hands it to the block, maybe in a narrower dtype.
        graphs: the tensors that carry the gradients of target and source, and their versions when the model got them.
        sign: of g, 1 or -1 for each sample, of shape (B, 1, ...) and the streams' dtype.
        weights: a where the sign is 1, and where it is -1.
        bits: m; None for the first block, which has no x[k-1].
        rebuilt: the bits that the division drops are kept for :meth:`undo`.
        before: the coupling of the block before, whose source the target is.
        on_backward: refers to what a backward calls that reaches the block.
    """

    grid: Grid
    written_as: torch.dtype
    _carries: torch.dtype
    _low: list[Tensor]
    """The bits that the division drops, packed, of each piece."""

    def __init__(
        self,
        grid: Grid,
        x: Tensor,
        graphs: Sequence[tuple[Tensor, int]],
        sign: Tensor,
        weights: tuple[float, float],
        bits: int | None,
        rebuilt: bool,
        before: TwoStep | None = None,
        on_backward: Callable[[], Callable[[], None] | None] = lambda: None,
    ) -> None:
        self.grid, self._sign, self._weights, self._bits, self._rebuilt = grid, sign, weights, bits, rebuilt
        # The graph holds the coupling, which lets go of what is in the graph.
        self._x: Tensor | None = x
        self._graphs = graphs
        self._carried: tuple[Tensor, ...] = ()
        self._coupled: tuple[Tensor, ...] = ()
        self._before, self._next_bits = before, None
        self._rebuilt_x: tuple[Tensor, torch.cuda.Stream | None] | None = None
        if before is not None:
            before._next_bits = bits
        self._read_as, self._on_backward = x.dtype, on_backward
        self.others: tuple[Any, ...] | None = None
        """What the block returned behind its stream; None: it returned one tensor."""

    def read(self, source: Tensor) -> Tensor:
        """The source in the dtype of the block. In the forward it is the very tensor of the model, whose hooks may want the
        gradient."""
        x, self._x = self._x, None
        (rebuilt, stream), self._rebuilt_x = self._rebuilt_x or (None, None), None
        if rebuilt is not None and stream == _stream_of(rebuilt):  # the memory of another CUDA stream may be used again
            return rebuilt
        return source.to(self._read_as) if x is None else x

    def couple(self, target: Tensor, source: Tensor, output: Any) -> Tensor:
        update = stream_in(output)
        if not isinstance(update, Tensor):
            raise ValueError(
                f"a block must return a tensor, or a tuple or list that begins with one, not {type(output).__name__}; "
                "make_reversible cannot take this model"
            )
        if update.shape != source.shape:
            raise ValueError(
                f"a block must keep the shape of its input: {tuple(source.shape)} became {tuple(update.shape)}; if these "
                "are the stages of a model, name the list of blocks in each, such as 'stages.0.blocks'"
            )
        self.others, self._kind = (None, Tensor) if output is update else (tuple(output[1:]), type(output))
        self.written_as = update.dtype
        if any(version_of(graph) != version for graph, version in self._graphs):
            raise ValueError(
                "something changed the input or the output of a block in place, so the blocks cannot be coupled; "
                "the first operation of a block must return a new tensor (inplace=False)"
            )
        carried = [graph for graph, _ in self._graphs]
        self._carried = _TwoStep.apply(*carried, update, target, source, self)
        (coupled,), self._coupled, self._graphs = self._coupled, (), ()
        return coupled

    def take_graphs(self) -> tuple[Tensor, Tensor, Tensor]:
        """The tensors that carry the gradients of the source, for the next block's coupling, and of the coupled stream; and
        this stream in the dtype of the block, which may be the second. May be called once."""
        (passed, carrier, *narrow), self._carried = self._carried, ()
        return passed, carrier, narrow[0] if narrow else carrier

    def reached(self) -> None:
        if (call := self._on_backward()) is not None:
            call()

    def returned(self, stream: Tensor, others: tuple[Any, ...]) -> Any:
        """What the block returned, a tuple, a named tuple or a list, with the coupled stream in it."""
        together = (stream, *others)
        return self._kind(*together) if hasattr(self._kind, "_fields") else self._kind(together)

    def undo(self, coupled: Tensor, source: Tensor, output: Any, last_use: bool = False) -> Tensor:
        """Rebuilds x[k-1], bit for bit."""
        if self._bits is None:
            return source
        target = coupled
        if coupled.stride() != self._strides:
            target = torch.empty_strided(coupled.shape, self._strides, dtype=coupled.dtype, device=coupled.device)
        elif not last_use:
            target = torch.empty_like(coupled)
        if is_fused(coupled):
            read_as = target.dtype if self._before is None else self._before._read_as
            narrow = target.new_empty(0) if read_as == target.dtype else torch.empty_like(target, dtype=read_as)
            fixed = (self._sign, self.grid.step, self._low[0], self._numbers(coupled.dtype), self._bits)
            coupling_ops.uncouple(target, narrow, coupled, source, stream_in(output), *fixed)
            if self._before is not None and narrow.numel():
                self._before._rebuilt_x = narrow, _stream_of(narrow)
            return target
        pieces = in_pieces(target, coupled, source, stream_in(output), self._sign * 2**self._bits, *self._factors())
        for (part, total, read, update, scale, *weights), low in zip(pieces, self._low, strict=False):
            part.copy_(total - self._step(read, update, *weights)).mul_(scale)
            part.addcmul_(unpacked(low, self._bits, part.numel()).view(part.shape).to(part.dtype), self.grid.step)
        return target

    def _step(self, source: Tensor, update: Tensor, weight: Tensor, rest: Tensor) -> Tensor:
        """``a block(x) + (1 - a - g) x`` on the grid.

        No kernel both multiplies and adds, so each result is rounded in the same way wherever it is computed.
        """
        return self.grid.nearest((update.to(source.dtype) * weight).add_(source * rest))

    def _factors(self) -> tuple[Tensor, Tensor]:
        """a and 1 - a - g. They are not kept: a block keeps its bits and nothing else."""
        above, below = self._weights
        gain = 0.0 if self._bits is None else self._sign * 2.0**-self._bits
        weight = self._sign * ((above - below) / 2) + (above + below) / 2
        return weight, 1 - weight - gain

    def _numbers(self, dtype: torch.dtype) -> tuple[float, ...]:
        """a and 1 - a - g, where the sign is 1 and where it is -1, in a dtype."""
        return coupling_ops.factors(self._weights, self._bits, self._sign.dtype, dtype)

    def merged(self, target: Tensor, source: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """x[k+1], and the same in the dtype of the update; keeps the bits that it drops of the target."""
        self._low, self._strides = [], target.stride()
        if is_fused(source):
            kept = self._rebuilt and self._bits is not None
            fixed = (self._sign, self.grid.step, self.grid.largest, self._numbers(source.dtype), self._bits or 0, kept)
            coupled, low, narrow = coupling_ops.couple(target, source, update, *fixed, update.dtype)
            self._low = [low]
            return coupled, coupled if coupled.dtype == update.dtype else narrow
        coupled = torch.empty_like(update, dtype=source.dtype)
        pieces = in_pieces(coupled, target, source, update, self._sign, *self._factors())
        for part, before, read, each, sign, *weights in pieces:
            part.copy_(self._step(read, each, *weights))
            if self._bits is not None:
                part.addcmul_(self._divided_and_packed(before, self._bits), sign)
        if self._low and has_no_data(coupled) and (pieces := coupled.numel() / max(part.numel(), 1)) > 1:
            self._low.append(self._low[0].new_empty(round(len(self._low[0]) * (pieces - 1))))
        self.grid.watch(coupled)
        return coupled, coupled.to(update.dtype)

    def _divided_and_packed(self, target: Tensor, bits: int) -> Tensor:
        """``x[k-1] / 2^m``, rounded down to the grid. Keeps the bits that this drops."""
        units = target / self.grid.step
        whole = torch.floor(units * 2**-bits)
        if self._rebuilt:
            self._low.append(packed(units.sub_(whole, alpha=2**bits).to(torch.uint8), bits))
        return whole.mul_(self.grid.step)

    def gradients(self, passed: Tensor | None, grad: Tensor | None, narrow: Tensor | None) -> tuple[Tensor | None, ...]:
        """Those of target, source and update.

        That of the target is not yet multiplied by g. The previous coupling, whose source the target was, multiplies it. This
        saves a kernel and a tensor.

        Args:
            passed: of the source, from the next coupling, whose target it was.
            grad, narrow: of the coupled stream, from the two tensors that carry it.
        """
        if grad is None:
            like = passed if narrow is None else narrow
            assert like is not None
            grad, narrow = torch.zeros_like(like) if narrow is None else narrow.to(self._carries), None
        gain = 0.0 if self._next_bits is None else 2.0**-self._next_bits
        if is_fused(grad) and not torch.is_grad_enabled():
            fixed = (self._sign, self._numbers(grad.dtype), gain, self.written_as)
            total, of_source, of_update = coupling_ops.gradients(grad, narrow, passed, *fixed)
            grad = grad if narrow is None else total
        else:
            grad = grad if narrow is None else grad + narrow
            sign, weight, rest = (each.to(grad.dtype) for each in (self._sign, *self._factors()))
            of_source = grad * rest if passed is None else torch.addcmul(grad * rest, passed, sign * gain)
            of_update = (grad * weight).to(self.written_as)
        return None if self._bits is None else grad, of_source, of_update


def _stream_of(tensor: Tensor) -> torch.cuda.Stream | None:
    return torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None


class _TwoStep(torch.autograd.Function):
    """Takes the tensors that carry the gradients of target and source, and the update. Returns those of the source, for the
    next coupling, and of the coupled stream; and that stream in the dtype of the update, if it is another."""

    @staticmethod
    def forward(
        ctx, target_graph: Tensor, source_graph: Tensor, update: Tensor, target: Tensor, source: Tensor, coupling: TwoStep
    ) -> tuple[Tensor, ...]:
        ctx.coupling, coupling._carries = coupling, source_graph.dtype
        ctx.set_materialize_grads(False)
        coupled, narrow = coupling.merged(target, source, update)
        coupling._coupled = (coupled.detach(),)
        if narrow.dtype == source_graph.dtype:
            return source_graph.detach(), narrow
        return source_graph.detach(), coupled.to(source_graph.dtype), narrow

    @staticmethod
    def backward(  # ty: ignore[incompatible-method-override]
        ctx, passed: Tensor | None, grad: Tensor | None, narrow: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        ctx.coupling.reached()
        if passed is None and grad is None and narrow is None:
            return (None,) * 6
        return *ctx.coupling.gradients(passed, grad, narrow), None, None, None
