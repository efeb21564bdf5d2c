"""What each layer saw since the last step: the sum of its inputs over everything but channels, gathered by forward hooks.

A key counts by its phases alone, so the sum serves as the mean does. A hook adds in place to memory that stays where it is,
so a captured graph goes on gathering when it is replayed, and several forwards before a step (accumulation) add up.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from holotrain.synthesis.layers import Layer
from holotrain.synthesis.transforms import folded

KEY_LENGTH = 4096
"""Longest key that is kept; wider inputs are folded to it."""


class Keys:
    """The keys of layers, gathered while ``model`` is in training.

    Args:
        model: whose training mode decides.
        layers: a key each: the total of the layer's first floating input, or of its output where there is none (embeddings).
        length: of a key, at most :data:`KEY_LENGTH`; shorter ones are padded, longer ones folded.
        like: of the dtype and on the device that keys are to have.
        outputs: take what the layers return rather than what they are given, summed over the batch alone. Of calls within
            calls of one module (Lightning's DDP runs a training step through its module's forward) the innermost counts.

    A second run of a forward, in a backward that recomputes activations, is no second input: what a backward runs is passed
    over, and so is what another thread runs than the first to run a forward after a step, such as one that recomputes.
    """

    def __init__(self, model: nn.Module, layers: Iterable[Layer], length: int, like: Tensor, outputs: bool = False) -> None:
        layers = list(layers)
        self.sums = torch.zeros(len(layers), min(length, KEY_LENGTH), dtype=like.dtype, device=like.device)
        self.seen = [False] * len(layers)
        self._outputs = outputs
        self._model = weakref.ref(model)
        self._thread: int | None = None
        self._begun = [True] * len(layers)
        self._handles = []
        for number, layer in enumerate(layers):
            self._handles.append(layer.module.register_forward_hook(_Hook(self, number), with_kwargs=True))
            if outputs:
                self._handles.append(layer.module.register_forward_pre_hook(_Beginning(self, number)))

    def take(self) -> Tensor:
        """The keys (layers, length) since they were last taken, of all processes together; the next begin from nothing."""
        taken = self.sums.clone()
        self.sums.zero_()
        self._thread = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(taken)
        return taken

    def remove(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()

    def begin(self, number: int) -> None:
        self._begun[number] = True

    def gather(self, number: int, module: nn.Module, given: Any, returned: Any) -> None:
        model = self._model()
        if model is None or not model.training or torch._C._current_graph_task_id() != -1:
            return
        self._thread = self._thread or threading.get_ident()
        if threading.get_ident() != self._thread or (self._outputs and not self._begun[number]):
            return
        self._begun[number] = False
        tensor = next((t for t in tree_leaves(returned if self._outputs else (given, returned)) if _is_floating(t)), None)
        if tensor is None or tensor.is_meta or tensor.numel() == 0:
            return
        self.seen[number] = True
        # Without a profiler a range would take as long as what it names, in small layers.
        named = profiler.record_function("synthesis keys") if profiler._is_profiler_enabled else nullcontext()
        with named, torch.no_grad():
            row = self.sums[number]
            total = _total(tensor.detach(), module, row.dtype, over_batch=self._outputs)
            total = folded(total, row.shape[0]) if len(total) > len(row) else total
            row[: len(total)].add_(total)


class _Hook:
    """Hands on what a module was given and returned. A copy of the module does not take it along: copies gather nothing."""

    def __init__(self, keys: Keys | None, number: int) -> None:
        self._keys, self._number = keys, number

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, returned: Any) -> None:
        if self._keys is not None:
            self._keys.gather(self._number, module, (args, kwargs), returned)

    def __deepcopy__(self, memo: dict) -> _Hook:
        return type(self)(None, self._number)

    def __reduce__(self):
        return type(self), (None, self._number)


class _Beginning(_Hook):
    """Notes that a call of a module begins."""

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if self._keys is not None:
            self._keys.begin(self._number)


def _total(x: Tensor, module: nn.Module, dtype: torch.dtype, over_batch: bool) -> Tensor:
    """The sum over all but the channels' dimension; or over the first alone, flattened."""
    if over_batch:
        return x.to(dtype).flatten() if x.ndim == 0 else x.sum(0, dtype=dtype).flatten()
    channels = 1 if x.ndim > 1 and isinstance(module, _ConvNd | _NormBase | nn.GroupNorm) else x.ndim - 1
    others = [dim for dim in range(x.ndim) if dim != channels]
    return x.sum(others, dtype=dtype) if others else x.to(dtype).flatten()


def _is_floating(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point()
