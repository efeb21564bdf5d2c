"""Whether the backward rebuilds the streams that the forward had, and what follows if it does not.

Rebuilding relies on blocks that compute the same each time they run. Where they do not, gradients would be wrong, and nothing
else would tell. So each backward compares the stream that the first of consecutive blocks read with the one that was rebuilt:
on a grid bit for bit, by a checksum, and without one by the relative error of a sample.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from holotrain.reversible.context import backward_id
from holotrain.reversible.graphs import collect
from holotrain.reversible.grid import Grid
from holotrain.reversible.reads import is_tensor_parallel
from holotrain.schedules import ON_MISMATCH, SCHEDULES, Schedule

SAMPLES = 4096
"""Number of entries of a stream that are sampled, approximately."""

BOUND = 0.05
"""Relative error of a stream that is rebuilt without a grid, above which its blocks no longer rebuild."""


class RebuildChecks:
    """The checks of one sequence, and what follows from them: ``on_mismatch`` is as in
    :class:`~holotrain.reversible.ReversibleSequence`, and ``name`` is for messages.

    Attributes:
        errors: the relative errors found since the latest forward began, as 0-dim tensors on the streams' device.
        failed: the blocks keep their inputs.

    The host does not wait for a GPU: it reads what one step finds when a later one begins, or a later replay of a CUDA graph
    has been started.
    """

    def __init__(self, name: str, on_mismatch: str = "store") -> None:
        if on_mismatch not in ON_MISMATCH:
            raise ValueError(f"on_mismatch must be one of {', '.join(ON_MISMATCH)}, not {on_mismatch!r}")
        self.name, self.on_mismatch = name, on_mismatch
        self.errors: list[Tensor] = []
        self.failed = self._failing = False
        self._passes = 0
        self._arriving: deque[tuple[Tensor, torch.cuda.Event, StreamCheck]] = deque()

    def begin(self) -> None:
        """Before a forward: looks at what has arrived, and may raise a RuntimeError for it."""
        if backward_id() != -1:
            return  # a recomputation around these blocks: its forward must do what it did
        self.errors.clear()
        self._passes += 1
        if not (self._arriving and torch.cuda.is_current_stream_capturing()):  # in which an event cannot be queried
            self._look_at_arrived()
        self.failed = self._failing

    def _look_at_arrived(self) -> None:
        while self._arriving and self._arriving[0][1].query():
            figures, _, check = self._arriving.popleft()
            self._look(figures, check)

    def in_force(self, schedules: list[Schedule], blocks: Iterable[nn.Module]) -> list[Schedule]:
        """The schedules of a forward: once a rebuilt stream was wrong, inputs are kept where they would be rebuilt.

        Tensor parallel blocks go on, since one process cannot change the order of collectives alone.
        """
        if not self.failed:
            return schedules
        in_force = []
        for schedule, block in zip(schedules, blocks, strict=True):
            kept = schedule.kind == "rebuilt" and not is_tensor_parallel(block)
            in_force.append(SCHEDULES["checkpoint"] if kept else schedule)
        return in_force

    def of_blocks(self, stream: Tensor, grid: Grid | None) -> StreamCheck:
        """The check of consecutive blocks that are rebuilt, of which the first reads a stream."""
        return StreamCheck(self, stream, grid, first_pass=self._passes == 1)

    def add(self, figures: Tensor, check: StreamCheck) -> None:
        """Takes the error, whether bits differ, the largest magnitude and the grid's limit, on the device."""
        self.errors.append(figures[0])
        if not figures.is_cuda:
            self._look(figures, check)
        elif torch.cuda.is_current_stream_capturing():
            collect(_Captured(self, figures, check))
        else:
            self._send(figures, check)

    def _send(self, figures: Tensor, check: StreamCheck) -> None:
        """To the host, which does not wait."""
        host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True).copy_(figures, non_blocking=True)
        self._arriving.append((host, torch.cuda.current_stream(figures.device).record_event(), check))

    def report(self, figures: Tensor, check: StreamCheck) -> bool:
        """After a replay: sends its figures. Returns whether earlier ones now have blocks keep their inputs."""
        before = self._failing
        self._look_at_arrived()
        self._send(figures, check)
        return self._failing and not before

    def _look(self, figures: Tensor, check: StreamCheck) -> None:
        error, differs, largest, limit = figures.tolist()
        # Of NaN and infinity in the forward the loss tells. An error of NaN is above the bound.
        if self._failing or not math.isfinite(largest) or not (differs or not error <= BOUND):
            return
        outgrown = check.grid is not None and largest >= limit
        kind = "inexact" if error <= BOUND else "wrong"
        message = (
            f"{self.name}: a stream that the backward rebuilt has a relative error of {error:.2g}, so the gradient of this "
            f"step is {kind}. {_likely_cause(check.grid, largest, limit)}"
        )
        if self.on_mismatch == "error":
            raise RuntimeError(message)
        message += ". "
        if outgrown and check.grid.follows:
            message += "The next step has a coarser grid"
        elif check.first_pass and check.grid is not None and not outgrown:
            message += f"If it happens in another step, the blocks will {_KEEP}"
        else:
            message += f"From the next step on the blocks {_KEEP}"
            self._failing = True
        warnings.warn(message, stacklevel=2)

    def __getstate__(self) -> dict:
        return self.__dict__ | {"errors": [], "_arriving": deque()}


class _Captured(NamedTuple):
    """A check in a CUDA graph, whose figures are computed anew in each replay."""

    checks: RebuildChecks
    figures: Tensor
    check: StreamCheck

    def report(self) -> bool:
        return self.checks.report(self.figures, self.check)


_KEEP = (
    "keep their inputs (checkpointing), which takes more memory. That helps unless what differs enters the gradient itself: "
    'then repair the block, or store it (backward="autograd", or store with its number)'
)


def _likely_cause(grid: Grid | None, largest: float, limit: float) -> str:
    if grid is None:
        return (
            "Rounding adds up over the blocks: a fixed-point grid prevents that (exact=True, on the command line "
            "backward.exact=true), and streams of fp32 instead of 16 bits reduce it"
        )
    if largest >= limit:
        return f"The streams reached {largest:.4g}, beyond {limit:.4g}, the limit of their fixed-point grid"
    return (
        "A block computed something else when it ran again: by an operation that is not deterministic (such as index_add_ on a "
        "GPU, or a kernel that is tuned when it first runs), or because an attribute of a module changed between the forward "
        "and the backward"
    )


class StreamCheck:
    """Remembers the stream that consecutive blocks begin with, by a sample and a checksum.

    The entries of the sample are evenly spaced, so no random numbers are drawn. On a grid all bits must be equal.
    """

    def __init__(self, checks: RebuildChecks, stream: Tensor, grid: Grid | None, first_pass: bool) -> None:
        self._checks, self.grid, self.first_pass = checks, grid, first_pass
        # Held until the graph goes: a recomputation on a second CUDA stream may read them when this method has returned.
        self._sample = _sample(stream).clone()
        self._checksum = None if grid is None else _checksum(stream)

    def compare(self, rebuilt: Tensor, other: Tensor) -> None:
        """In the backward: the stream, and the other one. Errors are relative to the larger one."""
        true, norm = self._sample.double(), torch.linalg.vector_norm
        size = norm(true)
        larger = torch.maximum(size, norm(_sample(other).double())).clamp_min(torch.finfo(torch.float32).tiny)
        error = norm(_sample(rebuilt).double() - true) / larger
        nothing = torch.zeros_like(error)
        if self.grid is None or self._checksum is None:
            figures = torch.stack([error, nothing, size, nothing])
        else:
            differs = torch.ne(_checksum(rebuilt), self._checksum)
            figures = torch.stack([error, *(each.double() for each in (differs, self.grid.largest, self.grid.limit))])
        self._checks.add(figures, self)


def _sample(stream: Tensor) -> Tensor:
    flat = stream.detach().reshape(-1) if stream.is_contiguous() else stream.detach().flatten()
    return flat[:: max(1, flat.numel() // SAMPLES)]


def _checksum(stream: Tensor) -> Tensor:
    """The sum of the squares of all bit patterns, as integers, so that no order of additions changes it, and errors of one step
    up and one step down do not cancel. 0 and -0, which are equal, have one pattern."""
    whole = torch.int32 if stream.dtype.itemsize == 4 else torch.int64
    patterns = (stream.detach() + 0.0).view(whole)
    return patterns.mul_(patterns).sum(dtype=whole)
