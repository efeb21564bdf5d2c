"""A module whose ``forward`` is replaced on the instance, in place, and given back."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import MethodType
from typing import Any, ClassVar, Self

from torch import nn


class ReplacedForward(ABC):
    """Stands in place of a module's ``forward`` until :meth:`remove`. A subclass defines ``__call__``, and sets ``KEY``, the
    name under which the module keeps it: others may wrap its forward meanwhile.

    Args:
        module: whose forward it becomes.

    Attributes:
        removed: it passes calls on, since something that wrapped it holds it.
    """

    KEY: ClassVar[str]
    WHAT: ClassVar[str]

    def __init__(self, module: Any) -> None:
        self.module, self._before, self.removed = module, vars(module).get("forward"), False
        module.forward = vars(module)[self.KEY] = self
        # Private: nn.DataParallel copies a module by it, and has no public hook.
        self._replicate = vars(module).get("_replicate_for_data_parallel")
        module._replicate_for_data_parallel = self.refuse_replica

    @classmethod
    def of(cls, module: nn.Module) -> Self | None:
        """That of a module; None: it has none."""
        return vars(module).get(cls.KEY)

    def own(self) -> Callable:
        """The forward that the module had before."""
        return self._before or MethodType(type(self.module).forward, self.module)

    def remove(self) -> None:
        """Gives the module its own forward back. Where something wrapped this one, it runs the module's own."""
        self.removed = True
        self.give_back(self.module)

    def give_back(self, module: Any) -> None:
        """Takes this forward from the module, or from a copy of it."""
        del module._replicate_for_data_parallel
        if self._replicate is not None:
            module._replicate_for_data_parallel = self._replicate
        if vars(module).pop(self.KEY) is not module.forward:
            return  # something wrapped it
        del module.forward
        if self._before is not None:
            module.forward = self._before

    @abstractmethod
    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """What is called in place of the forward; where ``removed``, it calls :meth:`own`."""

    def refuse_replica(self) -> nn.Module:
        """What ``nn.DataParallel`` calls to copy the module.

        Raises:
            ValueError: always; the copy would run the parts of this module.
        """
        raise ValueError(
            f"nn.DataParallel would run the {self.WHAT} of its first GPU on every GPU; start one process for each GPU with "
            "torchrun, or show the process one GPU with CUDA_VISIBLE_DEVICES=0, or call undo(model)"
        )

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own())


@contextmanager
def forward_replaced(module: Any, forward: Callable) -> Generator[None]:
    """Inside, the module has another forward."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
