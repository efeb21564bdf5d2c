"""A package of a user's: an optimizer, a schedule and a callback that holotrain has never heard of."""

from typing import Literal

import lightning.pytorch as pl
import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR


class Lion(Optimizer):
    """Chen et al., "Symbolic Discovery of Optimization Algorithms", 2023.

    Args:
        lr: size of each step
        betas: weights of the momentum in the step, and of the momentum itself
        weight_decay: decoupled weight decay
    """

    def __init__(self, params, lr: float, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0) -> None:
        if lr <= 0:
            raise ValueError(f"lr {lr} must be above 0")
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                step = torch.lerp(weight.grad, momentum, group["betas"][0]).sign_()
                weight.mul_(1 - group["lr"] * group["weight_decay"]).sub_(step, alpha=group["lr"])
                momentum.lerp_(weight.grad, 1 - group["betas"][1])
        return loss


def halving(optimizer: Optimizer, steps: int, times: int = 2) -> LambdaLR:
    """Halves the learning rate at equal distances.

    Args:
        times: how often
    """
    return LambdaLR(optimizer, lambda step: 0.5 ** (step * (times + 1) // max(steps, 1)))


class Diary(pl.Callback):
    """Counts the batches of the training, also over a resumption.

    Args:
        kind: what to count
    """

    def __init__(self, kind: Literal["batches", "epochs"] = "batches") -> None:
        self.kind, self.count = kind, 0

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.count += self.kind == "batches"

    def on_train_epoch_end(self, trainer, module) -> None:
        self.count += self.kind == "epochs"
        module.log("diary/count", float(self.count))

    def state_dict(self) -> dict:
        return {"count": self.count}

    def load_state_dict(self, state: dict) -> None:
        self.count = state["count"]
