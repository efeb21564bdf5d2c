"""torchao's optimizers with averages of few bits, for any device, for shards and for checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import _disable_current_modes

from holotrain.optimizers.plain_state import whole_blocks, with_plain_state
from holotrain.optimizers.standing_in import standing_in
from holotrain.shards import is_sharded, local

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
    with _disable_current_modes(), torch.device("cpu"):  # torchao computes once what codes stand for; not from fake tensors
        for signed in (True, False):
            base._subclass_zeros(torch.empty(LEAST), signed, LEAST)

    def new_buffer(self: Any, share: Tensor, signed: bool) -> Tensor:
        parameter = self.of_shares[share]
        if is_sharded(parameter) and not whole_blocks(parameter, self.block_size, LEAST):
            return torch.zeros_like(share)  # torchao asks the share alone, so those of one parameter could differ
        return base._new_buffer(self, share, signed)

    def fresh_state(self: Any, parameter: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        """What torchao makes before the first step of a parameter, or of its share."""
        share = local(parameter)
        self.of_shares = {share: parameter}
        made = {
            "step": torch.tensor(0.0),
            "exp_avg": self._new_buffer(share, True),
            "exp_avg_sq": self._new_buffer(share, False),
        }
        if group["amsgrad"]:
            made["max_exp_avg_sq"] = self._new_buffer(share, False)
        self.of_shares = {}
        return made

    def step(self: Any, closure: Callable[[], float] | None = None) -> float | None:
        """Steps the shares of parameters (which torchao, 0.18, does only in fp32)."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = [(group, {p: local(p) for p in group["params"] if p.grad is not None}) for group in self.param_groups]
        self.of_shares = {share: parameter for _, shares in groups for parameter, share in shares.items()}
        for share, parameter in self.of_shares.items():
            share.grad = local(parameter.grad)
        on_cpu = all(share.device.type == "cpu" for share in self.of_shares)
        try:
            with standing_in(self, groups), torch.compiler.set_stance("force_eager") if on_cpu else nullcontext():
                base.step(self)
        finally:
            for share, parameter in self.of_shares.items():
                if share is not parameter:
                    share.grad = None  # zero_grad frees that of the parameter alone
            self.of_shares = {}
        return loss

    changed = {"_new_buffer": new_buffer, "fresh_state": fresh_state, "step": step}
    return type(base.__name__, (base,), changed | {"__module__": __name__})
