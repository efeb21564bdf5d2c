"""The base class of all tasks, a model with a loss and an optimizer; and what commands ask of any LightningModule."""

import copy
import math
from abc import abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holotrain.errors import check_choice
from holotrain.optimizers import InBackward
from holotrain.optimizers.stepping import refuse_in_backward
from holotrain.reversible.graphs import StepGraphs
from holotrain.targets import ShowsInherited
from holotrain.tasks.schedules import continue_schedule, options_of, take_over

PLANNED = "planned_optimizer"
"""Where a checkpoint holds the options of the optimizer and the schedule as they were made, before the first step."""

FOLLOWED = "metric_of_plateau"
"""Where a checkpoint holds the value of the metric that ReduceLROnPlateau is still to see."""

DRAWN = "generators_of_graphs"
"""Where a checkpoint holds the states of the generators of blocks that run again."""


class Task(ShowsInherited, pl.LightningModule):
    """Trains a model by back-propagation.

    Args:
        model: the model to train
        optimizer: function of the model that returns the optimizer; null if the module is only evaluated
        scheduler: function of the optimizer and the number of optimizer steps that returns the schedule, which is stepped after
            every optimizer step, or a dict of Lightning's options for it, such as ``{"scheduler": ..., "interval": "epoch"}``
        graphs: capture forward and backward as CUDA graphs (:class:`~holotrain.reversible.graphs.StepGraphs`), on a CUDA device

    Logs ``train/loss`` and ``train/lr`` every ``log_every_n_steps`` (0: never), and what each task adds.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Callable[[nn.Module], Optimizer] | None = None,
        scheduler: Callable[[Optimizer, int], LRScheduler | dict[str, Any]] | None = None,
        graphs: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.make_optimizer = optimizer
        self.make_scheduler = scheduler
        self._planned: dict[str, Any] = {}  # options of the optimizer, and the schedule, before the first step
        self._planned_before: dict[str, Any] = {}  # those of the training that goes on
        self._followed: float | None = None
        self._validated_in: int | None = None  # the latest epoch, and that whose metric a schedule has seen
        self._followed_in: int | None = None
        self.graphs = StepGraphs(self.loss, model) if graphs else None

    @property
    @abstractmethod
    def monitored(self) -> dict[str, str]:
        """The validation metrics that can choose the best checkpoint, with ``min`` or ``max`` each; the first is default."""

    def forward(self, *inputs: Tensor | None) -> Tensor:
        return self.model(*inputs)

    @abstractmethod
    def inputs(self, batch: Any) -> tuple[Any, ...]:
        """The arguments of :meth:`loss` for a training batch."""

    @abstractmethod
    def loss(self, *inputs: Tensor) -> Tensor:
        """The mean loss of a batch, which is differentiated."""

    def terms(self, *inputs: Tensor) -> Tensor | int:
        """The number of terms of which :meth:`loss` is the mean."""
        return len(inputs[0])

    def configure_model(self) -> None:
        """Lets the strategy shard the parameters, if it does so."""
        divide = getattr(self.trainer.strategy, "divide", None)
        if divide is not None:
            divide(self)

    def log(self, name: str, value: Any, *arguments: Any, batch_size: int | None = None, **options: Any) -> None:
        # Lightning (2.6) averages batch sizes over processes as integers, rounded down, which makes means too large.
        super().log(name, value, *arguments, batch_size=batch_size and float(batch_size), **options)  # ty: ignore[invalid-argument-type]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs = self.inputs(batch)
        loss = (self._whole_step or self.loss)(*inputs)
        # Lightning's log takes a few per cent of a small model's step, so it is only called when the value will be read.
        period = self.trainer.log_every_n_steps  # ty: ignore[missing-attribute]
        if (period and (self.trainer.global_step + 1) % period == 0) or self.trainer.is_last_batch:
            self.log("train/loss", loss, prog_bar=True, batch_size=len(inputs[0]), sync_dist=True)
            self.log("train/lr", self.trainer.optimizers[0].param_groups[0]["lr"], batch_size=len(inputs[0]))
        return loss

    def on_fit_start(self) -> None:
        for what, used in _beyond_a_backward(self.trainer).items():
            if self.graphs is not None and used:
                raise ValueError(f"graphs: does not go together with {what}")

    @property
    def _whole_step(self) -> Callable[..., Tensor] | None:
        """What runs forward and backward together: CUDA graphs, or a strategy with stages, which sets gradients anew."""
        if self.graphs is not None:
            return partial(self.graphs, scale=1 / self.trainer.accumulate_grad_batches)
        return getattr(self.trainer.strategy, "run_step", None)

    def backward(self, loss: Tensor) -> None:
        if self._whole_step is None:
            super().backward(loss)

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None = None, gradient_clip_algorithm: str | None = None
    ) -> None:
        if isinstance(optimizer, InBackward):  # it has clipped them
            return
        settle = getattr(self.trainer.strategy, "reduce_and_clip_gradients", None)
        if settle is not None:
            settle(optimizer, gradient_clip_val, gradient_clip_algorithm)
        else:
            super().configure_gradient_clipping(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        if self._whole_step is None:  # Lightning calls this after it
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        if self.graphs is not None:
            optimizer.zero_grad()

    def configure_optimizers(self) -> Any:
        if self.make_optimizer is None:
            raise ValueError("this task has no optimizer; it can only be evaluated")
        optimizer = self.make_optimizer(self.model)
        if isinstance(optimizer, InBackward):
            refuse_in_backward({"a CUDA graph": self.graphs is not None})
            settle_in_backward(optimizer, self.trainer)
        self._planned = {"optimizer": options_of(optimizer)}
        if self.make_scheduler is None:
            return optimizer
        made = self.make_scheduler(optimizer, optimizer_steps(self.trainer))
        options: dict[str, Any] = made if isinstance(made, dict) else {"scheduler": made, "interval": "step"}
        if isinstance(options["scheduler"], ReduceLROnPlateau):
            options = self._following(options["scheduler"], options)
        made_with = [
            group | {"lr": base["lr"]} for group, base in zip(options_of(optimizer), self._planned["optimizer"], strict=True)
        ]
        self._planned = {"optimizer": made_with, "schedule": copy.deepcopy(options["scheduler"].state_dict())}
        return {"optimizer": optimizer, "lr_scheduler": options}

    def _following(self, schedule: ReduceLROnPlateau, options: dict[str, Any]) -> dict[str, Any]:
        """Lightning's options for a schedule that follows a metric. Its direction is that of the metric."""
        monitor = options.get("monitor") or next(iter(self.monitored))
        check_choice("scheduler.monitor", monitor, self.monitored)
        # Private: what the constructor calls. Lightning tells a user's function no metric.
        schedule._init_is_better(self.monitored[monitor], schedule.threshold, schedule.threshold_mode)
        schedule._reset()
        return {"strict": False} | options | {"monitor": monitor}

    def on_train_start(self) -> None:
        if not self._planned or self.trainer.ckpt_path is None:
            return
        take_over(self.trainer.optimizers[0], self._planned["optimizer"], self._planned_before.get("optimizer", []))
        if "schedule" not in self._planned:
            return
        schedule: Any = self.lr_schedulers()
        continue_schedule(schedule, self._planned["schedule"], self._planned_before.get("schedule"))
        if isinstance(schedule, ReduceLROnPlateau) and self._followed is not None:
            schedule.step(self._followed)

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        if metric is not None:  # Lightning (2.6) shows that of an earlier epoch again where none was validated
            if self._validated_in != self.trainer.current_epoch:
                return
            self._followed_in = self.trainer.current_epoch
        super().lr_scheduler_step(scheduler, metric)

    def on_validation_start(self) -> None:
        if not self.trainer.sanity_checking:
            self._validated_in = self.trainer.current_epoch

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.graphs is not None:
            checkpoint[DRAWN] = self.graphs.generators.state()
        checkpoint[PLANNED] = self._planned
        # Lightning (2.6) saves before ReduceLROnPlateau sees the metric of the epoch, and does not show it after a resume.
        validated = self.trainer.is_last_batch and self._validated_in == self.trainer.current_epoch
        due = validated and self._followed_in != self._validated_in
        for config in self.trainer.lr_scheduler_configs:
            if due and config.reduce_on_plateau and config.monitor in self.trainer.callback_metrics:
                checkpoint[FOLLOWED] = float(self.trainer.callback_metrics[config.monitor])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._planned_before = _checked(checkpoint.get(PLANNED))
        followed = checkpoint.get(FOLLOWED)
        self._followed = followed if isinstance(followed, float) else None
        if self.graphs is not None:
            drawn = checkpoint.get(DRAWN)
            self.graphs.generators.restore(drawn if isinstance(drawn, list) else [])

    def teardown(self, stage: str) -> None:
        optimizer = InBackward.among(self.trainer.optimizers)
        if optimizer is not None:  # the model may be trained on in another way
            optimizer.remove()


def _checked(planned: Any) -> dict[str, Any]:
    """What a checkpoint holds as :data:`PLANNED`, less what is not of its form."""
    found = planned if isinstance(planned, dict) else {}
    groups, schedule = found.get("optimizer"), found.get("schedule")
    of_groups = isinstance(groups, list) and all(isinstance(group, dict) for group in groups)
    return {"optimizer": groups if of_groups else [], "schedule": schedule if isinstance(schedule, dict) else None}


def optimizer_steps(trainer: pl.Trainer) -> int:
    """The optimizer steps of a training, also where a GradientAccumulationScheduler changes their number in an epoch.
    Raises a ValueError if it has no limit but that of time."""
    if math.isinf(trainer.estimated_stepping_batches):
        raise ValueError(
            "max_epochs=-1: a schedule must know how long the training is at most; give trainer.max_epochs or "
            "trainer.max_steps, too"
        )
    steps = int(trainer.estimated_stepping_batches)
    accumulation = next((each for each in trainer.callbacks if isinstance(each, GradientAccumulationScheduler)), None)  # ty: ignore[missing-attribute]
    if accumulation is None or not trainer.max_epochs or trainer.max_epochs < 0:
        return steps
    batches = trainer.num_training_batches
    by_epoch = (math.ceil(batches / accumulation.get_accumulate_grad_batches(epoch)) for epoch in range(trainer.max_epochs))
    planned = sum(by_epoch)
    return planned if trainer.max_steps < 0 else min(planned, trainer.max_steps)


def settle_in_backward(optimizer: InBackward, trainer: pl.Trainer) -> None:
    """Has the optimizer clip by value as the trainer would, which comes too late for it.

    :class:`~holotrain.tasks.task.Task` calls it. Another LightningModule can call it in ``configure_optimizers``.

    Raises:
        ValueError: the trainer accumulates, clips by norm or scales gradients, or has several processes.
    """
    clip, algorithm = trainer.gradient_clip_val, trainer.gradient_clip_algorithm or "norm"
    refuse_in_backward(
        {
            "accumulate_grad_batches above 1": trainer.accumulate_grad_batches > 1,
            "gradient clipping by norm": bool(clip) and algorithm == "norm",
            **_beyond_a_backward(trainer),
        }
    )
    if clip:
        optimizer.clip_value = float(clip)


def _beyond_a_backward(trainer: pl.Trainer) -> dict[str, bool]:
    """What changes gradients around Lightning's own backward, and whether the trainer does it."""
    return {
        "the gradient scaling of 16-mixed": getattr(trainer.precision_plugin, "scaler", None) is not None,
        type(trainer.strategy).__name__: not isinstance(trainer.strategy, SingleDeviceStrategy),
    }


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
    result: Any = module.training_step(batch, 0)
    return result["loss"] if isinstance(result, dict) else result


def optimizer_of(module: pl.LightningModule) -> Optimizer:
    """
    Raises:
        ValueError: the module has no optimizer, or several.
    """
    if isinstance(module, Task) and module.make_optimizer is not None:
        return module.make_optimizer(module.model)
    made: Any = module.configure_optimizers()
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], list):  # optimizers and schedules
        made = made[0]
    if isinstance(made, list | tuple) and len(made) == 1:
        made = made[0]
    if isinstance(made, dict):
        made = made.get("optimizer")
    if not isinstance(made, Optimizer):
        raise ValueError(f"{type(module).__name__} has no optimizer, or several; a plan needs one")
    return made
