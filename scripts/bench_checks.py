"""What it costs that every backward checks what it rebuilds: steps with the check against steps without it.

    python scripts/bench_checks.py
    python scripts/bench_checks.py --dim 1024 --heads 16 --batch 8 --tokens 1024 --amp --json scripts/results/cuda/checks.json

Needs only torch. A step is a forward and a backward of two streams on a grid (exact) and without one (two streams). Steps with
and without the check alternate in one process; ratios are medians over rounds.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from unittest.mock import patch

import torch
from bench_common import DEVICE, alternating, arguments, begin, median_ratio, save, timed
from torch import Tensor

from holotrain.models.layers.blocks import transformer_branches
from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.reversible.checks import RebuildChecks


def step_of(network: torch.nn.Module, x: Tensor, amp: bool, checked: bool) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
            loss = sum(network(x, x)).float().square().mean()
        loss.backward()

    def unchecked() -> None:
        with patch.object(RebuildChecks, "of_blocks", lambda *_: None):
            step()

    return step if checked else unchecked


def measure(options: argparse.Namespace) -> dict:
    x, results = torch.randn(options.batch, options.tokens, options.dim, device=DEVICE), {}
    for name, exact in {"exact": True, "two streams": False}.items():
        blocks = [ReversibleBlock(f, g) for f, g in transformer_branches(options.dim, options.depth, options.heads)]
        network = ReversibleSequence(blocks, exact=exact).to(DEVICE)
        steps = {kind: step_of(network, x, options.amp, kind == "checked") for kind in ("unchecked", "checked")}
        seconds = alternating({kind: timed(step, DEVICE) for kind, step in steps.items()}, options.rounds)
        ratio = median_ratio(seconds["checked"], seconds["unchecked"])
        errors = [error.item() for error in network.checks.errors]
        results[name] = {"seconds": seconds, "ratio": ratio, "errors": errors}
        millis = statistics.median(seconds["unchecked"]) * 1e3
        print(f"{name}: {ratio:.4f} of {millis:.1f} ms, error {max(errors):.2g}")
    return results


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
