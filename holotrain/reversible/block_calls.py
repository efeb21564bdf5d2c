"""The calls of another model's blocks: the stream among their arguments and in what they return."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor


def call_of(
    forward: Callable, arguments: tuple, keywords: dict[str, Any], again: bool
) -> tuple[Tensor, Callable, dict[str, Any]]:
    """A block's stream, its forward as a function of the stream, and the keyword arguments of that function.

    Args:
        again: the forward will run again in the backward.
    """
    name = name_of_stream(forward, arguments)
    if name not in keywords if name is not None else not arguments:
        raise ValueError("a block was called without its first argument, the stream")
    x, rest = (arguments[0], arguments[1:]) if name is None else (keywords[name], ())
    named = {key: value for key, value in keywords.items() if key != name}
    if again:
        rest, named = tuple(map(_no_cache, rest)), {key: _no_cache(value) for key, value in named.items()}

    def run(source: Tensor, rest: tuple = (), named: dict[str, Any] | None = None) -> Any:
        named = named or {}
        return forward(source, *rest, **named) if name is None else forward(**{name: source}, **named)

    return x, run, {key: value for key, value in (("rest", rest), ("named", named)) if value}


def name_of_stream(forward: Callable, arguments: tuple) -> str | None:
    """The keyword by which a block gets its stream; None: it is the first of the positional arguments."""
    return None if arguments else next(iter(inspect.signature(forward).parameters), None)


def _no_cache(value: Any) -> Any:
    """None for an empty cache of keys and values, to which a recomputation would add a second time.

    Raises:
        ValueError: the cache is not empty, or of fixed length.
    """
    if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
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


def stream_in(output: Any) -> Any:
    """The stream in what a block returned."""
    return output[0] if isinstance(output, tuple | list) and output else output
