"""What a branch's result depends on besides its input and its weights, and what earlier runs have shown of it.

This is the state of every random number generator that the branch used (PyTorch's on the CPU and on the device, those among the
keyword arguments, Python's and NumPy's global ones), autocast, the default dtype, and the attention kernels that may be chosen.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import ExitStack, contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.backends import cuda as kernels

from holotrain.reversible.context import backward_id
from holotrain.reversible.random_state import (
    State,
    generators_among,
    sources_of,
)


class BranchHistory:
    """What the runs of a branch have shown so far. It holds no module, so that a branch can go.

    Attributes:
        generators: that it and its submodules hold.
        draws: whether it draws Python's or NumPy's global random numbers, in training mode and not.
        verified: a recomputation was compared with the forward in full.
        kinds: shapes and dtypes of what its latest forward saved.
        places: those of them that are leaves, or views or casts of leaves.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.generators = generators_among(value for part in parts for value in vars(part).values())
        self.draws: dict[bool, bool] = {}
        self.verified = False
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        self.places: list[int] = []


_histories: WeakKeyDictionary[nn.Module, BranchHistory] = WeakKeyDictionary()


def history_of(branch: nn.Module, parts: Iterable[nn.Module]) -> BranchHistory:
    history = _histories.get(branch)
    if history is None:
        history = _histories[branch] = BranchHistory(parts)
    return history


class _Settings(NamedTuple):
    """Autocast, the attention kernels allowed and which comes first, and the default dtype. The backward runs outside
    autocast."""

    kinds: tuple[str, ...]
    enabled: list[bool]
    dtypes: list[torch.dtype] | list[None]
    cached: bool
    kernels: list[bool]
    order: list[int]
    default: torch.dtype

    @classmethod
    def present(cls, kinds: tuple[str, ...]) -> _Settings:
        enabled = [*map(torch.is_autocast_enabled, kinds)]
        dtypes = [*map(torch.get_autocast_dtype, kinds)] if any(enabled) else [None] * len(kinds)
        cached, allowed = torch.is_autocast_cache_enabled(), [allowed() for allowed, _ in _KERNELS]
        # Private: torch.nn.attention.sdpa_kernel sets the order for a context, and cannot tell what it is.
        return cls(kinds, enabled, dtypes, cached, allowed, torch._C._get_sdp_priority_order(), torch.get_default_dtype())

    @property
    def casts_weights(self) -> bool:
        """Whether autocast casts weights, each once."""
        return any(self.enabled) and self.cached

    @contextmanager
    def reinstated(self, cached: bool) -> Generator[None]:
        """Inside, the settings are these; not ``cached``: autocast casts weights anew in each run."""
        before = [allowed() for allowed, _ in _KERNELS]
        with ExitStack() as stack:
            for kind, enabled, dtype in zip(self.kinds, self.enabled, self.dtypes, strict=True):
                stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
            for (_, allow), allowed, was in zip(_KERNELS, self.kernels, before, strict=True):
                allow(allowed)
                stack.callback(allow, was)
            stack.callback(torch._C._set_sdp_priority_order, torch._C._get_sdp_priority_order())
            torch._C._set_sdp_priority_order(self.order)
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            torch.set_default_dtype(self.default)
            yield


_KERNELS = (
    (kernels.flash_sdp_enabled, kernels.enable_flash_sdp),
    (kernels.mem_efficient_sdp_enabled, kernels.enable_mem_efficient_sdp),
    (kernels.math_sdp_enabled, kernels.enable_math_sdp),
    (kernels.cudnn_sdp_enabled, kernels.enable_cudnn_sdp),
)


@contextmanager
def one_convolution() -> Generator[None]:
    """Inside, cuDNN takes the algorithm that its heuristics name, among those that repeat their result bit for bit.

    With ``benchmark`` it takes the fastest of a few runs. Each thread measures for itself, and a backward has another one than
    the forward.
    """
    cudnn = torch.backends.cudnn
    before, cudnn.benchmark = cudnn.benchmark, False
    repeated, cudnn.deterministic = cudnn.deterministic, True
    try:
        yield
    finally:
        cudnn.benchmark, cudnn.deterministic = before, repeated


class Call:
    """What all branches of one forward share, on the device of the streams."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.settings = _Settings.present(("cpu",) if device.type in ("cpu", "meta") else ("cpu", device.type))
        self.sources = sources_of(device)
        self.present: list[State] | None = None
        """The states of the sources, if nothing can have drawn since they were read."""
        self._compared_in, self._unchanged = -1, False
        self.distributed = torch.distributed.is_available() and torch.distributed.is_initialized()

    def states(self) -> list[State]:
        """Those of the sources, now."""
        return self.present or [source.read() for source in self.sources]

    def settle(self, first: bool) -> None:
        """After a branch, or its ``first`` run: takes over settings that it changed, since it has computed with them.

        The first use of an operator may do so: on Hopper and Blackwell the first attention of a process puts cuDNN's kernel
        before the others (``priority_order`` in PyTorch's sdp_utils.cpp), and uses it at once.
        """
        if (first or torch._C._get_sdp_priority_order() != self.settings.order) and not self.as_now():
            self.settings, self._compared_in = _Settings.present(self.settings.kinds), -1

    def as_now(self) -> bool:
        """Whether the settings are now as they were."""
        return _Settings.present(self.settings.kinds) == self.settings

    def is_unchanged(self) -> bool:
        """:meth:`as_now`, compared once in a backward."""
        task = backward_id()
        if task == -1 or task != self._compared_in:
            self._compared_in, self._unchanged = task, self.as_now()
        return self._unchanged
