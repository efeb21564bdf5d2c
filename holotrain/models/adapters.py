"""Fine-tuning a part: the layers of peft, such as LoRA (Hu et al., 2021), and freezing."""

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from holotrain.models.quantised import dequantise
from holotrain.targets import first_line, needed

PEFT = ("peft", "these adapters need peft", "peft")


def add_peft(model: nn.Module, config: Any) -> None:
    """Adds the layers of a configuration of peft, such as ``peft.LoraConfig``, in place. They and the head are trained.

    Raises:
        ValueError: peft is not installed, the configuration is none of peft's, or the model has no layer that it names.
    """
    peft = needed(*PEFT)
    if not isinstance(config, peft.PeftConfig):
        raise ValueError(f"adapters: a {type(config).__name__} is no configuration of peft, such as peft.LoraConfig")
    try:
        peft.inject_adapter_in_model(config, model)
    except (ValueError, TypeError) as error:
        raise ValueError(f"adapters: {first_line(error)}") from error
    head = getattr(model, "head", None)
    if head is not None:
        head.requires_grad_()


def has_peft(model: nn.Module) -> bool:
    """Whether a layer of peft stands beside one of the model."""
    return any(hasattr(module, "base_layer") for module in model.modules())


def merge_peft(model: nn.Module) -> None:
    """Adds what peft's layers have learned to the layers that they stand beside, and takes them away, in place. If they
    are quantised, they become usual ones."""
    if not has_peft(model):
        return
    needed(*PEFT)
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, BaseTunerLayer):
                dequantise(child)
                child.merge()
                setattr(module, name, child.get_base_layer())


def train_head_alone(model: nn.Module) -> None:
    """Freezes all parameters but those of the classifier, in place.

    Raises:
        ValueError: the model has no classifier of its own.
    """
    head = getattr(model, "head", None)
    if head is None:
        raise ValueError(f"a {type(model).__name__} has no separate head to train: its head is tied to the embedding")
    model.requires_grad_(False)
    head.requires_grad_()


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Freezes the parameters whose names have one of these patterns (fnmatch), such as ``embedding.*``, in place.

    Raises:
        ValueError: a pattern is that of no parameter, or nothing is left to train.
    """
    named = dict(model.named_parameters(remove_duplicate=False))  # a tied parameter has several names
    for pattern in patterns:
        found = [name for name in named if fnmatchcase(name, pattern)]
        if not found:
            raise ValueError(f"freeze: no parameter is named {pattern!r}; there are {', '.join([*named][:3])}, ...")
        for name in found:
            named[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise ValueError("freeze: nothing is left to train")
