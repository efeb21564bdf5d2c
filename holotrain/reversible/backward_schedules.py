"""The backward schedules: what each block keeps for the backward, and what it recomputes.

A recomputed block may keep results that are slow to recompute and cheap to store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts


@dataclass(frozen=True)
class Schedule:
    """What one block does.

    Args:
        kind: ``"stored"`` keeps every activation, ``"checkpointed"`` the inputs of f and g, ``"rebuilt"`` nothing: its input is
            computed from its output.
        ahead: a rebuilt block is recomputed while the gradients of the block behind it are computed.
        keep: results that a rebuilt block keeps all the same, as in :class:`~holotrain.reversible.backward_schedules.Keeper`.
    """

    kind: Literal["stored", "checkpointed", "rebuilt"]
    ahead: bool = False
    keep: tuple[str, ...] = ()


SCHEDULES = {
    "autograd": Schedule("stored"),
    "checkpoint": Schedule("checkpointed"),
    "reversible": Schedule("rebuilt"),
    "pareprop": Schedule("rebuilt", ahead=True),
}
"""The schedules by name."""


def schedule_of(words: str) -> Schedule:
    """
    Args:
        words: a name, followed by the results to keep, separated by plus signs: ``"reversible+attention"``.

    Raises:
        ValueError: an unknown schedule, or one that cannot keep results.
    """
    name, *keep = words.split("+")
    if name not in SCHEDULES:
        raise ValueError(f"backward must be one of {', '.join(SCHEDULES)}, not {name!r}")
    if keep and SCHEDULES[name].kind != "rebuilt":
        raise ValueError(f"backward={words!r}: {name} cannot keep results; reversible and pareprop can")
    return keeping(SCHEDULES[name], keep)


def schedules_of(
    backward: str | Sequence[str], depth: int, store: int | Collection[int] = 0, keep: str | Collection[str] = ()
) -> list[Schedule]:
    """The schedule of each of ``depth`` blocks; the arguments are those of :class:`~holotrain.reversible.ReversibleSequence`.

    Raises:
        ValueError: an unknown schedule or result, a wrong number of schedules, or no such block to store.
    """
    if not isinstance(backward, Sequence):
        raise ValueError(f"backward must be one of {', '.join(SCHEDULES)}, or a list of them, not {backward!r}")
    if not isinstance(backward, str) and len(backward) != depth:
        raise ValueError(f"backward lists {len(backward)} schedules for {depth} blocks")
    stored = frozenset(range(depth - store, depth) if isinstance(store, int) else store)
    if not stored <= set(range(depth)) or isinstance(store, bool) or (isinstance(store, int) and store < 0):
        raise ValueError(f"store must be a number of blocks up to {depth} or indices below {depth}, not {store!r}")
    named = [schedule_of(words) for words in ([backward] * depth if isinstance(backward, str) else backward)]
    words = [keep] if isinstance(keep, str) else keep
    return [SCHEDULES["autograd"] if i in stored else keeping(schedule, words) for i, schedule in enumerate(named)]


def keeping(schedule: Schedule, words: Collection[str]) -> Schedule:
    """The schedule, with results to keep added to it if it is rebuilt.

    Raises:
        ValueError: no such result.
    """
    if words:
        Keeper(words)
    return replace(schedule, keep=(*schedule.keep, *words)) if schedule.kind == "rebuilt" else schedule


def stores_everything(backward: str | Sequence[str]) -> bool:
    """Whether all blocks store all activations; also where there are no blocks."""
    return all(schedule_of(words).kind == "stored" for words in ([backward] if isinstance(backward, str) else backward))


class Shorthand:
    """``backward``, ``store`` or ``keep`` of an object with blocks. Setting one makes its ``schedules`` anew."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, of: Any, owner: type) -> Any:
        return of._shorthands[self._name]

    def __set__(self, of: Any, value: Any) -> None:
        shorthands = of._shorthands | {self._name: value}
        of.schedules = schedules_of(depth=len(of.blocks), **shorthands)
        of._shorthands = shorthands


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
