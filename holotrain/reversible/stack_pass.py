"""One forward of a stack in training: couples its blocks by two steps, and chooses their grid in the first batch."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any
from weakref import WeakMethod, ref

import torch
from torch import Tensor

from holotrain.reversible.context import backward_id, has_no_data, in_trace
from holotrain.reversible.grid import FixedPointGrid, Grid
from holotrain.reversible.kept_inputs import as_in_a_forward
from holotrain.reversible.reads import version_of
from holotrain.reversible.replaced_forward import call_of
from holotrain.reversible.tape import Recorder, same_tensor
from holotrain.reversible.two_step import TwoStep

if TYPE_CHECKING:
    from holotrain.reversible.stack import ReversibleStack

FIRST_HEADROOM_BITS = 20
"""In the first batch, when only the first stream is known, the streams may grow by a factor of 2^20."""

SAMPLE = 2**12
"""Elements of a stream from which a typical one is found."""

FINENESS_BITS = 10
"""Streams stay in fp32 if its grid resolves a typical element to 2^-10 of its magnitude. Otherwise they are kept in fp64."""


class StackPass:
    """One forward of a stack in training: a run of some of its blocks, in their order. A block that the model leaves out is the
    identity."""

    def __init__(self, stack: ReversibleStack) -> None:
        self._stack, self._task = stack, backward_id()
        self._following = 0
        stack.checks.begin()
        self._schedules = stack.checks.in_force(stack.schedules, stack.blocks)
        self._weights = stack.weights
        self._recorder: Recorder | None = None
        self._coupling: TwoStep | None = None
        self._changed: dict[int, int] = {}  # the block before which the model changed the stream, and the one that ran last
        self._on_backward = WeakMethod(self.close)

    def goes_on_with(self, index: int) -> bool:
        """Whether a block can be one of this forward."""
        return index >= self._following and self._task == backward_id()

    def run(self, index: int, arguments: tuple, keywords: dict[str, Any]) -> Any:
        """Runs the next block."""
        schedule = self._schedules[index]
        x, forward, rest = call_of(self._stack.own_forward(index), arguments, keywords, again=schedule.kind != "stored")
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
        before = None if bits is None else self._coupling
        coupling = TwoStep(self._grid, x, graphs, self._sign, weights, bits, rebuilt, before, self._on_backward)
        self._recorder.begin_block(index, schedule, coupling, block, (self._stream, self._before), forward)
        self._recorder.call.present = None  # what the model does between its blocks may draw random numbers
        with in_trace("forward", index):
            coupled = self._recorder.update("block", block, self._before, self._stream, rest)
        self._before, self._stream, self._following = self._stream, coupled, index + 1
        self._coupling = coupling
        passed, carrier, returned = coupling.take_graphs()
        self._graph_before, self._graph = _with_version(passed), _with_version(carrier)
        if self._choice is not None:
            self._choice.see(coupled)
        may_change = self._choice is not None or self._following in self._stack.changed  # in place, by the model
        shared = may_change and returned is carrier and carrier.dtype == coupled.dtype
        self._returned = returned.clone() if shared else returned
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
            self._choice = GridChoice(x)
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


class GridChoice:
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
