"""The options that all reversible models share."""

import re
from collections.abc import Collection, Sequence
from inspect import Signature, getdoc, signature
from typing import Any, Literal


class Reversible:
    """Base class of reversible models, in front of the plain model, whose ``__init__`` calls ``_assemble`` to make the blocks.

    Args:
        backward: how the backward pass gets the activations of a block, see
            :class:`~holotrain.reversible.ReversibleSequence`; a list: of each block
        store: blocks that store their activations: a number (the last n blocks) or a list of indices
        exact: recompute activations bit for bit on a fixed-point grid; true: choose its step from the first batch; k: step 2^-k
        keep: results to store instead of recomputing: attention, or operator names such as aten.mm.default
        arguments: those of the plain model
    """

    def __init__(
        self,
        *,
        backward: Literal["autograd", "checkpoint", "reversible", "pareprop"] | Sequence[str] = "reversible",
        store: int | Collection[int] = 0,
        exact: bool | int = False,
        keep: str | Collection[str] = (),
        **arguments: Any,
    ) -> None:
        self._engine = {"store": store, "exact": exact, "keep": keep}  # of the sequences that _assemble makes
        super().__init__(backward=backward, **arguments)

    def __init_subclass__(cls, **others: Any) -> None:
        """Has ``help(RevViT)`` show what ViT and this class say of their arguments, which are written once."""
        super().__init_subclass__(**others)
        if "__init__" in vars(cls):
            cls.__signature__ = None  # not the one of a base class
            return
        plain = cls.__mro__[cls.__mro__.index(Reversible) + 1]
        if Reversible not in cls.__bases__ or plain is object:
            return
        ours = {name: each for name, each in signature(Reversible).parameters.items() if name != "arguments"}
        theirs = [
            each.replace(kind=each.KEYWORD_ONLY) for each in signature(plain).parameters.values() if each.name not in ours
        ]
        cls.__signature__ = Signature([*theirs, *ours.values()])
        if not cls.__doc__:  # python -OO
            return
        said = [line for of in (plain, Reversible) for line in _arguments(of) if not line.strip().startswith("arguments:")]
        own, *rest = re.split(r"^(?=Shapes:|Raises:)", getdoc(cls), maxsplit=1, flags=re.MULTILINE)
        cls.__doc__ = "\n\n".join([own.rstrip(), "\n".join(["Args:", *said]), *rest])


def _arguments(of: type) -> list[str]:
    """The lines of a docstring below ``Args:``; ``backward`` is the reversible model's."""
    block = (getdoc(of) or "").partition("Args:\n")[2].partition("\n\n")[0]
    items = re.split(r"\n(?=    \w)", block)
    return [item for item in items if of is Reversible or not item.strip().startswith("backward:")]
