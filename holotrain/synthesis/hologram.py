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
    """``M <- decay * M + sum_p G_p conj(K_p)``, read back as ``K_p M`` (an associative memory, Plate 1995). Initially zero.

    With one gradient row per hologram row the read-out is the running sum of gradients, each rotated by the difference of the
    layer's input then and now. If inputs stay alike, this is momentum.

    With P gradient rows per hologram row, binding followed by read-out, divided by P, is the orthogonal projection onto a
    subspace with 1/P of the dimensions. In this subspace the hologram is exactly momentum. The part of a gradient outside it
    cannot be held and goes into the update directly: ``feedback * (g - projection of g)``. The spectral part is added here; the
    caller adds ``feedback * g``.

    Args:
        zeros: (S, F), in the dtype of the spectra, real or complex.
        half: ``torch.bfloat16`` or ``torch.float16``: the dtype in which their parts are stored; None: that of ``zeros``.
        feedback: the factor above.
    """

    def __init__(self, zeros: Tensor, half: torch.dtype | None, feedback: float) -> None:
        self._dtype, self._half, self._feedback = zeros.dtype, half, feedback
        self._stored = narrowed(zeros, half)

    def recall(self, spectrum: Tensor, keys: Tensor, part: slice, layers: Stretches, decay: Tensor) -> Tensor:
        """Adds the spectra of gradients to a part of the rows, and returns what is read back."""
        memory = widened([tensor[part] for tensor in self._stored], self._dtype)  # in full precision the memory itself
        if keys.ndim == 2:  # the keys of layers, so that they need not be copied to rows
            memory.mul_(decay)
            read = spectrum
            for layer, rows in layers:
                memory[rows].addcmul_(spectrum[0, rows], keys[layer].conj())
                torch.mul(memory[rows], keys[layer], out=read[0, rows])
        elif len(spectrum) == 1:
            memory.mul_(decay).addcmul_(spectrum[0], keys[0].conj())
            read = memory * keys
        else:
            bound = (spectrum * keys.conj()).sum(0)
            memory.mul_(decay).add_(bound)
            read = (memory - self._feedback * bound) * keys / len(spectrum)
        if self._half is not None:
            for stored, new in zip(self._stored, narrowed(memory, self._half), strict=True):
                stored[part] = new
        return read

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
