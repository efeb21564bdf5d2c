"""What happens to a gradient's spectrum: it is added to the hologram and read back.

Shapes: S rows of the hologram, P gradient rows that share each of them, F bins. Spectra and keys are (P, S, F), a hologram is
(S, F). If P is 1, keys may be those of the layers instead, (layers, F).
"""

from __future__ import annotations

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
