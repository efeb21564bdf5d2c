"""What a training chooses by itself before it begins."""

from collections.abc import Callable
from itertools import groupby

import lightning.pytorch as pl

from holotrain.commands.out_of_memory import OutOfMemory, memory_errors_told_apart
from holotrain.commands.screen import console
from holotrain.config.budget import budget_of
from holotrain.config.build_plan import Planner
from holotrain.config.choose_backward import Settled, settle
from holotrain.config.choose_batch import choose_batch
from holotrain.config.schema import RunConfig
from holotrain.errors import UserError
from holotrain.planning import ALLOCATORS, Unplannable
from holotrain.sizes import in_words


def chosen(
    config: RunConfig,
    data: pl.LightningDataModule,
    device: str,
    processes: int = 1,
    say: Callable[[str], object] = console.print,
) -> RunConfig:
    """The configuration with all that it left open filled in, and says what.

    Args:
        data: set up; where the batch is open, with the smallest one, which this changes.
        device: what the run is for.
        processes: of this machine, which share its memory.
        say: told what is being chosen, and the choice.

    Raises:
        UserError: nothing fits, the model cannot be planned, or nothing is known of the device.
    """
    if device not in ALLOCATORS and (config.batch_is_open or config.backward.open):
        raise UserError(f"auto: nothing is known of the memory of {device}; choose backward and batch yourself")
    if config.memory is not None and not (config.batch_is_open or config.backward.open):
        say(f"memory={config.memory} binds nothing here: only backward=auto and a batch of auto choose by it")
    try:
        if config.batch_is_open:
            option, _ = config.batch_option
            say(f"{option}=auto: planning the largest batch ...")
            budget = budget_of(config, device, processes)
            config = choose_batch(config, data, device, budget)
            say(f"  {option}={config.batch_option[1]} is the most that {in_words(budget)}, or the data, hold")
        if config.backward.open:
            say("backward=auto: planning what each block stores ...")
            with memory_errors_told_apart():
                settled = settle(Planner(config, data, device), budget_of(config, device, processes))
            say(f"  {described(settled)}")
            config = settled.config
    except Unplannable as error:
        raise UserError(f"auto: {error}; choose backward and batch yourself") from error
    except OutOfMemory as error:
        raise UserError("auto: there was not even memory to time a block; take smaller batches") from error
    return config


def described(settled: Settled) -> str:
    """The choice in words."""
    choice = settled.choice
    runs = ", ".join(f"{len(list(run))} {name}" for name, run in groupby(choice.blocks))
    saved = 1 - choice.cost / choice.dearest
    memory = f"{in_words(choice.peak)} of {in_words(settled.budget)}"
    return f"{runs}; {memory}; the blocks' work is {saved:.0%} less than if all recomputed"
