"""What an optimizer that steps in the backward needs of Lightning's Trainer."""

import lightning.pytorch as pl
from lightning.pytorch.strategies import SingleDeviceStrategy

from holotrain.optimizers import InBackward


def settle_in_backward(optimizer: InBackward, trainer: pl.Trainer) -> None:
    """Has the optimizer clip by value as the trainer would, which comes too late for it.

    :class:`~holotrain.tasks.task.Task` calls it. Another LightningModule can call it in ``configure_optimizers``.

    Raises:
        ValueError: the trainer accumulates, clips by norm or scales gradients, or has several processes.
    """
    clip, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm or "norm"
    refused = {
        "accumulate_grad_batches above 1": trainer.accumulate_grad_batches > 1,
        "gradient clipping by norm": bool(clip) and algorithm == "norm",
        "the gradient scaling of 16-mixed": getattr(trainer.precision_plugin, "scaler", None) is not None,
        type(trainer.strategy).__name__: not isinstance(trainer.strategy, SingleDeviceStrategy),
    }
    for what, found in refused.items():
        if found:
            raise ValueError(f"an optimizer that steps in the backward does not work with {what}: it has no gradients after it")
    if clip:
        optimizer.clip_value = float(clip)
