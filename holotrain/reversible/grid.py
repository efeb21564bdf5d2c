"""The fixed-point grid of an exact sequence: all streams are multiples of one step, so their sums are not rounded.

If the sum of two multiples of 2^-k is below 2^(m-k), with m the bits of the significand, the floating-point format represents
it exactly. So the inverse of the coupling is exact, bit for bit. The input streams and all outputs of f and g are rounded to
the grid. The gradient ignores the rounding (straight-through estimator).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from holotrain.reversible.context import backward_id, has_no_data

HEADROOM_BITS = 5
"""A grid that is chosen leaves the streams room to grow by a factor of 2^5."""

LEAST_HEADROOM_BITS, MOST_HEADROOM_BITS = 2, 8
"""A grid that leaves less room than 2^2 after a step, or more than 2^8, is chosen anew for the next one."""


def significand_bits(dtype: torch.dtype) -> int:
    """24 for fp32, 53 for fp64."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, step: Tensor) -> Tensor:
        return torch.round(x / step).mul_(step)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # ty: ignore[incompatible-method-override]
        return grad, None


class Grid:
    """The grid in one call.

    Attributes:
        step: 0-dim tensor of the streams' dtype, a power of two 2^-k; the streams are multiples of it.
        follows: later calls have another grid if the streams outgrow this one.
        largest: 0-dim tensor, the largest magnitude of the streams.
    """

    def __init__(self, step: Tensor, follows: bool) -> None:
        self.step, self.follows = step, follows
        self.largest = torch.zeros_like(step)

    @property
    def limit(self) -> Tensor:
        """Up to which magnitude sums are exact."""
        return self.step * 2.0 ** significand_bits(self.step.dtype)

    def round(self, x: Tensor) -> Tensor:
        """Rounds to multiples of the step; the gradient is unchanged."""
        return _Round.apply(x, self.step)

    def entered(self, stream: Tensor) -> Tensor:
        """Rounds an input stream to the grid."""
        self.watch(stream)
        return self.round(stream)

    def watch(self, stream: Tensor) -> None:
        """Updates the largest magnitude, on the device."""
        if stream.numel():
            self.largest = torch.maximum(self.largest, torch.linalg.vector_norm(stream.detach(), ord=torch.inf))


class FixedPointGrid(nn.Module):
    """The grid of a sequence, chosen by the user or from the streams.

    Args:
        bits: k, for multiples of 2^-k; None: the finest grid that leaves :data:`HEADROOM_BITS` above the largest magnitude of
            the streams in the first batch. Later it follows the streams (:meth:`follow`), and is saved in the ``state_dict``.
    """

    step: Tensor

    def __init__(self, bits: int | None = None) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(math.nan if bits is None else 2.0**-bits))
        self.known = bits is not None
        self._follows = bits is None
        # The steps of the next and of the latest forward. They are no buffers: DDP gives the buffers of the first process to
        # all, whose streams may be smaller, functional_call puts others in their place, and a recomputation puts earlier ones
        # back. A captured graph reads and writes them in this memory.
        self._next: Tensor | None = None
        self._latest: Tensor | None = None

    @property
    def upcoming(self) -> Tensor:
        """The step of the next forward, which is what a checkpoint holds."""
        return self.step if self._next is None else self._next

    def choose(self, largest: float, dtype: torch.dtype) -> None:
        """Chooses the grid for streams of this magnitude; zero leaves the choice to a later batch."""
        if not math.isfinite(largest):
            raise ValueError(
                f"the streams of the first batch reach {largest}, so that no grid can be chosen from them; check the data"
            )
        if largest:  # sums of zeros are exact without a grid
            self.set(_step_for(torch.tensor(largest, dtype=torch.float64), dtype))

    def set(self, step: Tensor | float) -> None:
        """Takes a step, a power of two."""
        self.step.fill_(step)
        self.known = True
        self._plan(self.step)

    def _plan(self, step: Tensor) -> None:
        if self._next is None or self._next.device != step.device:
            self._next, self._latest = step.to(self.step.dtype, copy=True), step.to(self.step.dtype, copy=True)
        self._next.copy_(step)

    def in_call(self, stream: Tensor, again: bool = False) -> Grid:
        """The grid for one call on streams like this one; ``again``: as in the latest forward. A recomputation in a backward
        always is."""
        dtype = stream.dtype
        if significand_bits(dtype) < 24:
            raise ValueError(f"exact needs streams of fp32 or fp64, not {dtype}; train under torch.autocast")
        if self.step.device != stream.device and not has_no_data(stream):  # the blocks were moved, and not what holds them
            self.to(stream.device)
        step = self.step
        if self._next is not None and self._latest is not None and not has_no_data(stream):
            if not again and backward_id() == -1:
                self._latest.copy_(self._next)
            step = self.step.copy_(self._latest)
        return Grid(step.to(dtype, copy=True), self._follows)  # of this call: a broadcast may change it before the backward

    def follow(self, call: Grid) -> None:
        """After a forward in training: if the streams came near the grid's limit, or have become much smaller, the next forward
        has another grid.

        This is computed on the device, so the host does not wait, and what a checkpoint holds decides all that follows.
        """
        if not self._follows or not self.known or has_no_data(call.step):
            return
        room = call.limit / call.largest
        stays = (room >= 2**LEAST_HEADROOM_BITS) & (room <= 2**MOST_HEADROOM_BITS)
        stays |= ~torch.isfinite(call.largest) | (call.largest == 0)
        self._plan(torch.where(stays, call.step, _step_for(call.largest, call.step.dtype)))

    def _save_to_state_dict(self, destination, prefix, keep_vars) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if self._next is not None:
            destination[prefix + "step"] = self._next.to(self.step.device).clone()

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        """A checkpoint of a sequence that was not exact brings no grid: then the choice is still to be made."""
        known_missing = []
        rest = unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, known_missing, *rest)
        missing_keys.extend(key for key in known_missing if key != prefix + "step")
        self.known, self._next, self._latest = not math.isnan(self.step.item()), None, None

    def extra_repr(self) -> str:
        return f"step={self.upcoming.item()}" if self.known and not self.step.is_meta else "step=chosen from the first batch"


def _step_for(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The step, a power of two, of the finest grid that leaves :data:`HEADROOM_BITS` above streams of this magnitude."""
    power = largest / torch.frexp(largest).mantissa  # the next power of two, exactly
    return power * 2.0 ** (HEADROOM_BITS - significand_bits(dtype))
