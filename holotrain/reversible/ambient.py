"""The state around a forward, saved for its recomputation: random state, autocast and the allowed attention kernels.

It is saved per call, not on a module, so two forwards before one backward each have their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch.backends import cuda as attention_kernels

from holotrain.reversible.graph_random import TwinState, twin_state

_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


def recomputing() -> bool:
    """Whether the calling code runs in a recomputation, so that a forward hook can skip the second run."""
    return _recomputing.get()


class recomputation:
    """Inside, :func:`recomputing` is true."""

    def __enter__(self) -> None:
        self._token = _recomputing.set(True)

    def __exit__(self, *error: object) -> None:
        _recomputing.reset(self._token)


@dataclass(frozen=True)
class RandomState:
    """The state of the CPU generator and, off the CPU, of the device's own."""

    device: torch.device
    cpu: torch.Tensor
    accelerator: torch.Tensor | None

    @classmethod
    def capture(cls, device: torch.device) -> RandomState:
        accelerator = torch.get_device_module(device).get_rng_state(device) if _has_generator(device) else None
        return cls(device, torch.get_rng_state(), accelerator)

    def recorded(self) -> AbstractContextManager:
        """Around the work that will be replayed."""
        return nullcontext()

    def moved(self) -> bool:
        """Whether random numbers were drawn since."""
        now = RandomState.capture(self.device)
        if not torch.equal(now.cpu, self.cpu):
            return True
        return self.accelerator is not None and not torch.equal(now.accelerator, self.accelerator)

    def restore(self) -> None:
        torch.set_rng_state(self.cpu)
        if self.accelerator is not None:
            torch.get_device_module(self.device).set_rng_state(self.accelerator, self.device)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, random numbers repeat from this state; afterwards the generators are as they were found."""
        ambient = RandomState.capture(self.device)
        self.restore()
        try:
            yield
        finally:
            ambient.restore()


@dataclass(frozen=True)
class NoRandomState:
    """Of work that is not computed: fake tensors draw nothing, and there may be no device whose state could be read."""

    def recorded(self) -> AbstractContextManager:
        return nullcontext()

    def moved(self) -> bool:
        return False

    replayed = recorded


def is_imagined(tensor: torch.Tensor) -> bool:
    """Whether only the tensor's shape is real: nothing can be read of its values."""
    return tensor.is_meta or _fake_mode_active()


def _fake_mode_active() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


def random_state(device: torch.device) -> RandomState | TwinState | NoRandomState:
    """The random state of work that begins now and will be recomputed."""
    if _fake_mode_active():
        return NoRandomState()
    return twin_state(device) or RandomState.capture(device)


def _has_generator(device: torch.device) -> bool:
    return device.type not in ("cpu", "meta")


@dataclass(frozen=True)
class AutocastState:
    """Autocast as it stood for one device type. Backward runs outside autocast, so a recomputation must restore it."""

    device_type: str
    enabled: bool
    dtype: torch.dtype
    cache: bool

    @classmethod
    def capture(cls, device_type: str) -> AutocastState:
        return cls(
            device_type,
            torch.is_autocast_enabled(device_type),
            torch.get_autocast_dtype(device_type),
            torch.is_autocast_cache_enabled(),
        )

    def replayed(self, cached: bool = True) -> torch.autocast:
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache and cached)


ATTENTION_KERNELS = {
    attention_kernels.flash_sdp_enabled: attention_kernels.enable_flash_sdp,
    attention_kernels.mem_efficient_sdp_enabled: attention_kernels.enable_mem_efficient_sdp,
    attention_kernels.math_sdp_enabled: attention_kernels.enable_math_sdp,
    attention_kernels.cudnn_sdp_enabled: attention_kernels.enable_cudnn_sdp,
}


@contextmanager
def _attention_kernels(allowed: tuple[bool, ...]) -> Iterator[None]:
    """Inside, scaled_dot_product_attention chooses among these kernels: another rounds, and draws its dropout, differently."""
    ambient = tuple(enabled() for enabled in ATTENTION_KERNELS)
    changes = [(enable, new, old) for enable, new, old in zip(ATTENTION_KERNELS.values(), allowed, ambient, strict=True)]
    changes = [change for change in changes if change[1] != change[2]]
    for enable, new, _ in changes:
        enable(new)
    try:
        yield
    finally:
        for enable, _, old in changes:
            enable(old)


@dataclass(frozen=True)
class Surroundings:
    """Autocast of the streams' device and of the CPU, where f and g may also work, and the attention kernels allowed."""

    autocast: tuple[AutocastState, ...]
    kernels: tuple[bool, ...]

    @classmethod
    def capture(cls, device: torch.device) -> Surroundings:
        return cls._of(sorted({"cpu", device.type} - {"meta"}))

    @classmethod
    def _of(cls, kinds: Iterable[str]) -> Surroundings:
        return cls(tuple(AutocastState.capture(kind) for kind in kinds), tuple(enabled() for enabled in ATTENTION_KERNELS))

    def replayed(self) -> AbstractContextManager:
        """Inside, they are as they were, and :func:`recomputing` is true."""
        if self == Surroundings._of(state.device_type for state in self.autocast):
            return recomputation()
        return self._reinstated()

    @contextmanager
    def _reinstated(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(recomputation())
            stack.enter_context(_attention_kernels(self.kernels))
            for state in self.autocast:
                stack.enter_context(state.replayed())
            yield

    @contextmanager
    def uncached(self) -> Iterator[None]:
        """Inside, autocast as it stands but without its cache of cast weights."""
        with ExitStack() as stack:
            for state in self.autocast:
                stack.enter_context(state.replayed(cached=False))
            yield
