"""Builds optimizers and schedules."""

import re
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from holotrain.config.command_options import RunConfig
from holotrain.config.objects import ObjectConfig
from holotrain.config.option_groups import IN_BACKWARD, OBJECT_GROUPS, takes
from holotrain.errors import UserError, as_user_error
from holotrain.optimizers.stepping import InBackward
from holotrain.tasks.optimizer_functions import decay_groups


def make_optimizer(chosen: ObjectConfig, clip_value: float | None, model: nn.Module) -> Optimizer:
    """The optimizer of a model.

    A function or class that takes ``model`` is given the model. One that takes ``params``, as torch's do, is given the two
    groups of :func:`~holotrain.tasks.optimizer_functions.decay_groups`: norms, biases and positions have no weight decay.

    Args:
        clip_value: to what an optimizer that steps in the backward clips the entries of gradients; of others the trainer does.

    Raises:
        UserError: a value out of range, or an optimizer that cannot step in the backward.
    """
    arguments = {name: value for name, value in chosen.arguments.items() if name != IN_BACKWARD}
    with as_user_error("optimizer", ["weight_decay"]):
        of = model if takes(chosen, "model") else decay_groups(model, arguments.get("weight_decay", 0.0))
    try:
        optimizer = OBJECT_GROUPS["optimizer"].make("optimizer", replace(chosen, arguments=arguments), Optimizer, of)
    except UserError as error:
        text = str(error.__cause__)
        if (name := _refused_by_torch(text, arguments)) is None:
            raise
        raise UserError(f"optimizer.{name}={arguments[name]}: {text}") from error
    if not chosen.arguments.get(IN_BACKWARD, False):
        return optimizer
    with as_user_error(f"optimizer.{IN_BACKWARD}"):
        return InBackward(optimizer, clip_value)


def make_scheduler(chosen: ObjectConfig, optimizer: Optimizer, steps: int) -> LRScheduler:
    """The schedule of an optimizer, which advances after every optimizer step.

    Args:
        steps: optimizer steps of the training; given as ``steps`` or ``total_steps``, where the function or class takes it.

    Raises:
        UserError: a value out of range.
    """
    return OBJECT_GROUPS["scheduler"].make("scheduler", chosen, LRScheduler, optimizer, steps=steps, total_steps=steps)


def check_optimizer(config: RunConfig) -> None:
    """Makes the optimizer and the schedule of a small model, before data are read.

    Raises:
        UserError: one of them refuses a value, or cannot be used here.
    """
    if config.optimizer is None:
        return
    optimizer = make_optimizer(config.optimizer, None, nn.Linear(1, 1))
    if config.steps_in_backward and not _steps_parameters_alone(config.optimizer):
        raise UserError(f"optimizer.{IN_BACKWARD}: {config.optimizer.name} steps all parameters together; set it to false")
    if config.scheduler is not None and isinstance(make_scheduler(config.scheduler, optimizer, 10), ReduceLROnPlateau):
        raise UserError("scheduler: ReduceLROnPlateau follows a metric, and a schedule here follows the optimizer's steps")


TORCHS_WORDS = {"lr": "learning rate", "eps": "epsilon", "betas": "beta", "weight_decay": "weight decay"}
"""What messages of torch's optimizers call an option, if not by its name."""


def _refused_by_torch(text: str, arguments: dict[str, Any]) -> str | None:
    """The option that such a message is about: it is named, and the text ends with its value; None: there is none."""
    for name, value in arguments.items():
        values = value if isinstance(value, list | tuple) else [value]
        named = re.search(rf"\b({name}|{TORCHS_WORDS.get(name, name)})(?![a-z_])", text, re.IGNORECASE)
        if named and text.rpartition(": ")[2] in map(str, values):
            return name
    return None


def _steps_parameters_alone(chosen: ObjectConfig) -> bool:
    """Whether a small model becomes the same in the usual steps and in steps of one parameter after another."""

    def trained(in_backward: bool) -> list[Tensor]:
        with torch.device("cpu"):
            model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, 2, 2) for _ in range(2)))  # draws no random numbers
            for parameter in model.parameters():
                parameter.data.copy_(torch.linspace(-1, 2, parameter.numel()).view_as(parameter))
            optimizer = make_optimizer(chosen.with_arguments(in_backward=in_backward), None, model)
            for number in range(2):
                for size, parameter in enumerate(model.parameters(), 1):
                    parameter.grad = (number + 1) * 10.0**size * parameter.detach().cos()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    try:
        return all(map(torch.equal, trained(True), trained(False)))
    except RuntimeError:  # a state of all parameters, which InBackward found
        return False
