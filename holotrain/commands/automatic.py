"""What a training chooses before it starts: ``data.batch_size=auto`` and ``backward=auto``."""

from collections.abc import Callable
from dataclasses import replace
from itertools import groupby

import lightning.pytorch as pl

from holotrain.commands.out_of_memory import OutOfMemory, as_out_of_memory
from holotrain.commands.screen import console
from holotrain.config.commands import RunConfig
from holotrain.config.plans import budget_of, planner_of, smallest_batch
from holotrain.errors import UserError
from holotrain.planning import ALLOCATORS, Choice, TooSmall, Unplannable, choose_batch, choose_schedules
from holotrain.sizes import in_words


def chosen(
    config: RunConfig,
    data: pl.LightningDataModule,
    device: str,
    processes: int = 1,
    say: Callable[[str], object] = console.print,
) -> RunConfig:
    """The configuration with its ``auto`` options filled in. Reports the choice.

    Args:
        data: set up; if the batch size is ``auto``, with the smallest one. Its batch size is changed.
        device: type of the run's device.
        processes: number of processes on this machine, which share its memory.
        say: called with each line of the report.

    Raises:
        UserError: nothing fits, the model cannot be planned, or the device is not supported.
    """
    if device not in ALLOCATORS and (config.batch_is_open or config.backward.open):
        raise UserError(f"auto: planning does not support {device}; set backward and the batch size yourself")
    if config.memory is not None and not (config.batch_is_open or config.backward.open):
        say(f"memory={config.memory} has no effect without backward=auto or an automatic batch size")
    try:
        if config.batch_is_open:
            option, _ = config.batch_option
            say(f"{option}=auto: planning the largest batch ...")
            budget = budget_of(config, device, processes)
            least = smallest_batch(config).batch_option[1]  # a batch must hold the longest document
            most = len(data.train_dataloader()) if option == "data.batch_size" else None
            size = choose_batch(planner_of(config, data, device), budget, least, most)
            setattr(data, option.removeprefix("data."), size)
            config = config.with_batch(size)
            say(f"  {option}={size} is the largest that fits into {in_words(budget)} or that the data provide")
        if config.backward.open:
            say("backward=auto: planning what each block stores ...")
            with as_out_of_memory():
                budget = budget_of(config, device, processes)
                choice = choose_schedules(planner_of(config, data, device), budget)
            say(f"  {described(choice, budget)}")
            config = replace(config, backward=replace(config.backward, blocks=choice.blocks))
    except TooSmall as error:
        option, size = (smallest_batch(config) if config.batch_is_open else config).batch_option
        raise UserError(
            f"memory: {in_words(budget)} is too little: {'' if size is None else f'with {option}={size} '}this run needs "
            f"{in_words(error.least, up=True)}"
        ) from error
    except Unplannable as error:
        raise UserError(f"auto: {error}; set backward and the batch size yourself") from error
    except OutOfMemory as error:
        raise UserError("auto: not enough memory to time a single block; use a smaller batch size") from error
    return config


def described(choice: Choice, budget: int) -> str:
    """The choice of ``backward=auto`` as text."""
    runs = ", ".join(f"{len(list(run))} {name}" for name, run in groupby(choice.blocks))
    saved = 1 - choice.cost / choice.most_expensive
    memory = f"{in_words(choice.bound, up=True)} of {in_words(budget)}"
    return f"{runs}; {memory}; {saved:.0%} less computation in blocks than with full recomputation"
