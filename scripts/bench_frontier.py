"""Throughput against peak memory of every engine on the same model, and of ``auto`` for a series of memory budgets.

    python scripts/bench_frontier.py                                          # ViT-S, batches of 4
    python scripts/bench_frontier.py --model swin_tiny --batch 2 --json scripts/results/frontier.json --picture frontier.png
    python scripts/bench_frontier.py --model gpt_small --depth 4 --tokens 256 --batch 1     # scaled to a small machine
    python scripts/bench_frontier.py --draw scripts/results/frontier_vit_small_cpu.json     # figures measured before

Needs only torch; revlib and memcnn are included if installed, and --picture needs matplotlib. An engine that does not work on
this machine is named and left out. All engines train the same reversible model; a step is a forward, a backward and a step of
SGD.

The budgets are evenly spaced between the peaks of ``reversible`` and ``autograd``, or ``--shares`` of the latter. For each,
``auto`` times every schedule of a block, chooses by a plan, and is measured like the others: peak memory from PyTorch's
allocator, step times of alternating runs in one process, ratios as medians over rounds.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import statistics
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from bench_backward import checkpointed, compiled, memcnn, minrev_like, offloaded, plain, revlib, selectively_checkpointed
from bench_common import (
    DEVICE,
    alternating,
    arguments,
    begin,
    draw_to,
    median_ratio,
    plotter,
    save,
    sizes_of,
    those_that_work,
    verdict,
    waited,
)
from measured_memory import measured_peak
from torch import Tensor, nn

from holotrain.models import RevGPT, RevRoBERTa, RevSwin, RevViT
from holotrain.models.block_schedules import schedule_blocks, sequences
from holotrain.planning import TrainingStep, simulate_step
from holotrain.planning.choice import choose, seconds, stage_of, visits_of
from holotrain.planning.devices import ALLOCATORS
from holotrain.planning.fake_tensors import fake_parameters, fake_tensors
from holotrain.reversible.kept_results import KEEPABLE
from holotrain.reversible.side_stream import assuming_a_side_stream


@dataclass
class Shape:
    """A model and its batch."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]


def shape_of(options) -> Shape:
    name, size = options.model.split("_")
    sizes = sizes_of(name)[size]
    if options.depth:
        sizes = sizes | ({"depths": (options.depth,) * len(sizes["depths"])} if name == "swin" else {"depth": options.depth})
    batch = options.batch
    if name in ("vit", "swin"):
        make = functools.partial({"vit": RevViT, "swin": RevSwin}[name], image_size=options.pixels, **sizes)
        return Shape(make, lambda: (torch.zeros(batch, 3, options.pixels, options.pixels),))
    tokens = functools.partial(torch.zeros, batch, options.tokens, dtype=torch.int64)
    if name == "gpt":  # learned positions, because blocks of other engines take no keyword arguments
        make = functools.partial(RevGPT, vocab=options.vocab, context=options.tokens, positions="learned", **sizes)
        return Shape(make, lambda: (tokens(), tokens()))
    make = functools.partial(RevRoBERTa, vocab=options.vocab, context=options.tokens, **sizes)
    return Shape(make, lambda: (tokens(),))  # use its logits, because the choice of masked words would depend on values


class ExternalModel(nn.Module):
    """A sequence whose blocks are run by another engine."""

    def __init__(self, sequence: nn.Module, engine: Callable) -> None:
        super().__init__()
        self.blocks = sequence.blocks
        self.averages = type(sequence).__name__ == "AveragedStreams"
        self._run = engine([(block.f, block.g) for block in sequence.blocks])

    def forward(self, x: Tensor, *rest: Any) -> Any:
        y1, y2 = self._run(x)
        return (y1 + y2) / 2 if self.averages else (y1, y2)


def foreign(engine: Callable) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        for parent in list(model.modules()):
            for name, child in list(parent.named_children()):
                if child in sequences(model):
                    setattr(parent, name, ExternalModel(child, engine))

    return apply


def ours(**attributes: Any) -> Callable[[nn.Module], None]:
    def apply(model: nn.Module) -> None:
        for sequence in sequences(model):
            for name, value in attributes.items():
                setattr(sequence, name, len(sequence.blocks) // 2 if value == "half" else value)

    return apply


def engines(options) -> dict[str, Callable[[nn.Module], None]]:
    made = {
        "autograd": foreign(plain),
        "checkpoint": foreign(checkpointed),
        "selective checkpoint": foreign(selectively_checkpointed),
        "compile": foreign(compiled),
        "reversible": ours(backward="reversible"),
        "pareprop": ours(backward="pareprop"),
        "store half": ours(backward="reversible", store="half"),
        "keep attention": ours(backward="reversible", keep=("attention",)),
        "keep matmul": ours(backward="reversible", keep=("matmul",)),
    }
    if options.device == "cuda":
        made["offload"] = foreign(offloaded)
    made |= {"minREV-like": foreign(minrev_like), "revlib": foreign(revlib), "memcnn": foreign(memcnn)}
    if options.compiled:
        left_out = ("selective checkpoint", "keep attention", "keep matmul", "memcnn")
        made = {name: make for name, make in made.items() if name not in left_out}
    if options.engines:
        return {name: make for name, make in made.items() if name in {"autograd", "reversible", *options.engines}}
    del made["compile"]
    return made


def make_step(shape: Shape, apply: Callable[[nn.Module], None], options, fake: bool = False) -> TrainingStep:
    """One step of SGD; fake: inside ``fake_tensors()``."""
    torch.manual_seed(0)
    place = torch.device("cpu" if fake else options.device)
    with torch.device("meta") if fake else nullcontext():
        model = shape.make()
    model = fake_parameters(model, place) if fake else model.to(place)
    for sequence in sequences(model):
        for block in sequence.blocks:
            block.exchange = False  # which the other engines do not support
            if options.compiled and not fake:
                block.f.compile()
                block.g.compile()
    apply(model)
    batch = tuple(None if given is None else given.to(place) for given in shape.batch())

    def loss() -> Tensor:
        result = model(*batch)
        return result if result.ndim == 0 else result.float().square().mean()

    return TrainingStep(
        model=model,
        loss=loss,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4, foreach=options.device == "cuda"),
        autocast=functools.partial(torch.autocast, place.type, torch.bfloat16, enabled=options.amp),
        held={"batch": [given for given in batch if given is not None]},
        sequences=sequences(model),
    )


def contestant(step: TrainingStep, device: str) -> Callable[[], float]:
    def whole() -> None:
        step.differentiate()
        step.update()

    return waited(whole, device)


def memory_of(step: TrainingStep, device: torch.device) -> dict[str, int]:
    """Peak bytes of a step; on CUDA also what the allocator reserved, and nothing else may be allocated there."""
    if device.type != "cuda":
        return {"peak": measured_peak(step, device)}
    torch.cuda.empty_cache()
    peak = measured_peak(step, device)
    return {"peak": peak, "reserved": torch.cuda.max_memory_reserved(device)}


class Auto:
    """Chooses schedules for a budget, like ``backward=auto``."""

    def __init__(self, shape: Shape, options) -> None:
        self.shape, self.options = shape, options
        recomputing = "pareprop" if options.device == "cuda" else "reversible"
        keeping = [] if options.compiled else [f"{recomputing}+{result}" for result in KEEPABLE]
        names = [recomputing, *keeping, "checkpoint", "autograd"]
        real = make_step(shape, ours(backward=recomputing), options)
        costs = [seconds(visit, names, real.autocast) for visit in visits_of(real)]
        with fake_tensors():
            step = make_step(shape, ours(backward=recomputing), options, fake=True)
            self.stages = [
                stage_of(visit, cost, step.autocast, ALLOCATORS[options.device])
                for visit, cost in zip(visits_of(step), costs, strict=True)
            ]

    def peak(self, blocks: list[str]) -> int:
        overlaps = assuming_a_side_stream() if self.options.device == "cuda" else nullcontext()
        with overlaps, fake_tensors():
            step = make_step(self.shape, lambda model: schedule_blocks(model, blocks), self.options, fake=True)
            return simulate_step(step, ALLOCATORS[self.options.device]).peak

    def choice(self, budget: int):
        return choose(self.stages, self.peak, budget)


NAMES = {
    "autograd": "plain PyTorch",
    "checkpoint": "activation checkpointing",
    "selective checkpoint": "selective checkpointing",
    "offload": "offloading to the CPU",
    "keep attention": "reversible, keep=attention",
    "keep matmul": "reversible, keep=matmul",
    "store half": "reversible, store=half",
}
"""What the picture calls an engine, where its name alone would not say."""

OURS = ("reversible", "pareprop", "store half", "keep attention", "keep matmul")


def draw(result: dict, path: Path) -> None:
    """Throughput against peak memory: ``auto`` as a line, single engines as points, ours in blue."""
    pyplot = plotter()

    options, engines = argparse.Namespace(**result["options"]), result["engines"]
    fastest = engines["autograd"]["samples_per_second"]
    places = {name: (row["peak"] / 2**20, 100 * row["samples_per_second"] / fastest) for name, row in engines.items()}
    autos = [place for name, place in places.items() if "budget" in engines[name]]
    singles = {name: place for name, place in places.items() if "budget" not in engines[name]}
    with torch.device("meta"):
        floor = 2 * sum(weight.nbytes for weight in shape_of(options).make().parameters()) / 2**20

    host = result["machine"]
    device = host["gpu"] or f"{host['threads']} cores of {host['cpu']}"

    blue, grey = "#1668b8", "#555555"
    canvas, axes = pyplot.subplots(figsize=(8.6, 4.8))
    right = 1.22 * max(peak for peak, _ in places.values())
    low = min(speed for _, speed in places.values())
    axes.axvspan(0, floor, color="#eeeeee", zorder=0)
    axes.text(floor / 2, low + 6, f"weights and gradients\n{floor:.0f} MiB", color=grey, ha="center", fontsize=10)
    axes.plot(*zip(*autos, strict=True), "o-", color=blue, linewidth=2.5, markersize=6, zorder=3)
    peak, speed = autos[len(autos) // 2]
    axes.annotate(
        "holotrain, backward=auto:\none point for each memory budget",
        (peak, speed), (-12, 8), textcoords="offset points", color=blue, fontsize=12, weight="bold", ha="right", va="bottom",
    )  # fmt: skip
    if "pareprop" in singles and abs(singles["pareprop"][0] - singles["reversible"][0]) < 1:
        del singles["pareprop"]  # it worked in turn
    for name, (peak, speed) in singles.items():
        color = blue if name in OURS else grey
        axes.plot(peak, speed, "o" if name in OURS else "s", color=color, markersize=8, zorder=4)
        left = name in ("reversible", "revlib", "memcnn")  # the least memory, where the line begins
        below = 10 * (name in ("revlib", "keep attention", "keep matmul"))  # beside another point
        axes.annotate(
            NAMES.get(name, name), (peak, speed), (-9 if left else 9, -4 - below), textcoords="offset points",
            color=color, fontsize=10, ha="right" if left else "left",
        )  # fmt: skip
    axes.set(
        xlim=(0, right),
        ylim=(low - 3, 106),
        xlabel="peak memory of a training step, MiB  (less is better)",
        ylabel="throughput, % of plain PyTorch",
        title=f"{options.model}, batch {options.batch}, {device}",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    draw_to(path, canvas, dpi=120)


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """The options of a model, its batch and its engines."""
    parser.add_argument(
        "--model", default="vit_small", help="family and size, such as vit_small; families: vit, swin, roberta, gpt"
    )
    parser.add_argument("--depth", type=int, help="number of blocks, of a Swin in each stage; default: that of the model")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--pixels", type=int, default=224)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument(
        "--vocab", type=int, default=8192, help="vocabulary size of text models; small, so that blocks dominate"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="CPU threads of torch's operations")
    parser.add_argument("--amp", action="store_true", help="use bf16 autocast")
    parser.add_argument("--compiled", action="store_true", help="compile f and g with torch.compile")
    parser.add_argument(
        "--engines", nargs="*", help="only these engines, and autograd and reversible; compile is only run if named"
    )
    parser.add_argument("--device", default=DEVICE)


def main() -> None:
    parser = arguments(__doc__)
    add_model_options(parser)
    parser.add_argument("--budgets", type=int, default=10, help="number of budgets of auto")
    parser.add_argument("--shares", type=float, nargs="+", default=[], help="budgets of auto as shares of autograd's peak")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--draw", type=Path, help="figures measured before, to draw again: measures nothing")
    options = parser.parse_args()
    if options.draw:
        return draw(json.loads(options.draw.read_text()), options.picture or options.draw.with_suffix(".png"))
    if options.threads:
        torch.set_num_threads(options.threads)
    gc.freeze()  # the collections before each measurement need not look through all that was imported
    shape, device = shape_of(options), torch.device(options.device)

    def memory(name: str, apply: Callable[[nn.Module], None]) -> dict[str, int]:
        gc.collect()
        taken = memory_of(make_step(shape, apply, options), device)
        print(f"  {name}: {taken['peak'] / 2**20:.1f} MiB", file=sys.stderr)
        return taken

    # All memory is measured before the models that will take turns are made.
    applied = engines(options)
    memories, left_out = those_that_work({name: functools.partial(memory, name, apply) for name, apply in applied.items()})
    if missing := {"autograd", "reversible"} & left_out.keys():
        raise SystemExit(f"nothing to compare with: {', '.join(left_out[name] for name in missing)}")
    least, most = (memories[name]["peak"] for name in ("reversible", "autograd"))
    between = [least + (most - least) * number / max(options.budgets - 1, 1) for number in range(options.budgets)]
    shared = {f"auto, {share:.0%} of autograd": max(least, share * most) for share in options.shares}
    budgets = shared or {f"auto {number + 1}": budget for number, budget in enumerate(between)}
    auto, chosen = Auto(shape, options), {}

    def automatic(name: str, budget: float) -> dict[str, int]:
        chosen[name] = choice = auto.choice(round(budget))
        applied[name] = functools.partial(schedule_blocks, schedules=choice.blocks)
        return memory(name, applied[name])

    autos, without = those_that_work({name: functools.partial(automatic, name, budgets[name]) for name in budgets})
    memories, left_out = memories | autos, left_out | without
    peaks = {name: taken["peak"] for name, taken in memories.items()}

    steps = {name: make_step(shape, applied[name], options) for name in memories}
    contestants = {name: contestant(step, options.device) for name, step in steps.items()}
    times = alternating(contestants, options.rounds)

    figures: dict[str, dict] = {}
    for name, peak in peaks.items():
        row: dict[str, Any] = memories[name] | {
            "seconds": times[name],
            "throughput_over_autograd": median_ratio(times["autograd"], times[name]),
            "samples_per_second": options.batch / statistics.median(times[name]),
        }
        if name in budgets:
            fitting = [other for other in peaks if other not in budgets and peaks[other] <= budgets[name]]
            against = {other: median_ratio(times[other], times[name]) for other in fitting}
            row |= {
                "budget": budgets[name],
                "planned": chosen[name].bound,
                "blocks": dict(Counter(chosen[name].blocks)),
                "over_budget": peak > budgets[name],
                "throughput_over": against,
                "worst": min(against.items(), key=lambda pair: pair[1]),
            }
        figures[name] = row

    print(
        f"\n{'':22}{'peak MiB':>10}{'budget':>10}{'planned':>10}{'samples/s':>11}  lowest ratio to an engine that fits; blocks"
    )
    for name, row in figures.items():
        line = f"{name:22}{row['peak'] / 2**20:10.1f}"
        if "budget" in row:
            other, ratio = row["worst"]
            line += f"{row['budget'] / 2**20:10.1f}{row['planned'] / 2**20:10.1f}{row['samples_per_second']:11.2f}"
            line += f"  {ratio:.3f} ({other}); {', '.join(f'{count} {way}' for way, count in row['blocks'].items())}"
        else:
            line += f"{'':20}{row['samples_per_second']:11.2f}"
        print(line)
    if rows := [row for row in figures.values() if "budget" in row]:
        print(f"over budget: {sum(row['over_budget'] for row in rows)} of {len(rows)}")
        print(f"lowest throughput relative to an engine that fits the same budget: {min(row['worst'][1] for row in rows):.3f}")
        print(f"largest error of a plan: {max(abs(row['planned'] / row['peak'] - 1) for row in rows):.2%}")
    result = begin(options) | {"engines": figures, "left_out": left_out}
    for name, expected in {"pareprop": 0.85, "auto, 60% of autograd": 0.92}.items():
        if row := figures.get(name):
            verdict(result, f"{name}: throughput / autograd", row["throughput_over_autograd"], expected, least=True)
            if "reserved" in row:
                verdict(result, f"{name}: reserved / allocated", row["reserved"] / row["peak"], 1.15)
    save(result, options.json)
    if options.picture:
        draw(result, options.picture)


if __name__ == "__main__":
    main()
