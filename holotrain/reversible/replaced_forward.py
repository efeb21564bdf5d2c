"""A module's ``forward``, replaced in place, and the stream among its arguments and in what it returns."""

from __future__ import annotations

import inspect
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import wraps
from types import MethodType
from typing import Any, ClassVar, Self
from weakref import WeakSet

import torch
from torch import Tensor, nn


class ReplacedForward(ABC):
    """Stands in place of a module's ``forward`` until :meth:`remove`. Without gradients it calls what was there before.

    A subclass defines :meth:`train`, and sets ``KEY``, the name under which the module keeps it, since others may wrap its
    forward meanwhile.

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

    @classmethod
    def remove_all(cls, model: nn.Module) -> None:
        """Removes those of a model's parts."""
        for part in model.modules():
            if (own := cls.of(part)) is not None:
                own.remove()

    def own(self) -> Callable:
        """The forward that the module had before."""
        return self._before or MethodType(type(self.module).forward, self.module)

    def remove(self) -> None:
        """Gives the module its own forward back. Where something wrapped this one, it runs the module's own."""
        self.removed, module = True, self.module
        if getattr(vars(module).get("_replicate_for_data_parallel"), "__self__", None) is self:
            del module._replicate_for_data_parallel
            if (replicate := self._present("_replicate")) is not None:
                module._replicate_for_data_parallel = replicate
        if vars(module).pop(self.KEY) is not module.forward:
            return  # something wrapped it
        del module.forward
        if (before := self._present("_before")) is not None:
            module.forward = before

    def _present(self, name: str) -> Any:
        """What was there before, without those that have been removed meanwhile."""
        value = getattr(self, name)
        while isinstance(owner := getattr(value, "__self__", value), ReplacedForward) and owner.removed:
            value = getattr(owner, name)
        return value

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if torch.is_grad_enabled() and not self.removed:
            return self.train(arguments, keywords)
        return self.pass_on(arguments, keywords)

    @abstractmethod
    def train(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        """A call with gradients."""

    def pass_on(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        """Any other call."""
        if self._before is not None:
            return self._before(*arguments, **keywords)
        return type(self.module).forward(self.module, *arguments, **keywords)  # a compiler cannot trace own()

    def pass_on_in_eval(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        """A call with gradients in ``eval()`` that may be an evaluation: ``from_pretrained`` gives a model in this mode."""
        kind = type(self.module)
        if kind not in _said_in_eval and any(parameter.requires_grad for parameter in self.module.parameters()):
            _said_in_eval.add(kind)
            warnings.warn(
                f"{kind.__name__} runs in eval() with gradients, and as without holotrain: call model.train() to train it, or "
                "evaluate within torch.no_grad()",
                stacklevel=4,
            )
        return self.pass_on(arguments, keywords)

    def refuse_replica(self) -> nn.Module:
        """What ``nn.DataParallel`` calls to copy the module: the copy would run the parts of this module."""
        raise ValueError(
            f"nn.DataParallel would run the {self.WHAT} of its first GPU on every GPU; start one process for each GPU with "
            "torchrun, or show the process one GPU with CUDA_VISIBLE_DEVICES=0, or call undo(model)"
        )

    @property
    def __func__(self) -> Callable:
        """It as a function of the module, too: what wraps a forward may take it for a bound method."""

        @wraps(type(self.module).forward)
        def forward(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
            return self(*arguments, **keywords)

        return forward

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.own())


class InParts(ReplacedForward):
    """The forward of a module that is taken in parts in training, where parts are seen to give what the whole gives.

    Attributes:
        said: what was logged or warned of already, for all modules of a model.
    """

    PARTS: ClassVar[str]
    said: set[str]

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._calls = 0

    def is_compared(self) -> bool:
        """Counts a call: in the calls 1, 2, 4, 8 ... parts are compared with the whole."""
        self._calls += 1
        return self._calls & (self._calls - 1) == 0

    def say(self, reason: str, how: Callable[[str], object]) -> None:
        """Why the module is taken whole, once."""
        message = f"{type(self.module).__name__} is taken whole, not in {self.PARTS}: {reason}"
        if message not in self.said:
            self.said.add(message)
            how(message)


def differ(found: Tensor, whole: Tensor) -> bool:
    """Whether parts gave something else than the whole; not where both are NaN."""
    off = (found - whole).abs().max()
    return bool(off > torch.finfo(off.dtype).eps ** 0.5 * whole.abs().max())


_said_in_eval: WeakSet[type] = WeakSet()
"""Classes of which a warning has said that they run in ``eval()`` with gradients."""


@contextmanager
def replaced(module: Any, name: str, value: Callable) -> Generator[None]:
    """Inside, the module has an attribute of its own, in place of its own or its class's."""
    before = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        delattr(module, name)
        if before is not None:
            setattr(module, name, before)


def call_of(forward: Callable, arguments: tuple, keywords: dict[str, Any]) -> tuple[Tensor, Callable, dict[str, Any]]:
    """A block's stream, its forward, which runs again in the backward, as a function of the stream, and the keyword arguments
    of that function."""
    # The keyword by which it gets the stream; None: the stream is the first of the positional arguments.
    name = None if arguments else next(iter(inspect.signature(forward).parameters), None)
    if name not in keywords if name is not None else not arguments:
        raise ValueError("a block was called without its first argument, the stream")
    x, rest = (arguments[0], arguments[1:]) if name is None else (keywords[name], ())
    rest = tuple(map(_no_cache, rest))
    named = {key: _no_cache(value) for key, value in keywords.items() if key != name}

    def run(source: Tensor, rest: tuple = (), named: dict[str, Any] | None = None) -> Any:
        named = named or {}
        return forward(source, *rest, **named) if name is None else forward(**{name: source}, **named)

    return x, run, {key: value for key, value in (("rest", rest), ("named", named)) if value}


def is_cache(value: Any) -> bool:
    """Whether a value is a cache of keys and values of transformers."""
    return hasattr(value, "get_seq_length") and hasattr(value, "update")


def _no_cache(value: Any) -> Any:
    """None for an empty cache of keys and values, to which a recomputation would add a second time."""
    if not is_cache(value) or getattr(value, "runs_again", False):
        return value
    if getattr(value, "is_compileable", False):
        raise ValueError(
            "a block got a StaticCache in training, for whose length its masks are made; call the model with use_cache=False, "
            'or have the block store its activations, with backward="autograd"'
        )
    if value.get_seq_length():
        raise ValueError(
            "a block got past keys and values in training, to which its recomputation would add a second time; call the model "
            'with use_cache=False, or have the block store its activations, with backward="autograd"'
        )
    return None
