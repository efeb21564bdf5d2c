"""Builds optimizers and learning rate schedules: holotrain's, torch's, or anybody's."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holotrain.checks import naming_group
from holotrain.config.chosen import Chosen
from holotrain.config.schema.classes import takes
from holotrain.config.schema.optimizer import IN_BACKWARD
from holotrain.config.schema.run import OPEN
from holotrain.errors import UserError
from holotrain.optimizers import InBackward
from holotrain.tasks.optimizers import decay_groups


def optimizer_maker(chosen: Chosen, clip_value: float | None = None) -> Callable[[nn.Module], Optimizer]:
    """A function of the model that makes its optimizer.

    A function or class that takes ``model`` is given the model. One that takes ``params``, as torch's do, is given the two
    groups of :func:`~holotrain.tasks.optimizers.decay_groups`: norms, biases and positions have no weight decay.

    Args:
        clip_value: to what an optimizer that steps in the backward clips the entries of gradients; of others the trainer does.

    Raises:
        UserError: a value out of range, or an optimizer that cannot step in the backward.
    """
    in_backward = chosen.arguments.get(IN_BACKWARD, False)
    chosen = replace(chosen, arguments={name: value for name, value in chosen.arguments.items() if name != IN_BACKWARD})

    def make(model: nn.Module) -> Optimizer:
        of = model if takes(chosen, "model") else decay_groups(model, chosen.arguments.get("weight_decay", 0.0))
        return OPEN["optimizer"].make("optimizer", chosen, Optimizer, of)

    made = make(nn.Linear(1, 1))
    if not in_backward:
        return make
    with naming_group(f"optimizer.{IN_BACKWARD}"):
        InBackward(made)
    if not _steps_parameters_alone(make):
        raise UserError(f"optimizer.{IN_BACKWARD}: {chosen.name} steps all parameters together; set it to false")
    return lambda model: InBackward(make(model), clip_value)


def _steps_parameters_alone(make: Callable[[nn.Module], Optimizer]) -> bool:
    """Whether a small model becomes the same in the usual steps and in steps of one parameter after another."""

    def trained(alone: bool) -> list[Tensor]:
        with torch.device("cpu"):
            model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, 2, 2) for _ in range(2)))  # draws no random numbers
            for parameter in model.parameters():
                parameter.data.copy_(torch.linspace(-1, 2, parameter.numel()).view_as(parameter))
            optimizer = make(model)
            optimizer = InBackward(optimizer) if alone else optimizer
            for number in range(2):
                for size, parameter in enumerate(model.parameters(), 1):
                    parameter.grad = (number + 1) * 10.0**size * parameter.detach().cos()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    try:
        return all(map(torch.equal, trained(alone=True), trained(alone=False)))
    except RuntimeError:  # a state of all parameters, which InBackward found
        return False


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
