"""Memory and time of a step of reversible blocks of two streams, with and without tiles along the sequence. Needs only torch.

    python scripts/bench_tiles.py --json scripts/results/tiles_cpu.json
    python scripts/bench_tiles.py --tokens 8192 --tiles 512 1024 --backward reversible
    python scripts/bench_tiles.py --amp --rounds 5

A step is a forward and a backward. Its peak is that of the bytes that it allocates, above weights and gradients, as PyTorch's
allocator reports them, with the scratch memory of libraries. All variants alternate in one process; ratios to the same
schedule without tiles are medians over rounds. On a CPU the time is that of all threads of the process, which other processes
disturb less than the time that passes; both are saved.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable

import torch
from bench_common import DEVICE, alternating, arguments, begin, median_ratio, save, timed
from measured_memory import peak_of as allocated_peak
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.reversible import ReversibleBlock, ReversibleSequence


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.outer, self.heads = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.outer(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))


def mlp(dim: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))


def step_of(options: argparse.Namespace, backward: str, tile: int | None, x: Tensor) -> Callable[[], None]:
    torch.manual_seed(0)
    blocks = (ReversibleBlock(Attention(options.dim, options.heads), mlp(options.dim)) for _ in range(options.depth))
    net = ReversibleSequence(blocks, backward, tile=tile).to(x.device)

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=options.amp):
            y1, y2 = net(x, x)
            loss = (y1 + y2).square().mean()
        loss.backward()

    return step


def watched(step: Callable[[], None], device: str, busy: list[float]) -> Callable[[], float]:
    """Returns the seconds that pass, and adds those that the process computes."""
    run = timed(step, device)

    def both() -> float:
        began = time.process_time()
        passed = run()
        busy.append(time.process_time() - began)
        return passed

    return both


def name_of(backward: str, tile: int | None) -> str:
    return backward if tile is None else f"{backward}, tiles of {tile}"


def measure(options: argparse.Namespace) -> dict:
    x = torch.randn(options.batch, options.tokens, options.dim, device=DEVICE)
    variants = [(backward, tile) for backward in options.backward for tile in (None, *options.tiles)]
    steps = {name_of(*variant): step_of(options, *variant, x) for variant in variants}
    peaks: dict[str, int] = {}
    for name, step in steps.items():
        step()  # makes the gradients
        gc.collect()
        peaks[name] = allocated_peak(step, x.device)
    busy: dict[str, list[float]] = {name: [] for name in steps}
    seconds = alternating({name: watched(step, x.device.type, busy[name]) for name, step in steps.items()}, options.rounds)
    busy = {name: times[1:] for name, times in busy.items()}  # without the round to warm up
    compared = seconds if x.is_cuda else busy
    results = {}
    for backward, tile in variants:
        name, whole = name_of(backward, tile), name_of(backward, None)
        results[name] = {
            "peak_bytes": peaks[name],
            "peak_ratio": peaks[name] / peaks[whole],
            "seconds": statistics.median(compared[name]),
            "time_ratio": median_ratio(compared[name], compared[whole]),
            "passed_ratio": median_ratio(seconds[name], seconds[whole]),
            "times": compared[name],
            "passed": seconds[name],
        }
        said = " ".join(f"{key} {value:.3f}" for key, value in results[name].items() if isinstance(value, float))
        print(f"{name}: {peaks[name] / 2**20:.1f} MiB, {said}")
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--tiles", type=int, nargs="+", default=[512, 256])
    parser.add_argument("--backward", nargs="+", default=["reversible", "checkpoint"])
    parser.add_argument("--amp", action="store_true", help="compute in bf16 under autocast")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    begun = begin(options)
    save(begun | {"results": measure(options)}, options.json)


if __name__ == "__main__":
    main()
