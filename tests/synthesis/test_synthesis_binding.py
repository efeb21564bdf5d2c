"""Binding against a float64 reference in NumPy and against torchhd."""

import math

import numpy as np
import pytest
import torch
import torchhd
from compared import assert_close
from scipy.linalg import hadamard

from holotrain.synthesis.binding import (
    Hadamard,
    folded,
    hadamard_bind,
    hadamard_unbind,
    next_power_of_two,
    phasor_bind,
    phasor_unbind,
)

LENGTHS = [1, 2, 3, 7, 8, 97, 1000, 4096]


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def phases(x: np.ndarray, n: int, empty: float) -> np.ndarray:
    spectrum = np.fft.rfft(x, n)
    size = np.abs(spectrum)
    return np.where(size > 1e-12 * size.max(), spectrum / np.where(size > 0, size, 1), empty)


def reference(x: torch.Tensor, key: torch.Tensor, n: int | None = None) -> np.ndarray:
    x, key = x.double().numpy(), key.double().numpy()
    n = n or 2 ** math.ceil(math.log2(max(len(x), len(key))))
    return np.fft.irfft(phases(x, n, 0) * np.conj(phases(key, n, 1)), n)


@pytest.mark.parametrize(("length", "n"), [*((length, None) for length in LENGTHS), (15, 15), (15, 17), (15, 31)])
@pytest.mark.parametrize("scale", [1e-18, 1, 1e18])
def test_bind_equals_the_reference(length, n, scale):
    x, key = normal(length), normal(max(1, length // 3), seed=1)
    assert np.abs(phasor_bind(scale * x, key, n).numpy() - reference(x, key, n)).max() <= 1e-5
    exact = phasor_bind(x.double(), key.double(), n)
    assert np.abs(exact.numpy() - reference(x, key, n)).max() <= 1e-12


@pytest.mark.parametrize("length", [8, 64, 1024])
def test_bind_equals_torchhd(length):
    x, key = normal(length), normal(length, seed=1)
    content, unit_key = (
        torch.fft.irfft(torch.polar(torch.ones(length // 2 + 1), torch.fft.rfft(v).angle()), length) for v in (x, key)
    )
    holographic = [torchhd.HRRTensor(content), torchhd.HRRTensor(unit_key)]
    theirs = torchhd.bind(holographic[0], holographic[1].inverse())
    assert (phasor_bind(x, key) - torch.as_tensor(theirs)).abs().max() <= 1e-5
    back = torchhd.bind(theirs, holographic[1])
    assert (phasor_unbind(phasor_bind(x, key), key) - torch.as_tensor(back)).abs().max() <= 1e-5
    spectra = [torchhd.FHRRTensor(torch.fft.rfft(v)) for v in (content, unit_key)]
    theirs = torch.fft.irfft(torch.as_tensor(torchhd.bind(spectra[0], spectra[1].inverse())), length)
    assert (phasor_bind(x, key) - theirs).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("length", LENGTHS)
def test_unbinding_returns_the_phase_normalised_vector(length, dtype):
    x, key = normal(length, dtype=dtype), normal(length, seed=1, dtype=dtype)
    n = next_power_of_two(length)
    bound = phasor_bind(x, key)
    assert bound.dtype == dtype and bound.shape == (n,)
    expected = torch.from_numpy(np.fft.irfft(phases(x.double().numpy(), n, 0), n))
    assert torch.cosine_similarity(phasor_unbind(bound, key).double(), expected, 0) >= 0.99999
    if dtype not in (torch.float16, torch.bfloat16):
        assert (phasor_unbind(bound, key) - expected).abs().max() <= 1e-5


def test_the_hadamard_transform_is_the_matrix():
    transform = Hadamard(512, seed=3)
    x = normal(3, 512, dtype=torch.float64)
    matrix = torch.from_numpy(hadamard(512)).double() / math.sqrt(512)
    drawn = torch.randint(0, 2, (512,), generator=torch.Generator().manual_seed(3)) * 2 - 1
    assert_close(transform.forward(x), (x * drawn) @ matrix)
    assert_close(transform.inverse(transform.forward(x)), x)


@pytest.mark.parametrize(("bind", "unbind"), [(phasor_bind, phasor_unbind), (hadamard_bind, hadamard_unbind)])
def test_blocks_are_bound_one_by_one(bind, unbind):
    """And leading dimensions broadcast."""
    x, key = normal(4, 1, 50), normal(3, 20, seed=1)
    x[2] *= 1e-12  # as small as it is, it is not empty
    bound = bind(x, key)
    assert bound.shape == (4, 3, 64)
    assert_close(bound[2, 1], bind(x[2, 0], key[1]), atol=1e-6)
    x, key = normal(2, 50), normal(2, 40, seed=1)
    bound = bind(x, key, block_length=16)
    assert bound.shape == (2, 64)
    third = bind(x[:, 32:48], folded(key, 16))
    assert_close(bound[:, 32:48], third, atol=1e-6)
    assert_close(unbind(bound, key, block_length=16)[:, 32:48], unbind(third, folded(key, 16)), atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"x": torch.zeros(0)}, "at least one entry"),
        ({"x": torch.arange(4)}, "the vector must be real and floating point"),
        ({"length": 3}, "length=3 is shorter than a vector of 4"),
        ({"block_length": 0}, "block_length=0"),
        ({"block_length": 2, "length": 8}, "does not go together with length"),
    ],
)
def test_what_cannot_be_bound_is_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        phasor_bind(**{"x": torch.ones(4), "key": torch.ones(4)} | arguments)
