"""Builds optimizers, learning rate schedules and syntheses: holotrain's, torch's, or anybody's."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holotrain.callbacks import SynthesisCallback
from holotrain.checks import described_by
from holotrain.config.chosen import Chosen
from holotrain.config.schema.classes import takes
from holotrain.config.schema.optimizer import IN_BACKWARD
from holotrain.errors import UserError
from holotrain.optimizers import InBackward
from holotrain.synthesis import HolographicSynthesis
from holotrain.tasks.optimizers import decay_groups


def optimizer_of(chosen: Chosen, clip_value: float | None = None) -> Callable[[nn.Module], Optimizer]:
    """A function of the model that makes its optimizer.

    A function or class that takes ``model`` is given the model. One that takes ``params``, as torch's do, is given the two
    groups of :func:`~holotrain.tasks.optimizers.decay_groups`: norms, biases and positions have no weight decay.

    Args:
        clip_value: to what an optimizer that steps in the backward clips the entries of gradients; of others the trainer does.

    Raises:
        UserError: a value out of range, or an optimizer that cannot step in the backward.
    """
    takes_model = takes(chosen, "model")
    in_backward = chosen.arguments.get(IN_BACKWARD, False)
    chosen = replace(chosen, arguments={name: value for name, value in chosen.arguments.items() if name != IN_BACKWARD})

    def make(model: nn.Module) -> Optimizer:
        if takes_model:
            return chosen.make(model)
        return chosen.make(decay_groups(model, chosen.arguments.get("weight_decay", 0.0)))

    with described_by("optimizer"):
        made = make(nn.Linear(1, 1))
    if not isinstance(made, Optimizer):
        raise UserError(f"optimizer: {chosen.target} is not an optimizer but returns a {type(made).__name__}")
    if not in_backward:
        return make
    with described_by(f"optimizer.{IN_BACKWARD}"):
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


def scheduler_of(chosen: Chosen, optimizer: Callable[[nn.Module], Optimizer]) -> Callable[[Optimizer, int], LRScheduler]:
    """A function of the optimizer and the number of optimizer steps of the training that makes the schedule.

    The number of steps is given as ``steps`` or ``total_steps``, where the function or class has such a parameter. The schedule
    advances after every optimizer step.

    Raises:
        UserError: a value out of range.
    """

    def make(optimizer: Optimizer, steps: int) -> LRScheduler:
        return chosen.make(optimizer, **{name: steps for name in ("steps", "total_steps") if takes(chosen, name)})

    with described_by("scheduler"):
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
    with described_by("synthesis"):
        callback = chosen.make()
        if not isinstance(callback, SynthesisCallback):
            raise UserError(f"synthesis: {chosen.target} is not a SynthesisCallback but a {type(callback).__name__}")
        return callback.applied_to(task, on_device=False)
