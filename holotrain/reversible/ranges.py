"""Names in a profiler's trace: what a schedule does when, and with which block."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import profiler

UNNAMED = nullcontext()


def in_trace(doing: str, what: object) -> AbstractContextManager:
    """Inside, a running torch.profiler shows ``<doing> <what>``; without one this costs a look at a flag.

    Work that is only traced or watched (a compiler's, a FLOP counter's, that of fake tensors) goes unnamed: a range is an
    operation itself, and whoever counts operations would count it.
    """
    if torch.compiler.is_compiling() or not profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack():
        return UNNAMED
    return profiler.record_function(f"{doing} {what}")
