"""What commands ask of any LightningModule, whether or not it is a :class:`~holotrain.tasks.task.Task`."""

from typing import Any

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer

from holotrain.tasks.task import Task


def model_of(module: pl.LightningModule) -> nn.Module:
    """Its attribute ``model``, or the module itself if it has none."""
    model = getattr(module, "model", None)
    return model if isinstance(model, nn.Module) else module


def monitored_by(module: pl.LightningModule) -> dict[str, str]:
    """The validation metrics that can select the best checkpoint, with ``min`` or ``max`` each; {}: it does not say."""
    return dict(getattr(module, "monitored", {}))


def training_loss(module: pl.LightningModule, batch: Any) -> Tensor:
    """The loss of a training batch, without logging."""
    if isinstance(module, Task):
        return module.loss(*module.inputs(batch))
    result = module.training_step(batch, 0)
    return result["loss"] if isinstance(result, dict) else result


def optimizer_of(module: pl.LightningModule) -> Optimizer:
    """
    Raises:
        ValueError: the module has no optimizer, or several.
    """
    if isinstance(module, Task):
        return module.make_optimizer(module.model)
    made = module.configure_optimizers()
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], list):  # optimizers and schedules
        made = made[0]
    if isinstance(made, list | tuple) and len(made) == 1:
        made = made[0]
    if isinstance(made, dict):
        made = made.get("optimizer")
    if not isinstance(made, Optimizer):
        raise ValueError(f"{type(module).__name__} has no optimizer, or several; a plan needs one")
    return made
