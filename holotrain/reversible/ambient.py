"""What a forward takes from its surroundings, kept so that a recomputation can be given the same: random state, autocast.

Both are kept per call, never on a module: two forwards before one backward each replay their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


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

    def replayed(self) -> torch.autocast:
        return torch.autocast(self.device_type, dtype=self.dtype, enabled=self.enabled, cache_enabled=self.cache)


@dataclass(frozen=True)
class Autocast:
    """Autocast of the streams' device and of the CPU, where f and g may also work."""

    states: tuple[AutocastState, ...]

    @classmethod
    def capture(cls, device: torch.device) -> Autocast:
        kinds = {"cpu", device.type} - {"meta"}
        return cls(tuple(AutocastState.capture(kind) for kind in sorted(kinds)))

    @contextmanager
    def replayed(self) -> Iterator[None]:
        with ExitStack() as stack:
            for state in self.states:
                stack.enter_context(state.replayed())
            yield
