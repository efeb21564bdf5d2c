"""The computation of one step: gradients in, updates out, on the device and in memory that is allocated beforehand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, reduce
from math import gcd

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.linalg import vecdot as dot

from holotrain.synthesis.binding import HALVES, Fourier, Hadamard, Hologram, folded, narrowed, next_power_of_two, units, widened
from holotrain.synthesis.keys import KEY_LENGTH, Layer, pairs, shares_of
from holotrain.synthesis.options import BLOCK_LENGTH, SynthesisOptions
from holotrain.synthesis.rows import RUN, Numbered, Part, Rows, choose

MOST = {"cpu": 1 << 19, "cuda": 1 << 25}
"""Entries that are processed at once: on a CPU as many as its cache holds, on a GPU few enough to limit temporary memory."""

SYNCHRONOUS = ("cpu",)
"""Devices whose results the host can read without waiting."""

WARM_UPS = 2
"""Ordinary runs before a capture, so that cuFFT has its plans. Its plan cache must not be cleared while the graph exists."""

AT_REST = {"decay": 1, "fresh": 0, "unbias": 0, "key_ema": 1}
"""What changes between steps: decay of the hologram, weight of the new gradient in the running mean, the bias correction of
that mean, which starts at zero, and decay of the keys. With these values gradients and keys of zero change no lasting state."""


class RowGroup:
    """The rows of one length: their transform, keys and hologram.

    Args:
        like: a tensor with the dtype to compute in, on the parameters' device.
        generator: draws the keys of rows that share a hologram.
    """

    def __init__(self, rows: Rows, options: SynthesisOptions, like: Tensor, generator: torch.Generator) -> None:
        length, slots = rows.length, rows.slots
        self.rows, self._options = rows, options
        self.transform = Hadamard(length, options.seed) if options.transform == "hadamard" else Fourier(length)
        # Rows that share a hologram each have a random mark in their key, so that rows of one layer differ too.
        self._marks: Tensor | None = None
        if slots > 1:
            marks = torch.randn(slots, 1, length, generator=generator).to(like)
            self._marks = units(self.transform.forward(marks), empty=1)
        self.hologram = None
        if options.mode != "bind":
            dtype = like.dtype.to_complex() if options.transform == "fft" else like.dtype
            zeros = like.new_zeros(rows.count, self.transform.bins, dtype=dtype)
            self.hologram = Hologram(zeros, HALVES.get(options.dtype), options.feedback)
        # On a GPU one launch per layer would cost more than copying the keys to rows.
        self._by_layers = options.mode == "associative" and like.device.type == "cpu"
        self.mean = like.new_zeros(slots, rows.count, length) if options.ema else None

    def update(self, keys: Tensor, scalars: dict[str, Tensor], measure: bool, in_turn: bool) -> Tensor | None:
        """Turns gradients into updates.

        Args:
            keys: (layers, length of a key).
            scalars: 0-dim tensors by the names of :data:`AT_REST`.
            measure: return (gg, gu, uu) of each row, (3, slots, rows).
            in_turn: read the gradients of each part and write its updates back, part by part; otherwise the gradients are
                already in the parts' memory, and the updates stay there.
        """
        # A summed key has rounding errors. In a bin with nothing else (the mean over channels after a LayerNorm is 0) the
        # phase would be random and would depend on the order of summation.
        noise = None if self._options.representation == "flattened" else torch.finfo(keys.dtype).eps ** 0.5
        unit_keys = units(self.transform.forward(folded(keys, self.rows.length)), empty=1, noise=noise)
        products = []
        for part in self.rows.parts:
            if in_turn:
                part.gather()
            keys = unit_keys if self._by_layers else unit_keys[part.layer]
            of_part = self._update(part, keys if self._marks is None else keys * self._marks, scalars, measure)
            if of_part is not None:
                products.append(of_part)
            if in_turn:
                part.scatter()
        return torch.cat(products, -1) if products else None

    def _update(self, part: Part, keys: Tensor, scalars: dict[str, Tensor], measure: bool) -> Tensor | None:
        gradient = part.memory
        content = gradient
        if self.mean is not None:
            mean = self.mean[:, part.rows].lerp_(gradient, scalars["fresh"])
            content = mean * scalars["unbias"]
        spectrum = self.transform.forward(content)
        if self._options.mode == "bind":  # rows of norm 1, as published
            spectrum = units(spectrum, empty=0) / self.rows.length**0.5
        if self.hologram is None:
            read = spectrum * keys.conj()
        else:
            read = self.hologram.recall(spectrum, keys, part.rows, part.stretches, scalars["decay"])
        if self._marks is None and not measure and gradient.is_contiguous():
            self.transform.inverse(read, out=gradient)
            return None
        update = self.transform.inverse(read)
        if self._marks is not None:
            update.add_(content, alpha=self._options.feedback)
        products = [dot(gradient, gradient), dot(gradient, update)] if measure else []
        gradient.copy_(update)
        if not measure:
            return None
        part.clear_unwritten()
        return torch.stack((*products, dot(gradient, gradient)))

    def state(self) -> dict[str, Tensor]:
        tensors = {} if self.hologram is None else dict(self.hologram.state)
        return tensors if self.mean is None else tensors | {"mean": self.mean}


class Updates:
    """All rows of a model, and the step over them.

    Args:
        layers: in the order of their keys.
        like: a tensor with the dtype to compute in, on the parameters' device.

    Attributes:
        key_length: the longest key that makes a difference.
        half: the half precision in which ``bind`` stores its updates, or None.
    """

    def __init__(self, layers: list[Layer], options: SynthesisOptions, like: Tensor) -> None:
        self.options = options
        self._layers = len(layers)
        self._parameters = [parameter for _, parameter in pairs(layers)]
        if options.cuda_graph and like.device.type != "cuda":
            raise ValueError(f"cuda_graph needs a model on a CUDA device, not on {like.device}")
        self._sharded = shares_of(layers) > 1
        if self._sharded and options.entries_a_block == 0:
            raise ValueError("block_length=0: whole layers are transformed, and FSDP2 shards them; give a block length")
        if self._sharded and options.cuda_graph:
            raise ValueError("cuda_graph: gradients that FSDP2 shards cannot be captured; use cuda_graph=false")
        generator = torch.Generator().manual_seed(options.seed)
        run = gcd(RUN, options.entries_a_block)  # a block ends where a run does
        chosen = choose(layers, options.subsample, run, generator)
        sizes = [sum(chosen[parameter][0] for parameter in layer.parameters.values()) for layer in layers]
        entries = sum(sizes)
        if self._sharded:  # shares differ, and all processes must refuse together
            most = torch.tensor(entries, device=like.device)
            dist.all_reduce(most, dist.ReduceOp.MAX)
            entries = int(most)
        if entries == 0:
            raise ValueError(
                f"subsample={options.subsample} selects nothing of these parameters; even the largest is too small"
            )
        if options.entries_a_block > max(BLOCK_LENGTH, next_power_of_two(entries)):
            raise ValueError(f"block_length={options.block_length}: it is longer than all {entries} covered entries")
        whole = options.representation == "flattened" and options.transform == "fft"  # as published, without padding
        by_length: dict[int, Numbered] = {}
        for number, layer in enumerate(layers):
            if sizes[number]:
                length = options.entries_a_block or (sizes[number] if whole else next_power_of_two(sizes[number]))
                by_length.setdefault(length, []).append((number, layer))
        # Updates that depend on inner products over a whole layer must wait for the whole layer. On a GPU everything is
        # processed together, because launches are expensive.
        self._synchronous = like.device.type in SYNCHRONOUS
        self._together = options.reshapes or not self._synchronous
        most = MOST.get(like.device.type, MOST["cuda"])
        self._groups = []
        for length, numbered in sorted(by_length.items()):
            slots = min(options.slots, sum(-(-sizes[number] // length) for number, _ in numbered))  # no more slots than rows
            rows = Rows(numbered, chosen, run, length, slots, most, self._together, like)
            self._groups.append(RowGroup(rows, options, like, generator))
        self._parts = [part for group in self._groups for part in group.rows.parts]
        self.key_length = max(by_length, default=options.entries_a_block)  # a process may have no entries
        self._scalars = {name: like.new_ones(()) for name in AT_REST}
        self._keys = like.new_zeros(len(layers), min(self.key_length, KEY_LENGTH)) if options.key_ema else None
        self.half = HALVES.get(options.dtype) if options.mode == "bind" else None
        self._graphs: dict[tuple, Graphed] = {}
        self._fixed: dict[nn.Parameter, Tensor] = {}

    def step(self, grads: list[Tensor], keys: Tensor, step: int, measuring: bool) -> tuple[Callable[[], bool], Tensor | None]:
        """One step. Returns a function that says whether gradients were finite (it waits if necessary), and the figures.

        On a CPU nothing changes if they were not. On a GPU the host learns of it later, so the step runs with gradients of zero
        and a decay of 1, which leaves every hologram as it is.

        Args:
            grads: of the whole model, covered or not; covered ones must be contiguous.
        """
        checked = total([*grads, keys])
        if self._sharded:
            dist.all_reduce(checked)
        finite = checked.isfinite()
        if self._synchronous and not finite:
            return lambda: False, None
        arrived = arriving(finite)
        measure = measuring or self.options.reshapes
        compute = self._captured(measure, keys, finite) if self.options.cuda_graph else partial(self._compute, measure=measure)
        ema = self.options.ema
        values = self.options.decay_at(step), 1 - ema, 1 / (1 - ema ** (step + 1)), self.options.key_ema or 0
        for scalar, value in zip(self._scalars.values(), values, strict=True):  # in the order of AT_REST
            scalar.fill_(value)
        return arrived, compute(keys, finite)

    def _captured(self, measure: bool, *inputs: Tensor) -> Graphed:
        """The step as a CUDA graph, which reads and writes gradients at fixed places; gradients elsewhere are moved there."""
        fixed = []
        for parameter in self._parameters:
            if parameter.grad is not None:
                fixed.append(self._fixed.setdefault(parameter, parameter.grad))
                if parameter.grad is not fixed[-1]:
                    parameter.grad = fixed[-1].copy_(parameter.grad)
        which = measure, *(parameter.grad is not None for parameter in self._parameters)
        if which not in self._graphs:
            copies = [grad.clone() for grad in fixed]
            self._graphs[which] = Graphed(partial(self._compute, measure=measure), *inputs)
            torch._foreach_copy_(fixed, copies)
        return self._graphs[which]

    def _compute(self, keys: Tensor, finite: Tensor, measure: bool) -> Tensor | None:
        """Rewrites the gradients. Returns the figures, if they are to be measured."""
        if self._together:
            for part in self._parts:
                part.gather()
        if not self._synchronous:
            keys = keys.masked_fill(~finite, 0)
            for part in self._parts:
                part.memory.masked_fill_(~finite, 0)
            for name, value in AT_REST.items():
                self._scalars[name].masked_fill_(~finite, value)
        keys = keys if self._keys is None else self._keys.mul_(self._scalars["key_ema"]).add_(keys)
        of_rows = [group.update(keys, self._scalars, measure, not self._together) for group in self._groups]
        factors = measured = None
        if measure:
            pairs = zip(self._groups, of_rows, strict=True)
            of_layers = (g.rows.by_layer(rows, self._layers) for g, rows in pairs if rows is not None)
            products = sum(of_layers, keys.new_zeros(3, self._layers))
            if self._sharded:
                dist.all_reduce(products)
            if self.options.reshapes:
                factors = coefficients(products, self.options)
                products = combined(products, *factors)
            measured = figures(products)
        if self._together:
            for part in self._parts:
                part.scatter(factors)
        if self.half is not None:
            for grad in (parameter.grad for parameter in self._parameters if parameter.grad is not None):
                grad.copy_(widened(narrowed(grad.view(1, -1), self.half), grad.dtype).view_as(grad))
        return measured

    def state(self) -> dict[str, Tensor]:
        """The tensors kept between steps, by name."""
        tensors = {} if self._keys is None else {"keys": self._keys}
        return tensors | {f"{g.rows.length}.{name}": tensor for g in self._groups for name, tensor in g.state().items()}

    def load(self, tensors: dict[str, Tensor]) -> None:
        """Takes over a state."""
        for name, tensor in self.state().items():
            tensor.copy_(tensors[name])


def combined(products: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """The inner products (gg, gu, uu) of layers, (3, layers), with ``a u + b g`` in place of u."""
    gg, gu, uu = products
    return torch.stack((gg, a * gu + b * gg, a * a * uu + 2 * a * b * gu + b * b * gg))


def figures(products: Tensor) -> Tensor:
    """(cosine of the whole update and the whole gradient, norm of the update)."""
    gg, gu, uu = products.sum(1)
    return torch.stack((gu / (gg.sqrt() * uu.sqrt()).clamp_min(torch.finfo(gg.dtype).tiny), uu.sqrt()))


def coefficients(products: Tensor, options: SynthesisOptions) -> tuple[Tensor, Tensor]:
    """The factors a and b of each layer, for the update ``a u + b g``.

    In this order: u is scaled to the norm of g, a share of g is mixed in, and as much of g is added as the cosine floor needs.
    If p is the part of u along g and q the part orthogonal to it, a cosine of c needs p = q c / sqrt(1 - c^2).
    """
    tiny = torch.finfo(products.dtype).tiny
    a, b = torch.ones_like(products[0]), torch.zeros_like(products[0])
    if options.match_norm:
        a = (products[0] / products[2].clamp_min(tiny)).sqrt()
    if options.mix:
        a, b = a * (1 - options.mix), b + options.mix
    if (floor := options.cosine_floor) is not None:
        gg, gu, uu = combined(products, a, b)
        norm = gg.sqrt().clamp_min(tiny)
        along = gu / norm
        across = (uu - along * along).clamp_min(0).sqrt()
        lacking = (across * floor / (1 - floor * floor) ** 0.5 - along).clamp_min(0)
        b = b + torch.where(gg > 0, lacking / norm, 0)
    return a, b


def total(tensors: list[Tensor]) -> Tensor:
    """A number that is finite if all entries are finite (and their sum does not overflow)."""
    dtype = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    if tensors[0].device.type == "cpu":
        return torch.stack([tensor.sum(dtype=dtype) for tensor in tensors]).sum()
    return torch.stack(torch._foreach_norm(tensors, 1, dtype=dtype)).sum()  # one launch, which refuses a narrower dtype


def arriving(flag: Tensor) -> Callable[[], bool]:
    """Copies a flag to the host. Returns a function that waits for this copy only, not for later work."""
    if flag.device.type != "cuda":
        return lambda: bool(flag)
    host = flag.to("cpu", non_blocking=True)
    event = torch.cuda.current_stream(flag.device).record_event()
    return lambda: event.synchronize() or bool(host)


class Graphed:
    """Replays ``compute(*inputs)``, captured once as a CUDA graph.

    Args:
        compute: launches work on the device only. With inputs of zero, as in the warm-up runs, it must change no lasting state.
        inputs: tensors like its arguments, which are copied to the memory that the graph reads.
    """

    def __init__(self, compute: Callable[..., Tensor | None], *inputs: Tensor) -> None:
        self._inputs = [torch.zeros_like(tensor) for tensor in inputs]
        self._device = inputs[0].device
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.device(self._device):
            current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
            aside.wait_stream(current)
            with torch.cuda.stream(aside):
                for _ in range(WARM_UPS):
                    compute(*self._inputs)
            current.wait_stream(aside)
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):  # a loader's thread may pin memory meanwhile
                self._result = compute(*self._inputs)

    def __call__(self, *inputs: Tensor) -> Tensor | None:
        for buffer, tensor in zip(self._inputs, inputs, strict=True):
            buffer.copy_(tensor)
        with torch.cuda.device(self._device):
            self._graph.replay()
        return None if self._result is None else self._result.clone()
