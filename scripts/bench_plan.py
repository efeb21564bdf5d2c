"""Compares the planned peak memory of a training step with that of a real step, from PyTorch's allocator.

    python scripts/bench_plan.py                                                 # every family, tiny to base, every backward
    python scripts/bench_plan.py --models vit_base gpt_small --precisions bf16 --json scripts/results/plan.json
    python scripts/bench_plan.py --measured scripts/results/cuda/planned_peaks.json   # plans of today, peaks of that file
    python scripts/bench_plan.py --models plain_vit_small vit_small --pixels 224 384 1024 --batch 4   # large images

Needs only torch. A step is a forward, a backward, clipping and a step of AdamW. Peak memory comes from the profiler on a CPU
and from ``max_memory_allocated`` on CUDA. On a CPU it includes the scratch of kernels and libraries, so it lies between the
planned peak and the bound of the plan ("at most"). The seconds are those of the plan. A base model in fp32 needs several GiB at
the default batch of 2.
"""

from __future__ import annotations

import functools
import gc
import itertools
import json
import time
from pathlib import Path

import torch
from bench_common import DEVICE, arguments, begin, save, sizes_of, verdict
from measured_memory import measured_peak
from torch import Tensor, nn

from holotrain.models import RevGPT, RevMViT, RevRoBERTa, RevSwin, RevViT, ViT
from holotrain.planning import Planner, TrainingStep
from holotrain.planning.planner import Size
from holotrain.schedules import PLAIN, SCHEDULES

FAMILIES = {"plain_vit": ViT, "vit": RevViT, "swin": RevSwin, "mvit": RevMViT, "roberta": RevRoBERTa, "gpt": RevGPT}
MODELS = (
    *("vit_tiny", "vit_small", "vit_base", "swin_nano", "swin_tiny", "swin_base", "mvit_nano", "mvit_tiny", "mvit_base"),
    *("roberta_tiny", "roberta_base", "gpt_tiny", "gpt_small"),
)
MASKED = 0.15


def planner_of(name: str, pixels: int, half: bool, options) -> Planner:
    family, size = name.rsplit("_", 1)
    make, sizes = FAMILIES[family], sizes_of(family.removeprefix("plain_"))[size]
    images = family not in ("roberta", "gpt")
    pixels = min(pixels, 32) if size == "nano" else pixels
    more = {"image_size": pixels} if images else {"vocab": 50257, "context": options.tokens}
    share = round(MASKED * options.tokens) / options.tokens
    return Planner(
        lambda backward, depth: make(**sizes, **more, backward=backward),
        functools.partial(make_step, family, pixels if images else None, half, options),
        options.device,
        Size("batch", options.batch),
        selected=share,
    )


def make_step(family: str, pixels: int | None, half: bool, options, model: nn.Module, size: int) -> TrainingStep:
    place = next(model.parameters()).device
    shape = (size, 3, pixels, pixels) if pixels else (size, options.tokens)
    batch = [torch.zeros(shape, dtype=torch.float32 if pixels else torch.int64, device=place)]
    targets = torch.zeros(size if pixels else shape, dtype=torch.int64, device=place)

    def loss() -> Tensor:
        if pixels:
            return nn.functional.cross_entropy(model(*batch), targets)
        if family == "gpt":
            return model(*batch, targets)
        # The assumed fraction of masked words, evenly spread.
        places = torch.arange(options.tokens, device=place) < round(MASKED * options.tokens)
        return model(*batch, None, targets.masked_fill(~places, -100))

    return TrainingStep(
        model=model,
        loss=loss,
        optimizer=torch.optim.AdamW(model.parameters(), foreach=options.device == "cuda"),
        autocast=functools.partial(torch.autocast, place.type, torch.bfloat16, enabled=half),
        clip=1.0,
        held={"batch": [*batch, targets]},
    )


def peaks_of(step: TrainingStep, device: torch.device) -> dict[str, int]:
    """The peak bytes of a step, and on a GPU what its allocator reserved meanwhile; nothing else should be there."""
    if device.type != "cuda":
        return {"taken": measured_peak(step, device)}
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return {"taken": measured_peak(step, device), "reserved": torch.cuda.max_memory_reserved(device)}


def main() -> None:
    parser = arguments(__doc__)
    known_models = [f"{name}_{size}" for name in FAMILIES for size in sizes_of(name.removeprefix("plain_"))]
    parser.add_argument(
        "--models", nargs="+", default=MODELS, choices=known_models, metavar="MODEL", help=", ".join(known_models)
    )
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--backwards", nargs="+", default=tuple(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--pixels", nargs="+", type=int, default=[224], help="height and width of an image")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--measured", help="a JSON of this script, maybe of a GPU: plans what it has measured")
    options = parser.parse_args()
    known = json.loads(Path(options.measured).read_text()) if options.measured else None
    if known:
        vars(options).update({name: value for name, value in known["options"].items() if name != "measured"})
    measured = {}
    for row in known["plans"] if known else []:
        case = row["model"], row.get("pixels", 224), row["precision"], row["backward"]
        measured[case] = {"taken": row["taken"]}
    result, rows = begin(options), []
    columns = f"{'planned MiB':>13}{'at most MiB':>13}{'actual MiB':>11}{'error':>8}{'seconds':>9}"
    print(f"{'model':15}{'pixels':>7}{'precision':>10}{'backward':>12}{columns}")
    for case in itertools.product(options.models, options.pixels, options.precisions, options.backwards):
        name, _, precision, backward = case
        if name.startswith("plain_") and backward not in PLAIN:
            continue
        row = row_of(*case, measured.get(case), options)
        rows.append(row)
        if "reserved" in row:
            what = f"{name}, {precision}, {backward}: reserved / allocated"
            verdict(result, what, row["reserved"] / row["taken"], 1.15)
        save(result | {"plans": rows}, options.json)
    worst = max(rows, key=lambda row: abs(row["error"]))
    which = f"{worst['model']}, {worst['precision']}, {worst['backward']}"
    verdict(result, f"largest error of a planned peak ({which})", abs(worst["error"]), 0.05)
    over = [row["bound"] / row["taken"] - 1 for row in rows]
    print(f"at most / actual: {min(over):+.1%} to {max(over):+.1%}")
    save(result | {"plans": rows}, options.json)


def row_of(name: str, pixels: int, precision: str, backward: str, found: dict[str, int] | None, options) -> dict[str, object]:
    """A line of the table: plans a step, and runs it where nothing was ``found`` by an earlier run."""
    started = time.perf_counter()
    planner = planner_of(name, pixels, precision == "bf16", options)
    footprint = planner.footprint(backward)
    planned, bound = footprint.peak, footprint.bound
    seconds = time.perf_counter() - started
    if found is None:
        device = torch.device(options.device)
        model = planner.make_model(backward, None).to(device)
        found = peaks_of(planner.make_step(model, options.batch), device)
        del model
    gc.collect()
    error = planned / found["taken"] - 1
    figures = f"{planned / 2**20:13.1f}{bound / 2**20:13.1f}{found['taken'] / 2**20:11.1f}{error:8.2%}{seconds:9.2f}"
    print(f"{name:15}{pixels:7}{precision:>10}{backward:>12}{figures}", flush=True)
    row = {"model": name, "pixels": pixels, "precision": precision, "backward": backward, "planned": planned, "bound": bound}
    return row | found | {"error": error, "seconds": seconds}


if __name__ == "__main__":
    main()
