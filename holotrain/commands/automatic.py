"""What a training chooses by itself before it begins."""

from itertools import groupby

import lightning.pytorch as pl

from holotrain.commands.screen import console
from holotrain.config.build_trainer import device_kind
from holotrain.config.choose_backward import Settled, settle
from holotrain.config.schema import RunConfig
from holotrain.errors import UserError
from holotrain.planning import Unplannable
from holotrain.sizes import in_words


def choose_backward(config: RunConfig, data: pl.LightningDataModule) -> RunConfig:
    """The configuration with a schedule for each block, and says which.

    Raises:
        UserError: nothing fits, or the model cannot be planned.
    """
    console.print("backward=auto: planning what each block stores ...")
    try:
        settled = settle(config, data, device_kind(config.trainer.accelerator))
    except Unplannable as error:
        raise UserError(f"backward=auto: {error}; take backward=reversible, pareprop, checkpoint or autograd") from error
    console.print(f"  {described(settled)}")
    return settled.config


def described(settled: Settled) -> str:
    """The choice in words."""
    choice = settled.choice
    runs = ", ".join(f"{len(list(run))} {name}" for name, run in groupby(choice.blocks))
    saved = 1 - choice.cost / choice.dearest
    memory = f"{in_words(choice.peak)} of {in_words(settled.budget)}"
    return f"{runs}; {memory}; the blocks' work is {saved:.0%} less than if all recomputed"
