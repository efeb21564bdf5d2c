"""What a branch's result depends on besides its input and its weights, put back for the recomputation.

This is the state of every random number generator that the branch used (PyTorch's on the CPU and on the device, those among the
keyword arguments, Python's and NumPy's global ones), autocast, the default dtype, and the attention kernels that may be chosen.
"""

from __future__ import annotations

import _random
import random
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from ctypes import c_char, string_at
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.autograd import profiler
from torch.backends import cuda as kernels

try:
    import numpy
except ImportError:  # torch works without it
    numpy = None

_NOTHING = nullcontext()
_recomputing: ContextVar[bool] = ContextVar("recomputing", default=False)


def recomputing() -> bool:
    """Whether the calling code runs in a recomputation, so that a forward hook can skip the second run."""
    return _recomputing.get()


def in_trace(doing: str, what: object) -> AbstractContextManager:
    """Names the work inside the context ``<doing> <what>`` in the trace of a running torch.profiler.

    There is no name under a compiler, a FLOP counter or fake tensors: a name is recorded by an operation, which they would
    count.
    """
    if torch.compiler.is_compiling() or not profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack():
        return _NOTHING
    return profiler.record_function(f"{doing} {what}")


def has_no_data(tensor: torch.Tensor) -> bool:
    """Whether only the tensor's shape is real: nothing can be read of its values."""
    return tensor.is_meta or _fake_mode_active()


def _fake_mode_active() -> bool:
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


class _Source:
    """A source of random numbers.

    Args:
        get, set: read and set its state.
        mark: what of a state tells whether numbers were drawn since; None: all of it.
    """

    def __init__(self, get: Callable[[], Any], set: Callable[[Any], None], mark: Callable[[Any], Any] | None = None) -> None:
        self._get, self.set, self._mark = get, set, mark

    def get(self) -> tuple[_Source, Any, Any]:
        """The source, its state and the state's mark."""
        state = self._get()
        return self, state, state if self._mark is None else self._mark(state)


_State = tuple[_Source, Any, Any]


def _ends(state: torch.Tensor) -> Any:
    """The first and last bytes of the state of a generator of PyTorch's, which are compared in a tenth of the time: the
    counters, the first of 624 words, and a normal number that is left over."""
    memory = (c_char * state.numel()).from_address(state.data_ptr())
    return memory[:64], memory[-64:]


_KINDS = (torch.Generator, random.Random) if numpy is None else (torch.Generator, random.Random, numpy.random.Generator)


def _of_generator(generator: Any) -> _Source:
    if isinstance(generator, torch.Generator):
        return _Source(generator.get_state, generator.set_state, _ends)
    if isinstance(generator, random.Random):
        return _Source(generator.getstate, generator.setstate)
    bits = generator.bit_generator
    return _Source(lambda: bits.state, partial(setattr, bits, "state"), repr)


def generators_among(values: Iterable[Any]) -> list[Any]:
    """The generators of PyTorch, Python and NumPy among some values."""
    return [value for value in values if isinstance(value, _KINDS)]


class Learned:
    """What the runs of a branch have shown so far. It holds no module, so that a branch can go.

    Args:
        parts: the branch and its submodules.
    """

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self.generators = generators_among(value for part in parts for value in vars(part).values())
        """Generators that it holds."""
        self.draws: dict[bool, bool] = {}
        """Whether it draws Python's or NumPy's global random numbers, in training mode and not."""
        self.verified = False
        """A recomputation was compared with the forward in full."""


_learned: WeakKeyDictionary[nn.Module, Learned] = WeakKeyDictionary()


def learned_of(branch: nn.Module, parts: Iterable[nn.Module]) -> Learned:
    """What is known of a branch."""
    learned = _learned.get(branch)
    if learned is None:
        learned = _learned[branch] = Learned(parts)
    return learned


_CPU = _of_generator(torch.default_generator)
_GLOBAL = [_of_generator(random._inst)]
"""The global generators of Python and NumPy. Reading their state takes 70 us, so it is read only for branches that use them."""
if numpy is not None:
    _GLOBAL.append(_Source(partial(numpy.random.get_state, legacy=False), numpy.random.set_state, repr))

_HEADER, _OBJECT = object.__basicsize__, _random.Random.__basicsize__


def _global_marks() -> tuple[bytes, ...]:
    """What tells that one of them was used, in 1 us: the memory in which the generators hold their state."""
    python = string_at(id(random._inst) + _HEADER, _OBJECT - _HEADER)
    if numpy is None:
        return (python,)
    generator = numpy.random.get_bit_generator()  # ty: ignore[missing-attribute]
    if isinstance(generator, numpy.random.MT19937):
        return python, string_at(generator.ctypes.state_address, 2500)  # 624 words and a position
    return python, repr(generator.state).encode()


class _Settings(NamedTuple):
    """Autocast, the attention kernels allowed and which comes first, and the default dtype. The backward runs outside
    autocast."""

    kinds: tuple[str, ...]
    enabled: list[bool]
    dtypes: list[torch.dtype]
    cached: bool
    kernels: list[bool]
    order: list[int]
    default: torch.dtype

    @classmethod
    def present(cls, kinds: tuple[str, ...]) -> _Settings:
        enabled = [*map(torch.is_autocast_enabled, kinds)]
        dtypes = [*map(torch.get_autocast_dtype, kinds)] if any(enabled) else []
        allowed = [allowed() for allowed, _ in _KERNELS]
        order, default = torch._C._get_sdp_priority_order(), torch.get_default_dtype()
        return cls(kinds, enabled, dtypes, torch.is_autocast_cache_enabled(), allowed, order, default)

    @property
    def casts_weights(self) -> bool:
        """Whether autocast casts weights, each once."""
        return any(self.enabled) and self.cached

    @contextmanager
    def reinstated(self, cached: bool) -> Generator[None]:
        before = [allowed() for allowed, _ in _KERNELS]
        with ExitStack() as stack:
            for kind, enabled, dtype in zip(self.kinds, self.enabled, self.dtypes or [None] * len(self.kinds), strict=True):
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
def _one_convolution() -> Generator[None]:
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
    """What all branches of one forward share.

    Args:
        device: of the streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.settings = _Settings.present(("cpu",) if device.type in ("cpu", "meta") else ("cpu", device.type))
        self.sources: list[_Source] = []
        if not _fake_mode_active():  # fake tensors draw nothing, and there may be no device whose state could be read
            self.sources.append(_CPU)
            if len(self.settings.kinds) == 2 and not is_captured(device):
                module = torch.get_device_module(device)
                set_state = partial(module.set_rng_state, device=device)
                self.sources.append(_Source(partial(module.get_rng_state, device), set_state, _ends))
        self.present: list[_State] | None = None
        """The states of the sources, if nothing can have drawn since they were read."""
        self._marks, self.drew_unexpectedly = _global_marks(), False
        self._asked, self._unchanged = -1, False
        self.distributed = torch.distributed.is_available() and torch.distributed.is_initialized()

    def states(self) -> list[_State]:
        """Those of the sources, now."""
        return self.present or [source.get() for source in self.sources]

    def drew_since(self, states: list[_State]) -> bool:
        """Whether PyTorch's random numbers were drawn since the sources had these states."""
        return any(source.get()[2] != mark for source, _, mark in states)

    def draw_again(self, states: list[_State]) -> None:
        """What runs next draws the random numbers that were drawn after these states."""
        _exchanged(states)
        self.present = states

    def end(self) -> None:
        """After the last branch: notices random numbers of Python or NumPy that no branch was known to use."""
        self.drew_unexpectedly = _global_marks() != self._marks

    def settle(self) -> None:
        """After a branch: takes over settings that it changed, since it has computed with them.

        The first use of an operator may do so: on Hopper and Blackwell the first attention of a process puts cuDNN's kernel
        before the others (``priority_order`` in PyTorch's sdp_utils.cpp), and uses it at once.
        """
        present = _Settings.present(self.settings.kinds)
        if present != self.settings:
            self.settings, self._asked = present, -1

    def as_now(self) -> bool:
        """Whether the settings are now as they were."""
        return _Settings.present(self.settings.kinds) == self.settings

    def is_unchanged(self) -> bool:
        """:meth:`as_now`, compared once in a backward."""
        task = torch._C._current_graph_task_id()
        if task == -1 or task != self._asked:
            self._asked, self._unchanged = task, self.as_now()
        return self._unchanged

    def uncached(self) -> AbstractContextManager:
        """Inside, autocast as it was but without its cache of cast weights, so that each run casts them."""
        return self.settings.reinstated(cached=False)


class Replay:
    """The state before one run of a branch, put back for its recomputation.

    Args:
        call: what the branches of the forward share.
        branch: the module that is about to run.
        learned: what is known of it.
        generators: generators among its keyword arguments.
    """

    def __init__(self, call: Call, branch: nn.Module, learned: Learned, generators: list[Any]) -> None:
        self._call, self._branch, self._training, self._learned = call, branch, branch.training, learned
        self._known = learned.draws.get(branch.training)
        self._states = call.states()
        if generators or learned.generators or self._known is not False:
            others = [*map(_of_generator, generators + learned.generators), *(_GLOBAL if self._known is not False else ())]
            self._states = self._states + [source.get() for source in others]
        self.on_gpu = call.device.type == "cuda"
        self._pair = _next_pair(call.device) if self.on_gpu else None

    @contextmanager
    def repeatable(self, recomputation: bool = False) -> Generator[None]:
        """The context in which the branch runs on a GPU."""
        pair = self._pair
        own = _NOTHING if pair is None else pair.used(pair.recomputation if recomputation else pair.forward)
        with _one_convolution(), own:
            yield

    def settle(self) -> None:
        """After the run: keeps the state of the generators that were used, and the settings."""
        self._call.settle()
        self._settings = self._call.settings  # earlier branches keep theirs
        before, self._states, after = self._states, [], []
        for then in before:
            now = then[0].get()
            after.append(now)
            if now[2] != then[2]:
                self._states.append(then)
        self._call.present = after[: len(self._call.sources)]
        if self._known is None:
            self._learned.draws[self._training] = any(source in _GLOBAL for source, _, _ in self._states)

    def begin(self, doing: str) -> None:
        """From here on everything is as it was then, gradients are recorded, and :func:`recomputing` is true.

        Args:
            doing: what a trace says of the work until :meth:`end`.
        """
        call = self._call
        self._token, self._grad_mode = _recomputing.set(True), torch.is_grad_enabled()
        self._present, self._contexts = None, None
        self._watched = _global_marks() if call.drew_unexpectedly and self._known is False else None
        if self._states:
            self._present = _exchanged(self._states)
        unchanged = self._settings is call.settings and call.is_unchanged()
        if self.on_gpu or not unchanged or profiler._is_profiler_enabled:
            self._contexts = ExitStack()
            self._contexts.enter_context(in_trace("recompute", doing))
            if not unchanged:
                self._contexts.enter_context(self._settings.reinstated(self._settings.cached))
            if self.on_gpu:
                self._contexts.enter_context(self.repeatable(recomputation=True))
        torch._C._set_grad_enabled(True)

    def end(self) -> None:
        """Everything is again as it was before :meth:`begin`."""
        torch._C._set_grad_enabled(self._grad_mode)
        if self._contexts is not None:
            self._contexts.close()
        if self._present is not None:
            _exchanged(self._present)
        _recomputing.reset(self._token)

    def require_known_sources(self) -> None:
        """After a recomputation.

        Raises:
            RuntimeError: the branch drew random numbers of Python or NumPy, and did not when it first ran.
        """
        if self._watched is not None and _global_marks() != self._watched:
            self._learned.draws[self._training] = True
            raise RuntimeError(
                f"{type(self._branch).__name__} drew from Python's or NumPy's global random numbers, which it did not do when "
                "it first ran, so they were not saved for its recomputation; they are from the next forward on"
            )


def _exchanged(states: list[_State]) -> list[_State]:
    """Sets the states of some sources and returns those that they had."""
    present = [source.get() for source, _, _ in states]
    for source, state, _ in states:
        source.set(state)
    return present


@contextmanager
def generators_unmoved(device: torch.device, others: Iterable[Any]) -> Generator[None]:
    """After the context all generators of a device, and others, are as they were before it."""
    states = [source.get() for source in (*Call(device).sources, *_GLOBAL, *map(_of_generator, others))]
    try:
        yield
    finally:
        _exchanged(states)


# During the capture of a CUDA graph the state of a generator cannot be read or set. It can only be replaced by the state of
# another generator that is registered with the graph. So each run that will be repeated gets two generators with equal seeds.
# A replay of the graph advances both by the same amount, so they stay equal.


class _Pair:
    """Generators for one run of a branch in a captured step, and for its recomputation."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._default = torch.cuda.default_generators[device.index or 0]
        self.forward, self.recomputation = (torch.Generator(device).manual_seed(seed) for _ in range(2))

    @contextmanager
    def used(self, generator: torch.Generator) -> Generator[None]:
        before = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(generator)
        try:
            yield
        finally:
            self._default.graphsafe_set_state(before)


class GraphGenerators:
    """Counts the pairs that a step needs, then hands them out while it is captured."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._asked = device, 0
        self._pairs: list[_Pair] = []

    def prepare(self, graph: torch.cuda.CUDAGraph) -> None:
        """Makes as many pairs as were asked for since the counting began, and registers them with ``graph``."""
        seed = torch.cuda.initial_seed()
        self._pairs = [_Pair(self._device, (seed + number + 1) % 2**63) for number in range(self._asked)]
        for pair in self._pairs:
            graph.register_generator_state(pair.forward)
            graph.register_generator_state(pair.recomputation)
        self._asked = 0

    def next(self) -> _Pair | None:
        """The next pair; None while they are counted."""
        self._asked += 1
        return self._pairs[self._asked - 1] if self._pairs else None

    @contextmanager
    def available(self) -> Generator[None]:
        """Inside, runs of branches take their pairs from here."""
        token = _graph_generators.set(self)
        try:
            yield
        finally:
            _graph_generators.reset(token)


_graph_generators: ContextVar[GraphGenerators | None] = ContextVar("graph generators", default=None)


def in_graphed_step() -> bool:
    """Whether the step is captured as a CUDA graph, or is about to be: each run of a branch then has generators of its own."""
    return _graph_generators.get() is not None


def is_captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _next_pair(device: torch.device) -> _Pair | None:
    """The pair for the run that begins now; None where no graph is captured.

    Raises:
        RuntimeError: a graph is captured by other means than :class:`~holotrain.reversible.GraphedStep`, or a sequence runs
            inside a branch of another.
    """
    if _fake_mode_active():
        return None
    generators = _graph_generators.get()
    pair = None if generators is None else generators.next()
    if pair is None and is_captured(device):
        raise RuntimeError(
            "use holotrain.reversible.GraphedStep to capture a step that recomputes activations, without a reversible "
            "sequence inside a branch of another; otherwise the recomputation would draw other random numbers"
        )
    return pair
