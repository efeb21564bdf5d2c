"""Settings of the process on which a branch's result depends, put back for its recomputation: autocast, the default dtype and
the attention kernels that may be chosen."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch.backends import cuda as kernels

from holotrain.reversible.context import backward_id
from holotrain.reversible.random_state import State, sources_of

_SETTINGS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    # Private: torch.nn.attention.sdpa_kernel sets the order of the kernels for a context, and cannot tell what it is.
    (torch._C._get_sdp_priority_order, torch._C._set_sdp_priority_order),
    (kernels.flash_sdp_enabled, kernels.enable_flash_sdp),
    (kernels.mem_efficient_sdp_enabled, kernels.enable_mem_efficient_sdp),
    (kernels.math_sdp_enabled, kernels.enable_math_sdp),
    (kernels.cudnn_sdp_enabled, kernels.enable_cudnn_sdp),
    (torch.get_default_dtype, torch.set_default_dtype),
]
"""How each is read and set."""


class Settings(NamedTuple):
    """Autocast on some kinds of devices, whether it casts each weight once, and the values of ``_SETTINGS``."""

    kinds: tuple[str, ...]
    enabled: list[bool]
    dtypes: list[torch.dtype] | list[None]
    cached: bool
    values: list[Any]

    @classmethod
    def present(cls, kinds: tuple[str, ...]) -> Settings:
        enabled = [*map(torch.is_autocast_enabled, kinds)]
        dtypes = [*map(torch.get_autocast_dtype, kinds)] if any(enabled) else [None] * len(kinds)
        return cls(kinds, enabled, dtypes, torch.is_autocast_cache_enabled(), [read() for read, _ in _SETTINGS])

    @property
    def casts_weights(self) -> bool:
        """Whether autocast casts weights, each once."""
        return any(self.enabled) and self.cached

    @contextmanager
    def reinstated(self, cached: bool) -> Generator[None]:
        """Inside, the settings are these; not ``cached``: autocast casts weights anew in each run."""
        with ExitStack() as stack:
            for kind, enabled, dtype in zip(self.kinds, self.enabled, self.dtypes, strict=True):
                stack.enter_context(torch.autocast(kind, dtype, enabled, cached))
            for (read, write), value in zip(_SETTINGS, self.values, strict=True):
                stack.callback(write, read())
                write(value)
            yield


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
    """What all branches of one forward share, on the device of the streams.

    Attributes:
        present: the states of the generators, if nothing can have drawn since they were read.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.on_gpu = device, device.type == "cuda"
        self.settings = Settings.present(("cpu",) if device.type in ("cpu", "meta") else ("cpu", device.type))
        self.sources = sources_of(device)
        self.present: list[State] | None = None
        self._compared_in, self._unchanged = -1, False
        self.distributed = torch.distributed.is_available() and torch.distributed.is_initialized()

    def states(self) -> list[State]:
        """Those of the device's generators, now."""
        return self.present or [source.read() for source in self.sources]

    def settle(self, first: bool) -> None:
        """After a branch, or its ``first`` runs: takes over settings that it changed, since it has computed with them.

        The first use of an operator may do so: on Hopper and Blackwell the first attention of a process puts cuDNN's kernel
        before the others (``priority_order`` in PyTorch's sdp_utils.cpp), and uses it at once.
        """
        if (first or _SETTINGS[0][0]() != self.settings.values[0]) and not self.as_now():
            self.settings, self._compared_in = Settings.present(self.settings.kinds), -1

    def as_now(self) -> bool:
        """Whether the settings are now as they were."""
        return Settings.present(self.settings.kinds) == self.settings

    def is_unchanged(self) -> bool:
        """:meth:`as_now`, compared once in a backward."""
        task = backward_id()
        if task == -1 or task != self._compared_in:
            self._compared_in, self._unchanged = task, self.as_now()
        return self._unchanged
