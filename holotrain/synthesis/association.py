"""What happens to a gradient's spectrum: it is added to the hologram and read back.

Shapes: S rows of the hologram, P gradient rows that share each of them, F bins. Spectra and keys are (P, S, F), a hologram is
(S, F). If P is 1, keys may be those of the layers instead, (layers, F).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from holotrain.synthesis.hologram import Hologram
from holotrain.synthesis.rows import Stretches


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
        compiled: fuse the arithmetic with torch.compile, if P is 1.
    """

    def __init__(self, hologram: Hologram, slots: int, feedback: float, compiled: bool) -> None:
        self.hologram = hologram
        self._slots, self._feedback = slots, feedback
        self._recall = _fused() if compiled else _recalled

    def __call__(self, spectrum: Tensor, keys: Tensor, part: slice, layers: Stretches, decay: Tensor) -> Tensor:
        memory = self.hologram.load(part)
        if keys.ndim == 2:
            read = _recalled_by_layers(memory, spectrum[0], keys, layers, decay)[None]
        elif self._slots == 1:
            read = self._recall(memory, spectrum[0], keys[0], decay)[None]
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


def _recalled(memory: Tensor, spectrum: Tensor, keys: Tensor, decay: Tensor) -> Tensor:
    memory.mul_(decay).addcmul_(spectrum, keys.conj())
    return memory * keys


def _recalled_in_parts(memory: Tensor, spectrum: Tensor, keys: Tensor, decay: Tensor) -> tuple[Tensor, Tensor]:
    """The same on real and imaginary parts, (..., 2), which the compiler can fuse."""
    (a, b), (g, h), (c, s) = (t.unbind(-1) for t in (memory, spectrum, keys))
    real, imaginary = decay * a + (g * c + h * s), decay * b + (h * c - g * s)
    return torch.stack((real, imaginary), -1), torch.stack((real * c - imaginary * s, real * s + imaginary * c), -1)


def _fused() -> Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]:
    parts, real = torch.compile(_recalled_in_parts), torch.compile(_recalled)

    def recall(memory: Tensor, spectrum: Tensor, keys: Tensor, decay: Tensor) -> Tensor:
        if not memory.is_complex():
            return real(memory, spectrum, keys, decay)
        held = torch.view_as_real(memory)
        new, read = parts(held, torch.view_as_real(spectrum), torch.view_as_real(keys), decay)
        held.copy_(new)
        return torch.view_as_complex(read)

    return recall
