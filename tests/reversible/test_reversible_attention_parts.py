"""Attention to parts of the keys, against torch's to all of them."""

import pytest
import torch
from torch.nn import functional as F

from holotrain.reversible import attention_parts
from holotrain.reversible.attention_parts import Reach, attend, gradients

LENGTH, HEADS, OF_KEYS = 24, 4, 2
WIDTHS = {"alike": (8, 8), "other values": (8, 6)}


def chunk(widths: tuple[int, int], device: str, dtype: torch.dtype):
    """The last 24 of 64 tokens' queries, (B, H, L, D), and keys and values."""
    width, of_values = widths
    torch.manual_seed(0)
    shapes = (2, HEADS, LENGTH, width), (2, OF_KEYS, 64, width), (2, OF_KEYS, 64, of_values)
    return [torch.randn(shape).to(device, dtype).requires_grad_() for shape in shapes]


def by_parts(query, key, value, gradient, window, scale):
    """What attention gives, and gradients, by parts of 16 and 24 tokens before the chunk, and its own."""
    folded, start = query.reshape(2, OF_KEYS, -1, query.shape[-1]), 64 - LENGTH
    parts = [(slice(begin, end), Reach(LENGTH, start - begin, window)) for begin, end in ((40, 64), (0, 16), (16, 40))]
    found = [attend(folded, key[:, :, of], value[:, :, of], reach, scale) for of, reach in parts]
    logs = torch.stack([each for _, each in found]).logsumexp(0)
    out = sum(each * (own - logs).exp()[..., None] for each, own in found).to(query.dtype)
    known, of_query = (gradient.reshape(out.shape), out, logs), 0
    of_key, of_value = torch.zeros_like(key), torch.zeros_like(value)
    for of, reach in parts:
        more, of_key[:, :, of], of_value[:, :, of] = gradients(known, folded, key[:, :, of], value[:, :, of], reach, scale)
        of_query = of_query + more
    return out.reshape(gradient.shape), of_query.reshape(query.shape), of_key, of_value


def require_equal(widths, window, device, dtype, bound):
    query, key, value = chunk(widths, device, dtype)
    rows, columns = torch.arange(40, 64, device=device)[:, None], torch.arange(64, device=device)
    mask = (columns <= rows) & (columns > rows - (window or 64))
    wide = [each.double() for each in (query, key, value)]
    out = F.scaled_dot_product_attention(*wide, mask, scale=0.3, enable_gqa=True)
    gradient = torch.randn_like(out)
    expected = [out, *torch.autograd.grad(out, [query, key, value], gradient)]
    with torch.no_grad():
        found = by_parts(query, key, value, gradient.to(dtype), window, 0.3)
    for each, due in zip(found, expected, strict=True):
        assert (each.double() - due).norm() <= bound * due.norm()


@pytest.mark.parametrize("rows", [5, 512])
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("window", [None, 20, 30, 60])
def test_parts_are_the_whole(window, widths, rows, monkeypatch):
    monkeypatch.setattr(attention_parts, "ROWS", rows)
    require_equal(widths, window, "cpu", torch.float64, 1e-12)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-4), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("window", [None, 30])
def test_parts_are_the_whole_on_a_gpu(window, dtype, bound):
    require_equal((64, 64), window, "cuda", dtype, bound)
