"""Blocks of any model, trained through the two-step coupling. The model itself stays as it is."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from itertools import pairwise
from types import MethodType
from typing import Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor, nn

from holotrain.numeric import counted
from holotrain.reversible.backward_schedules import Schedule, Shorthand
from holotrain.reversible.checks import RebuildChecks
from holotrain.reversible.context import backward_id, has_no_data, in_trace
from holotrain.reversible.grid import FixedPointGrid, Grid
from holotrain.reversible.kept_inputs import as_in_a_forward
from holotrain.reversible.reads import version_of
from holotrain.reversible.recorder import Recorder, same_tensor
from holotrain.reversible.two_step import TwoStep, in_words, stream_in, tapered, weights

FIRST_HEADROOM_BITS = 20
"""In the first batch, when only the first stream is known, the streams may grow by a factor of 2^20."""

SAMPLE = 2**12
"""Elements of a stream from which a typical one is found."""

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
        name: of the list of blocks, in messages.
        on_mismatch: as :class:`~holotrain.reversible.ReversibleSequence` takes it.

    Attributes:
        bits: of each block but the first.
        schedules: the schedule of each block.
        weights: of each block's update where the sign is 1, and where it is -1; see
            :func:`~holotrain.reversible.two_step.weights`.
        changed: the blocks before which the model changed the stream in some forward, for example by adding to it. There the
            recurrence begins anew, and the streams before and after are stored. Later forwards have weights for the runs of
            blocks between these places.
        grid: the fixed-point grid of the streams, chosen in the first batch in training, and again where they outgrow it.

    Raises:
        ValueError: an unknown schedule, number of bits or ``on_mismatch``.
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
        self._forwards = [vars(block).get("forward") for block in self.blocks]
        self.compiled_calls: dict[int, Callable] = {}  # of blocks on which compile() was called
        self._compiled: dict[int, Callable] = {}  # their own forwards
        self._pass: _Pass | None = None
        self._latest: Callable[[], TwoStep | None] = _nothing  # the last coupling of the last forward, if it is alive
        self.ran_plain = False  # the last forward in training, since it was without gradients
        self.removed = False
        for index, block in enumerate(self.blocks):
            coupled = CoupledForward(self, index)
            block.forward = vars(block)["_coupled_forward"] = coupled  # others may wrap the first
            block._replicate_for_data_parallel = coupled.refuse_replica
            self._take_compiled_call(index)

    def remove(self) -> None:
        """Gives the blocks their own forward back. Where something wrapped the coupled one, that runs the block's own."""
        self.removed = True
        if self._pass is not None:
            self._pass.close()
        for block, forward in zip(self.blocks, self._forwards, strict=True):
            _uncouple(block, forward)
        for index, call in self.compiled_calls.items():
            self.blocks[index]._compiled_call_impl = call

    def own_forward(self, index: int) -> Callable:
        """The forward that a block had before, compiled if ``block.compile()`` was called."""
        block = self.blocks[index]
        forward = self._forwards[index] or MethodType(type(block).forward, block)
        if index not in self.compiled_calls:
            return forward
        if index not in self._compiled:
            self._compiled[index] = torch.compile(forward)
        return self._compiled[index]

    def _take_compiled_call(self, index: int) -> None:
        """What couples the blocks cannot be compiled, so of a compiled block only its own forward is."""
        block = self.blocks[index]
        if block._compiled_call_impl is not None:
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
            block.forward = vars(block)["_coupled_forward"]  # without what wraps it
            _uncouple(block, self._forwards[0])
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
        """Runs a block in training.

        Raises:
            ValueError: it cannot be coupled with the blocks before it.
        """
        self._take_compiled_call(index)
        current = self._pass
        if current is None or not current.goes_on_with(index):
            current = self._begin_pass(index)
        try:
            return current.run(index, arguments, keywords)
        except BaseException:
            self._pass = None  # which holds a graph
            raise

    def _begin_pass(self, index: int) -> _Pass:
        if self._pass is not None:
            with suppress(ValueError):  # its last stream was changed in place, which its backward tells
                self._pass.close()
        self._require_one_mode()
        in_backward = backward_id() != -1
        if in_backward and self.ran_plain and self._latest() is None:
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
        self._pass = _Pass(self)
        return self._pass

    def _require_one_mode(self) -> None:
        evaluated = [index for index, block in enumerate(self.blocks) if not block.training]
        if evaluated:
            raise ValueError(
                f"block {evaluated[0]} is in eval() and others are in train(), but blocks are coupled all or none; call "
                "train() on each block (its submodules may stay in eval())"
            )

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pass": None, "_latest": _nothing, "compiled_calls": {}, "_compiled": {}}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kept}; backward={self.backward!r})"


def _uncouple(block: nn.Module, forward: Callable | None) -> None:
    """Takes a block's coupled forward from it; ``forward`` is the one of its own, None: that of its class."""
    del block._replicate_for_data_parallel
    if vars(block).pop("_coupled_forward") is not block.forward:
        return  # something wrapped it
    del block.forward
    if forward is not None:
        block.forward = forward


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


def _nothing() -> None:
    """Refers to nothing, as a weak reference does in the end."""


class CoupledForward:
    """The ``forward`` of a block that belongs to a stack.

    Args:
        stack: to which it belongs.
        index: the block's place in it.
    """

    def __init__(self, stack: ReversibleStack, index: int) -> None:
        self.stack, self._index = stack, index
        self._block, self._own = stack.blocks[index], stack._forwards[index]

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        stack, block = self.stack, self._block  # a compiler takes the same code for all blocks, if it does not read their index
        if block.training and not stack.removed:
            if torch.is_grad_enabled():
                return self._train(arguments, keywords)
            stack.ran_plain = True
        if stack.compiled_calls:
            return stack.own_forward(self._index)(*arguments, **keywords)
        if self._own is not None:
            return self._own(*arguments, **keywords)
        return type(block).forward(block, *arguments, **keywords)

    @torch.compiler.disable
    def _train(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        return self.stack.run(self._index, arguments, keywords)

    def refuse_replica(self) -> nn.Module:
        """What ``nn.DataParallel`` calls to copy the block.

        Raises:
            ValueError: always; the copy would run the parts of this block.
        """
        raise ValueError(
            "nn.DataParallel would run the blocks of its first GPU on every GPU, so it does not work with make_reversible; "
            "start one process for each GPU with torchrun, or show the process one GPU with CUDA_VISIBLE_DEVICES=0"
        )

    @property
    def __globals__(self) -> dict[str, Any]:
        """For which ``torch.jit.script`` asks.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(
            "torch.jit.script cannot compile the blocks that make_reversible changed; call undo(model) first, or use "
            "torch.export or torch.jit.trace in eval()"
        )

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.stack.own_forward(self._index))


def stack_of(block: nn.Module) -> ReversibleStack | None:
    """The stack to which a block belongs; None: it belongs to none."""
    forward = vars(block).get("_coupled_forward")
    return None if forward is None else forward.stack


def stacks_in(model: nn.Module) -> list[ReversibleStack]:
    """The stacks to which blocks of a model belong, first to last."""
    found = (stack for part in model.modules() if (stack := stack_of(part)))
    return list({id(stack): stack for stack in found}.values())


def kept_between_blocks(model: nn.Module) -> str | None:
    """What the stacks in a model keep, as :attr:`ReversibleStack.kept` says it; None: it has none."""
    return "; ".join(stack.kept for stack in stacks_in(model)) or None


class _Pass:
    """One forward of a stack in training: a run of some of its blocks, in their order. A block that the model leaves out is the
    identity."""

    def __init__(self, stack: ReversibleStack) -> None:
        self._stack, self._task = stack, backward_id()
        self._following = 0
        stack.checks.begin()
        self._schedules = stack.checks.in_force(stack.schedules, stack.blocks)
        self._weights = stack.weights
        self._recorder: Recorder | None = None
        self._changed: dict[int, int] = {}  # the block before which the model changed the stream, and the one that ran last
        self._on_backward = WeakMethod(self.close)

    def goes_on_with(self, index: int) -> bool:
        """Whether a block can be one of this forward."""
        return index >= self._following and self._task == backward_id()

    def run(self, index: int, arguments: tuple, keywords: dict[str, Any]) -> Any:
        """Runs the next block."""
        schedule = self._schedules[index]
        x, forward, words = call_of(self._stack.own_forward(index), arguments, keywords, again=schedule.kind != "stored")
        if not self._following:
            self._begin(x)
        elif same_tensor(x, self._returned) and version_of(x) == self._version:
            self._follow(x)
        else:
            self._begin_anew(index, x)
        if self._recorder is None or not self._recorder.call.as_now():
            self._end_recording()
            self._recorder = Recorder(self._stream.device, self._stack.checks)
        block, rebuilt = self._stack.blocks[index], schedule.kind == "rebuilt"
        bits = None if self._before is self._stream else self._stack.bits[index - 1]
        if bits is None:
            x = self._graph[0].to(x.dtype)  # which is on the grid
        graphs, weights = (self._graph_before, self._graph), self._weights[index]
        coupling = TwoStep(self._grid, x, graphs, self._sign, weights, bits, rebuilt, self._on_backward)
        self._recorder.begin_block(index, schedule, coupling, block, (self._stream, self._before), forward)
        self._recorder.call.present = None  # what the model does between its blocks may draw random numbers
        with in_trace("forward", index):
            coupled = self._recorder.update("block", block, self._before, self._stream, words)
        self._before, self._stream, self._following = self._stream, coupled, index + 1
        self._graph_before, self._graph = self._graph, _with_version(coupling.take_graph())
        if self._choice is not None:
            self._choice.see(coupled)
        may_change = self._choice is not None or self._following in self._stack.changed  # in place, by the model
        carrier = self._graph[0]
        self._returned = carrier.to(coupling.written_as, copy=may_change and carrier.dtype == coupled.dtype)
        self._version = version_of(self._returned)
        others, coupling.others = coupling.others, None  # the graph holds the coupling, and must not hold these
        if self._task == -1:
            self._stack._latest = ref(coupling)
        if self._following == len(self._schedules):
            self._end_recording()
            self.close()
        return self._returned if others is None else coupling.returned(self._returned, others)

    def close(self) -> None:
        """The model runs no more blocks. If it leaves out the last ones, a backward or the next forward tells."""
        if self._stack._pass is not self:
            return
        self._stack._pass = None
        if self._recorder is not None:
            with as_in_a_forward():
                self._end_recording()
        self._end()
        if self._changed and not (self._stack.changed or self._stack.noticed):
            places = ", ".join(f"block {last} and block {index}" for index, last in self._changed.items())
            warnings.warn(f"the model changes the stream between {places}; there it is stored instead of rebuilt", stacklevel=2)
        self._stack.noticed |= self._changed.keys()

    def _begin(self, x: Tensor) -> None:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 2:
            raise ValueError("the first argument of a block must be a floating-point tensor (batch, ...)")
        stack, self._choice = self._stack, None
        # The first batch is in fp64; a plan is for the batch that needs most.
        grid, dtype = stack.grid, torch.promote_types(x.dtype, stack.stream_dtype or torch.float64)
        if has_no_data(x):
            grid = FixedPointGrid(bits=0).to(x.device)
        elif not grid.known and x.numel():
            self._choice = _Choice(x)
            grid, dtype = self._choice.grid, torch.float64
        stream = x.to(dtype)
        self._grid = grid.in_call(stream)
        self._enter(stream, x.dtype)
        self._draw_sign(x)

    def _enter(self, stream: Tensor, dtype: torch.dtype) -> None:
        """The first stream of a recurrence, which autograd does not know, and what stands for it in the graph. So gradients are
        in fp32, or in fp64 if the model is.

        Args:
            dtype: of the model.
        """
        entered = self._grid.entered(stream)
        self._stream = self._before = entered.detach()
        self._graph = self._graph_before = _with_version(entered.to(torch.promote_types(dtype, torch.float32)))

    def _begin_anew(self, index: int, x: Tensor) -> None:
        """The model changed the stream before a block: from here on as at the first block."""
        last = self._following - 1
        self._changed[index] = last
        if x.device != self._stream.device:
            raise ValueError(
                f"the stream moves to {x.device} before block {index}; name the blocks of each device as a list of their own, "
                f"such as blocks=['layers[:{index}]', 'layers[{index}:]']"
            )
        try:
            self._end_recording()
        except ValueError:
            self._stack.remember_changes(self._changed)
            raise ValueError(
                f"the model changed the stream in place between block {last} and block {index}, which it had not done "
                "before, so it was not kept; it is from the next forward on"
            ) from None
        self._enter(x.to(torch.promote_types(x.dtype, self._stream.dtype)), x.dtype)
        if len(x) != len(self._sign) or x.dim() != self._sign.dim():
            self._draw_sign(x)

    def _draw_sign(self, x: Tensor) -> None:
        sign = torch.randint(0, 2, (len(x),) + (1,) * (x.dim() - 1), device=x.device)
        self._sign = sign.to(self._stream.dtype).mul_(2).sub_(1)

    def _follow(self, x: Tensor) -> None:
        """The graph goes on from what the next block reads: a view with hooks of its own, or one without a graph."""
        if torch.is_grad_enabled() and x.grad_fn is None:  # detached, or computed without gradients
            self._graph, self._graph_before = ((each.detach(), version) for each, version in (self._graph, self._graph_before))
        carrier, version = self._graph
        if same_tensor(x, carrier):
            self._graph = x, version

    def _end_recording(self) -> None:
        recorder, self._recorder = self._recorder, None
        if recorder is not None:
            recorder.end(self._stream, self._before)

    def _end(self) -> None:
        if self._choice is not None:
            self._stack.stream_dtype = self._choice.settle(self._stack.grid, self._grid)
        elif self._task == -1:  # a recomputation in a backward leaves the grid as it is
            self._stack.grid.follow(self._grid)


def _with_version(tensor: Tensor) -> tuple[Tensor, int]:
    return tensor, version_of(tensor)


class _Choice:
    """Chooses the grid from the streams of the first batch, which are kept in fp64.

    Args:
        x: the first of them.
    """

    def __init__(self, x: Tensor) -> None:
        self._least = torch.promote_types(x.dtype, torch.float32)
        self.grid = FixedPointGrid().to(x.device)
        largest = torch.linalg.vector_norm(x.detach(), ord=torch.inf).item()
        self.grid.choose(max(largest, 1e-6), torch.float64, FIRST_HEADROOM_BITS)
        self._typical = torch.full((), math.inf, dtype=torch.float64, device=x.device)
        self.see(x)

    def see(self, stream: Tensor) -> None:
        """Notes how large a typical element of a stream is, on its device. A few may be a thousand times as large."""
        places = torch.arange(0, stream.numel(), max(stream.numel() // SAMPLE, 1), device=stream.device)
        size = stream.detach().take(places).abs().double()
        median = size.where(size > 0, math.nan).nanmedian()  # NaN if all are zero
        self._typical = torch.fmin(self._typical, median.to(self._typical.device))

    def settle(self, grid: FixedPointGrid, call: Grid) -> torch.dtype:
        """Chooses ``grid`` and returns the dtype of later streams.

        Args:
            call: the grid on which the streams of the first batch were.
        """
        dtype, largest = self._least, call.largest.item()
        grid.to(self.grid.step.device)
        grid.choose(largest, dtype)
        if grid.known and grid.step.item() > self._typical.item() * 2.0**-FINENESS_BITS:
            dtype = torch.float64
            grid.choose(largest, dtype)
        return dtype


def call_of(
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
        ValueError: the cache is not empty, or of fixed length.
    """
    if not (hasattr(value, "get_seq_length") and hasattr(value, "update")):
        return value
    if getattr(value, "is_compileable", False):
        raise ValueError(
            "a block got a StaticCache in training, for whose length its masks are made; call the model with use_cache=False, "
            'or have the block store its activations, with backward="autograd"'
        )
    if value.get_seq_length():
        raise ValueError(
            "a block got past keys and values in training, to which its recomputation would add a second time; call the model "
            'with use_cache=False, or have the block store its activations, with backward="autograd"'
        )
    return None
