"""Objects that Python code gives to a run in place of what a configuration names: a model, data, a task."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, NoReturn

from holotrain.config.objects import ObjectConfig

PYTHON_OBJECT = "holotrain.config.given.given"
"""What a configuration, and so a checkpoint, names in place of the object."""


def given(kind: str) -> NoReturn:
    """An object of Python code. No file can name it, so the command line cannot make it.

    Args:
        kind: full name of the object's class
    """
    raise ValueError(f"a {kind} that Python code made is needed; give it to holotrain.fit, test, ... as an object")


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


@dataclass(frozen=True)
class PythonObject(ObjectConfig):
    """An object that is made already. What is not among its arguments is an attribute of the object.

    Args:
        object: the model, the data or the task.
    """

    object: Any = field(default=None, repr=False)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("arguments", {}) or name.startswith("__"):
            return super().__getattr__(name)
        return getattr(self.__dict__.get("object"), name)

    @property
    def name(self) -> str:
        return type(self.object).__name__

    @property
    def bases(self) -> tuple[str, ...]:
        return tuple(map(full_name, type(self.object).__mro__))

    def make(self, *positional: Any, **keywords: Any) -> Any:
        """The object; while torch's default device is ``meta``, a copy of it that has shapes but no data."""
        import torch

        if torch.get_default_device().type != "meta" or not isinstance(self.object, torch.nn.Module):
            return self.object
        memo: dict[int, Any] = {id(getattr(self.object, "_trainer", None)): None}  # a copy belongs to no trainer
        for tensor in self.object.buffers():
            memo[id(tensor)] = torch.empty_like(tensor, device="meta")
        for weight in self.object.parameters():
            memo[id(weight)] = torch.nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
        return copy.deepcopy(self.object, memo)
