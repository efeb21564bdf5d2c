"""Which parameters share a key: those of one layer, or of the whole model."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn

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
        ValueError: no parameter is covered; a parameter is sharded or complex; parameters are on several devices.
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
    first, device = named[0][0], named[0][1].device
    for name, parameter in named:
        if _is_sharded(parameter):
            raise ValueError(
                f"{name} is sharded over several processes (fully_shard, tensor parallel); synthesis needs whole parameters"
            )
        if not parameter.is_floating_point():
            raise ValueError(f"{name} is of {parameter.dtype}; synthesis needs real floating parameters")
        if parameter.device != device:
            raise ValueError(f"{name} is on {parameter.device} and {first} on {device}; synthesis needs one device")
        if parameter.device.type == "meta":
            raise ValueError(f"{name} is on the meta device; allocate it before it is covered")


def _is_sharded(parameter: nn.Parameter) -> bool:
    sharding = sys.modules.get("torch.distributed.tensor")  # do not import it just to ask
    return type(parameter).__name__ == "FlatParameter" or (sharding is not None and isinstance(parameter, sharding.DTensor))


def working_dtype(layers: list[Layer]) -> torch.dtype:
    """The dtype in which gradients are transformed: fp32, or fp64 if a parameter is fp64."""
    return torch.float64 if any(p.dtype == torch.float64 for _, p in _pairs(layers)) else torch.float32
