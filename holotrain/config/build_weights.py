"""Prepares a new model: pretrained weights, adapters and frozen parameters."""

import sys
from typing import Any

from torch import nn

from holotrain.checks import naming_group
from holotrain.config.chosen import Chosen
from holotrain.models.adapters import add_adapters, add_peft, freeze
from holotrain.models.building import bounded
from holotrain.models.checkpoint_files import read_weights
from holotrain.models.foreign import Foreign
from holotrain.models.pretrained import load_pretrained
from holotrain.targets import made


def prepare_weights(model: nn.Module, config: Chosen, read: bool) -> None:
    """Loads pretrained weights, adds adapters and freezes parameters, in place. Reports which weights were used.

    Args:
        read: load the pretrained weights; False if a checkpoint is loaded instead.

    Raises:
        UserError: the weights are missing or belong to another model, or the model lacks the part to train.
    """
    if isinstance(model, Foreign):
        with naming_group("model"):
            if read and (said := model.start_from(config.pretrained)):
                print(said, file=sys.stderr)
    elif read and config.pretrained:
        with naming_group("model.pretrained"):
            print(load_pretrained(model, read_weights(config.pretrained)), file=sys.stderr)
    with naming_group("model"):
        with bounded():
            with_adapters(model, config.adapters)
        if config.trained != "all" and not isinstance(config.adapters, dict):  # peft has frozen the others
            freeze(model, config.trained)


def with_adapters(model: nn.Module, adapters: int | dict[str, Any]) -> None:
    """Adds adapters in place.

    Args:
        adapters: the option ``model.adapters``.

    Raises:
        ValueError: the model has no place for them.
    """
    if isinstance(adapters, dict):
        add_peft(model, made(adapters))
    elif adapters:
        add_adapters(model, adapters)
