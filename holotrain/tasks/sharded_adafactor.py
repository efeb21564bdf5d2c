"""Adafactor for parameters that are sharded among processes."""

from collections.abc import Callable

import torch
from torch.distributed.tensor import distribute_tensor
from torch.optim import Adafactor

from holotrain.optimizers.stepping import standing_in
from holotrain.shards import is_sharded


class ShardedAdafactor(Adafactor):
    """torch's Adafactor, which also steps sharded parameters (FSDP2, tensor parallel), each as a whole.

    Its update depends on means over rows and columns and on norms of the whole parameter, which torch (2.15) cannot compute in
    place on shards. Here every process gathers one parameter and its gradient at a time and computes what a single process
    would. Its state is small and stays whole.

    Attributes:
        whole_state, whole_copies: for a plan of the memory: the state is whole, and so are one parameter and its gradient.
    """

    whole_state, whole_copies = True, 2

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in (p for p in group["params"] if p.grad is not None and is_sharded(p)):
                whole = parameter.full_tensor()
                whole.grad = parameter.grad.full_tensor()
                with standing_in(self, [(group, {parameter: whole})]):
                    super().step()
                parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))
                del whole  # before the next one is gathered
        with standing_in(self, [(group, {p: p for p in group["params"] if not is_sharded(p)}) for group in self.param_groups]):
            super().step()
        return loss
