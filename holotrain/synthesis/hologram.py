"""Memory for the sum of spectra over steps, in full or half precision: gradients are added to it and read back.

Shapes: S rows of the hologram, P gradient rows that share each of them, F bins. Spectra and keys are (P, S, F), a hologram is
(S, F). If P is 1, keys may be those of the layers instead, (layers, F).
"""

from __future__ import annotations

import torch
from torch import Tensor

from holotrain.synthesis.rows import Stretches

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


class Association:
    """``M <- decay * M + sum_p G_p conj(K_p)``, read back as ``K_p M`` (an associative memory, Plate 1995).

    With one gradient row per hologram row the read-out is the running sum of gradients, each rotated by the difference of the
    layer's input then and now. If inputs stay alike, this is momentum.

    With P gradient rows per hologram row, binding followed by read-out, divided by P, is the orthogonal projection onto a
    subspace with 1/P of the dimensions. In this subspace the hologram is exactly momentum. The part of a gradient outside it
    cannot be held and goes into the update directly: ``feedback * (g - projection of g)``. The spectral part is added here; the
    caller adds ``feedback * g``.

    Args:
        hologram: S rows of F bins.
        slots, feedback: P, and the factor above.
    """

    def __init__(self, hologram: Hologram, slots: int, feedback: float) -> None:
        self.hologram = hologram
        self._slots, self._feedback = slots, feedback

    def __call__(self, spectrum: Tensor, keys: Tensor, part: slice, layers: Stretches, decay: Tensor) -> Tensor:
        memory = self.hologram.load(part)
        if keys.ndim == 2:
            read = _recalled_by_layers(memory, spectrum[0], keys, layers, decay)[None]
        elif self._slots == 1:
            memory.mul_(decay).addcmul_(spectrum[0], keys[0].conj())
            read = memory * keys
        else:
            bound = (spectrum * keys.conj()).sum(0)
            memory.mul_(decay).add_(bound)
            read = (memory - self._feedback * bound) * keys / self._slots
        self.hologram.keep(part, memory)
        return read


def _recalled_by_layers(memory: Tensor, spectrum: Tensor, keys: Tensor, layers: Stretches, decay: Tensor) -> Tensor:
    """The same with the keys of layers, (layers, F), so that keys need not be copied to rows."""
    memory.mul_(decay)
    for layer, rows in layers:
        memory[rows].addcmul_(spectrum[rows], keys[layer].conj())
        torch.mul(memory[rows], keys[layer], out=spectrum[rows])
    return spectrum
