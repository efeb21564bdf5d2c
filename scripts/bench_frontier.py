"""Throughput against peak memory of every engine on the same model, and of ``auto`` for a series of memory budgets.

    python scripts/bench_frontier.py                                          # ViT-S, batches of 4
    python scripts/bench_frontier.py --model swin_tiny --batch 2 --json scripts/results/frontier.json --picture frontier.png
    python scripts/bench_frontier.py --model gpt_small --depth 4 --tokens 256 --batch 1     # scaled to a small machine
    python scripts/bench_frontier.py --draw scripts/results/frontier_vit_small_cpu.json     # figures measured before
    python scripts/bench_frontier.py --launches --model llama_1b --batch 1 --tokens 8192 --amp --json launches.json

Needs only torch; revlib and memcnn are included if installed, and --picture needs matplotlib. An engine that does not work on
this machine is named and left out. All engines train the same reversible model; a step is a forward, a backward and a step of
SGD.

The budgets are evenly spaced between the peaks of ``reversible`` and ``autograd``, or ``--shares`` of the latter. For each,
``auto`` times every schedule of a block, chooses by a plan, and is measured like the others: peak memory from PyTorch's
allocator, step times of alternating runs in one process, ratios as medians over rounds.

--launches compares, one after the other, schedules by how their steps are launched: one kernel after the other (eager), as a
CUDA graph (graphed), with compiled blocks (compiled), or both; and the plain model compiled with reduce-overhead. Schedules
that rebuild train the reversible model, the others its plain twin. Each row is saved at once, and says what was allocated and
reserved, and why it failed or why its steps were not captured.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import signal
import statistics
import sys
import time
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
    timed,
    verdict,
    waited,
)
from measured_memory import measured_peak
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain import schedules
from holotrain.models import GPT, RevGPT, RevRoBERTa, RevSwin, RevViT, RoBERTa, Swin, ViT
from holotrain.models.block_schedules import compile_blocks, schedule_blocks, sequences, set_backward
from holotrain.models.layers.attention import Attention, RotaryPositions
from holotrain.models.layers.blocks import AttentionBranch, AveragedStreams, Branch, Reversible, make_sequences
from holotrain.planning import TrainingStep, simulate_step
from holotrain.planning.choice import choose, seconds, stage_of, visits_of
from holotrain.planning.devices import ALLOCATORS
from holotrain.planning.fake_tensors import fake_parameters, fake_tensors
from holotrain.reversible.graphs import WARM_UPS, StepGraphs
from holotrain.reversible.kept_results import KEEPABLE
from holotrain.reversible.side_stream import assuming_a_side_stream


class Gated(Branch):
    """G of a block of a Llama: RMS norm, SwiGLU."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(dim)
        self.gate, self.widen, self.narrow = nn.Linear(dim, hidden), nn.Linear(dim, hidden), nn.Linear(hidden, dim)

    def update(self, x: Tensor) -> Tensor:
        return self.narrow(F.silu(self.gate(x)) * self.widen(x))


class Llama(nn.Module):
    """The blocks of a Llama alone. (B, T, C) -> (B, T, C)."""

    def __init__(self, context: int, dim: int, depth: int, heads: int, hidden: int, backward: str = "autograd") -> None:
        super().__init__()
        attention = [AttentionBranch(nn.RMSNorm(dim), Attention(dim, heads, causal=True, layer=i)) for i in range(depth)]
        branches: Any = [(each, Gated(dim, hidden)) for each in attention]
        (self.blocks,) = make_sequences(self, [branches], backward, streams=AveragedStreams, exchange=True)
        self.rotary = RotaryPositions(context, dim // heads)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x, {"rotation": self.rotary(torch.arange(x.shape[1], device=x.device))})


class RevLlama(Reversible, Llama):
    """Its reversible twin."""


MODELS = {"vit": (ViT, RevViT), "swin": (Swin, RevSwin), "gpt": (GPT, RevGPT), "roberta": (RoBERTa, RevRoBERTa)}
LLAMAS = {"tiny": {"dim": 64, "depth": 2, "heads": 2, "hidden": 128}}
LLAMAS["1b"] = {"dim": 2048, "depth": 16, "heads": 32, "hidden": 8192}


@dataclass
class Shape:
    """A model and its batch."""

    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, ...]]


def shape_of(options, reversible: bool = True) -> Shape:
    name, size = options.model.split("_")
    if name == "llama":
        x = torch.randn(options.batch, options.tokens, LLAMAS[size]["dim"])
        return Shape(functools.partial((Llama, RevLlama)[reversible], context=options.tokens, **LLAMAS[size]), lambda: (x,))
    kind, sizes, batch = MODELS[name][reversible], sizes_of(name)[size], options.batch
    if options.depth:
        sizes = sizes | ({"depths": (options.depth,) * len(sizes["depths"])} if name == "swin" else {"depth": options.depth})
    if name in ("vit", "swin"):
        make = functools.partial(kind, image_size=options.pixels, **sizes)
        return Shape(make, lambda: (torch.zeros(batch, 3, options.pixels, options.pixels),))
    tokens = functools.partial(torch.zeros, batch, options.tokens, dtype=torch.int64)
    if name == "gpt":  # learned positions, because blocks of other engines take no keyword arguments
        make = functools.partial(kind, vocab=options.vocab, context=options.tokens, positions="learned", **sizes)
        return Shape(make, lambda: (tokens(), tokens()))
    make = functools.partial(kind, vocab=options.vocab, context=options.tokens, **sizes)
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


def loss_of(result: Tensor) -> Tensor:
    return result if result.ndim == 0 else result.float().square().mean()


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
        compile_blocks(model)
    apply(model)
    batch = tuple(None if given is None else given.to(place) for given in shape.batch())

    return TrainingStep(
        model=model,
        loss=lambda: loss_of(model(*batch)),
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


LAUNCHES = ("eager", "graphed", "compiled", "both", "reduce-overhead")
WAYS = ("autograd", "checkpoint", "reversible", "pareprop", "compiled", "checkpoint8", "offload")
EXPECTED = [
    ("vit", ("reversible", "graphed"), ("autograd", "eager"), 1.0),
    ("vit", ("reversible", "graphed"), ("autograd", "graphed"), 0.75),
    ("", ("pareprop", "graphed"), ("reversible", "graphed"), 1.0),
    ("llama", ("reversible", "eager"), ("autograd", "eager"), 0.78),
]
"""Of a model: the least speed of a row over that of another, written before either was measured."""


def rows_of(options) -> list[tuple[str, str]]:
    """Schedules and launches, the most telling first."""
    ways = [way for way in WAYS if way != "compiled"]
    found = [(way, launch) for launch in ("eager", "graphed") for way in ways]
    found += [("compiled", "eager"), ("compiled", "graphed")]  # compiling takes longer than all before
    found += [(way, launch) for way in ways for launch in ("compiled", "both")]
    return [row for row in (*found, ("autograd", "reduce-overhead")) if row[1] in options.launches]


def launched(way: str, launch: str, options) -> dict[str, Any]:
    """Speed and memory of steps of SGD."""
    torch.manual_seed(0)
    torch._dynamo.reset()  # of one function it keeps a few versions, and then runs it as it is
    shape, device = shape_of(options, way in schedules.REBUILDING), torch.device(options.device)
    with device:  # a billion weights are drawn there
        model = shape.make().train()
    set_backward(model, way)
    if launch in ("compiled", "both"):
        compile_blocks(model)
    run = torch.compile(model, mode="reduce-overhead") if launch == "reduce-overhead" else model
    batch = [each.to(device) for each in shape.batch()]
    optimizer = torch.optim.SGD(model.parameters(), 1e-4, foreach=device.type == "cuda")

    def loss(*batch: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=options.amp):
            return loss_of(run(*batch))

    graphs = StepGraphs(loss, model) if launch in ("graphed", "both") else None
    differentiate = graphs or (lambda *batch: loss(*batch).backward())

    def step() -> None:
        differentiate(*batch)
        optimizer.step()
        optimizer.zero_grad()

    started = time.perf_counter()
    for _ in range(WARM_UPS + 2):  # the last but one is captured
        step()
    begun = {"seconds_before": time.perf_counter() - started}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    run_some = timed(step, device.type, repeats=options.repeats)
    seconds = [run_some() for _ in range(options.rounds)]
    row = begun | {"seconds": seconds, "samples_per_second": options.batch / statistics.median(seconds)}
    if graphs is not None and graphs.reason is not None:
        row["not_captured"] = graphs.reason
    if device.type == "cuda":
        row |= {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
    return row


def in_time(work: Callable[[], Any], ends: float) -> Any:
    """What the work returns.

    Raises:
        TimeoutError: it is not done when ``time.monotonic()`` has reached ``ends``.
    """

    def end(number: int, frame: object) -> None:
        raise TimeoutError("the time of all rows is over")

    signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, max(ends - time.monotonic(), 1e-3))
    try:
        return work()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def compare_launches(options) -> None:
    """Measures row after row, until the time is over."""
    result = begin(options) | {"rows": {}}
    rows, ends = result["rows"], time.monotonic() + options.seconds
    for way, launch in rows_of(options):
        name, work = f"{way}, {launch}", functools.partial(launched, way, launch, options)
        made, why = those_that_work({name: functools.partial(in_time, work, ends)})
        rows[name] = made.get(name) or {"failed": why[name]}
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
        say_launched(name, rows)
        for model, over, under, expected in EXPECTED:
            pair = [rows.get(", ".join(each), {}) for each in (over, under)]
            there = all("seconds" in row and "not_captured" not in row for row in pair)
            if options.model.startswith(model) and (way, launch) in (over, under) and there:
                ratio = pair[0]["samples_per_second"] / pair[1]["samples_per_second"]
                what = f"{options.model}: speed of {', '.join(over)} / {', '.join(under)}"
                verdict(result, what, ratio, expected, least=True)
        save(result, options.json)


def say_launched(name: str, rows: dict[str, dict[str, Any]]) -> None:
    row, plain = rows[name], rows.get("autograd, eager", {}).get("samples_per_second")
    if "failed" in row:
        return print(f"{name:28}{row['failed']}", flush=True)
    over = row["samples_per_second"] / plain if plain else float("nan")
    memory = "".join(f"{row[key] / 2**20:9.0f} MiB {key}" for key in ("allocated", "reserved") if key in row)
    why = f"; not captured: {row['not_captured']}" if "not_captured" in row else ""
    print(f"{name:28}{row['samples_per_second']:10.2f}/s{over:7.3f} of plain{memory}{why}", flush=True)


NAMES = {
    "autograd": "plain PyTorch",
    "checkpoint": "activation checkpointing",
    "selective checkpoint": "selective checkpointing",
    "offload": "offloading to the CPU",
    "minREV-like": "minREV-like (our rewriting)",
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
    canvas, axes = pyplot.subplots(figsize=(8.6, 6.0))
    right = 1.22 * max(peak for peak, _ in places.values())
    axes.axvspan(0, floor, color="#eeeeee", zorder=0)
    axes.text(floor / 2, 30, f"weights and gradients\n{floor:.0f} MiB", color=grey, ha="center", fontsize=10)
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
        below = 10 * (name in ("revlib", "keep attention", "keep matmul", "store half"))  # beside another point
        axes.annotate(
            NAMES.get(name, name), (peak, speed), (-9 if left else 9, -4 - below), textcoords="offset points",
            color=color, fontsize=10, ha="right" if left else "left",
        )  # fmt: skip
    axes.set(
        xlim=(0, right),
        ylim=(0, 106),
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
        "--model", default="vit_small", help="family and size, such as vit_small; families: vit, swin, roberta, gpt, llama"
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
    parser.add_argument("--launches", nargs="*", choices=LAUNCHES, help="compare launches, these or all, and no budgets")
    parser.add_argument("--repeats", type=int, default=4, help="steps of each round, of launches")
    parser.add_argument("--seconds", type=float, default=1e6, help="after these, the row of launches that runs is the last")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--draw", type=Path, help="figures measured before, to draw again: measures nothing")
    options = parser.parse_args()
    if options.draw:
        return draw(json.loads(options.draw.read_text()), options.picture or options.draw.with_suffix(".png"))
    if options.threads:
        torch.set_num_threads(options.threads)
    gc.freeze()  # the collections before each measurement need not look through all that was imported
    if options.launches is not None:
        options.launches = options.launches or list(LAUNCHES)
        return compare_launches(options)
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
