"""The defaults of a training that starts from pretrained weights, where the recipes of ``conf`` are those of random ones."""

from collections.abc import Mapping
from typing import Any

from holotrain.config import option_groups as groups
from holotrain.config.option_groups import is_a
from holotrain.schedules import AUTO
from holotrain.targets import TARGET

RATES = {
    groups.IMAGE_CLASSIFIER: 1e-4,
    groups.SEQUENCE_CLASSIFIER: 5e-5,
    groups.CAUSAL_LM: 1e-4,
    groups.MASKED_LM: 1e-4,
}
"""AdamW's peak learning rate, where pretrained weights are trained, by task."""


def loads_weights(model: Mapping[str, Any] | None) -> bool:
    """Whether a training with these options of the model, in plain containers, starts from pretrained weights."""
    if not model:
        return False
    if model.get("pretrained"):
        return True
    name, download = model.get("name"), bool(model.get("download"))
    if not is_a(model[TARGET], groups.HUGGING_FACE) or not isinstance(name, str):
        return is_a(model[TARGET], groups.TIMM) and download
    from holotrain.models.huggingface_files import has_weights  # imports torch

    try:
        return has_weights(name)
    except ValueError:  # there is no such folder, or not yet
        return download


def trains_all(model: Mapping[str, Any]) -> bool:
    """Whether all weights are trained, not only a head or adapters."""
    return model.get("trained", "all") == "all" and not isinstance(model.get("adapters"), Mapping)


def optimizer_for(optimizer: dict[str, Any], task: str, model: Mapping[str, Any] | None) -> dict[str, Any]:
    """The options of an optimizer, with those that depend on the weights that the training starts from.

    ``optimizer=auto`` is AdamW for pretrained weights, and Muon for random ones. Unless a rate is given, AdamW has a smaller
    one for pretrained weights; a head or adapters alone, which are new, keep its usual one.
    """
    is_fine_tuning = loads_weights(model)
    if optimizer.get(TARGET) == AUTO:
        optimizer = {**optimizer, TARGET: groups.ADAMW if is_fine_tuning else groups.MUON}
    if not is_fine_tuning or not trains_all(model or {}) or optimizer.get(TARGET) not in (groups.ADAMW, groups.LOW_BIT):
        return optimizer
    rates = [rate for kind, rate in RATES.items() if is_a(task, kind)]
    return {"lr": rates[0], **optimizer} if rates else optimizer
