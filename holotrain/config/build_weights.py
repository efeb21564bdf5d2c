"""What a training begins with: pretrained weights, adapters, and which part of the model is trained."""

import sys

from torch import nn

from holotrain.checks import described_by
from holotrain.config.schema.model import TransformerConfig
from holotrain.models.adapters import add_adapters, freeze
from holotrain.models.pretrained import load_pretrained, read_weights


def prepare_weights(model: nn.Module, config: TransformerConfig, read: bool) -> None:
    """Gives a new model what its configuration names beside its shape, in place, and says what of the weights was used.

    Args:
        read: the pretrained weights too; a checkpoint brings its own.

    Raises:
        UserError: there are no such weights, or they are of another model; a part to train that the model does not have.
    """
    if read and config.pretrained:
        with described_by("model.pretrained"):
            print(load_pretrained(model, read_weights(config.pretrained)), file=sys.stderr)
    with described_by("model"):
        if config.adapters:
            add_adapters(model, config.adapters)
        freeze(model, config.trained)
