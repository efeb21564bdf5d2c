"""Which tokens of a padded batch are real."""

from typing import Any

import torch
from torch import Tensor

from holotrain.tasks.task import Task


class PaddedBatches(Task):
    """Gives the mask of a batch on the CPU to a model that reads it there, which spares it waiting for the GPU.

    A model says so with ``reads_masks_on_the_cpu = True``; any other gets its mask on its own device.
    """

    def transfer_batch_to_device(self, batch: dict[str, Any], device: torch.device, dataloader_idx: int) -> dict[str, Any]:
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        on_the_cpu = getattr(self.model, "reads_masks_on_the_cpu", False)
        return moved | {"cpu_lengths": batch["lengths"].tolist()} if on_the_cpu else moved  # DDP would move a tensor


def attended(batch: dict[str, Any]) -> Tensor:
    """(B, T): True for tokens, False for the padding after them.

    Args:
        batch: has ``tokens`` (B, T) and ``lengths`` (B,). With ``cpu_lengths``, a list of B, the mask is on the CPU.
    """
    lengths = torch.tensor(batch["cpu_lengths"]) if "cpu_lengths" in batch else batch["lengths"]
    return torch.arange(batch["tokens"].shape[1], device=lengths.device) < lengths[:, None]
