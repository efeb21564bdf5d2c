"""The largest batch of each engine within a budget of memory, and its throughput there.

    python scripts/bench_budget.py --model vit_small --memory 16 24 40 --amp
    python scripts/bench_budget.py --model vit_tiny --depth 4 --pixels 64 --memory 0.25       # scaled to a small machine

Needs only torch; revlib and memcnn are included if installed. An engine that does not work on this machine is named and left
out. Models, engines and the step are those of bench_frontier.py. A batch fits if the peak of its step does. On CUDA a process
can also reserve no more than the budget, so what fragmentation costs counts. Batches are found to within a sixteenth of their
size. ``auto`` is given the largest batch of each other engine in turn, and its fastest choice is shown.

One engine after the other is timed, since two of them would not fit. Throughput comes from the median step.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import math
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from bench_common import NOTHING_FITS, arguments, begin, in_short, save, those_that_work, verdict
from bench_frontier import Auto, add_model_options, contestant, engines, make_step, shape_of
from measured_memory import measured_peak
from torch import nn

from holotrain.models.block_schedules import schedule_blocks

GIB = 2**30
PRECISION = 16
"""The largest batch is found to within this part of it."""
LEAP = 16
"""How many times as large a batch is tried at most, since a line through two small batches is not exact."""


def with_batch(options: argparse.Namespace, batch: int) -> argparse.Namespace:
    given = copy.copy(options)
    given.batch = batch
    return given


def peak(apply: Callable[[nn.Module], None], options: argparse.Namespace) -> float:
    """The bytes of a step; infinite if it runs out of memory."""
    device = torch.device(options.device)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    try:
        return measured_peak(make_step(shape_of(options), apply, options), device)
    except torch.OutOfMemoryError:
        return float("inf")


def largest_batch(apply: Callable[[nn.Module], None], options: argparse.Namespace, budget: int) -> int:
    """0 if not even one sample fits. Memory is nearly a straight line over the batch, so the line finds it in a few steps."""
    peaks: dict[int, float] = {}
    low, high, guess = 0, options.most + 1, 1
    while high - low > max(1, low // PRECISION):
        peaks[guess] = peak(apply, with_batch(options, guess))
        low, high = (guess, high) if peaks[guess] <= budget else (low, guess)
        known = sorted(batch for batch, taken in peaks.items() if math.isfinite(taken))[-2:]
        if len(known) < 2:
            guess = 2 * low
            continue
        fewer, more = known
        slope = max((peaks[more] - peaks[fewer]) / (more - fewer), 1)
        nearest = max(1, low // PRECISION)
        guess = int(max(more + (budget - peaks[more]) // slope, low + nearest))
        guess = min(guess, max(high - nearest, low + 1), LEAP * low)
    return low


def measured(apply: Callable[[nn.Module], None], options: argparse.Namespace) -> dict[str, Any]:
    """Throughput and memory of steps with this batch."""
    gc.collect()
    if options.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    run = contestant(make_step(shape_of(options), apply, options), options.device)
    run()
    seconds = [run() for _ in range(options.rounds)]
    row = {"batch": options.batch, "seconds": seconds, "samples_per_second": options.batch / statistics.median(seconds)}
    if options.device == "cuda":
        row |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return row


def automatic(batches: set[int], options: argparse.Namespace, budget: int) -> dict[str, Any] | None:
    """The fastest of what ``auto`` chooses for these batches; None if none fits."""
    rows = []
    for batch in sorted(batches):
        given = with_batch(options, batch)
        try:
            choice = Auto(shape_of(given), given).choice(budget)
            rows.append(measured(functools.partial(schedule_blocks, schedules=choice.blocks), given))
            rows[-1]["blocks"] = dict(Counter(choice.blocks))
        except (torch.OutOfMemoryError, ValueError) as error:
            print(f"  auto, batch {batch}: {in_short(error)}", file=sys.stderr)
    return max(rows, key=lambda row: row["samples_per_second"], default=None)


def main() -> None:
    parser = arguments(__doc__)
    add_model_options(parser)
    parser.add_argument("--memory", type=float, nargs="+", default=[16, 24, 40], help="budgets in GiB")
    parser.add_argument("--most", type=int, default=2**20, help="the largest batch that is tried")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)

    gc.freeze()  # the collections before each measurement need not look through all that was imported
    begun, budgets = begin(options), {}
    for gib in options.memory:
        budget = int(gib * GIB)
        if options.device == "cuda":
            if (share := budget / torch.cuda.get_device_properties(0).total_memory) > 1:
                print(f"{gib:g} GiB: left out, the GPU has less")
                continue
            torch.cuda.set_per_process_memory_fraction(share)

        def row_of(name: str, apply: Callable[[nn.Module], None], budget: int = budget) -> dict[str, Any]:
            batch = largest_batch(apply, options, budget)
            print(f"  {name}: {batch} samples", file=sys.stderr)
            if not batch:
                raise torch.OutOfMemoryError(NOTHING_FITS)
            return measured(apply, with_batch(options, batch))

        makers = {name: functools.partial(row_of, name, apply) for name, apply in engines(options).items()}
        rows, left_out = those_that_work(makers)
        if auto := automatic({row["batch"] for row in rows.values()}, options, budget):
            rows["auto"] = auto
        budgets[f"{gib:g} GiB"] = {"engines": rows, "left_out": left_out}
        print(f"\n{gib:g} GiB\n{'':22}{'batch':>8}{'samples/s':>12}{'over autograd':>15}")
        plain = rows.get("autograd", {}).get("samples_per_second")
        for name, row in rows.items():
            over = f"{row['samples_per_second'] / plain:.2f}" if plain else "autograd does not fit"
            print(f"{name:22}{row['batch']:8}{row['samples_per_second']:12.1f}{over:>15}")
        ours = max(
            (row["samples_per_second"] for name, row in rows.items() if name in ("pareprop", "reversible", "auto")), default=0.0
        )
        if plain:  # which otherwise does not fit
            verdict(begun, f"{gib:g} GiB: the fastest of ours / autograd", ours / plain, 1.5, least=True)
        save(begun | {"budgets": budgets}, options.json)


if __name__ == "__main__":
    main()
