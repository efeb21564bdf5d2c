"""Muon for matrices that are sharded among processes."""

from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Muon


class ShardedMuon(Muon):
    """torch's Muon, which also orthogonalises sharded matrices (FSDP2, tensor parallel) as a whole.

    On shards, each of its ten matrix products would be a collective in half precision, and the result would depend on how many
    there are. Here every process gathers an update once and computes what a single process would. Momentum stays sharded.

    Attributes:
        whole_copies: for a plan of the memory: a matrix, its gradient and its momentum are whole in a step.
    """

    whole_copies = 3

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        sharded = [group | {"params": [p for p in group["params"] if isinstance(p, DTensor)]} for group in self.param_groups]
        if not any(group["params"] for group in sharded):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in sharded:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_of(parameter, group)
        held_back = [(p, p.grad) for group in sharded for p in group["params"]]
        for parameter, _ in held_back:
            parameter.grad = None
        super().step()  # for the parameters that are not sharded
        for parameter, grad in held_back:
            parameter.grad = grad
        return loss

    def _step_of(self, parameter: DTensor, group: dict) -> None:
        state, grad = self.state[parameter], parameter.grad
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(grad)
        momentum = state["momentum_buffer"].lerp_(grad, 1 - group["momentum"])
        update = grad.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        matrix = nn.Parameter(torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device))
        matrix.grad = update.full_tensor()
        options = {name: group[name] for name in ("lr", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")}
        Muon([matrix], weight_decay=0, momentum=0, nesterov=False, **options).step()
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        own = distribute_tensor(matrix.detach(), parameter.device_mesh, parameter.placements, src_data_rank=None)
        parameter.add_(own)
