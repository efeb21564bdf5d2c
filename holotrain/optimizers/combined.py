"""Several optimizers that step as one, each over its own parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class CombinedOptimizer(Optimizer):
    """Behaves as one optimizer for training loops, schedules, gradient scalers and checkpoints.

    Args:
        parts: the optimizers, over different parameters. This optimizer has their parameter groups, one after another.
    """

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = list(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self._share()

    def _share(self) -> None:
        """Uses the parts' own groups, so that a learning rate changed here changes there."""
        self.param_groups = [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:
        """The state of all parts. Entries added here are lost; changes to existing entries are kept."""
        return {parameter: kept for part in self.parts for parameter, kept in part.state.items()}

    @state.setter
    def state(self, state: dict[Tensor, Any]) -> None:
        """Ignored, because the parts hold the state; Optimizer's constructor assigns an empty one."""

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
