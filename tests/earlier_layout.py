"""State dicts and checkpoints as versions wrote them that stacked all queries, all keys and all values in ``qkv``."""

from typing import Any

import torch
from torch import Tensor, nn

from holotrain.models.layers.attention import Attention


def stacked(rows: Tensor, heads: int) -> Tensor:
    return rows.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)


def stacked_state_dict(state: dict[str, Tensor], heads: int) -> dict[str, Tensor]:
    def of(name: str, value: Tensor) -> Tensor:
        return stacked(value, heads) if "query_key_value" in name and "lora_A" not in name else value

    return {name.replace("query_key_value", "qkv"): of(name, value) for name, value in state.items()}


def stacked_checkpoint(checkpoint: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A checkpoint of Lightning's, with the optimizer's state.

    Args:
        optimizer: of the same kind, for this model.
    """
    (heads,) = {module.heads for module in model.modules() if isinstance(module, Attention)}
    changed = {
        id(p) for module in model.modules() if isinstance(module, Attention) for p in module.query_key_value.parameters()
    }
    states = [{"parts": [dict(part) for part in state.get("parts", [state])]} for state in checkpoint["optimizer_states"]]
    for state in states:
        for part, kept in zip(getattr(optimizer, "parts", [optimizer]), state["parts"], strict=True):
            numbered = enumerate(parameter for group in part.param_groups for parameter in group["params"])
            numbers = {number for number, parameter in numbered if id(parameter) in changed}
            kept["state"] = {
                number: {name: stacked(x, heads) if number in numbers and x.ndim else x for name, x in values.items()}
                for number, values in kept["state"].items()
            }
    states = [
        new if "parts" in old else new["parts"][0] for new, old in zip(states, checkpoint["optimizer_states"], strict=True)
    ]
    weights = stacked_state_dict(checkpoint["state_dict"], heads)
    return checkpoint | {"state_dict": weights, "optimizer_states": states}
