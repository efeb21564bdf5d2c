"""Compares the kernels of the two-step coupling with the several operations of a CPU, bit for bit, in Triton's interpreter.

Not a test by itself: test_reversible_coupling_kernels.py starts it with TRITON_INTERPRET=1, set before Triton is imported, and
with the number of random cases; ``model`` in its place trains a small model.
"""

import math
import random
import sys
from unittest.mock import patch

import torch
from torch import Tensor, nn

from holotrain.reversible import make_reversible, two_step, undo
from holotrain.reversible.grid import Grid
from holotrain.reversible.stack import stacks_in
from holotrain.reversible.two_step import TwoStep, weights

SIZES = (1, 2, 3, 5, 7, 8, 9, 16, 31, 33, 64, 129)
STREAMS, BLOCKS = (torch.float32, torch.float64), (torch.float32, torch.float16, torch.bfloat16)
MOST = 2**13
"""Elements: some programs of the kernel."""
LAYOUTS = ("contiguous", "transposed", "batch last", "sliced", "expanded")


def fused(on: bool):
    return patch.object(two_step, "is_fused", lambda stream: on)


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The values (B, T, C) in memory of that layout; of the last one, those of the first token for all."""
    if layout == "transposed":
        return values.mT.contiguous().mT
    if layout == "batch last":
        return values.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    if layout == "sliced":
        room = torch.full((values.shape[0] + 1, values.shape[1] + 2, values.shape[2] + 3), torch.nan, dtype=values.dtype)
        return room[1:, 1:-1, 3:].copy_(values)
    return values[:, :1].expand(values.shape) if layout == "expanded" else values.contiguous()


def same(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, what
    if expected.dtype == torch.bfloat16:  # the interpreter cuts bits off instead of rounding
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-30, msg=lambda text: f"{what}: {text}")
    else:
        assert torch.equal(found, expected), f"{what}: {(found - expected).abs().max()}"


def check(draw: random.Random) -> None:
    """One random coupling."""
    shape = [draw.choice(SIZES) for _ in range(3)]
    while math.prod(shape) > MOST:
        shape[draw.randrange(3)] = draw.choice(SIZES)
    streams, block = draw.choice(STREAMS), draw.choice(BLOCKS)
    dtype = torch.promote_types(block, torch.float32)
    unit = torch.tensor(2.0 ** -draw.randint(0, 16 if streams == torch.float32 else 40), dtype=streams)
    size = 2.0 ** draw.randint(-3, 4)

    def stream() -> Tensor:
        return laid_out((torch.randn(shape, dtype=streams) * size / unit).round() * unit, draw.choice(LAYOUTS[:3]))

    target, source = stream(), stream()
    update = laid_out((torch.randn(shape) * size).to(block), draw.choice(LAYOUTS))
    sign = torch.tensor([draw.choice((1.0, -1.0)) for _ in range(shape[0])], dtype=streams).view(-1, 1, 1)
    depth, bits = draw.randint(1, 5), [draw.randint(1, 8) for _ in range(4)]
    pair = (weights(bits[:depth], 1)[0], weights(bits[:depth], -1)[0])
    m, following = draw.choice((None, *range(1, 9))), draw.choice((None, *range(1, 9)))
    grad = laid_out(torch.randn(shape, dtype=dtype), draw.choice(LAYOUTS))
    passed = None if following is None else laid_out(torch.randn(shape, dtype=dtype), draw.choice(LAYOUTS))
    narrow = None if block == dtype else laid_out(torch.randn(shape).to(block), draw.choice(LAYOUTS))
    last_use = draw.random() < 0.5
    results = []
    for way in (False, True):
        with fused(way), torch.no_grad():
            earlier = TwoStep(Grid(unit, False), source.to(block), (), sign, pair, None, True)
            coupling = TwoStep(Grid(unit, False), source.to(block), (), sign, pair, m, True, None if m is None else earlier)
            coupling._next_bits, coupling.written_as, coupling._carries = following, block, dtype
            coupled, narrowed = coupling.merged(target, source, update)
            found = [coupled.clone(), narrowed.clone(), coupling.grid.largest]
            if m is not None:
                rebuilt = coupling.undo(coupled, source, update, last_use)
                assert torch.equal(rebuilt, target)
                strides = zip(rebuilt.stride(), target.stride(), shape, strict=True)
                assert all(own == other or length == 1 for own, other, length in strides)
                earlier._x = None
                found.append(earlier.read(rebuilt))
            found += [each for each in coupling.gradients(passed, grad, narrow) if each is not None]
            results.append(found)
    for number, (expected, of_kernels) in enumerate(zip(*results, strict=True)):
        same(of_kernels, expected, f"result {number} of {len(results[0])} of {shape}, {streams}, {block}, m={m}")


class Block(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(16, dtype=dtype), nn.Linear(16, 16, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


def train(dtype: torch.dtype) -> None:
    """Two steps of a model in the kernels and without them, and its gradients against those of stored blocks."""
    torch.manual_seed(0)
    blocks = nn.Sequential(*(Block(dtype) for _ in range(5)))
    x = torch.randn(3, 5, 16, dtype=dtype)
    results = []
    for way, backward in ((False, "reversible"), (True, "reversible"), (True, "autograd")):
        model = make_reversible(nn.ModuleDict({"blocks": blocks}), "blocks", backward=backward)
        torch.manual_seed(1)
        with fused(way):
            for _ in range(2):
                model.zero_grad()
                inputs = x.clone().requires_grad_()
                model["blocks"](inputs).double().square().mean().backward()
        assert all(stack.grid.known for stack in stacks_in(model))
        results.append([inputs.grad, *(parameter.grad.clone() for parameter in blocks.parameters())])
        undo(model)
    # The interpreter does not round to bf16, so there is no model in it.
    for plain, kernels, stored in zip(*results, strict=True):
        same(kernels, plain, "a gradient without kernels")
        assert torch.equal(kernels, stored)


if __name__ == "__main__":
    if sys.argv[1] == "model":
        train(torch.float32)
        train(torch.float16)
    else:
        torch.manual_seed(0)
        draw = random.Random(0)
        for _ in range(int(sys.argv[1])):
            check(draw)
