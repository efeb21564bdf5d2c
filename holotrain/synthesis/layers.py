"""Which parameters share a key: those of one layer, or of the whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from holotrain.shards import is_sharded

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
    taken: set[int] = set()
    layers = []
    for name, module in model.named_modules():
        own = {}
        for local, parameter in module.named_parameters(name, recurse=False):
            if id(parameter) not in taken and parameter.requires_grad and (covers is None or covers(local, parameter)):
                taken.add(id(parameter))
                own[local] = parameter
        if own:
            layers.append(Layer(module, own))
    _check([pair for layer in layers for pair in layer.parameters.items()])
    return layers


def as_one(model: nn.Module, layers: list[Layer]) -> list[Layer]:
    """The same parameters as one layer: the model."""
    return [Layer(model, dict(_pairs(layers)))]


def _pairs(layers: list[Layer]) -> Iterator[tuple[str, nn.Parameter]]:
    for layer in layers:
        yield from layer.parameters.items()


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
    return max(parameter.device_mesh.size() if is_sharded(parameter) else 1 for _, parameter in _pairs(layers))


def working_dtype(layers: list[Layer]) -> torch.dtype:
    """The dtype in which gradients are transformed: fp32, or fp64 if a parameter is fp64."""
    return torch.float64 if any(p.dtype == torch.float64 for _, p in _pairs(layers)) else torch.float32
