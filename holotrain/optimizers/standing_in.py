"""A step of an optimizer on other tensors than its parameters."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor
from torch.optim import Optimizer


@contextmanager
def standing_in(optimizer: Optimizer, others: Mapping[Tensor, Tensor]) -> Iterator[None]:
    """Has an optimizer step other tensors for its parameters, with the state of these, such as the local share of a DTensor.

    Args:
        others: what stands in for each parameter; the optimizer has no parameters but these inside the context.
    """
    groups = optimizer.param_groups
    optimizer.param_groups = [group | {"params": [others[p] for p in group["params"] if p in others]} for group in groups]
    new = {other: parameter for parameter, other in others.items() if other is not parameter}
    for other, parameter in new.items():
        optimizer.state[other] = optimizer.state[parameter]
    try:
        yield
    finally:
        optimizer.param_groups = groups
        for other in new:
            del optimizer.state[other]
