"""The fixed-point grid of an exact sequence: all streams are multiples of one step, so their sums are not rounded.

If the sum of two multiples of 2^-k is below 2^(m-k), with m the bits of the significand, the floating-point format represents
it exactly. So the inverse of the coupling is exact, bit for bit. The input streams and all outputs of f and g are rounded to
the grid. The gradient ignores the rounding (straight-through estimator).
"""

from __future__ import annotations

import math
import warnings

import torch
from torch import Tensor, nn

from holotrain.reversible.replay import has_no_data

HEADROOM_BITS = 5
"""On a grid that is chosen from the first batch, the streams may grow by a factor of 2^5."""


def significand_bits(dtype: torch.dtype) -> int:
    """24 for fp32, 53 for fp64."""
    return 1 - round(math.log2(torch.finfo(dtype).eps))


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, grid: Grid) -> Tensor:
        return grid.nearest(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # ty: ignore[incompatible-method-override]
        return grad, None


class Grid:
    """The grid in one call.

    Args:
        step: 0-dim tensor of the streams' dtype, a power of two 2^-k; the streams are multiples of it.
        largest: 0-dim tensor that is updated with the largest magnitude of the streams.
    """

    def __init__(self, step: Tensor, largest: Tensor) -> None:
        self.step = step
        self._largest = largest

    def round(self, x: Tensor) -> Tensor:
        """Rounds to multiples of the step; the gradient is unchanged."""
        return _Round.apply(x, self)

    def nearest(self, x: Tensor) -> Tensor:
        """The nearest multiples of the step, without a gradient."""
        return torch.round(x / self.step).mul_(self.step)

    def entered(self, stream: Tensor) -> Tensor:
        """Rounds an input stream to the grid."""
        self.watch(stream)
        return self.round(stream)

    def watch(self, stream: Tensor) -> None:
        """Updates the largest magnitude, on the device."""
        if not stream.numel():
            return
        largest = torch.linalg.vector_norm(stream.detach(), ord=torch.inf)
        self._largest.copy_(torch.maximum(self._largest, largest))


class FixedPointGrid(nn.Module):
    """The grid of a sequence, chosen by the user or from the first batch.

    Args:
        bits: k, for multiples of 2^-k; None: the finest grid that leaves :data:`HEADROOM_BITS` above the largest magnitude of
            the streams in the first batch. The chosen grid is saved in the ``state_dict``.

    If a stream grows beyond the grid, a warning says so once: on a CPU in the same forward, on other devices in a later one, so
    that the host does not wait.
    """

    step: Tensor
    _largest: Tensor

    def __init__(self, bits: int | None = None) -> None:
        super().__init__()
        self.register_buffer("step", torch.tensor(math.nan if bits is None else 2.0**-bits))
        self.register_buffer("_largest", torch.zeros(()), persistent=False)
        self.known = bits is not None
        self._reported = False
        self._arriving: tuple[Tensor, torch.cuda.Event] | None = None

    def choose(self, largest: float, dtype: torch.dtype, headroom: int = HEADROOM_BITS) -> None:
        """Chooses the grid for streams of this magnitude, which may grow by a factor of 2^headroom; zero leaves the choice to a
        later batch.

        Raises:
            ValueError: the magnitude is not finite.
        """
        if not math.isfinite(largest):
            raise ValueError(
                f"the streams of the first batch reach {largest}, so that no grid can be chosen from them; check the data"
            )
        if largest == 0:
            return  # sums of zeros are exact without a grid
        exponent = math.ceil(math.log2(largest))
        self.step.fill_(2.0 ** (exponent + headroom - significand_bits(dtype)))
        self.known = True

    @property
    def largest(self) -> float:
        """The largest magnitude of the streams so far."""
        return self._largest.item()

    def in_call(self, dtype: torch.dtype) -> Grid:
        """The grid for one call on streams of ``dtype``.

        Raises:
            ValueError: the dtype has less precision than fp32.
        """
        if significand_bits(dtype) < 24:
            raise ValueError(f"exact needs streams of fp32 or fp64, not {dtype}; train under torch.autocast")
        step = self.step.to(dtype, copy=True)  # of this call: a broadcast may change it before the backward
        return Grid(step, self._largest)

    def report(self, dtype: torch.dtype, remedy: str = "use exact={bits}") -> None:
        """Warns if a stream is known to have grown beyond the grid; does not wait for the device.

        Args:
            dtype: of the streams.
            remedy: what to do about it; {bits} stands for the k of a grid that is coarse enough.
        """
        if self._reported or has_no_data(self._largest):
            return
        if self._largest.device.type != "cuda":
            self._compare(self._largest.item(), self.step.item(), dtype, remedy)
        elif not torch.cuda.is_current_stream_capturing():
            if self._arriving is None:
                figures = torch.stack((self._largest, self.step))
                host = torch.empty_like(figures, device="cpu", pin_memory=True).copy_(figures, non_blocking=True)
                self._arriving = host, torch.cuda.current_stream().record_event()
            elif self._arriving[1].query():
                self._compare(*self._arriving[0].tolist(), dtype, remedy)
                self._arriving = None

    def _compare(self, largest: float, step: float, dtype: torch.dtype, remedy: str) -> None:
        limit = step * 2.0 ** significand_bits(dtype)
        if not largest < limit:
            self._reported = True
            if math.isfinite(largest):
                remedy = remedy.format(bits=-math.ceil(math.log2(largest)) + significand_bits(dtype) - 1)
            else:
                remedy = "the training has diverged"
            warnings.warn(
                f"a stream reached {largest:.4g}, beyond {limit:.4g}, the limit of a grid of 2^{round(math.log2(step))}: "
                f"the inverse is no longer exact; {remedy}",
                stacklevel=4,
            )

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        """A checkpoint of a sequence that was not exact brings no grid: then the choice is still to be made."""
        known_missing = []
        rest = unexpected_keys, error_msgs
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, known_missing, *rest)
        missing_keys.extend(key for key in known_missing if key != prefix + "step")
        self.known = not math.isnan(self.step.item())

    def __getstate__(self):
        return self.__dict__ | {"_arriving": None}

    def extra_repr(self) -> str:
        return f"step={self.step.item()}" if self.known and not self.step.is_meta else "step=chosen from the first batch"
