"""Adafactor and Muon for parameters that are sharded among processes (FSDP2, tensor parallel)."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Adafactor, Muon, Optimizer

from holotrain.optimizers.stepping import loss_of, swapped_parameters


class _EachWhole(Optimizer):
    """Steps each sharded parameter with ``_step_whole``, and all the others as the next class does."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # ty: ignore[incompatible-method-override]
        loss = loss_of(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, DTensor) and parameter.grad is not None:
                    self._step_whole(parameter, parameter.grad, group)
        unsharded = [(group, {p: p for p in group["params"] if not isinstance(p, DTensor)}) for group in self.param_groups]
        with swapped_parameters(self, unsharded):
            super().step()
        return loss

    @abstractmethod
    def _step_whole(self, parameter: DTensor, grad: DTensor, group: dict[str, Any]) -> None: ...


class ShardedAdafactor(_EachWhole, Adafactor):
    """torch's Adafactor, which also steps sharded parameters (FSDP2, tensor parallel), each as a whole.

    Its update depends on means over rows and columns and on norms of the whole parameter, which torch (2.15) cannot compute in
    place on shards. Here every process gathers one parameter and its gradient at a time and computes what a single process
    would. Its state is small and stays whole.
    """

    def _step_whole(self, parameter: DTensor, grad: DTensor, group: dict[str, Any]) -> None:
        whole = parameter.full_tensor()
        whole.grad = grad.full_tensor()
        with swapped_parameters(self, [(group, {parameter: whole})]):
            Adafactor.step(self)
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))


class ShardedMuon(_EachWhole, Muon):
    """torch's Muon, which also orthogonalises sharded matrices (FSDP2, tensor parallel) as a whole.

    On shards, each of its ten matrix products would be a collective in half precision, and the result would depend on how many
    there are. Here every process gathers an update once and computes what a single process would. Momentum stays sharded.
    """

    def _step_whole(self, parameter: DTensor, grad: DTensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        matrix = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device))
        matrix.grad = update.full_tensor()  # ty: ignore[missing-union-attribute]
        options = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        Muon([matrix], weight_decay=0, momentum=0, nesterov=False, **options).step()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        own = distribute_tensor(matrix.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.add_(own)
