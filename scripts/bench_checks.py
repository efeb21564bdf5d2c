"""What it costs that every backward checks what it rebuilds: steps with the check against steps without it.

    python scripts/bench_checks.py
    python scripts/bench_checks.py --dim 1024 --heads 16 --batch 8 --tokens 1024 --amp --json scripts/results/cuda/checks.json

Needs only torch. A step is a forward and a backward of blocks that make_reversible coupled (two-step), of two streams on a
grid (exact) and without one (two streams). Steps with and without the check alternate in one process; ratios are medians over
rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from unittest.mock import patch

import torch
from bench_common import DEVICE, alternating, arguments, begin, median_ratio, save, timed
from bench_make_reversible import SHAPES, Stack
from holotrain.reversible.stack import stacks_in
from torch import Tensor

from holotrain.models.layers.blocks import transformer_branches
from holotrain.reversible import ReversibleBlock, ReversibleSequence, make_reversible
from holotrain.reversible.checks import RebuildChecks


def two_step(depth: int, dim: int, heads: int) -> Callable[[Tensor], Tensor]:
    return make_reversible(Stack(depth, SHAPES["gpt2"] | {"dim": dim, "heads": heads}), "blocks", bits=4)


def two_streams(depth: int, dim: int, heads: int, exact: bool = False) -> Callable[[Tensor], Tensor]:
    blocks = [ReversibleBlock(f, g) for f, g in transformer_branches(dim, depth, heads)]
    return ReversibleSequence(blocks, exact=exact)


NETWORKS = {
    "two-step": two_step,
    "exact": lambda *sizes: two_streams(*sizes, exact=True),
    "two streams": two_streams,
}


def step_of(network: torch.nn.Module, x: Tensor, amp: bool, checked: bool) -> Callable[[], None]:
    given = (x, x) if isinstance(network, ReversibleSequence) else (x,)

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
            y = network(*given)
            loss = (y if isinstance(y, Tensor) else sum(y)).float().square().mean()
        loss.backward()

    def unchecked() -> None:
        with patch.object(RebuildChecks, "of_blocks", lambda *_: None):
            step()

    return step if checked else unchecked


def measure(options: argparse.Namespace) -> dict:
    x, results = torch.randn(options.batch, options.tokens, options.dim, device=DEVICE), {}
    for name, make in NETWORKS.items():
        network = make(options.depth, options.dim, options.heads).to(DEVICE)
        steps = {kind: step_of(network, x, options.amp, kind == "checked") for kind in ("unchecked", "checked")}
        seconds = alternating({kind: timed(step, DEVICE) for kind, step in steps.items()}, options.rounds)
        ratio = median_ratio(seconds["checked"], seconds["unchecked"])
        errors = [error.item() for error in checks_of(network).errors]
        results[name] = {"seconds": seconds, "ratio": ratio, "errors": errors}
        millis = statistics.median(seconds["unchecked"]) * 1e3
        print(f"{name}: {ratio:.4f} of {millis:.1f} ms, error {max(errors):.2g}")
    return results


def checks_of(network: torch.nn.Module) -> RebuildChecks:
    return network.checks if isinstance(network, ReversibleSequence) else stacks_in(network)[0].checks


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--amp", action="store_true", help="bf16 autocast")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    save(begin(options) | {"results": measure(options)}, options.json)


if __name__ == "__main__":
    main()
