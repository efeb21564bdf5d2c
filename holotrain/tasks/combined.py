"""Several optimizers that step as one, each over its own parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """What a training loop, a schedule, a gradient scaler and a checkpoint take for one optimizer.

    Args:
        parts: the optimizers, over different parameters. Their parameter groups are this one's, in turn.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Groups and state are the parts' own, so that who changes a learning rate here changes it there."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        """That of all parts; what is added to it is lost, what is changed within is not."""
        return {parameter: kept for part in self.parts for parameter, kept in part.state.items()}

    @state.setter
    def state(self, state: dict[Tensor, Any]) -> None:
        """The parts hold it: Optimizer's own constructor would begin an empty one."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, kept in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(kept)
        self._share()
