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


def optimizer_maker(chosen: Chosen) -> Callable[[nn.Module], Optimizer]:
    """A function of the model that makes its optimizer.

    A function or class that takes ``model`` is given the model. One that takes ``params``, as torch's do, is given the two
    groups of :func:`~holotrain.tasks.optimizers.decay_groups`: norms, biases and positions have no weight decay.

    Raises:
        UserError: a value out of range.
    """

    def make(model: nn.Module) -> Optimizer:
        of = model if takes(chosen, "model") else decay_groups(model, chosen.arguments.get("weight_decay", 0.0))
        return OPEN["optimizer"].make("optimizer", chosen, Optimizer, of)

    make(nn.Linear(1, 1))
    return make


def scheduler_maker(chosen: Chosen, optimizer: Callable[[nn.Module], Optimizer]) -> Callable[[Optimizer, int], LRScheduler]:
    """A function of the optimizer and the number of optimizer steps of the training that makes the schedule.

    The number of steps is given as ``steps`` or ``total_steps``, where the function or class has such a parameter. The schedule
    advances after every optimizer step.

    Raises:
        UserError: a value out of range.
    """

    def make(optimizer: Optimizer, steps: int) -> LRScheduler:
        return OPEN["scheduler"].make("scheduler", chosen, LRScheduler, optimizer, steps=steps, total_steps=steps)

    if isinstance(make(optimizer(nn.Linear(1, 1)), 10), ReduceLROnPlateau):
        raise UserError("scheduler: ReduceLROnPlateau follows a metric, and a schedule here follows the optimizer's steps")
    return make


def synthesis_of(chosen: Chosen, task: nn.Module) -> HolographicSynthesis:
    """The synthesis of a task, which need not be on its device yet.

    Raises:
        UserError: a value out of range, or a pattern that matches no parameter.
    """
    callback = OPEN["synthesis"].make("synthesis", chosen, SynthesisCallback)
    with described_by("synthesis"):
        return callback.applied_to(task, on_device=False)
