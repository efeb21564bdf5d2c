"""Names in a profiler's trace: what a schedule is doing, and with which block."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler

UNNAMED = nullcontext()


def in_trace(doing: str, what: object) -> AbstractContextManager:
    """Names the work inside the context ``<doing> <what>`` in the trace of a running torch.profiler.

    There is no name under a compiler, a FLOP counter or fake tensors: a name is recorded by an operation, which they would
    count.
    """
    if torch.compiler.is_compiling() or not profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack():
        return UNNAMED
    return profiler.record_function(f"{doing} {what}")
