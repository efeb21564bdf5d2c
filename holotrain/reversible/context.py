"""In which context code runs: a recomputation, a trace, a plan without data, or the capture of a CUDA graph."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar

import torch
from torch._C._autograd import _get_current_graph_task_keep_graph
from torch.autograd import profiler

in_recomputation: ContextVar[bool] = ContextVar("recomputing", default=False)


def recomputing() -> bool:
    """Whether the calling code runs in a recomputation, so that a forward hook can skip the second run."""
    return in_recomputation.get()


_NOTHING = nullcontext()


def in_trace(doing: str, what: object) -> AbstractContextManager:
    """Names the work inside the context ``<doing> <what>`` in the trace of a running torch.profiler.

    There is no name under a compiler, a FLOP counter or fake tensors: a name is recorded by an operation, which they would
    count.
    """
    # Private: torch has no public way to ask whether a profiler runs, and a name costs time without one, or whether a dispatch
    # mode is active.
    if torch.compiler.is_compiling() or not profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack():
        return _NOTHING
    return profiler.record_function(f"{doing} {what}")


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether only the tensor's shape is real: nothing can be read of its values."""
    return tensor.is_meta or fake_mode_active()


def fake_mode_active() -> bool:
    # Private: the public ``detect_fake_mode`` looks through tensors and is slow.
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


@contextmanager
def may_wait(device: torch.device) -> Generator[None]:
    """Inside, the host may wait for the device, as for a comparison that is seldom made, and nobody is told."""
    if device.type != "cuda":
        yield
        return
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def backward_id() -> int:
    """A number of the backward that is running; -1: none is."""
    return torch._C._current_graph_task_id()  # private: torch has no public way to ask


def graph_is_retained() -> bool:
    """Whether the graph stays after this backward; where there is no backward, somebody looks at what a node saved."""
    # Private: torch.utils.checkpoint knows it by the same function.
    return backward_id() == -1 or _get_current_graph_task_keep_graph()
