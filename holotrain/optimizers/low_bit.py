"""torchao's optimizers with averages of few bits, as checkpoints need them.

torchao keeps averages as tensors of 8 or 4 bits: codes, a scale for each block of entries, and the values that codes stand for.
A checkpoint is data, so it holds these parts as plain tensors. Loaded, they become a state again, with no bit changed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes, is_traceable_wrapper_subclass

CLASS = "tensor_class"
"""Key of a tensor's class, beside its parts."""

ENTRIES = 4096
"""torchao keeps the averages of parameters with fewer entries in full precision."""


def low_bit(name: str, params: Any, **options: Any) -> Optimizer:
    """An optimizer of torchao, such as AdamW8bit, whose ``state_dict`` holds plain tensors. For one process, or DDP.

    On the CPU its step is not compiled, which would take longer than hundreds of steps.

    Args:
        name: of the class in ``torchao.optim``.
        params: the parameters or parameter groups.
        options: of the class.

    Raises:
        ValueError: torchao is not installed, or FSDP2 or tensor parallelism shards a parameter; in ``load_state_dict``: a part
            of a state is missing, or differs from a fresh one in shape or dtype.
    """
    try:
        import torchao.optim
    except ImportError as error:
        raise ValueError(f"{name} needs torchao: pip install 'holotrain[torchao]'") from error
    base: Any = getattr(torchao.optim, name)
    with _disable_current_modes(), torch.device("cpu"):  # torchao computes once what codes stand for; not from fake tensors
        for signed in (True, False):
            base._subclass_zeros(torch.empty(ENTRIES), signed, ENTRIES)

    def step(self: Any, closure: Callable[[], float] | None = None) -> float | None:
        on_cpu = all(parameter.device.type == "cpu" for group in self.param_groups for parameter in group["params"])
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            return base.step(self, closure)

    optimizer = type(name, (base,), {"step": step, "__module__": __name__})(params, **options)
    if any(hasattr(parameter, "device_mesh") for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(f"{name} keeps the state of whole parameters, and these are sharded")
    optimizer.register_state_dict_post_hook(_with_plain_tensors)
    optimizer.register_load_state_dict_pre_hook(_with_averages)
    return optimizer


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The tensors that hold the memory of a tensor: its parts, or itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def _with_plain_tensors(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        if not is_traceable_wrapper_subclass(value):
            return value
        return {name: getattr(value, name) for name in value.__tensor_flatten__()[0]} | {CLASS: type(value).__name__}

    states = state_dict["state"].items()
    return state_dict | {"state": {n: {name: plain(value) for name, value in state.items()} for n, state in states}}


def _with_averages(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    of = dict(zip(numbers, parameters, strict=False))  # load_state_dict reports other lengths
    states = {n: _loaded(optimizer, state, of[n]) if n in of else state for n, state in state_dict["state"].items()}
    return state_dict | {"state": states}


def _loaded(optimizer: Any, state: dict[str, Any], parameter: Tensor) -> dict[str, Tensor]:
    loaded = {"step": _fitting("step", state.get("step"), torch.tensor(0.0))}
    averages = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * ("max_exp_avg_sq" in state)
    for name in averages:
        fresh, value = optimizer._new_buffer(parameter, name == "exp_avg"), state.get(name)
        if not is_traceable_wrapper_subclass(fresh):
            loaded[name] = _fitting(name, value, fresh)
            continue
        if not isinstance(value, dict) or value.get(CLASS) != type(fresh).__name__:
            raise ValueError(f"the optimizer's state does not fit: {name} is not of {type(fresh).__name__}")
        names, context = fresh.__tensor_flatten__()
        parts = {part: _fitting(f"{name}.{part}", value.get(part), getattr(fresh, part)) for part in names}
        loaded[name] = type(fresh).__tensor_unflatten__(parts, context, fresh.shape, fresh.stride())
    return loaded


def _fitting(name: str, value: Any, like: Tensor) -> Tensor:
    """The value with the device and dtype of ``like``, if the shape and dtype are the same, or both are floats of more bits."""
    fits = isinstance(value, Tensor) and value.shape == like.shape and value.layout == like.layout
    if fits and value.dtype != like.dtype:
        fits = all(each.is_floating_point() and each.itemsize > 1 for each in (value, like))
    if not fits:
        found = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else "missing or no tensor"
        raise ValueError(f"the optimizer's state does not fit: {name} is {found}, not {like.dtype} {tuple(like.shape)}")
    return value.to(like)
