"""Which tokens of a padded batch are real."""

from typing import Any

import torch
from torch import Tensor, nn


def attended(batch: dict[str, Any], model: nn.Module | None = None) -> Tensor:
    """(B, T): True for tokens, False for the padding after them.

    Args:
        batch: has ``tokens`` (B, T), ``lengths`` (B,) and perhaps ``cpu_lengths``, a list of B.
        model: that the mask is for. With ``reads_masks_on_the_cpu = True`` it gets it there, if the batch has ``cpu_lengths``,
            and need not wait for a GPU to read it.
    """
    lengths = batch["lengths"]
    if getattr(model, "reads_masks_on_the_cpu", False) and "cpu_lengths" in batch:
        lengths = torch.tensor(batch["cpu_lengths"])
    return torch.arange(batch["tokens"].shape[1], device=lengths.device) < lengths[:, None]
