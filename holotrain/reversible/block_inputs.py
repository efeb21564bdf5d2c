"""What a block that runs again keeps of its input until the backward.

:data:`WAYS` names the ways as the schedules do: the input as it is, rounded to 8 bits, or copied to main memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from weakref import ref

import torch
from torch import Tensor, nn

from holotrain.reversible.context import is_captured
from holotrain.reversible.main_memory import InMainMemory
from holotrain.reversible.side_stream import SameStream, SideStream, side_of


class _Saver(torch.autograd.Function):
    @staticmethod
    def forward(ctx, anchor: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(*tensors)
        return anchor.new_empty(0)


class SavedTensors:
    """Some tensors, saved as autograd saves them: an outer recomputation, in whose branch this one runs, recomputes them.

    Reading them raises a RuntimeError if one was changed in place.
    """

    def __init__(self, *tensors: Tensor) -> None:
        # The whole result is held: before torch 2.14 a node lets go of what it saved when its result is gone.
        self._result = _Saver.apply(torch.empty(0, requires_grad=True), *(tensor.detach() for tensor in tensors))

    def tensors(self) -> tuple[Tensor, ...]:
        return self._result.grad_fn.saved_tensors


class InputAsIs:
    """The input, which is not copied. Other ways to keep it are subclasses."""

    def __init__(self, x: Tensor) -> None:
        self._saved = SavedTensors(x)

    def settle(self) -> None:
        """After the block's forward: what follows may change the input, as far as plain autograd allows it."""

    def restore(self) -> Tensor:
        """The input of the recomputation, in the backward, maybe more than once."""
        return self._saved.tensors()[0]


GROUP = 64
"""The most elements that share a scale."""


class Int8Input(InputAsIs):
    """The input in 8 bits; see :func:`rounded`."""

    def __init__(self, x: Tensor) -> None:
        self._dtype, self._layout = x.dtype, (x.size(), x.stride())
        self._saved = SavedTensors(*rounded(x.detach()))

    def restore(self) -> Tensor:
        x = unrounded(*self._saved.tensors(), self._dtype)[..., : self._layout[0][-1]]
        # The layout decides which operations run, and so what they save.
        return x if x.stride() == self._layout[1] else x.new_empty_strided(*self._layout).copy_(x)


def rounded(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds each group of at most 64 elements along the last dimension to 255 multiples of a 127th of its largest magnitude.

    Shapes: x: (..., C) -> the multiples, int8: (..., G, C / G), where the last group is filled up; the steps, bf16:
    (..., G, 1).
    """
    groups = -(-x.shape[-1] // GROUP)
    size = -(-x.shape[-1] // groups)
    parts = nn.functional.pad(x, (0, groups * size - x.shape[-1])).unflatten(-1, (groups, size))
    parts = parts.to(torch.promote_types(x.dtype, torch.float32))
    steps = torch.linalg.vector_norm(parts, torch.inf, -1, keepdim=True) / 127
    steps = steps.clamp_(min=torch.finfo(torch.bfloat16).tiny).bfloat16()
    return (parts / steps).round_().clamp_(-127, 127).to(torch.int8), steps


def unrounded(multiples: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """What :func:`rounded` has rounded, in a dtype: (..., G, C / G) -> (..., C), with what fills the last group."""
    return (multiples * steps.to(torch.promote_types(dtype, torch.float32))).flatten(-2).to(dtype)


class OffloadedInput(InMainMemory, InputAsIs):
    """A copy in pinned main memory.

    It is made while the block computes, and fetched in the backward while the block behind computes, so that the device holds
    two inputs at most.
    """

    def __init__(self, x: Tensor, side: SideStream | SameStream) -> None:
        InMainMemory.__init__(self, x, side)
        self._earlier, _latest[x.device] = _latest.get(x.device, lambda: None), ref(self)

    def restore(self) -> Tensor:
        x = self.take()
        if (earlier := self._earlier()) is not None:
            with suppress(torch.OutOfMemoryError):  # it is fetched in its turn
                earlier.fetch()
        return x


_latest: dict[torch.device, Callable[[], OffloadedInput | None]] = {}
"""The input of each device that was copied last, if it is alive."""


def _int8_input(x: Tensor) -> InputAsIs:
    return Int8Input(x) if x.is_floating_point() and x.dim() and x.numel() and not _is_repeated(x) else InputAsIs(x)


def _offloaded_input(x: Tensor) -> InputAsIs:
    side = side_of(x)
    if is_captured(x.device):
        warnings.warn("offload keeps inputs on the device in a CUDA graph, in which nothing can be offloaded", stacklevel=2)
        return InputAsIs(x)
    if side is None or _is_repeated(x):
        return InputAsIs(x)
    try:
        return OffloadedInput(x, side)
    except RuntimeError as error:  # this system pins no memory, or no more
        warnings.warn(f"offload keeps inputs on the device: {str(error).partition(chr(10))[0]}", stacklevel=2)
        return InputAsIs(x)


def _is_repeated(x: Tensor) -> bool:
    """Whether a dimension repeats the same memory, as after ``expand``."""
    return any(stride == 0 and size > 1 for size, stride in zip(x.size(), x.stride(), strict=True))


WAYS: dict[str, Callable[[Tensor], InputAsIs]] = {
    "checkpoint": InputAsIs,
    "checkpoint8": _int8_input,
    "offload": _offloaded_input,
}
"""How the input of a block is kept, by the name of the schedule. On a device without memory of its own, and in a CUDA graph,
``offload`` keeps it as it is."""
