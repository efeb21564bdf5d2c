"""Optimizer states in checkpoints of earlier versions."""

from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from holotrain.models.layers.attention import Attention
from holotrain.optimizers import CombinedOptimizer, InBackward


def order_states_by_head(states: list[dict[str, Any]], model: nn.Module, optimizer: Optimizer) -> None:
    """Orders the rows of queries, keys and values by head in all tensors of optimizer states, in place. They were stacked.

    Args:
        states: full tensors, by the number of a parameter.
        optimizer: of the same kind as the one that was saved; it is not used otherwise.
    """
    if isinstance(optimizer, InBackward):
        optimizer.remove()
        optimizer = optimizer.optimizer
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
    attention_of = {
        parameter: module
        for module in model.modules()
        if isinstance(module, Attention)
        for parameter in module.query_key_value.parameters()
    }
    for state in states:
        for part, kept in zip(parts, state.get("parts", [state]), strict=True):
            parameters = [parameter for group in part.param_groups for parameter in group["params"]]
            for number, values in kept["state"].items():
                if attention := attention_of.get(parameters[number]):
                    values |= {name: attention.by_head(value) for name, value in values.items() if isinstance(value, Tensor)}
