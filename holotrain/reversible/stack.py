"""Blocks of any model, trained through the two-step coupling. The model itself stays as it is."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any
from weakref import ReferenceType

import torch
from torch import Tensor, nn

from holotrain.numeric import counted
from holotrain.reversible.backward_schedules import Shorthand
from holotrain.reversible.checks import RebuildChecks
from holotrain.reversible.context import backward_id
from holotrain.reversible.grid import FixedPointGrid
from holotrain.reversible.replaced_forward import ReplacedForward, name_of_stream, stream_in
from holotrain.reversible.stack_pass import StackPass
from holotrain.reversible.two_step import TwoStep, bits_in_words, tapered, weights
from holotrain.schedules import Schedule


class ReversibleStack:
    """The blocks of a model that are coupled by two steps in training. In evaluation they run as they are.

    It is no module, and the model does not hold it. Each block's ``forward`` leads to it.

    Args:
        blocks: in the order in which the model runs them.
        bits: bits kept for each element and block in the middle, and up to 6 towards both ends, as
            :func:`~holotrain.reversible.two_step.tapered` takes them; :attr:`kept` says what that makes.
        backward, store, keep, on_mismatch: as :class:`~holotrain.reversible.ReversibleSequence` takes them.
        name: of the list of blocks, in messages.

    Attributes:
        bits: of each block but the first.
        schedules: the schedule of each block.
        weights: of each block's update where the sign is 1, and where it is -1; see
            :func:`~holotrain.reversible.two_step.weights`.
        changed: the blocks before which the model changed the stream in some forward, for example by adding to it. There the
            recurrence begins anew, and the streams before and after are stored. Later forwards have weights for the runs of
            blocks between these places.
        grid: the fixed-point grid of the streams, chosen in the first batch in training, and again where they outgrow it.
    """

    backward, store, keep = Shorthand(), Shorthand(), Shorthand()
    schedules: list[Schedule]
    changed: frozenset[int] = frozenset()

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        bits: int | Sequence[int] = 4,
        backward: str | Sequence[str] = "reversible",
        store: int | Collection[int] = 0,
        keep: str | Collection[str] = (),
        name: str = "",
        on_mismatch: str = "store",
    ) -> None:
        self.blocks = list(blocks)
        self.bits = tapered(bits, len(self.blocks))
        self.noticed: set[int] = set()  # of the latest forwards, which the next one remembers
        self.remember_changes(())
        self._shorthands = {"backward": backward, "store": store}
        self.keep = keep
        self.grid = FixedPointGrid()
        self.stream_dtype: torch.dtype | None = None
        self.checks = RebuildChecks(f"blocks {name!r}" if name else counted(len(self.blocks), "block"), on_mismatch)
        self.compiled_calls: dict[int, Callable] = {}  # of blocks on which compile() was called
        self._compiled: dict[int, Callable] = {}  # their own forwards
        self._pass: StackPass | None = None
        self._latest: ReferenceType[TwoStep] | None = None  # the last coupling of the last forward, if it is alive
        self.ran_plain = False  # the last forward in training, since it was without gradients
        self._forwards = [CoupledForward(self, index) for index in range(len(self.blocks))]
        for index in range(len(self.blocks)):
            self._take_compiled_call(index)

    def remove(self) -> None:
        """Gives the blocks their own forward back. Where something wrapped the coupled one, that runs the block's own."""
        if self._pass is not None:
            self._pass.close()
        for forward in self._forwards:
            forward.remove()
        for index, call in self.compiled_calls.items():
            self.blocks[index]._compiled_call_impl = call

    def own_forward(self, index: int) -> Callable:
        """The forward that a block had before, compiled if ``block.compile()`` was called."""
        forward = self._forwards[index].own()
        if index not in self.compiled_calls:
            return forward
        if index not in self._compiled:
            self._compiled[index] = torch.compile(forward)
        return self._compiled[index]

    def _take_compiled_call(self, index: int) -> None:
        """What couples the blocks cannot be compiled, so of a compiled block only its own forward is."""
        block = self.blocks[index]
        if block._compiled_call_impl is not None:  # private: where module.compile() puts it, which cannot be taken back
            self.compiled_calls[index], block._compiled_call_impl = block._compiled_call_impl, None

    def grid_state(self) -> dict[str, Any] | None:
        """What a resumed training needs to compute the same, in plain values; None before the first batch."""
        if not self.grid.known:
            return None
        dtype = str(self.stream_dtype).removeprefix("torch.")
        return {"step": self.grid.upcoming.item(), "dtype": dtype, "changed": sorted(self.changed | self.noticed)}

    def load_grid_state(self, state: dict[str, Any] | None) -> None:
        """Takes over what :meth:`grid_state` returned; None changes nothing.

        Raises:
            ValueError: it is not such a state.
        """
        if state is None:
            return
        step, dtype = state.get("step"), {"float32": torch.float32, "float64": torch.float64}.get(state.get("dtype"))
        if dtype is None or not isinstance(step, float) or not 0 < step < math.inf or math.frexp(step)[0] != 0.5:
            raise ValueError(f"{state} is not the grid of a reversible stack")
        self.grid.set(step)
        self.stream_dtype = dtype
        self.remember_changes(state.get("changed", ()))

    @property
    def kept(self) -> str:
        """What the stack keeps between its blocks, in words: ``"30 blocks, 4.2 bits an element: 6, 5, 25 x 4, 5, 6"``.

        The mean is over the blocks that keep bits: those that are rebuilt, but for the first and those before which the model
        changes the stream. What the others keep is what their schedule says; they are computed as if they kept bits.
        """
        blocks = counted(len(self.blocks), "block")
        schedules = self.checks.in_force(self.schedules, self.blocks)
        rebuilt = []
        for index, (m, schedule) in enumerate(zip(self.bits, schedules[1:], strict=True), 1):
            if schedule.kind == "rebuilt" and index not in self.changed:
                rebuilt.append(m)
        if not rebuilt and self.bits:
            return f"{blocks}, none rebuilt, computed as with {bits_in_words(self.bits)}"
        some = "" if len(rebuilt) == len(self.bits) else f", of which {len(rebuilt)} keep bits to be rebuilt"
        return f"{blocks}{some}, {bits_in_words(rebuilt)}"

    @property
    def ends(self) -> tuple[nn.Module, nn.Module]:
        """The modules with whose calls it begins and ends."""
        return self.blocks[0], self.blocks[-1]

    def again(self, depth: int, backward: str) -> nn.Module:
        """A stack of ``depth`` blocks with the weights of the first, and with as many bits as in the middle of this one: it
        takes the arguments of the first block, and passes all but the stream on to each."""
        blocks = [copy.copy(self.blocks[0]) for _ in range(depth)]
        for block in blocks:
            block.forward = self._forwards[0]  # without what wraps it
            self._forwards[0].give_back(block)
        ReversibleStack(blocks, [min(self.bits, default=1)] * (depth - 1), backward)
        return _Chain(blocks)

    def remember_changes(self, places: Collection[int]) -> None:
        """The model has changed the stream before these blocks."""
        self.changed |= frozenset(places)
        self.weights = []
        for start, stop in pairwise((0, *sorted(self.changed), len(self.blocks))):
            bits = self.bits[start : stop - 1]
            self.weights += zip(weights(bits, 1), weights(bits, -1), strict=True)

    def run(self, index: int, arguments: tuple, keywords: dict[str, Any]) -> Any:
        """Runs a block in training."""
        self._take_compiled_call(index)
        current = self._pass
        if current is None or not current.goes_on_with(index):
            current = self._begin_pass(index)
        try:
            return current.run(index, arguments, keywords)
        except BaseException:
            self._pass = None  # which holds a graph
            raise

    def _begin_pass(self, index: int) -> StackPass:
        if self._pass is not None:
            with suppress(ValueError):  # its last stream was changed in place, which its backward tells
                self._pass.close()
        evaluated = [number for number, block in enumerate(self.blocks) if not block.training]
        if evaluated:
            raise ValueError(
                f"block {evaluated[0]} is in eval() and others are in train(), but blocks are coupled all or none; call "
                "train() on each block (its submodules may stay in eval())"
            )
        in_backward = backward_id() != -1
        if in_backward and self.ran_plain and (self._latest is None or self._latest() is None):
            raise ValueError(
                "the backward runs blocks again that ran without gradients before, where they are not coupled; turn off "
                "gradient checkpointing, or use checkpoint(..., use_reentrant=False) around the whole model"
            )
        if in_backward and index:
            raise ValueError(
                f"block {index} ran again in the backward without the blocks before it, to which it is coupled; turn off "
                "gradient checkpointing of blocks: make_reversible takes its place"
            )
        if getattr(self.blocks[0], "gradient_checkpointing", False):  # of Hugging Face's
            off = "turn it off with model.gradient_checkpointing_disable()"
            warnings.warn(f"gradient checkpointing keeps what make_reversible would rebuild; {off}", stacklevel=3)
        if not in_backward and not self.noticed <= self.changed:  # a recomputation must have the weights of its forward
            self.remember_changes(self.noticed)
        self.ran_plain = self.ran_plain and in_backward
        self._pass = StackPass(self)
        return self._pass

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pass": None, "_latest": None, "compiled_calls": {}, "_compiled": {}}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kept}; backward={self.backward!r})"


class _Chain(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor:
        name = name_of_stream(self.blocks[0].forward, arguments)
        for block in self.blocks:
            x = stream_in(block(*arguments, **keywords))
            arguments, keywords = ((x, *arguments[1:]), keywords) if name is None else ((), {**keywords, name: x})
        return x


class CoupledForward(ReplacedForward):
    """The ``forward`` of the block at some place in a stack."""

    KEY, WHAT = "_coupled_forward", "reversible blocks"

    def __init__(self, stack: ReversibleStack, index: int) -> None:
        super().__init__(stack.blocks[index])
        self.stack, self._index = stack, index

    @torch.compiler.disable
    def train(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        return self.stack.run(self._index, arguments, keywords)

    def pass_on(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        stack = self.stack  # a compiler takes the same code for all blocks, if it does not read their index
        if self.module.training and not self.removed:
            stack.ran_plain = True
        if stack.compiled_calls:
            return stack.own_forward(self._index)(*arguments, **keywords)
        return super().pass_on(arguments, keywords)

    @property
    def __globals__(self) -> dict[str, Any]:
        """``torch.jit.script`` reads it."""
        raise AttributeError(
            "torch.jit.script cannot compile the blocks that make_reversible changed; call undo(model) first, or use "
            "torch.export or torch.jit.trace in eval()"
        )


def stack_of(block: nn.Module) -> ReversibleStack | None:
    """The stack to which a block belongs; None: it belongs to none."""
    forward = CoupledForward.of(block)
    return None if forward is None else forward.stack


def stacks_in(model: nn.Module) -> list[ReversibleStack]:
    """The stacks to which blocks of a model belong, first to last."""
    found = (stack for part in model.modules() if (stack := stack_of(part)))
    return list({id(stack): stack for stack in found}.values())


def kept_between_blocks(model: nn.Module) -> str | None:
    """What the stacks in a model keep, as :attr:`ReversibleStack.kept` says it; None: it has none."""
    return "; ".join(stack.kept for stack in stacks_in(model)) or None
