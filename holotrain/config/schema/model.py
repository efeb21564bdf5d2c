"""How the training of a model begins: options of every model, beside those of its class."""

from typing import Literal

from holotrain.checks import at_least, described_by
from holotrain.config.chosen import Chosen
from holotrain.config.schema.classes import HUGGING_FACE, is_a
from holotrain.errors import UserError
from holotrain.targets import TARGET

BEGINNING = ("pretrained", "trained", "adapters")
"""Options that are not passed on to the model's class."""


class Beginning:
    """
    Args:
        pretrained: initial weights: a local file or folder from timm, Hugging Face or holotrain; null: random
        trained: what to train: all, head (only the classifier) or adapters (with norms and head); the rest is frozen
        adapters: width of the adapter after each branch of each block; 0: no adapters; or a configuration of peft, such as
            {_target_: peft.LoraConfig, r: 8, target_modules: [qkv]}, which trains its layers and the head
    """

    def __init__(
        self, pretrained: str | None = None, trained: Literal["all", "head", "adapters"] = "all", adapters: int | dict = 0
    ) -> None:
        if isinstance(adapters, dict):
            if TARGET not in adapters:
                raise UserError(f"model.adapters: give a width, or model.adapters.{TARGET}=peft.LoraConfig")
            if trained == "head":
                raise UserError("model.trained=head: the layers of model.adapters would not be trained; use trained=adapters")
        else:
            at_least("model.adapters", adapters, 0)
        if trained == "adapters" and not adapters:
            raise UserError("model.trained=adapters: the model has no adapters; give their width, such as model.adapters=64")


def check_beginning(model: Chosen) -> None:
    """
    Raises:
        UserError: a value out of range, or options that exclude each other.
    """
    Beginning(**{name: model.arguments[name] for name in BEGINNING})


def with_network(model: Chosen) -> Chosen:
    """A Hugging Face model with the content of its config.json, so that a checkpoint holds it and needs no other file.

    Raises:
        UserError: there is no such file, or it is not the configuration of a model.
    """
    if not is_a(model, HUGGING_FACE):
        return model
    from holotrain.models.foreign.network import network_of  # imports torch

    with described_by("model.name"):
        return model.with_arguments(config=network_of(model.arguments["name"], model.config, model.download))
