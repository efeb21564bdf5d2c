"""The options that all reversible models share."""

from collections.abc import Collection, Sequence
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
