"""torchao's optimizers with averages of few bits, for any device, for shards and for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from holotrain.optimizers.plain_state import whole_blocks, with_plain_state

LEAST = 4096
"""torchao keeps the averages of parameters with fewer entries in full precision."""


def low_bit(name: str, params: Any, **options: Any) -> Optimizer:
    """An optimizer of torchao, such as AdamW8bit, whose ``state_dict`` holds plain tensors.

    On the CPU its step is not compiled, which would take longer than hundreds of steps. Of a parameter that FSDP2 shards, the
    averages have few bits if the share of each process consists of whole blocks (of 128 or 256 entries, as in one process).

    Args:
        name: of the class in ``torchao.optim``.
        params: the parameters or parameter groups.
        options: of the class.

    Raises:
        ValueError: torchao is not installed.
    """
    try:
        import torchao.optim
    except ImportError as error:
        raise ValueError(f"{name} needs torchao: pip install 'holotrain[torchao]'") from error
    return with_plain_state(_adapted(getattr(torchao.optim, name))(params, **options))


@cache
def _adapted(base: type[Optimizer]) -> type[Optimizer]:
    def new_buffer(self: Any, parameter: Tensor, signed: bool) -> Tensor:
        if hasattr(parameter, "device_mesh") and not whole_blocks(parameter, self.block_size, LEAST):
            return torch.zeros_like(parameter)  # where torchao asks each share, shares of one parameter would differ
        return base._new_buffer(self, parameter, signed)

    def step(self: Any, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        on_cpu = all(parameter.device.type == "cpu" for group in self.param_groups for parameter in group["params"])
        with torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
            base.step(self)
        return loss

    return type(base.__name__, (base,), {"_new_buffer": new_buffer, "step": step, "__module__": __name__})
