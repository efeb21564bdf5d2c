"""The computation of one step: gradients in, updates out, all on the device and in memory allocated beforehand."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from holotrain.synthesis.bundle import SCALARS, Bundle
from holotrain.synthesis.direction import Products, coefficients
from holotrain.synthesis.graphed import Graphed
from holotrain.synthesis.hologram import OffloadedHologram
from holotrain.synthesis.layers import Layer
from holotrain.synthesis.recipe import Recipe
from holotrain.synthesis.rows import Part, Rows
from holotrain.synthesis.transforms import next_power_of_two

MOST = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Entries that are worked on at once: on a CPU what its cache holds, on a GPU what keeps temporary memory small."""


class Weaver:
    """All bundles of a model, and the step over them.

    Args:
        layers: in the order of their keys.
        recipe: how.
        like: of the dtype to compute in, on the parameters' device.
    """

    def __init__(self, layers: list[Layer], recipe: Recipe, like: Tensor) -> None:
        self.recipe = recipe
        self._layers = len(layers)
        self._device = like.device
        if recipe.cuda_graph and self._device.type != "cuda":
            raise ValueError(f"cuda_graph needs a model on a CUDA device, not on {self._device}")
        generator = torch.Generator().manual_seed(recipe.seed)
        by_length: dict[int, list[tuple[int, Layer]]] = {}
        for number, layer in enumerate(layers):
            size = sum(parameter.numel() for parameter in layer.parameters.values())
            length = recipe.entries_a_block or next_power_of_two(max(1, round(size * recipe.subsample)))
            by_length.setdefault(length, []).append((number, layer))
        # Updates that are changed by what a whole layer has in common with its gradient wait for all of it. On a GPU, where a
        # launch has its price, everything is worked on together.
        self._together = recipe.reshapes or self._device.type != "cpu"
        most = MOST.get(self._device.type, MOST["cuda"])
        self.bundles = []
        for length, numbered in sorted(by_length.items()):
            rows = Rows(numbered, length, recipe.slots, recipe.subsample, most, self._together, like, generator)
            self.bundles.append(Bundle(rows, recipe, like, generator))
        self.key_length = max(by_length)
        self._scalars = {name: like.new_ones(()) for name in SCALARS}
        self._graphed: dict[bool, Graphed] = {}

    def weave(self, grads: list[Tensor], keys: Tensor, step: int, measuring: bool) -> tuple[Callable[[], bool], Tensor | None]:
        """One step: returns a function that tells, waiting if need be, whether gradients were finite, and the figures.

        On a CPU nothing is touched if they were not. On a GPU the host learns of it later, so the step is made with gradients
        of zero and a decay of 1, which leaves every hologram as it is.

        Args:
            grads: all that there are, contiguous.
        """
        if self._together:
            for part in self._parts:
                part.gather()
            sums = [part.memory.sum() for part in self._parts]
        else:
            sums = [grad.sum(dtype=self._scalars["decay"].dtype) for grad in grads]
        finite = torch.stack(sums).isfinite().all()
        if self._device.type == "cpu" and not finite:
            return lambda: False, None
        self._set_scalars(step, finite)
        arrived = _arriving(finite)
        if self._device.type != "cpu":
            for part in self._parts:
                part.memory.masked_fill_(~finite, 0)
        results = self._woven(keys, measuring)
        if self._together:
            for part in self._parts:
                part.scatter(results.get("a"), results.get("b"))
        return arrived, results.get("figures")

    @property
    def _parts(self) -> list[Part]:
        return [part for bundle in self.bundles for part in bundle.rows.parts]

    def _set_scalars(self, step: int, finite: Tensor) -> None:
        recipe = self.recipe
        values = {
            "decay": recipe.decay_at(step),
            "feedback": recipe.feedback,
            "fresh": 1 - recipe.ema,
            "unbias": 1 / (1 - recipe.ema ** (step + 1)),
        }
        for name, scalar in self._scalars.items():
            scalar.fill_(values[name])
        if self._device.type != "cpu":
            self._scalars["decay"].copy_(torch.where(finite, self._scalars["decay"], 1))
            self._scalars["fresh"].copy_(torch.where(finite, self._scalars["fresh"], 0))

    def _woven(self, keys: Tensor, measuring: bool) -> dict[str, Tensor]:
        measure = measuring or self.recipe.reshapes
        if not self.recipe.cuda_graph:
            return self._compute(keys, measure)
        if measure not in self._graphed:
            volatile = [*(part.memory for part in self._parts), *self._scalars.values()]
            kept = [tensor.clone() for tensor in volatile]
            self._graphed[measure] = Graphed(lambda keys: self._compute(keys, measure), keys, self._at_rest)
            torch._foreach_copy_(volatile, kept)
        return self._graphed[measure](keys)

    def _compute(self, keys: Tensor, measure: bool) -> dict[str, Tensor]:
        """Makes the updates; returns the figures, and the coefficients of update and gradient by layer, if they are wanted."""
        products = [bundle.weave(keys, self._scalars, measure, not self._together) for bundle in self.bundles]
        if not measure:
            return {}
        of_layers = Products(
            *sum(bundle.rows.by_layer(rows, self._layers) for bundle, rows in zip(self.bundles, products, strict=True))
        )
        if not self.recipe.reshapes:
            return {"figures": of_layers.figures()}
        a, b = coefficients(of_layers, self.recipe)
        return {"figures": of_layers.combined(a, b).figures(), "a": a, "b": b}

    def _at_rest(self) -> None:
        """Gradients and scalars with which a step changes no hologram."""
        for part in self._parts:
            part.memory.zero_()
        self._scalars["decay"].fill_(1)
        self._scalars["fresh"].fill_(0)

    def state(self) -> dict[str, Tensor]:
        """What lasts from step to step, by name."""
        for bundle in self.bundles:
            if isinstance(bundle.hologram, OffloadedHologram):
                bundle.hologram.wait()
        return {f"{b.rows.length}.{name}": tensor for b in self.bundles for name, tensor in b.state().items()}


def _arriving(flag: Tensor) -> Callable[[], bool]:
    """Sends a flag to the host and gives a function that waits for it alone, not for what was launched since."""
    if flag.device.type != "cuda":
        return lambda: bool(flag)
    host = flag.to("cpu", non_blocking=True)
    event = torch.cuda.current_stream(flag.device).record_event()

    def arrived() -> bool:
        event.synchronize()
        return bool(host)

    return arrived
