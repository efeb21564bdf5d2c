"""Builds optimizers, learning rate schedules and syntheses: holotrain's, torch's, or anybody's."""

from collections.abc import Callable

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holotrain.callbacks import SynthesisCallback
from holotrain.checks import described_by
from holotrain.config.chosen import Chosen
from holotrain.config.schema.classes import takes
from holotrain.config.schema.run import OPEN
from holotrain.errors import UserError
from holotrain.synthesis import HolographicSynthesis
from holotrain.tasks.optimizers import decay_groups


def optimizer_of(chosen: Chosen) -> Callable[[nn.Module], Optimizer]:
    """A function of the model that makes its optimizer.

    A function or class that takes ``model`` is given the model. One that takes ``params``, as torch's do, is given the two
    groups of :func:`~holotrain.tasks.optimizers.decay_groups`: norms, biases and positions have no weight decay.

    Raises:
        UserError: a value out of range.
    """
    takes_model = takes(chosen, "model")

    def make(model: nn.Module) -> Optimizer:
        if takes_model:
            return chosen.make(model)
        return chosen.make(decay_groups(model, chosen.arguments.get("weight_decay", 0.0)))

    with described_by("optimizer", OPEN["optimizer"].options(chosen.target)):
        made = make(nn.Linear(1, 1))
    if not isinstance(made, Optimizer):
        raise UserError(f"optimizer: {chosen.target} is not an optimizer but returns a {type(made).__name__}")
    return make


def scheduler_of(chosen: Chosen, optimizer: Callable[[nn.Module], Optimizer]) -> Callable[[Optimizer, int], LRScheduler]:
    """A function of the optimizer and the number of optimizer steps of the training that makes the schedule.

    The number of steps is given as ``steps`` or ``total_steps``, where the function or class has such a parameter. The schedule
    advances after every optimizer step.

    Raises:
        UserError: a value out of range.
    """

    def make(optimizer: Optimizer, steps: int) -> LRScheduler:
        return chosen.make(optimizer, **{name: steps for name in ("steps", "total_steps") if takes(chosen, name)})

    with described_by("scheduler", OPEN["scheduler"].options(chosen.target)):
        made = make(optimizer(nn.Linear(1, 1)), 10)
    if isinstance(made, ReduceLROnPlateau):
        raise UserError("scheduler: ReduceLROnPlateau follows a metric, and a schedule here follows the optimizer's steps")
    if not isinstance(made, LRScheduler):
        raise UserError(f"scheduler: {chosen.target} is not a learning rate schedule but returns a {type(made).__name__}")
    return make


def synthesis_of(chosen: Chosen, task: nn.Module) -> HolographicSynthesis:
    """The synthesis of a task, which need not be on its device yet.

    Raises:
        UserError: a value out of range, or a pattern that matches no parameter.
    """
    with described_by("synthesis", OPEN["synthesis"].options(chosen.target)):
        callback = chosen.make()
        if not isinstance(callback, SynthesisCallback):
            raise UserError(f"synthesis: {chosen.target} is not a SynthesisCallback but a {type(callback).__name__}")
        return callback.applied_to(task, on_device=False)
