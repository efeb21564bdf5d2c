"""Which parameters share a key, and the keys: the inputs of each layer since the last step, gathered by forward hooks.

Inputs are summed over all dimensions but the channels. Only the phases of a key matter, so the sum serves as well as the mean.
Hooks add in place to fixed memory, so a captured CUDA graph goes on gathering when it is replayed, and several forwards before
a step (accumulation) add up.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.utils._pytree import tree_leaves

from holotrain.synthesis.binding import folded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs


def is_sharded(tensor: Tensor) -> TypeIs[DTensor]:
    """Whether it is a DTensor, without importing what shards it."""
    return hasattr(tensor, "device_mesh")


def local(tensor: Tensor) -> Tensor:
    """This process's shard of a DTensor, without its history; any other tensor itself."""
    return tensor.detach().to_local() if is_sharded(tensor) else tensor  # ty: ignore[missing-attribute]


Covers = Callable[[str, nn.Parameter], bool]


@dataclass(frozen=True)
class Layer:
    """A module and its own covered parameters, by full name."""

    module: nn.Module
    parameters: dict[str, nn.Parameter]


def layers_of(model: nn.Module, covers: Covers | None = None) -> list[Layer]:
    """Returns every module with covered parameters of its own. A parameter of several modules belongs to the first.

    Args:
        covers: whether a parameter is covered, given its full name and the parameter; None: all that require grad.

    Raises:
        ValueError: no parameter is covered; a parameter is complex, or sharded otherwise than FSDP2 does over all processes;
            some are sharded and others whole, or on several devices.
    """
    seen: set[int] = set()
    layers = []
    for name, module in model.named_modules():
        own = {}
        for local, parameter in module.named_parameters(name, recurse=False):
            if id(parameter) not in seen and parameter.requires_grad and (covers is None or covers(local, parameter)):
                seen.add(id(parameter))
                own[local] = parameter
        if own:
            layers.append(Layer(module, own))
    _check(list(pairs(layers)))
    return layers


def pairs(layers: Iterable[Layer]) -> Iterator[tuple[str, nn.Parameter]]:
    """All covered parameters, with their full names."""
    return chain.from_iterable(layer.parameters.items() for layer in layers)


def _check(named: list[tuple[str, nn.Parameter]]) -> None:
    if not named:
        raise ValueError("no parameter is covered: none requires grad, or covers selects none")
    first, other = named[0]
    for name, parameter in named:
        by_rows = not is_sharded(parameter) or (
            parameter.device_mesh.size() == dist.get_world_size() and parameter.placements[0].is_shard(0)
        )
        if type(parameter).__name__ == "FlatParameter" or not by_rows:
            raise ValueError(
                f"{name} is sharded by FSDP1 or tensor parallel; synthesis needs whole ones, or fully_shard over all processes"
            )
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is of {parameter.dtype}; synthesis needs real floating parameters")
        if parameter.device != other.device:
            raise ValueError(f"{name} is on {parameter.device} and {first} on {other.device}; synthesis needs one device")
        if is_sharded(parameter) != is_sharded(other):
            sharded, whole = (name, first) if is_sharded(parameter) else (first, name)
            raise ValueError(f"{sharded} is sharded by FSDP2 and {whole} is not; cover either sharded parameters or whole ones")
        if parameter.device.type == "meta":
            raise ValueError(f"{name} is on the meta device; allocate it before it is covered")


def shares_of(layers: list[Layer]) -> int:
    """The number of processes over which the rows of parameters are divided."""
    return max(parameter.device_mesh.size() if is_sharded(parameter) else 1 for _, parameter in pairs(layers))


def working_dtype(layers: list[Layer]) -> torch.dtype:
    """The dtype in which gradients are transformed: fp32, or fp64 if a parameter is fp64."""
    return torch.float64 if any(p.dtype == torch.float64 for _, p in pairs(layers)) else torch.float32


KEY_LENGTH = 4096
"""The longest key; wider inputs are folded to it."""


class Keys:
    """The keys of layers, gathered while ``model`` is in training mode.

    Args:
        model: keys are gathered while this model is in training mode.
        layers: each has a key: the sum of the layer's first floating input, or of its output if there is none (embeddings).
        length: of a key, at most :data:`KEY_LENGTH` unless it is flattened; shorter inputs are padded, longer ones folded.
        like: a tensor with the dtype and device of the keys.
        outputs: use the layers' outputs instead of their inputs, ``"summed"`` over the batch only or ``"flattened"``: those of
            several calls, and then of several processes, one after the other, and zeros after them, more of them if a batch is
            smaller. If a module is called inside its own call (Lightning's DDP runs a training step through the module's
            forward), the innermost call counts.

    A backward that recomputes activations runs a forward again. Such calls do not count: calls during a backward are skipped,
    and so are calls from a thread other than the first that runs a forward after a step.
    """

    def __init__(self, model: nn.Module, layers: list[Layer], length: int, like: Tensor, outputs: str | None = None) -> None:
        length = length if outputs == "flattened" else min(length, KEY_LENGTH)
        self.sums = torch.zeros(len(layers), length, dtype=like.dtype, device=like.device)
        self._filled = 0
        self.seen = [False] * len(layers)
        self._outputs = outputs
        self._model = weakref.ref(model)
        self._thread: int | None = None
        self.called = [True] * len(layers)
        self._handles = []
        for number, layer in enumerate(layers):
            self._handles.append(layer.module.register_forward_hook(_Hook(self, number), with_kwargs=True))
            if outputs:
                self._handles.append(layer.module.register_forward_pre_hook(_Beginning(self, number)))

    def take(self) -> Tensor:
        """Returns the keys (layers, length) gathered since the last call, summed over all processes, and resets them."""
        keys, length = self.sums.clone(), self.sums.shape[1]
        self.sums.zero_()
        self._thread = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            if self._outputs == "flattened":
                filled = torch.zeros(dist.get_world_size(), dtype=torch.long, device=keys.device)
                filled[dist.get_rank()] = self._filled
                dist.all_reduce(filled)  # the batches of processes may differ in size
                places = filled[: dist.get_rank()].sum() + torch.arange(min(self._filled, length), device=keys.device)
                keys = torch.zeros_like(keys).index_copy_(1, places % length, keys[:, : len(places)])
            dist.all_reduce(keys)
        self._filled = 0
        return keys

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def gather(self, number: int, module: nn.Module, inputs: Any, returned: Any) -> None:
        model = self._model()
        if model is None or not model.training or torch._C._current_graph_task_id() != -1:
            return
        self._thread = self._thread or threading.get_ident()
        if threading.get_ident() != self._thread or (self._outputs and not self.called[number]):
            return
        self.called[number] = False
        tensors = (t for t in tree_leaves(returned if self._outputs else (inputs, returned)) if isinstance(t, Tensor))
        tensor = next((t for t in tensors if t.is_floating_point()), None)
        if tensor is None or tensor.is_meta or tensor.numel() == 0:
            return
        self.seen[number] = True
        with torch.no_grad():
            row = self.sums[number]
            if self._outputs == "flattened":
                total = nn.functional.pad(tensor.detach().to(row.dtype).flatten(), (self._filled, 0))
                self._filled = len(total)
            else:
                total = _total(tensor.detach(), module, row.dtype, over_batch=self._outputs == "summed")
            total = folded(total, row.shape[0]) if len(total) > len(row) else total
            row[: len(total)].add_(total)


class _Hook:
    """Passes on the inputs and outputs of a module. In a copy of the module the hook does nothing."""

    def __init__(self, keys: Keys | None, number: int) -> None:
        self._keys, self._number = keys, number

    @torch.compiler.disable
    def __call__(self, module: nn.Module, args: tuple, kwargs: dict, returned: Any) -> None:
        if self._keys is not None:
            self._keys.gather(self._number, module, (args, kwargs), returned)

    def __reduce__(self):
        return type(self), (None, self._number)


class _Beginning(_Hook):
    """Notes that a module's call begins."""

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if self._keys is not None:
            self._keys.called[self._number] = True


def _total(x: Tensor, module: nn.Module, dtype: torch.dtype, over_batch: bool) -> Tensor:
    """The sum over all dimensions but the channels, or over the first dimension only, flattened."""
    if over_batch:
        return torch.atleast_1d(x).sum(0, dtype=dtype).flatten()
    channels = 1 if x.ndim > 1 and isinstance(module, _ConvNd | _NormBase | nn.GroupNorm) else x.ndim - 1
    others = [dim for dim in range(x.ndim) if dim != channels]
    return x.sum(others, dtype=dtype) if others else x.to(dtype).flatten()
