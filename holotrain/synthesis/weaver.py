"""The computation of one step: gradients in, updates out, on the device and in memory that is allocated beforehand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from holotrain.synthesis.bundle import SCALARS, Bundle
from holotrain.synthesis.direction import Products, coefficients
from holotrain.synthesis.graphed import Graphed
from holotrain.synthesis.layers import Layer, shares_of
from holotrain.synthesis.recipe import BLOCK_LENGTH, Recipe
from holotrain.synthesis.rows import RUN, Part, Rows, choose, size_of
from holotrain.synthesis.transforms import next_power_of_two

MOST = {"cpu": 1 << 19, "cuda": 1 << 25}
"""Entries that are processed at once: on a CPU as many as its cache holds, on a GPU few enough to limit temporary memory."""

TOLD_AT_ONCE = ("cpu",)
"""Devices whose results the host can read without waiting."""

AT_REST = {"decay": 1, "fresh": 0, "unbias": 0}
"""Scalars with which gradients of zero change no lasting state."""


class Weaver:
    """All bundles of a model, and the step over them.

    Args:
        layers: in the order of their keys.
        recipe: the options.
        like: a tensor with the dtype to compute in, on the parameters' device.
    """

    def __init__(self, layers: list[Layer], recipe: Recipe, like: Tensor) -> None:
        self.recipe = recipe
        self._layers = len(layers)
        self._device = like.device
        self._shared_out = shares_of(layers) > 1
        if self._shared_out and recipe.entries_a_block == 0:
            raise ValueError("block_length=0: whole layers are transformed, and FSDP2 shards them; give a block length")
        if recipe.cuda_graph and self._device.type != "cuda":
            raise ValueError(f"cuda_graph needs a model on a CUDA device, not on {self._device}")
        if recipe.offload and self._device.type != "cuda":
            raise ValueError(f"offload needs a model on a CUDA device, not on {self._device}")
        generator = torch.Generator().manual_seed(recipe.seed)
        run = min(RUN, recipe.entries_a_block or RUN)
        chosen = choose(layers, recipe.subsample, run, generator)
        sizes = {number: size_of(layer, chosen, run) for number, layer in enumerate(layers)}
        entries = sum(sizes.values())
        if entries == 0:
            raise ValueError(f"subsample={recipe.subsample} selects nothing of these parameters; even the largest is too small")
        if recipe.entries_a_block > max(BLOCK_LENGTH, next_power_of_two(entries)):
            raise ValueError(f"block_length={recipe.block_length}: it is longer than all {entries} covered entries")
        by_length: dict[int, list[tuple[int, Layer]]] = {}
        for number, layer in enumerate(layers):
            if sizes[number]:
                length = recipe.entries_a_block or next_power_of_two(sizes[number])
                by_length.setdefault(length, []).append((number, layer))
        # Updates that depend on inner products over a whole layer must wait for the whole layer. On a GPU everything is
        # processed together, because launches are expensive.
        self._told_at_once = self._device.type in TOLD_AT_ONCE
        self._together = recipe.reshapes or not self._told_at_once
        most = MOST.get(self._device.type, MOST["cuda"])
        self.bundles = []
        for length, numbered in sorted(by_length.items()):
            slots = min(recipe.slots, sum(-(-sizes[number] // length) for number, _ in numbered))  # no more slots than rows
            rows = Rows(numbered, chosen, run, length, slots, most, self._together, like)
            self.bundles.append(Bundle(rows, recipe, like, generator))
        self.key_length = max(by_length)
        self._scalars = {name: like.new_ones(()) for name in SCALARS}
        self._graphed: dict[bool, Graphed] = {}

    def weave(self, grads: list[Tensor], keys: Tensor, step: int, measuring: bool) -> tuple[Callable[[], bool], Tensor | None]:
        """One step. Returns a function that says whether gradients were finite (it waits if necessary), and the figures.

        On a CPU nothing changes if they were not. On a GPU the host learns of it later, so the step runs with gradients of zero
        and a decay of 1, which leaves every hologram as it is.

        Args:
            grads: of the whole model, covered or not; covered ones must be contiguous.
        """
        total = _total([*grads, keys])
        if self._shared_out:
            dist.all_reduce(total)
        finite = total.isfinite()
        if self._told_at_once and not finite:
            return lambda: False, None
        self._set_scalars(step)
        if self._together:
            for part in self._parts:
                part.gather()
        if not self._told_at_once:
            keys = keys.masked_fill(~finite, 0)
            self._rest(unless=finite)
        arrived = _arriving(finite)
        results = self._woven(keys, measuring)
        if self._together:
            for part in self._parts:
                part.scatter(results.get("a"), results.get("b"))
        return arrived, results.get("figures")

    @property
    def _parts(self) -> list[Part]:
        return [part for bundle in self.bundles for part in bundle.rows.parts]

    def _set_scalars(self, step: int) -> None:
        recipe = self.recipe
        values = {
            "decay": recipe.decay_at(step),
            "feedback": recipe.feedback,
            "fresh": 1 - recipe.ema,
            "unbias": 1 / (1 - recipe.ema ** (step + 1)),
        }
        for name, scalar in self._scalars.items():
            scalar.fill_(values[name])

    def _rest(self, unless: Tensor) -> None:
        """Sets gradients and scalars with which a step changes neither hologram nor running mean."""
        for part in self._parts:
            part.memory.masked_fill_(~unless, 0)
        for name, value in AT_REST.items():
            self._scalars[name].masked_fill_(~unless, value)

    def _woven(self, keys: Tensor, measuring: bool) -> dict[str, Tensor]:
        measure = measuring or self.recipe.reshapes
        if not self.recipe.cuda_graph:
            return self._compute(keys, measure)
        if measure not in self._graphed:
            volatile = [*(part.memory for part in self._parts), *self._scalars.values()]
            kept = [tensor.clone() for tensor in volatile]
            never = torch.zeros((), dtype=torch.bool, device=self._device)
            compute = partial(self._compute, measure=measure)
            self._graphed[measure] = Graphed(compute, keys, partial(self._rest, unless=never))
            torch._foreach_copy_(volatile, kept)
        return self._graphed[measure](keys)

    def _compute(self, keys: Tensor, measure: bool) -> dict[str, Tensor]:
        """Computes the updates. Returns the figures and the coefficients of update and gradient by layer, if needed."""
        products = [bundle.weave(keys, self._scalars, measure, not self._together) for bundle in self.bundles]
        if not measure:
            return {}
        sums = sum(bundle.rows.by_layer(rows, self._layers) for bundle, rows in zip(self.bundles, products, strict=True))
        if self._shared_out:
            dist.all_reduce(sums)
        of_layers = Products(*sums)
        if not self.recipe.reshapes:
            return {"figures": of_layers.figures()}
        a, b = coefficients(of_layers, self.recipe)
        return {"figures": of_layers.combined(a, b).figures(), "a": a, "b": b}

    def state(self) -> dict[str, Tensor]:
        """The tensors kept between steps, by name."""
        for bundle in self.bundles:
            if bundle.hologram is not None:
                bundle.hologram.wait()
        return {f"{b.rows.length}.{name}": tensor for b in self.bundles for name, tensor in b.state().items()}


def _total(tensors: list[Tensor]) -> Tensor:
    """A number that is finite if all entries are finite (and their sum does not overflow)."""
    if tensors[0].device.type == "cpu":
        return torch.stack([tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors]).sum()
    norms = torch._foreach_norm(tensors, 1, dtype=torch.float32)
    return torch.stack(norms).sum()


def _arriving(flag: Tensor) -> Callable[[], bool]:
    """Copies a flag to the host. Returns a function that waits for this copy only, not for later work."""
    if flag.device.type != "cuda":
        return lambda: bool(flag)
    host = flag.to("cpu", non_blocking=True)
    event = torch.cuda.current_stream(flag.device).record_event()

    def arrived() -> bool:
        event.synchronize()
        return bool(host)

    return arrived
