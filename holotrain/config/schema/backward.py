"""How a model's backward comes by activations."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from holotrain.checks import one_of
from holotrain.errors import UserError

PLAIN = ("autograd", "checkpoint")
SCHEDULES = (*PLAIN, "reversible", "pareprop")
AUTO = "auto"


def reversible(model_kind: str) -> bool:
    """Whether models of that kind can rebuild their activations."""
    return model_kind.startswith("rev_")


def schedules_of(model_kind: str) -> tuple[str, ...]:
    """Those that models of that kind can have."""
    if model_kind == "error_diffusion":  # whose layers are no blocks
        return PLAIN[:1]
    return SCHEDULES if reversible(model_kind) else PLAIN


@dataclass
class BackwardConfig:
    kind: str = MISSING
    """autograd stores every activation, checkpoint what lies between blocks, reversible nothing between blocks,
    pareprop neither, and recomputes while it differentiates; auto chooses block by block, within memory="""

    blocks: list[str] = field(default_factory=list)
    """a schedule for each block, first to last: what auto has chosen; [reversible+attention, ...] keeps attention outputs"""

    store: Any = 0
    """blocks that keep their activations all the same: how many of the last, or a list of indices"""

    exact: Any = False
    """rebuild activations bit for bit, on a fixed-point grid: true chooses it from the first batch, k asks for 2^-k"""

    keep: list[str] = field(default_factory=list)
    """results that the recomputation reuses: [attention], or names of operators such as aten.mm.default"""

    cuda_graph: bool = False
    """capture forward and backward once and replay them: for small models, which are bound by launches (GPU only)"""

    def __post_init__(self) -> None:
        one_of("backward.kind", self.kind, (*SCHEDULES, AUTO))
        stored = [self.store] if isinstance(self.store, int) else self.store
        if not isinstance(stored, list) or not all(type(index) is int and index >= 0 for index in stored):
            raise UserError(f"backward.store: {self.store!r} is neither a number of blocks nor a list of their indices")
        if not isinstance(self.exact, bool) and not (isinstance(self.exact, int) and 0 < self.exact < 53):
            raise UserError(f"backward.exact: {self.exact!r} is neither true, false nor a number of bits after the point")
        if stored != [0] and self.kind == "autograd":
            raise UserError("backward.store: backward=autograd stores every block; take backward=reversible or pareprop")
        if self.blocks and self.kind != AUTO:
            raise UserError("backward.blocks: schedules block by block go with backward=auto")
        for words in self.blocks:
            one_of("backward.blocks", words.partition("+")[0], SCHEDULES)
        if self.kind == AUTO and (stored != [0] or self.keep):
            raise UserError("backward=auto: it decides what is stored and kept by itself; leave out backward.store and keep")
        if self.keep and self.kind not in ("reversible", "pareprop"):
            raise UserError(f"backward.keep: backward={self.kind} has no use for it; take backward=reversible or pareprop")

    def schedule(self, model_kind: str) -> str:
        """The schedule of blocks that have none of their own."""
        if self.kind != AUTO:
            return self.kind
        return "reversible" if reversible(model_kind) else PLAIN[0]

    @property
    def open(self) -> bool:
        """Whether there is something left to choose."""
        return self.kind == AUTO and not self.blocks

    def engine(self) -> dict[str, Any]:
        """The options that a reversible sequence takes beside the schedule, as far as they were changed."""
        options = {"store": self.store, "exact": self.exact, "keep": tuple(self.keep)}
        return {name: value for name, value in options.items() if value}
