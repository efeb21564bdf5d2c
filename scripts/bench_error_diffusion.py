"""Time and memory of error diffusion by depth, compared with back-propagation in the same network.

    python scripts/bench_error_diffusion.py                          # 2^4 to 2^12 hidden layers of 32 pairs, batch 64
    python scripts/bench_error_diffusion.py --depths 64 129 512 4096
    python scripts/bench_error_diffusion.py --outputs 10 --json scripts/results/error_diffusion.json

Needs only torch. Runs alternate in one process; times and ratios are medians over rounds. On CUDA, times are between two CUDA
events.

forward        forward pass that stores all activities, as in training
update         the complete backward pass of error diffusion: the update of all magnitudes
autograd       autograd's backward pass through the same network
contracted     the part of the update for the weights between hidden layers, of all layers at once
one by one     the same, layer after layer
materialised   the same, computed per sample and then summed over the batch
allocated      materialised, with the time to allocate its memory, as in the article
floor          time to copy as many bytes as an update reads and writes

With --device cuda also "as in the article": host time of the launches of an update, without synchronization.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path

import torch
from bench_common import DEVICE, alternating, arguments, begin, draw_to, median_ratio, plotter, save, timed, verdict
from measured_memory import peak_of
from torch import Tensor

from holotrain.error_diffusion import ErrorDiffusionNetwork
from holotrain.error_diffusion.rules import BACKPROPAGATION, contract, kaneko, slope
from holotrain.reversible.graphs import StepGraphs

COLUMNS = ("forward", "update", "autograd", "contracted", "one by one", "materialised", "allocated", "floor")
BATCHES = (16, 64, 256, 1024)


def half_squares(network: ErrorDiffusionNetwork, x: Tensor, targets: Tensor) -> Tensor:
    return 0.5 * (network(x) - targets).square().sum(1).mean()


def materialised(activities: Tensor, error: Tensor, each: Tensor | None = None) -> Tensor:
    """The same as ``contract``, with a matrix per sample; in ``each``, if given, (L - 1, D, B, C, C)."""
    return torch.mul(kaneko(activities[:-1], error).unsqueeze(-1), slope(activities[1:]).unsqueeze(-2), out=each).sum(2)


def one_by_one(activities: Tensor, error: Tensor) -> Tensor:
    """The same as ``contract``, with one product for each layer."""
    layers, outputs, _, cells = activities.shape
    updates = activities.new_empty(layers - 1, outputs, cells, cells)
    for sources, targets, update in zip(activities[:-1], activities[1:], updates, strict=True):
        torch.bmm(kaneko(sources, error).mT, slope(targets), out=update)
    return updates


def copied(size: int, device: str) -> tuple[Tensor, Tensor]:
    """Two tensors; copying one to the other moves ``size`` bytes."""
    source = torch.ones(size // 8, device=device)
    return torch.empty_like(source), source


def examples(depth: int, batch: int, options) -> tuple[ErrorDiffusionNetwork, Tensor, Tensor]:
    torch.manual_seed(0)
    network = ErrorDiffusionNetwork(options.inputs, options.outputs, options.width, depth).to(options.device)
    x = torch.rand(batch, options.inputs, device=options.device)
    return network, x, torch.randint(2, (batch, options.outputs), device=options.device).float()


def backward_timed(rule: str, network: ErrorDiffusionNetwork, x: Tensor, targets: Tensor, device: str):
    """Times only the backward; the forward runs before, untimed."""
    losses = []

    def forward() -> None:
        network.zero_grad()
        with network.ruled_by(rule):
            losses[:] = [half_squares(network, x, targets)]

    return timed(lambda: losses.pop().backward(), device, forward)


def launched(network: ErrorDiffusionNetwork, x: Tensor, targets: Tensor):
    """The article's way of timing: host time of the launches, which the GPU has not finished yet."""

    def run() -> float:
        network.zero_grad()
        loss = half_squares(network, x, targets)
        torch.cuda.synchronize()
        started = time.perf_counter()
        loss.backward()
        taken = time.perf_counter() - started
        torch.cuda.synchronize()
        return taken

    return run


def depth_row(depth: int, options) -> dict:
    device = options.device
    network, x, targets = examples(depth, options.batch, options)
    activities, error = network.activities(x), torch.randn(options.outputs, options.batch, 1, device=device)
    update_bytes = activities.nbytes + sum(parameter.nbytes for parameter in network.parameters())
    target, source = copied(update_bytes, device)
    contestants = {
        "forward": timed(lambda: half_squares(network, x, targets), device),
        "update": backward_timed("kaneko", network, x, targets, device),
        "autograd": backward_timed(BACKPROPAGATION, network, x, targets, device),
        "contracted": timed(lambda: contract(activities, error), device),
        "one by one": timed(lambda: one_by_one(activities, error), device),
        "floor": timed(lambda: target.copy_(source), device),
    }
    if depth <= options.materialise:
        contestants["allocated"] = timed(lambda: materialised(activities, error), device)
        # Allocated once, because allocation takes longer than the computation.
        each = activities.new_empty(*activities[1:].shape, activities.shape[-1])
        contestants["materialised"] = timed(lambda: materialised(activities, error, each), device)
    if device == "cuda":
        contestants["update, launched"] = launched(network, x, targets)
        step = StepGraphs(lambda x, targets: half_squares(network, x, targets), network)
        contestants["step"] = timed(lambda: half_squares(network, x, targets).backward(), device, network.zero_grad)
        contestants["step, graphed"] = timed(lambda: step(x, targets), device)
    seconds = alternating(contestants, options.rounds)
    row = {"depth": depth, "milliseconds": {name: statistics.median(times) * 1e3 for name, times in seconds.items()}}
    row["autograd_over_update"] = median_ratio(seconds["autograd"], seconds["update"])
    for name in ("one by one", "materialised", "allocated"):
        if name in seconds:
            row[f"{name.replace(' ', '_')}_over_contracted"] = median_ratio(seconds[name], seconds["contracted"])
    row["peak_bytes"] = step_peak(depth, options)
    return row


def step_peak(depth: int, options) -> int:
    """Peak memory of weights, activities, gradients and workspace, all allocated here."""

    def whole() -> None:
        half_squares(*examples(depth, options.batch, options)).backward()

    return peak_of(whole, torch.device(options.device))


def batch_rows(options) -> list[dict]:
    """Extra memory of the contraction, without its result, by batch size."""
    rows = []
    for batch in BATCHES:
        network, x, _ = examples(options.deep, batch, options)
        activities, error = network.activities(x), torch.randn(options.outputs, batch, 1, device=options.device)
        each = {}
        for name, work in (("contracted", contract), ("materialised", materialised)):
            if name == "contracted" or batch <= options.batch:
                peak = peak_of(lambda work=work, a=activities, e=error: work(a, e), torch.device(options.device))
                each[name] = peak - network.hidden.nbytes
        rows.append({"depth": options.deep, "batch": batch, "activities": activities.nbytes, **each})
    return rows


def show(row: dict) -> None:
    times = "".join(
        f"{format(row['milliseconds'][name], '.2f') if name in row['milliseconds'] else '-':>14}" for name in COLUMNS
    )
    found = (row.get(f"{name}_over_contracted") for name in ("one_by_one", "materialised", "allocated"))
    ratios = "".join(f"{'-' if ratio is None else format(ratio, '.1f'):>8}" for ratio in found)
    print(f"{row['depth']:>6}{times}{ratios}{row['peak_bytes'] / 2**20:>12.1f} MiB")
    for name in row["milliseconds"].keys() - set(COLUMNS):
        print(f"{'':>6}  {name}: {row['milliseconds'][name]:.3f} ms")


def draw(rows: list[dict], path: Path) -> None:
    pyplot = plotter()

    figure, axes = pyplot.subplots(figsize=(6.4, 4.6))
    for name in COLUMNS:
        mine = [row for row in rows if name in row["milliseconds"]]
        axes.plot([row["depth"] for row in mine], [row["milliseconds"][name] for row in mine], "o-", label=name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set(xlabel="hidden layers", ylabel="milliseconds")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    draw_to(path, figure, dpi=100)


def main() -> None:
    parser = arguments(__doc__)
    depths = [2**power for power in range(4, 13)]
    parser.add_argument("--depths", type=int, nargs="+", default=depths, help="numbers of hidden layers")
    parser.add_argument("--width", type=int, default=32, help="pairs of cells per layer")
    parser.add_argument("--inputs", type=int, default=64)
    parser.add_argument("--outputs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--materialise", type=int, default=512, help="maximum number of layers for the materialised variant")
    parser.add_argument("--deep", type=int, default=512, help="number of layers for the memory measurement by batch size")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    begun = begin(options)
    print("milliseconds; 1/c, m/c, a/c: one by one, materialised, allocated / contracted")
    print(f"{'layers':>6}{''.join(f'{name:>14}' for name in COLUMNS)}{'1/c':>8}{'m/c':>8}{'a/c':>8}{'peak':>16}")
    rows = []
    for depth in options.depths:
        rows.append(depth_row(depth, options))
        show(rows[-1])
    batches = batch_rows(options)
    print(f"\nMiB in addition to the result, {options.deep} layers")
    print(f"{'batch':>6}{'activities':>14}{'contracted':>14}{'materialised':>14}")
    for row in batches:
        sizes = (row.get(name) for name in ("activities", "contracted", "materialised"))
        print(f"{row['batch']:>6}" + "".join(f"{'-' if size is None else format(size / 2**20, '.1f'):>14}" for size in sizes))
    if "autograd_over_update" in rows[-1] and DEVICE == "cuda":  # launches count most there
        verdict(begun, f"{rows[-1]['depth']} layers: autograd / update", rows[-1]["autograd_over_update"], 20, least=True)
    save(begun | {"rows": rows, "batches": batches}, options.json)
    if options.picture:
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
