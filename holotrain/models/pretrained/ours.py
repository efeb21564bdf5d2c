"""Weights of our own models: the ``state_dict`` of a checkpoint (``model.`` before every name) or of a saved model."""

import re

from torch import Tensor


def recognises(weights: dict[str, Tensor]) -> bool:
    """Whether these are a state_dict of one of holotrain's models."""
    return any(re.search(r"(^|\.)blocks\.\d+\.f\.", name) for name in weights)


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the model's own names. The grid of an exact sequence is left out, because it depends on the data.

    Raises:
        ValueError: the weights are quantised.
    """
    if any(name.endswith(".weight_scale") for name in weights):
        raise ValueError("these weights are int8 and cannot be trained; use the checkpoint that they were exported from")
    # A branch with an adapter is inside the adapter.
    named = {re.sub(r"\.([fg])\.branch\.", r".\1.", name.removeprefix("model.")): x for name, x in weights.items()}
    return {name: x for name, x in named.items() if not name.endswith(".grid.step")}
