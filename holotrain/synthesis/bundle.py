"""The rows of one length, with their transform, keys and memory: what a step makes of them."""

from __future__ import annotations

import torch
from torch import Tensor

from holotrain.synthesis.association import Association, Binding
from holotrain.synthesis.hologram import Hologram, OffloadedHologram
from holotrain.synthesis.recipe import HALVES, Recipe
from holotrain.synthesis.rows import Part, Rows
from holotrain.synthesis.transforms import TRANSFORMS, Hadamard, Transform, folded, units

SCALARS = ("decay", "feedback", "fresh", "unbias")
"""0-dim tensors that change from step to step: decay and feedback of the hologram, weight of the present in the running mean
of gradients, and what corrects that mean for having begun at zero."""


class Bundle:
    """The rows of one length: their transform, keys and memory.

    Args:
        rows: the gradients.
        recipe: what becomes of them.
        like: of the dtype to compute in, on the parameters' device.
        generator: draws what tells rows apart that share a hologram.
    """

    def __init__(self, rows: Rows, recipe: Recipe, like: Tensor, generator: torch.Generator) -> None:
        self.rows, self._recipe = rows, recipe
        length, slots = rows.length, rows.slots
        self._slots = slots
        self.transform: Transform = (
            Hadamard(length, recipe.seed) if recipe.transform == "hadamard" else TRANSFORMS[recipe.transform](length)
        )
        # A row's place among those that share a hologram is part of its key: rows of one layer must differ too.
        self._marks = None
        if slots > 1:
            marks = torch.randn(slots, 1, length, generator=generator).to(like)
            self._marks = units(self.transform.forward(marks), empty=1)
        self.hologram = None
        self._associate = Binding()
        if recipe.mode != "bind":
            spectrum = self.transform.spectrum_dtype(like.dtype)
            half = HALVES.get(recipe.dtype)
            kind = OffloadedHologram if recipe.offload else Hologram
            self.hologram = kind(rows.count, self.transform.bins, spectrum, half, like.device)
            self._associate = Association(self.hologram, slots, recipe.compile)
        # On a GPU a launch for each layer would cost more than to write keys out row by row.
        self._by_layers = recipe.mode == "associative" and like.device.type == "cpu" and not recipe.compile
        self.mean = like.new_zeros(slots, rows.count, length) if recipe.ema else None

    def weave(self, keys: Tensor, scalars: dict[str, Tensor], measure: bool, in_turn: bool) -> Tensor | None:
        """Turns gradients into updates.

        Args:
            keys: (layers, length of a key).
            scalars: those of :data:`SCALARS`.
            measure: return (gg, gu, uu) of each row, (3, slots, rows).
            in_turn: fetch the gradients of each part and write its updates back; otherwise they stand in the parts' memory
                beforehand, and the updates do so afterwards.
        """
        # A key's sum rounds with every input. Where nothing else is in a bin (the mean over channels of what a LayerNorm gives
        # is zero), its phase would be chance, and another in every order of summing.
        noise = torch.finfo(keys.dtype).eps ** 0.5
        unit_keys = units(self.transform.forward(folded(keys, self.rows.length)), empty=1, noise=noise)
        figures = []
        parts = self.rows.parts
        self._associate.prefetch(parts[0].rows)
        for part, following in zip(parts, [*parts[1:], None], strict=True):
            if in_turn:
                part.gather()
            if following is not None:
                self._associate.prefetch(following.rows)
            figures.append(self._weave(part, self._keys_of(part, unit_keys), scalars, measure))
            if in_turn:
                part.scatter()
        return torch.cat(figures, -1) if measure else None

    def _weave(self, part: Part, keys: Tensor, scalars: dict[str, Tensor], measure: bool) -> Tensor | None:
        gradient = part.memory
        content = self._smoothed(gradient, part.rows, scalars)
        spectrum = self.transform.forward(content)
        if self._recipe.phase_only or self._recipe.mode == "bind":
            spectrum = self._phases(spectrum, content)
        read = self._associate(spectrum, keys, part.rows, part.stretches, scalars["decay"], scalars["feedback"])
        if self._slots == 1 and not measure and gradient.is_contiguous():
            self.transform.inverse(read, out=gradient)
            return None
        update = self.transform.inverse(read)
        if self._slots > 1:
            update.addcmul_(content, scalars["feedback"])
        products = [_dot(gradient, gradient), _dot(gradient, update)] if measure else []
        gradient.copy_(update)
        if not measure:
            return None
        part.clear_unwritten()
        return torch.stack((*products, _dot(gradient, gradient)))

    def _keys_of(self, part: Part, unit_keys: Tensor) -> Tensor:
        if self._by_layers:
            return unit_keys
        keys = unit_keys[part.layer]
        return keys if self._marks is None else keys * self._marks

    def _smoothed(self, gradient: Tensor, rows: slice, scalars: dict[str, Tensor]) -> Tensor:
        if self.mean is None:
            return gradient
        mean = self.mean[:, rows]
        mean.lerp_(gradient, scalars["fresh"])
        return mean * scalars["unbias"]

    def _phases(self, spectrum: Tensor, content: Tensor) -> Tensor:
        """Every bin at one magnitude: rows of norm 1 as published, or of the norm that they had."""
        phases = units(spectrum, empty=0) / self.rows.length**0.5
        if self._recipe.mode == "bind":
            return phases
        return phases * torch.linalg.vector_norm(content, dim=-1, keepdim=True)

    def state(self) -> dict[str, Tensor]:
        kept = {} if self.hologram is None else dict(self.hologram.state)
        return kept if self.mean is None else kept | {"mean": self.mean}


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return torch.linalg.vecdot(a, b)
