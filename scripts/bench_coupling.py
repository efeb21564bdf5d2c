"""The kernels of the two-step coupling on a GPU: are they what several operations compute, bit for bit, and how fast are they?

    python scripts/bench_coupling.py --json scripts/results/cuda/coupling.json

First random streams of several sizes and dtypes are coupled, undone and differentiated on the GPU, by the kernels and by
several operations. Then both are timed on the streams of a block of Llama's size. Expected, from the bytes that are counted
(bench_counted.py): the kernels take an eighth of the time or less, and reach 70 % of the bandwidth of a copy. Without a GPU
only several operations run.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any
from unittest.mock import patch

import torch
from bench_common import DEVICE, alternating, arguments, begin, median_ratio, save, timed, verdict
from holotrain.reversible.coupling_ops import is_fused
from holotrain.reversible.two_step import TwoStep, weights
from torch import Tensor

from holotrain.reversible import two_step
from holotrain.reversible.grid import Grid

BYTES = 4 + 4 + 2 + 4 + 2, 4 + 4 + 2 + 4, 4 + 2 + 4 + 4 + 4 + 2
"""Read and written for each element by the forward, its undoing and its gradients: streams in fp32, a block in bf16."""

SHAPES = ((1, 1), (3, 17), (4, 64, 96), (2, 33, 7), (8, 256, 768))

EXPECTED = {"time_of_kernels": 1 / 8, "share_of_bandwidth": 0.7}


class Case:
    """A coupling of random streams.

    Args:
        streams, block: the dtypes of the streams and of the block.
    """

    def __init__(self, shape: tuple[int, ...], streams: torch.dtype, block: torch.dtype, bits: int) -> None:
        unit = torch.tensor(2.0**-16, dtype=streams, device=DEVICE)
        self.target, self.source = (self._stream(shape, unit) for _ in range(2))
        self.update = torch.randn(shape, device=DEVICE).to(block)
        sign = torch.where(torch.rand(shape[0], *([1] * (len(shape) - 1)), device=DEVICE) < 0.5, 1.0, -1.0).to(streams)
        pair = (weights([bits] * 4, 1)[0], weights([bits] * 4, -1)[0])
        self.coupling = TwoStep(Grid(unit, False), self.source.to(block), (), sign, pair, bits, True)
        self.coupling.written_as, self.coupling._carries, self.coupling._next_bits = block, torch.float32, bits
        self.grad, self.passed = (torch.randn(shape, device=DEVICE) for _ in range(2))
        self.narrow = None if block == torch.float32 else torch.randn(shape, device=DEVICE).to(block)

    @staticmethod
    def _stream(shape: tuple[int, ...], unit: Tensor) -> Tensor:
        return (torch.randn(shape, dtype=unit.dtype, device=DEVICE) / unit).round() * unit

    def forward(self) -> tuple[Tensor, Tensor]:
        return self.coupling.merged(self.target, self.source, self.update)

    def undo(self, coupled: Tensor) -> Tensor:
        return self.coupling.undo(coupled, self.source, self.update)

    def gradients(self) -> tuple[Tensor | None, ...]:
        return self.coupling.gradients(self.passed, self.grad, self.narrow)


def differing() -> list[str]:
    """The cases in which kernels and several operations differ."""
    found = []
    dtypes = itertools.product((torch.float32, torch.float64), (torch.float32, torch.float16, torch.bfloat16))
    for (streams, block), shape, bits in itertools.product(dtypes, SHAPES, (1, 3, 8)):
        case, results = Case(shape, streams, block, bits), []
        for fused in (False, is_fused(case.source)):
            with patch.object(two_step, "is_fused", lambda stream, fused=fused: fused), torch.no_grad():
                coupled, narrow = case.forward()
                back = case.undo(coupled)
                results.append([coupled, narrow, back, *filter(torch.is_tensor, case.gradients())])
        same = all(torch.equal(*pair) for pair in zip(*results, strict=True))
        if not same or not torch.equal(results[1][2], case.target):
            found.append(f"{shape}, {streams}, {block}, {bits} bits")
    return found


def times(shape: tuple[int, ...], rounds: int) -> dict[str, Any]:
    case = Case(shape, torch.float32, torch.bfloat16, 2)
    copied = torch.empty_like(case.source)
    contestants = {"copy": timed(lambda: copied.copy_(case.source), DEVICE, repeats=10)}
    with torch.no_grad():
        ways = {"several operations": False} | ({"kernels": True} if is_fused(case.source) else {})
        for way, fused in ways.items():

            def step(fused: bool = fused) -> None:
                with patch.object(two_step, "is_fused", lambda stream: fused):
                    coupled, _ = case.forward()
                    case.undo(coupled)
                    case.gradients()

            contestants[way] = timed(step, DEVICE, repeats=10)
        seconds = alternating(contestants, rounds)
    found: dict[str, Any] = {
        "shape": shape,
        "milliseconds": {way: statistics.median(each) * 1e3 for way, each in seconds.items()},
    }
    if "kernels" in seconds:
        bandwidth = 8 * case.source.numel() / statistics.median(seconds["copy"])
        reached = sum(BYTES) * case.source.numel() / statistics.median(seconds["kernels"])
        found["time_of_kernels"] = median_ratio(seconds["kernels"], seconds["several operations"])
        found["share_of_bandwidth"] = reached / bandwidth
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--dim", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    result = begin(options)
    result["differing"] = differing()
    print(*result["differing"], sep="\n")
    verdict(result, "cases in which kernels and several operations differ", len(result["differing"]), 0)
    result["times"] = found = times((1, options.tokens, options.dim), options.rounds)
    print(", ".join(f"{way} {milliseconds:.3f} ms" for way, milliseconds in found["milliseconds"].items()))
    for name, expected in EXPECTED.items():
        if name in found:
            verdict(result, name.replace("_", " "), found[name], expected, least=name.startswith("share"))
    save(result, options.json)


if __name__ == "__main__":
    main()
