"""Prepares a new model: pretrained weights, adapters and frozen parameters."""

import sys

from torch import nn

from holotrain.checks import described_by
from holotrain.config.chosen import Chosen
from holotrain.models.adapters import add_adapters, freeze
from holotrain.models.foreign import Foreign
from holotrain.models.pretrained import load_pretrained, read_weights


def prepare_weights(model: nn.Module, config: Chosen, read: bool) -> None:
    """Loads pretrained weights, adds adapters and freezes parameters, in place. Reports which weights were used.

    Args:
        read: load the pretrained weights; False if a checkpoint is loaded instead.

    Raises:
        UserError: the weights are missing or belong to another model, or the model lacks the part to train.
    """
    if isinstance(model, Foreign):
        with described_by("model"):
            if read and (said := model.start_from(config.pretrained)):
                print(said, file=sys.stderr)
    elif read and config.pretrained:
        with described_by("model.pretrained"):
            print(load_pretrained(model, read_weights(config.pretrained)), file=sys.stderr)
    with described_by("model"):
        if config.adapters:
            add_adapters(model, config.adapters)
        if config.trained != "all":
            freeze(model, config.trained)
