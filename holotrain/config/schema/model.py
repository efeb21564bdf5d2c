"""How the training of a model begins: options of every model, beside those of its class."""

from typing import Literal

from holotrain.checks import at_least
from holotrain.config.chosen import Chosen
from holotrain.errors import UserError

BEGINNING = ("pretrained", "trained", "adapters")
"""Options that are not passed on to the model's class."""


class Beginning:
    """
    Args:
        pretrained: initial weights: a local file or folder from timm, Hugging Face or holotrain; null: random
        trained: what to train: all, head (only the classifier) or adapters (with norms and head); the rest is frozen
        adapters: width of the adapter after each branch of each block; 0: no adapters
    """

    def __init__(
        self, pretrained: str | None = None, trained: Literal["all", "head", "adapters"] = "all", adapters: int = 0
    ) -> None:
        at_least("model.adapters", adapters, 0)
        if trained == "adapters" and not adapters:
            raise UserError("model.trained=adapters: the model has no adapters; give their width, such as model.adapters=64")


def check_beginning(model: Chosen) -> None:
    """
    Raises:
        UserError: a value out of range, or options that exclude each other.
    """
    Beginning(**{name: model.arguments[name] for name in BEGINNING})
