"""Results that are stored because recomputing them is slow and storing them is cheap. A recomputation reuses them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


def _attention() -> tuple[OpOverload, ...]:
    names = (
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    )
    return tuple(getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name))


KEPT = {"attention": _attention}
"""Short names of what can be kept: ``attention`` is the output of scaled_dot_product_attention, as large as one stream."""


def _operators(word: str) -> tuple[OpOverload, ...]:
    if word in KEPT:
        return KEPT[word]()
    found = torch.ops
    for name in word.split("."):
        found = getattr(found, name, None)
    if not isinstance(found, OpOverload):
        raise ValueError(f"keep takes {', '.join(KEPT)} or operators such as aten.mm.default, not {word!r}")
    return (found,)


class Keeper:
    """Returns two contexts for each half: one that keeps results in the forward, one that reuses them in the recomputation.

    Args:
        words: ``"attention"``, or full names of operators.

    Raises:
        ValueError: an unknown name.
    """

    def __init__(self, words: Iterable[str]) -> None:
        self._operators = frozenset(operator for word in words for operator in _operators(word))

    def __call__(self) -> tuple[AbstractContextManager, AbstractContextManager]:
        keeping, reusing = create_selective_checkpoint_contexts(self._policy)
        keeping.respect_saved_tensors_hooks = False  # what is kept must not be discarded like the rest
        return keeping, reusing

    def _policy(self, context, operator, *args, **kwargs) -> CheckpointPolicy:
        if operator in self._operators and not _drops(operator, args, kwargs):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE


def _drops(operator: OpOverload, args: tuple, kwargs: dict) -> bool:
    """Whether the call draws a dropout mask: skipping it would shift the random numbers of all that follows."""
    for place, argument in enumerate(operator._schema.arguments):
        if argument.name == "dropout_p":
            return (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0)) > 0
    return False
