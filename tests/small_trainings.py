"""A Trainer on the CPU that says and leaves nothing, and a block for ``make_reversible``."""

from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn

QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def quiet_trainer(**options: Any) -> pl.Trainer:
    return pl.Trainer(**QUIET | options)


class Residual(nn.Module):
    """A block that ``make_reversible`` couples."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()
