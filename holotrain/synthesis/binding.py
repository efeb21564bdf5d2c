"""Binding of vectors, in the Fourier or the Hadamard domain, whole or in blocks; and the hologram, a memory for bound vectors.

A content x and a key k are padded with zeros to length n and transformed. Every bin is scaled to magnitude 1, and the bins of
the content are multiplied with the conjugates of the key's bins (Algorithm 1 of holographic weight synthesis). All bins of the
key have magnitude 1, so binding is unitary: unbinding with the same key returns the phase-normalised content exactly.

Both transforms are orthonormal, (..., n) <-> (..., bins). In the Fourier domain binding is a circular correlation. In the
Hadamard domain spectra are real, and binding needs only additions and changes of sign.

Shapes of a hologram: S rows, P gradient rows that share each of them, F bins. Spectra and keys are (P, S, F), a hologram is
(S, F). If P is 1, keys may be those of the layers instead, (layers, F).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache, partial

import torch
from torch import Tensor


class Fourier:
    """The real discrete Fourier transform; n // 2 + 1 complex bins."""

    def __init__(self, length: int) -> None:
        self.length, self.bins = length, length // 2 + 1

    def forward(self, rows: Tensor) -> Tensor:
        return torch.fft.rfft(rows, n=self.length, norm="ortho")

    def inverse(self, spectrum: Tensor, out: Tensor | None = None) -> Tensor:
        return torch.fft.irfft(spectrum, n=self.length, norm="ortho", out=out)


class Hadamard:
    """The Walsh-Hadamard transform of a vector whose entries are multiplied with random signs; n real bins, n a power of two.

    The random signs spread regular patterns of a vector evenly over the bins (Ailon and Chazelle, 2006). The signs and the
    factors of the matrix are computed once for each device and dtype and kept with this object.
    """

    def __init__(self, length: int, seed: int = 0) -> None:
        if length & (length - 1):
            raise ValueError(f"the length of a Hadamard transform must be a power of two, not {length}")
        self.length = self.bins = length
        self._seed = seed
        self._constants: dict[tuple[torch.device, torch.dtype], tuple[Tensor, list[Tensor]]] = {}

    def forward(self, rows: Tensor) -> Tensor:
        signs, factors = self._constants_for(rows)
        return _walsh_hadamard(rows * signs, factors)

    def inverse(self, spectrum: Tensor, out: Tensor | None = None) -> Tensor:
        signs, factors = self._constants_for(spectrum)
        return torch.mul(_walsh_hadamard(spectrum, factors), signs, out=out)

    def _constants_for(self, like: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The signs, (n,), and the factors of the matrix, on the device and in the dtype of ``like``."""
        kind = like.device, like.dtype
        if kind not in self._constants:
            generator = torch.Generator().manual_seed(self._seed)
            with torch.inference_mode(False):  # these tensors are used with autograd later
                signs = torch.randint(0, 2, (self.length,), generator=generator) * 2 - 1
                self._constants[kind] = signs.to(*kind), _factors(self.length, *kind)
        return self._constants[kind]


TRANSFORMS = {"fft": Fourier, "hadamard": Hadamard}
Transform = Fourier | Hadamard

LARGEST_FACTOR = 256


def _walsh_hadamard(x: Tensor, factors: list[Tensor]) -> Tensor:
    """H_n x / sqrt(n), in Sylvester's order, as products with the factors of H_n = H_a (x) H_b (x) ...: hardware computes them
    far faster than log2(n) passes of additions."""
    shape = x.shape
    right = 1
    with torch.autocast(x.device.type, enabled=False):  # rounding of half precision products could change signs
        for matrix in factors:
            order = len(matrix)
            x = x.reshape(-1, order) @ matrix if right == 1 else matrix @ x.reshape(-1, order, right)
            right *= order
    return x.reshape(shape)


def _factors(n: int, device: torch.device, dtype: torch.dtype) -> list[Tensor]:
    """Orthonormal Hadamard matrices whose Kronecker product is that of order n, a power of two; equal ones share a tensor."""
    orders = []
    while math.prod(orders) < n:
        orders.append(min(LARGEST_FACTOR, n // math.prod(orders)))
    matrices = {order: _sylvester(order).to(device, dtype) for order in set(orders)}
    return [matrices[order] for order in orders]


def _sylvester(order: int) -> Tensor:
    """The orthonormal Hadamard matrix of ``order``, a power of two, in float64."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < order:
        matrix = torch.kron(matrix.new_tensor([[1, 1], [1, -1]]), matrix)
    return matrix / math.sqrt(order)


def units(spectrum: Tensor, empty: float, noise: float | None = None) -> Tensor:
    """Scales each bin to magnitude 1: phasors of a complex spectrum, signs of a real one.

    Args:
        empty: the value of an empty bin: 0 for a content, so that the bin stays empty; 1 for a key, so that binding leaves the
            content's bin as it is. In a real spectrum this applies only if all bins are empty; else an empty bin becomes +1.
        noise: a bin is empty up to this magnitude, relative to the largest; None: four roundings, the error of the transform.

    A complex bin is this small only if the content lacks its frequency. A real bin can also be small by chance, and rounding
    decides how small. If it stayed empty, the norm of the vector would depend on the machine.
    """
    parts = torch.view_as_real(spectrum) if spectrum.is_complex() else spectrum.unsqueeze(-1)
    limits = torch.finfo(parts.dtype)
    largest = parts.abs().amax((-2, -1), keepdim=True).clamp_min(limits.tiny)
    scaled = parts / largest  # avoids overflow and underflow of the squares
    squared = scaled.square().sum(-1, keepdim=True)
    nothing = torch.zeros_like(scaled[..., :1, :])
    nothing[..., 0] = empty
    noise = 4 * limits.eps if noise is None else noise
    holds_nothing = squared <= noise**2
    if not spectrum.is_complex():
        nothing = torch.where(holds_nothing.all(-2, keepdim=True), nothing, torch.ones_like(nothing))
    unit = torch.where(holds_nothing, nothing, scaled * squared.clamp_min(limits.tiny).rsqrt())  # NaN stays NaN
    return torch.view_as_complex(unit) if spectrum.is_complex() else unit.squeeze(-1)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least n, for n >= 1."""
    return 1 << (n - 1).bit_length()


def folded(vectors: Tensor, length: int) -> Tensor:
    """(..., d) -> (..., length): padded with zeros, or cut into pieces of ``length`` that are added up.

    In both cases the result's Fourier spectrum is that of the vector, sampled at the frequencies of the new length.
    """
    d = vectors.shape[-1]
    padded = torch.nn.functional.pad(vectors, (0, -d % length))
    return padded if d <= length else padded.unflatten(-1, (-1, length)).sum(-2)


Operation = Callable[[Transform, Tensor, Tensor], Tensor]


def phasor_bind(x: Tensor, key: Tensor, length: int | None = None, block_length: int | None = None) -> Tensor:
    """``irfft(X / |X| * conj(K / |K|))``: a circular correlation of the phases.

    Args:
        x: content (..., d), real floating; leading dimensions broadcast with the key's.
        key: (..., e).
        length: n of the transform, at least d and e; None: the next power of two.
        block_length: bind blocks of this many entries of x, each with the key, which is folded if it is longer. This is a
            partial convolution; its cost grows linearly with d.

    Returns:
        (..., n), or (..., d rounded up to whole blocks), in the dtype to which x and key promote. Half precision is
        transformed in fp32.

    The result has norm 1 if no bin of x is empty. An empty bin of x stays empty and lowers the norm: the squared norm is the
    share of the n frequencies that x has. So if x is zero, the result is zero. An empty bin of the key counts as 1, so a key of
    zeros does not change the phases of x. A bin is empty if its magnitude is at most four roundings of the largest.

    Raises:
        ValueError: a vector is empty, of integers or complex, or the length is too short.
    """
    return _apply(_bound, Fourier, x, key, length, block_length)


def phasor_unbind(bound: Tensor, key: Tensor, length: int | None = None, block_length: int | None = None) -> Tensor:
    """``irfft(rfft(bound) * K / |K|)``: undoes :func:`phasor_bind` with the same key and lengths, up to the magnitudes of x.

    Same arguments and result. The magnitudes of ``bound`` are kept, so it may be a sum of bound vectors.
    """
    return _apply(_unbound, Fourier, bound, key, length, block_length)


def hadamard_bind(x: Tensor, key: Tensor, length: int | None = None, block_length: int | None = None, seed: int = 0) -> Tensor:
    """Like :func:`phasor_bind`, with a randomised Walsh-Hadamard transform in place of Fourier: signs instead of phasors.

    Same arguments and result, but lengths are powers of two. It needs less arithmetic and keeps less of x: only signs. An empty
    bin of x counts as +1, so the result has norm 1 unless x is zero.

    Args:
        seed: of the random signs of the transform.
    """
    return _apply(_bound, partial(_hadamard, seed=seed), x, key, length, block_length)


def hadamard_unbind(
    bound: Tensor, key: Tensor, length: int | None = None, block_length: int | None = None, seed: int = 0
) -> Tensor:
    """Undoes :func:`hadamard_bind` with the same key, lengths and seed, up to the magnitudes of x."""
    return _apply(_unbound, partial(_hadamard, seed=seed), bound, key, length, block_length)


@lru_cache(maxsize=32)
def _hadamard(length: int, seed: int) -> Hadamard:
    """Cached between calls. Each keeps its signs and the factors of its matrix for every device and dtype that it has met."""
    return Hadamard(length, seed)


def _bound(transform: Transform, x: Tensor, key: Tensor) -> Tensor:
    content = units(transform.forward(x), empty=0) * units(transform.forward(key), empty=1).conj()
    return transform.inverse(content) / transform.length**0.5


def _unbound(transform: Transform, bound: Tensor, key: Tensor) -> Tensor:
    return transform.inverse(transform.forward(bound) * units(transform.forward(key), empty=1))


def _apply(
    operation: Operation, make: Callable[[int], Transform], x: Tensor, key: Tensor, length: int | None, block_length: int | None
) -> Tensor:
    for name, vector in (("the vector", x), ("the key", key)):
        if not vector.is_floating_point() or vector.ndim == 0 or vector.shape[-1] == 0:
            raise ValueError(
                f"{name} must be real and floating point, with at least one entry in the last dimension, not "
                f"{tuple(vector.shape)} of {vector.dtype}"
            )
    dtype = torch.promote_types(x.dtype, key.dtype)
    computed = torch.promote_types(dtype, torch.float32)
    x, key = x.to(computed), key.to(computed)
    if block_length is not None:
        if length is not None or block_length < 1:
            raise ValueError(f"block_length={block_length}: it must be at least 1, and it does not go together with length")
        blocks = torch.nn.functional.pad(x, (0, -x.shape[-1] % block_length)).unflatten(-1, (-1, block_length))
        result = operation(make(block_length), blocks, folded(key, block_length).unsqueeze(-2)).flatten(-2)
    else:
        longest = max(x.shape[-1], key.shape[-1])
        length = next_power_of_two(longest) if length is None else length
        if length < longest:
            raise ValueError(f"length={length} is shorter than a vector of {longest} entries")
        result = operation(make(length), folded(x, length), folded(key, length))
    return result.to(dtype)


Stretches = list[tuple[int, slice]]
"""Numbers of layers, with their rows in a part of a hologram."""

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}

HALF_RANGE = 1024.0
"""Each row is scaled to this largest magnitude in fp16, which leaves headroom."""


class Hologram:
    """``M <- decay * M + sum_p G_p conj(K_p)``, read back as ``K_p M`` (an associative memory, Plate 1995). Initially zero.

    With one gradient row per hologram row the read-out is the running sum of gradients, each rotated by the difference of the
    layer's input then and now. If inputs stay alike, this is momentum.

    With P gradient rows per hologram row, binding followed by read-out, divided by P, is the orthogonal projection onto a
    subspace with 1/P of the dimensions. In this subspace the hologram is exactly momentum. The part of a gradient outside it
    cannot be held and goes into the update directly: ``feedback * (g - projection of g)``. The spectral part is added here; the
    caller adds ``feedback * g``.

    Args:
        zeros: (S, F), in the dtype of the spectra, real or complex.
        half: ``torch.bfloat16`` or ``torch.float16``: the dtype in which their parts are stored; None: that of ``zeros``.
        feedback: the factor above.
    """

    def __init__(self, zeros: Tensor, half: torch.dtype | None, feedback: float) -> None:
        self._dtype, self._half, self._feedback = zeros.dtype, half, feedback
        self._stored = narrowed(zeros, half)

    def recall(self, spectrum: Tensor, keys: Tensor, part: slice, layers: Stretches, decay: Tensor) -> Tensor:
        """Adds the spectra of gradients to a part of the rows, and returns what is read back."""
        memory = widened([tensor[part] for tensor in self._stored], self._dtype)  # in full precision the memory itself
        if keys.ndim == 2:  # the keys of layers, so that they need not be copied to rows
            memory.mul_(decay)
            read = spectrum
            for layer, rows in layers:
                memory[rows].addcmul_(spectrum[0, rows], keys[layer].conj())
                torch.mul(memory[rows], keys[layer], out=read[0, rows])
        elif len(spectrum) == 1:
            memory.mul_(decay).addcmul_(spectrum[0], keys[0].conj())
            read = memory * keys
        else:
            bound = (spectrum * keys.conj()).sum(0)
            memory.mul_(decay).add_(bound)
            read = (memory - self._feedback * bound) * keys / len(spectrum)
        if self._half is not None:
            for stored, new in zip(self._stored, narrowed(memory, self._half), strict=True):
                stored[part] = new
        return read

    @property
    def state(self) -> dict[str, Tensor]:
        """The stored tensors."""
        return dict(zip(("memory", "scales"), self._stored, strict=False))


def narrowed(rows: Tensor, half: torch.dtype | None) -> list[Tensor]:
    """Rows (n, ...) in half precision, complex ones as pairs of parts; in fp16 also the scale of each. None: as they are."""
    if half is None:
        return [rows]
    parts = torch.view_as_real(rows) if rows.is_complex() else rows
    if half is not torch.float16:
        return [parts.to(half)]
    largest = parts.abs().amax(tuple(range(1, parts.ndim)), keepdim=True).float()
    scales = (largest / HALF_RANGE).clamp_min(torch.finfo(torch.float32).tiny)  # smaller values become zero
    return [(parts / scales).to(half), scales]


def widened(stored: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Undoes :func:`narrowed`, for rows of ``dtype``."""
    memory, *scales = stored
    if memory.dtype == dtype and not scales:
        return memory
    wide = memory.to(dtype.to_real())
    wide = wide * scales[0] if scales else wide
    return torch.view_as_complex(wide) if dtype.is_complex else wide
