"""The backward schedules, in one table for all parts. Nothing here imports torch, so that ``--help`` is fast."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Schedule:
    """What one block does.

    Args:
        kind: ``"stored"`` keeps every activation, ``"checkpointed"`` the inputs of f and g, ``"rebuilt"`` nothing: its input is
            computed from its output.
        input: of a checkpointed block: how its inputs are kept, as :data:`~holotrain.reversible.block_inputs.WAYS` names it.
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
    "checkpoint8": Schedule("checkpointed", "checkpoint8", exact=False, help="store these inputs in 8 bits (inexact)"),
    "offload": Schedule("checkpointed", "offload", gpu=True, help="store these inputs in main memory (GPU)"),
    "reversible": Schedule("rebuilt", help="store nothing, rebuild the inputs of blocks from their outputs"),
    "pareprop": Schedule("rebuilt", ahead=True, gpu=True, help="the same on a second stream (GPU)"),
}
"""By name. Each needs less memory than those before it, but for ``ahead``, which needs more than without."""

PLAIN = tuple(name for name, schedule in SCHEDULES.items() if schedule.kind != "rebuilt")
"""Those of any block. The first one stores everything, the second keeps inputs as they are."""

REBUILDING = tuple(name for name, schedule in SCHEDULES.items() if schedule.kind == "rebuilt")

OF_REVERSIBLE = (*PLAIN[:2], *REBUILDING)
"""Those to compare for reversible blocks, since what rebuilds needs less than the other ways to keep inputs."""

AUTO = "auto"
OPTIONS = {name: schedule.help for name, schedule in SCHEDULES.items()} | {AUTO: "choose them to fit memory="}
"""What ``backward=`` takes on the command line, with its help."""

ON_MISMATCH = ("store", "error")
"""What may follow if a stream is rebuilt wrongly."""
