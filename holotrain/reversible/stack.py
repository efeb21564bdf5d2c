"""Blocks of any model, trained through the two-step coupling. The model itself stays as it is."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from holotrain.numeric import counted
from holotrain.reversible.backward_schedules import SCHEDULES, Schedule, Shorthand
from holotrain.reversible.grid import FixedPointGrid
from holotrain.reversible.reads import version_of
from holotrain.reversible.replay import has_no_data, in_trace
from holotrain.reversible.tape import InputCheck, Recorder, same_tensor
from holotrain.reversible.two_step import TwoStep, in_words, stream_in, tapered, weights

FIRST_HEADROOM_BITS = 20
"""In the first batch, when only the first stream is known, the streams may grow by a factor of 2^20."""

FINENESS_BITS = 10
"""Streams stay in fp32 if its grid resolves a typical element to 2^-10 of its magnitude. Otherwise they are kept in fp64."""


class ReversibleStack:
    """The blocks of a model that are coupled by two steps in training. In evaluation they run as they are.

    It is no module, and the model does not hold it. Each block's ``forward`` leads to it.

    Args:
        blocks: in the order in which the model runs them.
        bits: bits kept for each element and block in the middle, and up to 6 towards both ends, as
            :func:`~holotrain.reversible.two_step.tapered` takes them; :attr:`kept` says what that makes.
        backward, store, keep: as :class:`~holotrain.reversible.ReversibleSequence` takes them; they can be changed between
            calls.

    Attributes:
        bits: of each block but the first.
        schedules: the schedule of each block.
        weights: of each block's update where the sign is 1, and where it is -1; see
            :func:`~holotrain.reversible.two_step.weights`.
        grid: the fixed-point grid of the streams, chosen in the first batch in training.

    Raises:
        ValueError: an unknown schedule or number of bits.
    """

    backward, store, keep = Shorthand(), Shorthand(), Shorthand()
    schedules: list[Schedule]

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        bits: int | Sequence[int] = 4,
        backward: str | Sequence[str] = "reversible",
        store: int | Collection[int] = 0,
        keep: str | Collection[str] = (),
    ) -> None:
        self.blocks = list(blocks)
        self.bits = tapered(bits, len(self.blocks))
        self.weights = list(zip(weights(self.bits, 1), weights(self.bits, -1), strict=True))
        self._shorthands = {"backward": backward, "store": store}
        self.keep = keep
        self.grid = FixedPointGrid()
        self.stream_dtype: torch.dtype | None = None
        self.input_checks: list[InputCheck] | None = None
        self._forwards = [vars(block).get("forward") for block in self.blocks]
        self._compiled_calls: dict[int, Callable] = {}  # of blocks on which compile() was called
        self._compiled: dict[int, Callable] = {}  # their own forwards
        self._pass: _Pass | None = None
        for index, block in enumerate(self.blocks):
            block.forward = CoupledForward(self, index)
            self._take_compiled_call(index)

    def remove(self) -> None:
        """Gives the blocks their own forward back."""
        for block, forward in zip(self.blocks, self._forwards, strict=True):
            del block.forward
            if forward is not None:
                block.forward = forward
        for index, call in self._compiled_calls.items():
            self.blocks[index]._compiled_call_impl = call

    def own_forward(self, index: int) -> Callable:
        """The forward that a block had before, compiled if ``block.compile()`` was called."""
        block = self.blocks[index]
        forward = self._forwards[index] or MethodType(type(block).forward, block)
        if index not in self._compiled_calls:
            return forward
        if index not in self._compiled:
            self._compiled[index] = torch.compile(forward)
        return self._compiled[index]

    def _take_compiled_call(self, index: int) -> None:
        """What couples the blocks cannot be compiled, so of a compiled block only its own forward is."""
        block = self.blocks[index]
        if block._compiled_call_impl is not None:
            self._compiled_calls[index], block._compiled_call_impl = block._compiled_call_impl, None

    def grid_state(self) -> dict[str, Any] | None:
        """What a resumed training needs to compute the same, in plain values; None before the first batch."""
        if not self.grid.known:
            return None
        return {"step": self.grid.step.item(), "dtype": str(self.stream_dtype).removeprefix("torch.")}

    def load_grid_state(self, state: dict[str, Any]) -> None:
        """Takes over what :meth:`grid_state` returned.

        Raises:
            ValueError: it is not such a state.
        """
        step, dtype = state.get("step"), {"float32": torch.float32, "float64": torch.float64}.get(state.get("dtype"))
        if dtype is None or not isinstance(step, float) or not 0 < step < math.inf or math.frexp(step)[0] != 0.5:
            raise ValueError(f"{state} is not the grid of a reversible stack")
        self.grid.step.fill_(step)
        self.grid.known, self.stream_dtype = True, dtype

    @property
    def kept(self) -> str:
        """What the stack keeps between its blocks, in words: ``"30 blocks, 4.2 bits an element: 6, 5, 25 x 4, 5, 6"``.

        The mean is over all blocks but the first, which keeps no bits, and which are rebuilt. The others keep as much as their
        schedule says, and are computed as if they kept bits.
        """
        blocks = counted(len(self.blocks), "block")
        rebuilt = [m for m, schedule in zip(self.bits, self.schedules[1:], strict=True) if schedule.kind == "rebuilt"]
        if not rebuilt and self.bits:
            return f"{blocks}, none rebuilt, computed as with {in_words(self.bits)}"
        some = "" if len(rebuilt) == len(self.bits) else f", of which {len(rebuilt)} keep bits to be rebuilt"
        return f"{blocks}{some}, {in_words(rebuilt)}"

    @property
    def ends(self) -> tuple[nn.Module, nn.Module]:
        """The modules with whose calls it begins and ends."""
        return self.blocks[0], self.blocks[-1]

    def again(self, depth: int, backward: str) -> nn.Module:
        """A stack of ``depth`` blocks with the weights of the first, and with as many bits as in the middle of this one.

        Returns:
            a module that takes the arguments of the first block and passes all but the stream on to each.
        """
        blocks = [copy.copy(self.blocks[0]) for _ in range(depth)]
        for block in blocks:
            del block.forward
            if self._forwards[0] is not None:
                block.forward = self._forwards[0]
        ReversibleStack(blocks, [min(self.bits, default=1)] * (depth - 1), backward)
        return _Chain(blocks)

    def run(self, index: int, arguments: tuple, keywords: dict[str, Any]) -> Any:
        """Runs a block in training.

        Raises:
            ValueError: the model does not run its blocks one after another, each on what the block before it returned.
        """
        self._take_compiled_call(index)
        try:
            if index == 0:
                self._require_one_mode()
                if getattr(self.blocks[0], "gradient_checkpointing", False):  # of Hugging Face's
                    off = "turn it off with model.gradient_checkpointing_disable()"
                    warnings.warn(f"gradient checkpointing keeps what make_reversible would rebuild; {off}", stacklevel=2)
                self._pass = _Pass(self)
            if self._pass is None or self._pass.following != index:
                came = "no block before it" if self._pass is None else f"block {self._pass.following - 1} before it"
                self._require_one_mode()
                raise ValueError(
                    f"block {index} ran with {came}, and make_reversible takes blocks that run one after another, each once: "
                    "turn off the model's gradient checkpointing, layer drop or early exit; if the list has changed, undo first"
                )
            returned = self._pass.run(index, arguments, keywords)
        except BaseException:
            self._pass = None  # which holds a graph
            raise
        if index == len(self.blocks) - 1:
            self._pass = None
        return returned

    def _require_one_mode(self) -> None:
        evaluated = [index for index, block in enumerate(self.blocks) if not block.training]
        if evaluated:
            raise ValueError(
                f"block {evaluated[0]} is in eval() and others are in train(), but blocks are coupled all or none; call "
                "train() on each block (its submodules may stay in eval())"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pass": None, "_compiled_calls": {}, "_compiled": {}}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kept}; backward={self.backward!r})"


class _Chain(nn.Module):
    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, *arguments: Any, **keywords: Any) -> Tensor:
        name = _name_of_stream(self.blocks[0].forward, arguments)
        for block in self.blocks:
            x = stream_in(block(*arguments, **keywords))
            arguments, keywords = ((x, *arguments[1:]), keywords) if name is None else ((), {**keywords, name: x})
        return x


class CoupledForward:
    """The ``forward`` of a block that belongs to a stack.

    Args:
        stack: to which it belongs.
        index: the block's place in it.
    """

    def __init__(self, stack: ReversibleStack, index: int) -> None:
        self.stack, self._index = stack, index

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if self.stack.blocks[self._index].training:
            return self._train(arguments, keywords)
        return self.stack.own_forward(self._index)(*arguments, **keywords)

    @torch.compiler.disable
    def _train(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        return self.stack.run(self._index, arguments, keywords)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.stack.own_forward(self._index))


def stack_of(block: nn.Module) -> ReversibleStack | None:
    """The stack to which a block belongs; None: it belongs to none."""
    forward = vars(block).get("forward")
    return forward.stack if isinstance(forward, CoupledForward) else None


def stacks_in(model: nn.Module) -> list[ReversibleStack]:
    """The stacks to which blocks of a model belong, first to last."""
    found = (stack for part in model.modules() if (stack := stack_of(part)))
    return list({id(stack): stack for stack in found}.values())


def kept_between_blocks(model: nn.Module) -> str | None:
    """What the stacks in a model keep, as :attr:`ReversibleStack.kept` says it; None: it has none."""
    return "; ".join(stack.kept for stack in stacks_in(model)) or None


class _Pass:
    """One forward of a stack in training."""

    def __init__(self, stack: ReversibleStack) -> None:
        self._stack = stack
        self.following = 0
        self._schedules = stack.schedules
        self._recorder: Recorder | None = None

    def run(self, index: int, arguments: tuple, keywords: dict[str, Any]) -> Any:
        """Runs the next block."""
        schedule = self._schedules[index] if torch.is_grad_enabled() else SCHEDULES["autograd"]
        x, forward, words = _call(self._stack.own_forward(index), arguments, keywords, again=schedule.kind != "stored")
        if index == 0:
            self._begin(x)
        elif not same_tensor(x, self._returned) or version_of(x) != self._version:
            raise ValueError(
                f"the model changes the stream between block {index - 1} and block {index}; make_reversible takes blocks that "
                "read what the block before them returned"
            )
        else:
            self._follow(x)
        if self._recorder is None or not self._recorder.call.as_now():
            self._end_recording()
            self._recorder = Recorder(self._stream.device, self._stack.input_checks)
        block, bits = self._stack.blocks[index], self._stack.bits[index - 1] if index else None
        coupling = TwoStep(self._grid, x, self._sign, self._stack.weights[index], bits, schedule.kind == "rebuilt")
        run = self._recorder.block(index, schedule, coupling, block, (self._stream, self._before), forward)
        self._recorder.call.present = None  # what the model does between its blocks may draw random numbers
        with in_trace("forward", index):
            coupled = run("block", block, self._before, self._stream, words)
        self._before, self._stream, self.following = self._stream, coupled, index + 1
        if self._choice is not None:
            self._choice.see(coupled)
        if self.following == len(self._schedules):
            self._end_recording()
            self._end()
        self._returned = coupled.to(coupling.written_as)
        self._version = version_of(self._returned)
        others, coupling.others = coupling.others, None  # the graph holds the coupling, and must not hold these
        return self._returned if others is None else (self._returned, *others)

    def _begin(self, x: Tensor) -> None:
        if self._stack.input_checks is not None:
            self._stack.input_checks.clear()
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
            raise ValueError("the first argument of a block must be a floating-point tensor (batch, ...)")
        stack, self._choice = self._stack, None
        grid, dtype = stack.grid, torch.promote_types(x.dtype, stack.stream_dtype or torch.float32)
        if has_no_data(x):
            grid = FixedPointGrid(bits=0).to(x.device)
        elif not grid.known and x.numel():
            self._choice = _Choice(x)
            grid, dtype = self._choice.grid, torch.float64
        elif grid.step.device != x.device:
            grid.to(x.device)
        self._grid = grid.in_call(dtype)
        self._stream = self._before = self._grid.entered(x.to(dtype))
        sign = torch.randint(0, 2, (len(x),) + (1,) * (x.dim() - 1), device=x.device)
        self._sign = sign.to(dtype).mul_(2).sub_(1)

    def _follow(self, x: Tensor) -> None:
        """Gives the streams the graph of what the next block reads: a view with hooks of its own, or one without a graph."""
        if torch.is_grad_enabled() and x.grad_fn is None:  # detached, or computed without gradients
            self._stream, self._before = self._stream.detach(), self._before.detach()
        if x.dtype == self._stream.dtype:
            self._stream = x

    def _end_recording(self) -> None:
        if self._recorder is not None:
            self._recorder.end(self._stream, self._before)

    def _end(self) -> None:
        if self._choice is not None:
            self._stack.stream_dtype = self._choice.settle(self._stack.grid)
        elif self._stack.grid.known and not has_no_data(self._stream):
            self._stack.grid.report(self._stream.dtype, "undo and make_reversible choose a new grid")


class _Choice:
    """Chooses the grid from the streams of the first batch, which are kept in fp64.

    Args:
        x: the first of them.
    """

    def __init__(self, x: Tensor) -> None:
        self._least = torch.promote_types(x.dtype, torch.float32)
        self.grid = FixedPointGrid().to(x.device)
        self.grid.choose(max(x.detach().abs().amax().item(), 1e-6), torch.float64, FIRST_HEADROOM_BITS)
        self._typical = math.inf
        self.see(x)

    def see(self, stream: Tensor) -> None:
        """Notes how large a typical element of a stream is. A few may be a thousand times as large."""
        size = stream.detach().abs()
        median = size[size > 0].double().median().item()
        self._typical = min(self._typical, median) if median > 0 else self._typical

    def settle(self, grid: FixedPointGrid) -> torch.dtype:
        """Chooses ``grid`` and returns the dtype of later streams."""
        dtype, largest = self._least, self.grid.largest
        grid.to(self.grid.step.device)
        grid.choose(largest, dtype)
        if grid.known and grid.step.item() > self._typical * 2.0**-FINENESS_BITS:
            dtype = torch.float64
            grid.choose(largest, dtype)
        return dtype


def _call(
    forward: Callable, arguments: tuple, keywords: dict[str, Any], again: bool
) -> tuple[Tensor, Callable, dict[str, Any]]:
    """A block's stream, its forward as a function of the stream, and the keyword arguments of that function.

    Args:
        again: the forward will run again in the backward.
    """
    name = _name_of_stream(forward, arguments)
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


def _name_of_stream(forward: Callable, arguments: tuple) -> str | None:
    """The keyword by which a block gets its stream; None: it is the first of the positional arguments."""
    return None if arguments else next(iter(inspect.signature(forward).parameters), None)


def _no_cache(value: Any) -> Any:
    """None for an empty cache of keys and values, to which a recomputation would add a second time.

    Raises:
        ValueError: the cache is not empty.
    """
    if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
        return value
    if value.get_seq_length():
        raise ValueError(
            "a block got past keys and values in training, to which its recomputation would add a second time; set "
            'stack_of(block).backward = "autograd", or make_reversible(model, backward="autograd")'
        )
    return None
