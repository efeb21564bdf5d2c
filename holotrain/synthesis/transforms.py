"""The two orthonormal transforms for binding vectors, (..., n) <-> (..., bins): real Fourier and randomised Walsh-Hadamard.

Binding is an elementwise product of spectra. In the Fourier domain this is a circular correlation. In the Hadamard domain
spectra are real, and binding needs only additions and changes of sign.
"""

from __future__ import annotations

import math

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
