"""The rows of one length with their transform, keys and hologram, and the step over them."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.linalg import vecdot as dot

from holotrain.synthesis.association import Association
from holotrain.synthesis.hologram import HALVES, Hologram
from holotrain.synthesis.recipe import Recipe
from holotrain.synthesis.rows import Part, Rows
from holotrain.synthesis.transforms import TRANSFORMS, Hadamard, Transform, folded, units

SCALARS = ("decay", "fresh", "unbias")
"""0-dim tensors that change between steps: decay of the hologram, weight of the new gradient in the running mean, and the bias
correction of that mean, which starts at zero."""


class RowGroup:
    """The rows of one length: their transform, keys and hologram.

    Args:
        rows: the gradients.
        recipe: the options.
        like: a tensor with the dtype to compute in, on the parameters' device.
        generator: draws the keys of rows that share a hologram.
    """

    def __init__(self, rows: Rows, recipe: Recipe, like: Tensor, generator: torch.Generator) -> None:
        self.rows, self._recipe = rows, recipe
        length, slots = rows.length, rows.slots
        self._slots = slots
        self.transform: Transform = (
            Hadamard(length, recipe.seed) if recipe.transform == "hadamard" else TRANSFORMS[recipe.transform](length)
        )
        # Rows that share a hologram each have a random mark in their key, so that rows of one layer differ too.
        self._marks = None
        if slots > 1:
            marks = torch.randn(slots, 1, length, generator=generator).to(like)
            self._marks = units(self.transform.forward(marks), empty=1)
        self.hologram = self._associate = None
        if recipe.mode != "bind":
            dtype = like.dtype.to_complex() if recipe.transform == "fft" else like.dtype
            self.hologram = Hologram(rows.count, self.transform.bins, dtype, HALVES.get(recipe.dtype), like.device)
            self._associate = Association(self.hologram, slots, recipe.compile)
        # On a GPU one launch per layer would cost more than copying the keys to rows.
        self._by_layers = recipe.mode == "associative" and like.device.type == "cpu" and not recipe.compile
        self.mean = like.new_zeros(slots, rows.count, length) if recipe.ema else None

    def update(self, keys: Tensor, scalars: dict[str, Tensor], measure: bool, in_turn: bool) -> Tensor | None:
        """Turns gradients into updates.

        Args:
            keys: (layers, length of a key).
            scalars: those of :data:`SCALARS`.
            measure: return (gg, gu, uu) of each row, (3, slots, rows).
            in_turn: read the gradients of each part and write its updates back, part by part; otherwise the gradients are
                already in the parts' memory, and the updates stay there.
        """
        # A summed key has rounding errors. In a bin with nothing else (the mean over channels after a LayerNorm is 0) the
        # phase would be random and would depend on the order of summation.
        noise = None if self._recipe.representation == "flattened" else torch.finfo(keys.dtype).eps ** 0.5
        unit_keys = units(self.transform.forward(folded(keys, self.rows.length)), empty=1, noise=noise)
        figures = []
        for part in self.rows.parts:
            if in_turn:
                part.gather()
            keys = unit_keys if self._by_layers else unit_keys[part.layer]
            figures.append(self._update(part, keys if self._marks is None else keys * self._marks, scalars, measure))
            if in_turn:
                part.scatter()
        return torch.cat(figures, -1) if measure else None

    def _update(self, part: Part, keys: Tensor, scalars: dict[str, Tensor], measure: bool) -> Tensor | None:
        gradient = part.memory
        content = self._smoothed(gradient, part.rows, scalars)
        spectrum = self.transform.forward(content)
        if self._recipe.phase_only or self._recipe.mode == "bind":
            spectrum = self._phases(spectrum, content)
        if self._associate is None:
            read = spectrum * keys.conj()
        else:
            read = self._associate(spectrum, keys, part.rows, part.stretches, scalars["decay"], self._recipe.feedback)
        if self._slots == 1 and not measure and gradient.is_contiguous():
            self.transform.inverse(read, out=gradient)
            return None
        update = self.transform.inverse(read)
        if self._slots > 1:
            update.add_(content, alpha=self._recipe.feedback)
        products = [dot(gradient, gradient), dot(gradient, update)] if measure else []
        gradient.copy_(update)
        if not measure:
            return None
        part.clear_unwritten()
        return torch.stack((*products, dot(gradient, gradient)))

    def _smoothed(self, gradient: Tensor, rows: slice, scalars: dict[str, Tensor]) -> Tensor:
        if self.mean is None:
            return gradient
        mean = self.mean[:, rows]
        mean.lerp_(gradient, scalars["fresh"])
        return mean * scalars["unbias"]

    def _phases(self, spectrum: Tensor, content: Tensor) -> Tensor:
        """All bins at one magnitude: rows of norm 1 as published, or with the norm they had."""
        phases = units(spectrum, empty=0) / self.rows.length**0.5
        if self._recipe.mode == "bind":
            return phases
        return phases * torch.linalg.vector_norm(content, dim=-1, keepdim=True)

    def state(self) -> dict[str, Tensor]:
        kept = {} if self.hologram is None else dict(self.hologram.state)
        return kept if self.mean is None else kept | {"mean": self.mean}
