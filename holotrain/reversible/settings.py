"""What a branch's result depends on besides its input and its weights, put back for its recomputation: the states of torch's
random number generators, autocast, the default dtype and the attention kernels that may be chosen.

The states of the generators of the CPU and of the device are read after each branch, which takes 2 us. Those of Python and
NumPy are not put back: they are compared, to tell which block draws from them.
"""

from __future__ import annotations

import pickle
import random
import sys
from collections.abc import Callable, Generator, Iterable
from contextlib import ExitStack, contextmanager
from ctypes import c_char
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda as kernels

from holotrain.reversible.context import backward_id, fake_mode_active, is_captured


class Source(NamedTuple):
    """A generator: how its state is read and set."""

    get: Callable[[], Tensor]
    set: Callable[[Tensor], object]

    def read(self) -> State:
        """The source, its state, and the state's first and last bytes, which change when numbers are drawn: the counters, the
        first of 624 words, and a normal number that is left over. They are compared in a tenth of the time of the whole."""
        state = self.get()
        memory = (c_char * state.numel()).from_address(state.data_ptr())
        return self, state, (memory[:64], memory[-64:])


State = tuple[Source, Tensor, object]


class Draws:
    """The random numbers that one run of a branch may draw, and draws again in its replay.

    Args:
        generators: those of torch that it reads, besides the device's.
        python: those of Python and NumPy, whose use is looked for; None: it is not.
    """

    def __init__(self, call: Call, generators: list[torch.Generator], python: list[Any] | None) -> None:
        self._call, self._python, self._python_after = call, python, None
        self._states = call.states() + [source_of(generator).read() for generator in generators]
        self._present: list[State] | None = None
        self._python_before = None if python is None else python_states(python)

    def have_moved(self) -> bool:
        """After the run: whether it drew."""
        return any(source.read()[2] != mark for source, _, mark in self._states)

    def take_back(self) -> None:
        """After the run: the generators are as they were before it."""
        put_back(self._states)

    def settle(self) -> None:
        """After the run: keeps the states of the generators that it drew from."""
        after = [source.read() for source, _, _ in self._states]
        self._call.present = after[: len(self._call.sources)]
        self._states = [then for then, now in zip(self._states, after, strict=True) if now[2] != then[2]]
        if self._python is not None and (states := python_states(self._python)) != self._python_before:
            self._python_after = states

    def begin(self) -> None:
        """Before the replay."""
        if self._states:
            self._present = put_back(self._states)

    def end(self) -> None:
        """After the replay: the generators are as they were before it."""
        if self._present is not None:
            put_back(self._present)
            self._present = None

    def require_same(self, name: str) -> None:
        """Raises a RuntimeError if a branch drew from Python's or NumPy's generators. One that sets a seed draws the same."""
        if self._python_after is not None and self._python_after != python_states(self._python or []):
            raise RuntimeError(
                f"block {name} draws from Python's or NumPy's random numbers in its forward, and drew others when it ran "
                'again in the backward: draw with torch, or have it store its activations (backward="autograd")'
            )


def generators_among(values: Iterable[Any]) -> list[torch.Generator]:
    return [value for value in values if isinstance(value, torch.Generator)]


def python_generators_among(values: Iterable[Any]) -> list[Any]:
    """Those of Python and NumPy."""
    return [value for value in values if isinstance(value, random.Random) or type(value).__module__.startswith("numpy.random")]


def python_states(generators: Iterable[Any]) -> bytes:
    """The states of Python's and NumPy's global generators, and of some of theirs, to compare; takes 70 us."""
    numpy = sys.modules.get("numpy")  # torch works without it
    return pickle.dumps([random.getstate(), numpy and numpy.random.get_state(), *generators])


def source_of(generator: torch.Generator) -> Source:
    return Source(generator.get_state, generator.set_state)


_CPU = source_of(torch.default_generator)


def sources_of(device: torch.device) -> list[Source]:
    """The generators for work on a device."""
    if fake_mode_active():  # fake tensors draw nothing, and there may be no device whose state could be read
        return []
    if device.type in ("cpu", "meta") or is_captured(device):
        return [_CPU]
    module = torch.get_device_module(device)
    return [_CPU, Source(partial(module.get_rng_state, device), partial(module.set_rng_state, device=device))]


def states_of(device: torch.device) -> list[State]:
    """The states of the generators for work on a device, for :func:`put_back`."""
    return [source.read() for source in sources_of(device)]


def put_back(states: list[State]) -> list[State]:
    """Sets the states of some sources and returns those that they had."""
    present = [source.read() for source, _, _ in states]
    for source, state, _ in states:
        source.set(state)
    return present


@contextmanager
def generators_unmoved(device: torch.device, others: Iterable[torch.Generator]) -> Generator[None]:
    """After the context all generators of a device, and others, are as they were before it."""
    states = states_of(device) + [source_of(generator).read() for generator in others]
    try:
        yield
    finally:
        put_back(states)


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

    Raises:
        ValueError: a transform of torch.func is active.
    """

    def __init__(self, device: torch.device) -> None:
        if torch._C._are_functorch_transforms_active():  # private: nothing public tells it
            raise ValueError(
                "blocks that run again in the backward cannot be transformed by torch.func (grad, vmap, jvp); use "
                'torch.autograd.grad, or have them store their activations (backward="autograd")'
            )
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
