"""Objects that Python code gives to a run in place of what a configuration names: a model, data, a task."""

import copy
from typing import Any, NoReturn

PYTHON_OBJECT = "holotrain.config.given.given"
"""What a configuration, and so a checkpoint, names in place of the object."""


def given(kind: str) -> NoReturn:
    """An object of Python code. No file can name it, so the command line cannot make it.

    Args:
        kind: full name of the object's class
    """
    raise ValueError(f"a {kind} that Python code made is needed; give it to holotrain.fit, test, ... as an object")


def for_default_device(thing: Any) -> Any:
    """The object; while torch's default device is ``meta``, a copy of it that has shapes but no data."""
    import torch

    if torch.get_default_device().type != "meta" or not isinstance(thing, torch.nn.Module):
        return thing
    memo: dict[int, Any] = {id(getattr(thing, "_trainer", None)): None}  # a copy belongs to no trainer
    for tensor in thing.buffers():
        memo[id(tensor)] = torch.empty_like(tensor, device="meta")
    for weight in thing.parameters():
        memo[id(weight)] = torch.nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
    return copy.deepcopy(thing, memo)
