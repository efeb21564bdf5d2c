"""Memory for the sum of spectra over steps, in full or half precision."""

from __future__ import annotations

import torch
from torch import Tensor

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

HALF_RANGE = 1024.0
"""Each row is scaled to this largest magnitude in fp16, which leaves headroom."""


class Hologram:
    """Rows of spectra, initially zero.

    Args:
        rows, bins: the shape.
        dtype: of the spectra, real or complex.
        half: ``torch.bfloat16`` or ``torch.float16``: the dtype in which their parts are stored; None: ``dtype``.
    """

    def __init__(self, rows: int, bins: int, dtype: torch.dtype, half: torch.dtype | None, device: torch.device) -> None:
        self._dtype, self._half = dtype, half
        self._stored = narrowed(torch.zeros(rows, bins, dtype=dtype, device=device), half)

    def load(self, part: slice) -> Tensor:
        """Returns rows to change in place and pass to :meth:`keep`."""
        return widened([tensor[part] for tensor in self._stored], self._dtype)

    def keep(self, part: slice, rows: Tensor) -> None:
        """Stores rows that :meth:`load` returned."""
        if self._half is not None:  # otherwise load returned the memory itself
            for stored, new in zip(self._stored, narrowed(rows, self._half), strict=True):
                stored[part] = new

    @property
    def state(self) -> dict[str, Tensor]:
        """The stored tensors."""
        return dict(zip(("memory", "scales"), self._stored, strict=False))


def narrowed(rows: Tensor, half: torch.dtype | None) -> list[Tensor]:
    """Rows (n, ...) in half precision, complex ones as pairs of parts; in fp16 also the scale of each. None: as they are."""
    if half is None:
        return [rows]
    parts = torch.view_as_real(rows) if rows.is_complex() else rows
    if half is not torch.float16:
        return [parts.to(half)]
    largest = parts.abs().amax(tuple(range(1, parts.ndim)), keepdim=True).float()
    scales = (largest / HALF_RANGE).clamp_min(torch.finfo(torch.float32).tiny)  # smaller values become zero
    return [(parts / scales).to(half), scales]


def widened(stored: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Undoes :func:`narrowed`, for rows of ``dtype``."""
    memory, *scales = stored
    if memory.dtype == dtype and not scales:
        return memory
    wide = memory.to(dtype.to_real())
    wide = wide * scales[0] if scales else wide
    return torch.view_as_complex(wide) if dtype.is_complex else wide
