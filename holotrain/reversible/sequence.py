"""A run of reversible blocks and the schedule of its backward."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.schedules import SCHEDULES, run_storing


class ReversibleSequence(nn.Module):
    """Reversible blocks in a row, whose backward stores or recomputes their activations. All schedules give the same numbers.

    Args:
        blocks: the blocks, first to last.
        backward: ``"autograd"`` stores everything (the reference), ``"checkpoint"`` stores the two streams between blocks
            (torch.utils.checkpoint), ``"reversible"`` stores nothing between blocks and rebuilds each block's input from its
            output. It is a plain attribute: it may be changed between calls and is no part of the ``state_dict``.

    Raises:
        ValueError: an unknown ``backward``; an f or g that does not preserve shape and dtype (at the call).

    Without gradients (``torch.no_grad``, ``torch.inference_mode``, nothing that requires grad) the blocks simply run. Under
    autocast half-precision streams are widened to fp32: only f and g run in half precision, since streams that are rounded
    at every addition cannot be rebuilt.
    """

    def __init__(self, blocks: Iterable[ReversibleBlock], backward: str = "reversible") -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.backward = backward

    @property
    def backward(self) -> str:
        return self._backward

    @backward.setter
    def backward(self, name: str) -> None:
        if name not in SCHEDULES:
            raise ValueError(f"backward must be one of {', '.join(SCHEDULES)}, not {name!r}")
        self._backward = name

    def forward(
        self, x1: Tensor, x2: Tensor, f_kwargs: dict | None = None, g_kwargs: dict | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs the blocks.

        Args:
            x1, x2: the two streams, of one shape and one floating dtype, on one device.
            f_kwargs, g_kwargs: keyword arguments for every f and every g; tensors among them (nested in lists, tuples and
                dicts too) may require grad.

        Returns:
            y1, y2: shaped as x1 and x2.
        """
        if x1.shape != x2.shape or x1.dtype != x2.dtype or x1.device != x2.device or not x1.is_floating_point():
            raise ValueError(
                "the two streams must share shape, floating dtype and device; got "
                f"{tuple(x1.shape)} {x1.dtype} on {x1.device} and {tuple(x2.shape)} {x2.dtype} on {x2.device}"
            )
        x1, x2 = _widened(x1), _widened(x2)
        run = SCHEDULES[self.backward] if torch.is_grad_enabled() else run_storing
        return run(self.blocks, x1, x2, f_kwargs or {}, g_kwargs or {})

    def inverse(
        self, y1: Tensor, y2: Tensor, f_kwargs: dict | None = None, g_kwargs: dict | None = None
    ) -> tuple[Tensor, Tensor]:
        """Rebuilds (x1, x2) from (y1, y2), up to rounding; f and g must be deterministic (eval, or no dropout)."""
        for block in reversed(self.blocks):
            y1, y2 = block.inverse(y1, y2, f_kwargs, g_kwargs)
        return y1, y2

    def extra_repr(self) -> str:
        return f"backward={self.backward!r}"


def _widened(stream: Tensor) -> Tensor:
    if stream.dtype in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(stream.device.type):
        return stream.float()
    return stream
