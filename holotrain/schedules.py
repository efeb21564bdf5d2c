"""The backward schedules, in one table for all parts. Nothing here imports torch, so that ``--help`` is fast."""

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """What one block does.

    Args:
        kind: ``"stored"`` keeps every activation, ``"checkpointed"`` the inputs of f and g, ``"rebuilt"`` nothing: its input is
            computed from its output.
        input: of a checkpointed block: how its inputs are kept, as :data:`~holotrain.reversible.block_inputs.WAYS` names it;
            of :data:`COMPILED` ones their name, with a budget.
        ahead: a rebuilt block is recomputed while the gradients of the block behind it are computed.
        keep: results that a rebuilt block keeps all the same, as in
            :class:`~holotrain.reversible.kept_results.KeptResults`.
        exact: gradients are those of plain autograd up to rounding in the last digits.
        gpu: on a CPU it is the one before it that has no such mark: ``checkpoint`` or ``reversible``.
        help: a line for ``--help``.
    """

    kind: Literal["stored", "checkpointed", "rebuilt"]
    input: str = "checkpoint"
    ahead: bool = False
    keep: tuple[str, ...] = ()
    exact: bool = True
    gpu: bool = False
    help: str = ""


SCHEDULES = {
    "autograd": Schedule("stored", help="store all activations"),
    "checkpoint": Schedule("checkpointed", help="store the inputs of blocks, recompute the rest"),
    "compiled": Schedule("checkpointed", "compiled", help="the same by torch.compile; compiled:0.3 stores 0.3 of the rest"),
    "checkpoint8": Schedule("checkpointed", "checkpoint8", exact=False, help="store these inputs in 8 bits (inexact)"),
    "compiled8": Schedule("checkpointed", "compiled8", exact=False, help="the same by torch.compile (inexact)"),
    "offload": Schedule("checkpointed", "offload", gpu=True, help="store these inputs in main memory (GPU)"),
    "reversible": Schedule("rebuilt", help="store nothing, rebuild the inputs of blocks from their outputs"),
    "pareprop": Schedule("rebuilt", ahead=True, gpu=True, help="the same on a second stream (GPU)"),
}
"""By name. Each needs less memory than those before it, but for ``ahead``, which needs more than without."""

PLAIN = tuple(name for name, schedule in SCHEDULES.items() if schedule.kind != "rebuilt")
"""Those of any block. The first one stores everything, the second keeps inputs as they are."""

REBUILDING = tuple(name for name, schedule in SCHEDULES.items() if schedule.kind == "rebuilt")

COMPILED = {"compiled": "checkpoint", "compiled8": "checkpoint8"}
"""What torch.compile recomputes, and the schedule that does the same without it."""

EAGER = tuple(name for name in PLAIN if name not in COMPILED)
"""Those of any block without a compiler, which plans show and choose from."""

OF_REVERSIBLE = (*PLAIN[:2], *REBUILDING)
"""Those to compare for reversible blocks, since what rebuilds needs less than the other ways to keep inputs."""

AUTO = "auto"
OPTIONS = {name: schedule.help for name, schedule in SCHEDULES.items()} | {AUTO: "choose them to fit memory="}
"""What ``backward=`` takes on the command line, with its help."""

ON_MISMATCH = ("store", "error")
"""What may follow if a stream is rebuilt wrongly."""


def kind_of(name: object) -> str:
    """The name of a schedule without its memory budget: ``"compiled"`` of ``"compiled:0.3"``.

    Raises:
        ValueError: the budget is no number from 0 to 1, or the schedule takes none.
    """
    kind, colon, budget = str(name).partition(":")
    if not colon:
        return kind
    if kind not in COMPILED:
        raise ValueError(f"{name}: {' and '.join(COMPILED)} take a budget, not {kind}; such as compiled:0.3")
    try:
        value = float(budget)
    except ValueError:
        value = math.nan
    if not 0 <= value <= 1:
        nearest = 1 if value > 1 else 0 if value < 0 else 0.3
        raise ValueError(f"{name}: the budget is a number from 0 to 1, such as {kind}:{nearest}")
    return kind


def budget_of(name: str) -> float | None:
    """The memory budget of a compiled schedule; None, and for 0: it keeps its inputs alone."""
    budget = name.partition(":")[2]
    return float(budget or 0) or None


def planned_as(name: str) -> str:
    """The schedule that a plan, which runs no compiler, takes in place of a compiled one, which needs no more memory."""
    if kind_of(name) not in COMPILED:
        return name
    return COMPILED[kind_of(name)] if budget_of(name) is None else PLAIN[0]
