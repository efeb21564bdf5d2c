"""A GPU on paper: tensors on the host that say they are on a CUDA device, and a recorder of the order of their work.

Inside :func:`paper_gpu` a tensor's ``device`` is a label of its memory, and code takes its CUDA branches. The streams, events
and graphs of ``torch.cuda`` are replaced by recorders. Every operation is computed at once on the host, and noted on the stream
that would run it, by the rules of :mod:`happens_before`: a read without a wait before it raises
:class:`~happens_before.Race` on the spot, whatever a real device would have done that day. So do a write, a reuse of freed
memory, and a read on the host of a pinned copy that has not been waited for. Operands on different devices raise too. A
captured graph is recorded, and its replay computes it again in the same memory. A thread of ThreadPoolExecutor has a clock of
its own, and computes as early or as late as it can.

What it cannot see: time; what a kernel or library does inside (atomics, workspaces of cuBLAS, NCCL's own streams, which the
stand-in has one of); that autograd runs each backward operation on the stream of its forward, since here all run on the stream
that called the backward; the pool of a captured graph, whose memory is never reused here; autocast for CUDA, which does not
cast these tensors; memory that is read by its address;
which kernel attention chooses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace

import torch
from happens_before import Actor, Memories, Memory, Race
from torch import Tensor
from torch.nn.utils import clip_grad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from holotrain.overlap import predictor, signals
from holotrain.reversible import graph_generators, side_stream
from holotrain.reversible.graph_generators import _Pair
from holotrain.synthesis import delayed

CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)
_handles = count(1)
aten = torch.ops.aten
WAITING = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten._unique2, aten.is_nonzero}
"""Operations whose result the host waits for."""
COPYING = {aten.copy_, aten._to_copy}
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
"""Operations that take indices of the host beside tensors of the device."""


class Stream(Actor):
    """Stands for ``torch.cuda.Stream``."""

    def __init__(self, machine: Machine, name: str) -> None:
        super().__init__(name)
        self._machine, self.cuda_stream, self.device = machine, next(_handles), CUDA
        machine.streams.append(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event(self._machine)
        event.clock = dict(self.clock)
        return event

    def wait_event(self, event: Event) -> None:
        self.learn(event.clock)

    def wait_stream(self, other: Stream) -> None:
        self.learn(other.clock)


class Event:
    """Stands for ``torch.cuda.Event``. What is asked for has always just happened."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self.clock = machine, {}

    def synchronize(self) -> None:
        self._machine.events_waited_for += 1
        self.query()

    def query(self) -> bool:
        self._machine.require_no_capture()
        self._machine.host.learn(self.clock)
        return True

    def elapsed_time(self, later: Event) -> float:
        return 0.0


class Graph:
    """Stands for ``torch.cuda.CUDAGraph``: the operations of a capture."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self.calls = machine, []
        self._there, self._before = {id(memory) for memory in machine.memories}, {}
        self.generators: dict[torch.Generator, Tensor] = {}

    def note(self, tensor: Tensor) -> None:
        """Before a tensor is changed: keeps what memory held that was there before the capture."""
        storage = tensor.untyped_storage()
        if id(self._machine.memory_of(tensor)) in self._there and storage._cdata not in self._before:
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                self._before[storage._cdata] = storage, storage.clone()

    def put_back(self) -> None:
        """A capture computes and draws nothing."""
        for generator, state in self.generators.items():
            generator.set_state(state)
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for storage, before in self._before.values():
                storage.copy_(before)
        self._before = {}

    def register_generator_state(self, generator: object) -> None:
        pass

    def replay(self) -> None:
        self._machine.replays += 1
        with torch.no_grad(), torch._C.DisableTorchFunction(), _disable_current_modes():
            for function, args, kwargs, made, wanted, generator in self.calls:
                self._machine.wanted = wanted
                self._machine.begin(function, args, kwargs)
                again = self._machine.compute(function, args, kwargs, generator)
                for old, new in zip(tensors_in(made), tensors_in(again), strict=True):
                    if old.untyped_storage()._cdata != new.untyped_storage()._cdata:  # else it is in the same memory
                        old.copy_(new)
                self._machine.end(function, args, kwargs, made)
            self._machine.wanted = None


class Pair(_Pair):
    """Stands for a pair of generators of the device."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self._machine = machine
        self.forward, self.recomputation = (torch.Generator().manual_seed(seed) for _ in range(2))

    @contextmanager
    def used(self, generator: torch.Generator) -> Iterator[None]:
        before, self._machine.generator = self._machine.generator, generator
        try:
            yield
        finally:
            self._machine.generator = before


class Worker:
    """Stands for a ThreadPoolExecutor with one thread, whose work is done as soon as it is submitted, or when it is asked for.

    Args:
        late: when it is asked for.
    """

    def __init__(self, machine: Machine, late: bool) -> None:
        self._machine, self._late, self._thread = machine, late, Actor("the thread")

    def submit(self, work: Callable, *args: object) -> SimpleNamespace:
        begun, machine, done = dict(self._machine.host.clock), self._machine, []

        def run() -> None:
            before = machine.host, machine.current
            machine.host, machine.current = self._thread, machine.streams[0]
            self._thread.learn(begun)
            try:
                done.append(work(*args))
            finally:
                machine.host, machine.current = before

        def result() -> object:
            if not done:
                run()
            machine.host.learn(self._thread.clock)
            return done[0]

        if not self._late:
            run()
        return SimpleNamespace(result=result)


def tensors_in(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


class WrongDevice(AssertionError):
    """Operands on different devices."""


class Machine:
    """The streams and threads, and what runs on them."""

    def __init__(self) -> None:
        self.host, self.streams = Actor("the host"), []
        self.current = Stream(self, "the default stream")
        self.memories = Memories()
        self.generator = torch.Generator()
        """From which the device draws now."""
        self.capture: Graph | None = None
        self.wanted: tuple[torch.device, bool] | None = None
        self.log: list[tuple[str, str]] = []
        """What ran on which stream."""
        self.sync_debug_mode: int | str = 0
        self.waits: list[str] = []
        """The operations for whose result the host waited."""
        self.events_waited_for = self.replays = 0
        """How often the host waited for an event, and replayed a graph."""
        self.made_on_host: list[str] = []
        """The operations that made a tensor on the host, in ordinary memory, other than a number or nothing."""

    # what the host waits for

    def wait_for(self, *streams: Stream) -> None:
        self.require_no_capture()
        for stream in streams:
            self.host.learn(stream.clock)

    def require_no_capture(self) -> None:
        if self.capture is not None:
            raise RuntimeError("the host waits for the device while a graph is captured")

    # devices

    def memory_of(self, tensor: Tensor) -> Memory:
        memory = self.memories.of(tensor)
        return memory or self.memories.add(tensor, Memory(tensor.untyped_storage().nbytes(), None, "cpu"))

    def device_of(self, tensor: Tensor) -> torch.device:
        return CUDA if self.memory_of(tensor).device == "cuda" else CPU

    @contextmanager
    def wanting(self, device: torch.device | str | int | None, pinned: bool = False) -> Iterator[None]:
        """Inside, new tensors are on that device."""
        kind = "cuda" if isinstance(device, int) else torch.device(device or "cpu").type
        before, self.wanted = self.wanted, (kind, pinned)
        try:
            yield
        finally:
            self.wanted = before

    # operations

    def begin(self, function, args: tuple, kwargs: dict) -> None:
        """Before an operation: who runs it, and whether its operands are there."""
        packet = function.overloadpacket
        read, written = _operands(function, args, kwargs)
        operands = [*read, *written]
        on_device = [tensor for tensor in operands if self.device_of(tensor) is CUDA]
        wanted = self.wanted[0] if self.wanted and (packet is aten._to_copy or not operands or _by_shape(function)) else None
        device = "cuda" if on_device or wanted == "cuda" else "cpu"
        if packet not in COPYING | INDEXING and on_device:
            for tensor in operands:
                if self.device_of(tensor) is CPU and tensor.dim():
                    raise WrongDevice(f"{function} of tensors on the device and on the host")
        self._actor = self.host
        if device == "cuda":
            self._actor = self.current
            self._actor.learn(self.host.clock)  # what the host did is done when it launches
            self.log.append((str(packet), self._actor.name))
        self._actor.act()
        if _by_shape(function):
            return
        staged = packet in COPYING and device == "cuda"
        for tensor in read:
            memory = self.memory_of(tensor)
            from_host = memory.device == "cpu" and self._actor is not self.host
            if from_host and not (staged and memory.pinned and self._without_waiting(function, args, kwargs)):
                self.host.act()
                memory.read(self.host, tensor, str(packet))  # copied before the launch returns
            else:
                memory.read(self._actor, tensor, str(packet))
        for tensor in written:
            if self.capture is not None:
                self.capture.note(tensor)
            self.memory_of(tensor).write(self._actor, tensor, str(packet))

    def compute(self, function, args: tuple, kwargs: dict, generator: torch.Generator) -> object:
        """Runs the operation; the device draws from a generator of its own."""
        if self._actor is self.host or kwargs.get("generator") or torch.Tag.nondeterministic_seeded not in function.tags:
            return function(*args, **kwargs)
        of_host = torch.get_rng_state()
        if self.capture is not None:
            self.capture.generators.setdefault(generator, generator.get_state())
        torch.set_rng_state(generator.get_state())
        try:
            return function(*args, **kwargs)
        finally:
            generator.set_state(torch.get_rng_state())
            torch.set_rng_state(of_host)

    def end(self, function, args: tuple, kwargs: dict, made: object) -> None:
        """After an operation: where its results are, and whether the host waited."""
        packet, actor = function.overloadpacket, self._actor
        read, written = _operands(function, args, kwargs)
        known = {tensor.untyped_storage()._cdata for tensor in (*read, *written)}
        to_host = packet is aten.copy_ and actor is not self.host and self.device_of(args[0]) is CPU
        pinned = to_host and self.memory_of(args[0]).pinned
        for tensor in tensors_in(made):
            if tensor.untyped_storage()._cdata in known:
                continue
            device, pinned_here = ("cpu" if actor is self.host else "cuda"), False
            if self.wanted is not None and (packet is aten._to_copy or not known or _by_shape(function)):
                device, pinned_here = self.wanted
            if packet is aten._to_copy and device == "cpu" and actor is not self.host:
                to_host, pinned = True, self._without_waiting(function, args, kwargs)
                pinned_here = pinned
            memory = self.memories.of(tensor)
            if memory is None:
                home = self.current if device == "cuda" else None
                if home is not None and self.capture is None:
                    self.memories.allocate(home)
                size = tensor.untyped_storage().nbytes()
                memory = self.memories.add(tensor, Memory(size, None if self.capture else home, device, pinned_here))
            if "empty" not in str(packet):
                memory.write(actor, tensor, str(packet))
            if actor is self.host and not pinned_here and tensor.dim() and tensor.numel():
                self.made_on_host.append(str(packet))
        waits = to_host and not (pinned and self._without_waiting(function, args, kwargs))
        if actor is not self.host and (packet in WAITING or waits):
            self.waits.append(str(packet))
            if self.sync_debug_mode == "warn":
                warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
            self.wait_for(actor)

    def _without_waiting(self, function, args: tuple, kwargs: dict) -> bool:
        return bool(kwargs.get("non_blocking") or (function.overloadpacket is aten.copy_ and len(args) > 2 and args[2]))

    def read_by_a_kernel(self, tensor: Tensor) -> list:
        """The values that a kernel reads on the current stream."""
        self.current.learn(self.host.clock)
        self.current.act()
        self.memory_of(tensor).read(self.current, tensor, "a kernel")
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            return tensor.tolist()

    # graphs

    @contextmanager
    def captured(self, graph: Graph, pool=None, stream: Stream | None = None, capture_error_mode="global") -> Iterator[None]:
        """Stands for ``torch.cuda.graph``. Nothing runs on the device in a capture, so it leaves no trace on memory."""
        self.wait_for(*self.streams)
        before = self.current
        self.current = own = stream or Stream(self, "the stream of a capture")
        noted, ran = {memory: memory.noted() for memory in self.memories}, len(self.log)
        self.capture = graph
        try:
            yield
        finally:
            self.capture, self.current = None, before
            graph.put_back()
        for other in self.streams:
            if any(name == other.name for _, name in self.log[ran:]) and not own.knows(other, other.clock[other]):
                raise Race(f"the capture ends before it has waited for {other.name}")
        for memory in self.memories:
            memory.forget()
            if memory in noted:
                memory.restore(noted[memory])


class _Operations(TorchDispatchMode):
    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self._machine.begin(function, args, kwargs)
        machine = self._machine
        made = machine.compute(function, args, kwargs, machine.generator)
        machine.end(function, args, kwargs, made)
        if machine.capture is not None:
            machine.capture.calls.append((function, args, kwargs, made, machine.wanted, machine.generator))
        return made


class _Devices(TorchFunctionMode):
    """Answers what a tensor says of its device, and hides devices from factories and copies."""

    def __init__(self, machine: Machine) -> None:
        super().__init__()
        self._machine = machine

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs, machine = dict(kwargs or {}), self._machine
        name = getattr(function, "__name__", "")
        if name == "__get__":
            asked = function.__self__.__name__
            if asked in ("device", "is_cuda"):
                device = machine.device_of(args[0])
                return device if asked == "device" else device is CUDA
        elif function is torch.Tensor.to:
            return self._to(*args, **kwargs)
        elif function in (torch.Tensor.cpu, torch.Tensor.cuda):
            return self._to(args[0], "cpu" if function is torch.Tensor.cpu else "cuda")
        elif function is torch.Tensor.pin_memory:
            with machine.wanting("cpu", pinned=True):
                return args[0].to(args[0].dtype, copy=True)
        elif function in (torch.Tensor.tolist, torch.Tensor.numpy):
            memory = machine.memory_of(args[0])
            if memory.device == "cuda":
                machine.waits.append(name)
                machine.wait_for(machine.current)
            machine.host.act()
            memory.read(machine.host, args[0], name)
            with _disable_current_modes():
                return function(*args, **kwargs)
        elif function in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            device = kwargs.pop("device")
            return self._to(function(*args, **kwargs), device)
        elif kwargs.get("device") is not None or kwargs.get("pin_memory"):
            with machine.wanting(kwargs.get("device"), kwargs.pop("pin_memory", False)):
                return function(*args, **kwargs | {"device": CPU})
        return function(*args, **kwargs)

    def _to(self, tensor: Tensor, *args, copy: bool = False, **kwargs) -> Tensor:
        machine, own = self._machine, self._machine.device_of(tensor)
        if args and isinstance(args[0], Tensor):
            device, dtype, wait = machine.device_of(args[0]), args[0].dtype, True
        else:
            device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
            wait = not non_blocking
        if (device or own).type == own.type:
            return tensor.to(dtype or tensor.dtype, copy=copy)
        with machine.wanting(device):
            return tensor.to(dtype or tensor.dtype, non_blocking=not wait, copy=True)


def _operands(function, args: tuple, kwargs: dict) -> tuple[list[Tensor], list[Tensor]]:
    """The tensors that an operation takes to read, and those that it changes."""
    read, written = [], []
    for number, argument in enumerate(function._schema.arguments):
        given = args[number] if number < len(args) else kwargs.get(argument.name)
        changed = argument.alias_info is not None and argument.alias_info.is_write
        if changed:
            written += tensors_in(given)
        if not changed or (function.overloadpacket is not aten.copy_ and argument.name != "out" and not _overwrites(function)):
            read += tensors_in(given)
    return read, written


def _overwrites(function) -> bool:
    """Whether it writes without reading what was there."""
    name = function.overloadpacket.__name__
    return name in ("zero_", "fill_", "_foreach_copy_", "_foreach_zero_", "normal_", "uniform_", "random_", "bernoulli_")


def _by_shape(function) -> bool:
    """Whether only the shape of its operands matters: the result is new, or a view of the same memory."""
    name = function.overloadpacket.__name__
    return name.startswith("new_") or name.endswith("_like") or _is_view(function)


def _is_view(function) -> bool:
    return function.is_view or function.overloadpacket in (aten._unsafe_view, aten.lift_fresh, aten._reshape_alias)


@contextmanager
def replace_cuda(monkeypatch, machine: Machine, late: bool = False) -> Iterator[None]:
    """Has the machine answer for ``torch.cuda``. Before and after, nothing is kept of a device."""

    @contextmanager
    def on(stream: Stream | None) -> Iterator[None]:
        before, machine.current = machine.current, stream or machine.current
        try:
            yield
        finally:
            machine.current = before

    names = (f"side stream {number}" for number in count(1))
    replacing = {
        "current_stream": lambda device=None: machine.current,
        "Stream": lambda device=None, priority=0: Stream(machine, next(names)),
        "Event": lambda enable_timing=False, blocking=False: Event(machine),
        "stream": on,
        "device": lambda device: nullcontext(),
        "synchronize": lambda device=None: machine.wait_for(*machine.streams),
        "is_current_stream_capturing": lambda: machine.capture is not None,
        "get_device_properties": lambda device=None: SimpleNamespace(multi_processor_count=4),
        "get_device_capability": lambda device=None: (8, 0),
        "CUDAGraph": lambda: Graph(machine),
        "graph": machine.captured,
        "graph_pool_handle": lambda: object(),
        "get_sync_debug_mode": lambda: machine.sync_debug_mode,
        "set_sync_debug_mode": lambda mode: setattr(machine, "sync_debug_mode", mode),
        "get_rng_state": lambda device=None: machine.require_no_capture() or machine.generator.get_state(),
        "set_rng_state": lambda state, device=None: machine.require_no_capture() or machine.generator.set_state(state),
        "initial_seed": lambda: 0,
    }
    for name, stand_in in replacing.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    recorded = lambda tensor, stream: machine.memory_of(tensor).recorded.add(stream)  # noqa: E731
    monkeypatch.setattr(torch.Tensor, "record_stream", recorded)
    grouped = clip_grad._group_tensors_by_device_and_dtype  # which asks tensors for their device in C++
    on_device = lambda lists: {(CUDA, dtype): group for (_, dtype), group in grouped(lists).items()}  # noqa: E731
    monkeypatch.setattr(clip_grad, "_group_tensors_by_device_and_dtype", on_device)
    monkeypatch.setattr(graph_generators, "_Pair", lambda device, seed: Pair(machine, seed))
    monkeypatch.setattr(delayed, "ThreadPoolExecutor", lambda threads, thread_name_prefix: Worker(machine, late))
    kept = (side_stream._side_stream, signals._stream_of, signals.order_of, predictor.sms_of)
    for cached in kept:
        cached.cache_clear()
    try:
        yield
    finally:
        for cached in kept:
            cached.cache_clear()


@contextmanager
def paper_gpu(monkeypatch, late: bool = False) -> Iterator[Machine]:
    """A machine on which everything inside runs.

    Args:
        monkeypatch: pytest's.
        late: threads compute when their result is asked for, not when they are given work.
    """
    machine = Machine()
    devices, engine = _Devices(machine), torch.autograd._engine_run_backward

    def backward(*args, **kwargs):
        with devices:  # a backward is called as a function that the mode has let through, so the mode is off in it
            return engine(*args, **kwargs)

    for module in (torch.autograd, torch.autograd.graph):
        monkeypatch.setattr(module, "_engine_run_backward", backward)
    with replace_cuda(monkeypatch, machine, late), devices, _Operations(machine):
        yield machine
