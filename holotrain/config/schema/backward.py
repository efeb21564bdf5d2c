"""How the backward pass gets its activations: stored, checkpointed or recomputed."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from holotrain.checks import one_of
from holotrain.errors import UserError
from holotrain.ranges import require_at_least, require_within

PLAIN = ("autograd", "checkpoint")
SCHEDULES = (*PLAIN, "reversible", "pareprop")
AUTO = "auto"


@dataclass
class BackwardConfig:
    kind: str | None = None
    """autograd: store all; checkpoint: store block inputs; reversible, pareprop: recompute; auto: choose to fit memory=;
    null: as the model's class has it"""

    blocks: Sequence[str] = ()
    """schedules for backward=auto, one per block, such as [pareprop+attention, autograd] (+: keep outputs); []: choose"""

    store: int | Sequence[int] = 0
    """blocks that store their activations: a number (the last n blocks) or a list of indices"""

    exact: bool | int = False
    """recompute activations bit for bit on a fixed-point grid; true: choose its step from the first batch; k: step 2^-k"""

    keep: Sequence[str] = ()
    """results to store instead of recomputing: [attention], or operator names such as aten.mm.default"""

    cuda_graph: bool = False
    """capture forward and backward as a CUDA graph; faster for small models, whose kernel launches dominate (GPU only)"""

    def __post_init__(self) -> None:
        if self.kind is not None:
            one_of("backward.kind", self.kind, (*SCHEDULES, AUTO))
        stored = [self.store] if isinstance(self.store, int) else self.store
        require_at_least(0, store=stored)
        if not isinstance(self.exact, bool):
            require_within(1, 52, closed=True, exact=self.exact)
        if stored != [0] and self.kind == "autograd":
            raise UserError("backward.store: backward=autograd already stores every block; use backward=reversible or pareprop")
        if self.blocks and self.kind != AUTO:
            raise UserError("backward.blocks: needs backward=auto")
        for words in self.blocks:
            one_of("backward.blocks", words.partition("+")[0], SCHEDULES)
        if self.kind == AUTO and (stored != [0] or self.keep):
            raise UserError("backward=auto: it chooses what to store; remove backward.store and backward.keep")
        if self.keep and self.kind not in ("reversible", "pareprop"):
            raise UserError(f"backward.keep: not supported by backward={self.kind}; use backward=reversible or pareprop")

    @property
    def name(self) -> str:
        """The kind, for display."""
        return self.kind or "as built"

    @property
    def open(self) -> bool:
        """Whether the schedules are still to be chosen."""
        return self.kind == AUTO and not self.blocks

    def engine(self) -> dict[str, Any]:
        """The arguments of a reversible sequence other than the schedule, where they differ from the default."""
        options = {"store": self.store, "exact": self.exact, "keep": tuple(self.keep)}
        return {name: value for name, value in options.items() if value}
