"""A step of an optimizer on other tensors than its parameters."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer


@contextmanager
def standing_in(optimizer: Optimizer, groups: Sequence[tuple[dict[str, Any], Mapping[Tensor, Tensor]]]) -> Iterator[None]:
    """Inside the context an optimizer steps other tensors in place of its parameters, such as the local shards of DTensors. It
    uses and changes the state of the parameters.

    Args:
        groups: parameter groups, each with the parameters to step and what stands in for each. Nothing else is stepped.
    """
    before = optimizer.param_groups
    optimizer.param_groups = [group | {"params": [*others.values()]} for group, others in groups]
    new = {other: p for _, others in groups for p, other in others.items() if other is not p}
    for other, parameter in new.items():
        optimizer.state[other] = optimizer.state[parameter]
    try:
        yield
    finally:
        optimizer.param_groups = before
        for other in new:
            del optimizer.state[other]
