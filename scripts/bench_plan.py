"""Compares the planned peak memory of a training step with that of a real step, from PyTorch's allocator.

    python scripts/bench_plan.py                                                 # every family, tiny to base, every backward
    python scripts/bench_plan.py --models vit_base gpt_small --precisions bf16 --json scripts/results/plan.json
    python scripts/bench_plan.py --measured scripts/results/cuda/planned_peaks.json   # plans of today, peaks of that file

Needs only torch. A step is a forward, a backward, clipping and a step of AdamW. Peak memory comes from the profiler on a CPU
and from ``max_memory_allocated`` on CUDA. On a CPU it includes the scratch of kernels and libraries, so it lies between the
planned peak and the bound of the plan ("at most"). The seconds are those of the plan. A base model in fp32 needs several GiB at
the default batch of 2.
"""

from __future__ import annotations

import functools
import gc
import json
import time
from pathlib import Path

import torch
from bench_common import DEVICE, arguments, begin, save, sizes_of, verdict
from measured_memory import measured_peak
from torch import Tensor, nn

from holotrain.models import RevGPT, RevMViT, RevRoBERTa, RevSwin, RevViT
from holotrain.planning import Planner, TrainingStep
from holotrain.planning.planner import Size
from holotrain.schedules import SCHEDULES

FAMILIES = {"vit": RevViT, "swin": RevSwin, "mvit": RevMViT, "roberta": RevRoBERTa, "gpt": RevGPT}
MODELS = (
    *("vit_tiny", "vit_small", "vit_base", "swin_nano", "swin_tiny", "swin_base", "mvit_nano", "mvit_tiny", "mvit_base"),
    *("roberta_tiny", "roberta_base", "gpt_tiny", "gpt_small"),
)
MASKED = 0.15


def planner_of(name: str, half: bool, options) -> Planner:
    family, size = name.split("_")
    make, sizes = FAMILIES[family], sizes_of(family)[size]
    images = family in ("vit", "swin", "mvit")
    pixels = 32 if size == "nano" else 224
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
    parser.add_argument("--models", nargs="+", default=MODELS, help="family and size, such as vit_base")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], choices=["fp32", "bf16"])
    parser.add_argument("--backwards", nargs="+", default=tuple(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--measured", help="a JSON of this script, maybe of a GPU: plans what it has measured")
    options = parser.parse_args()
    known = json.loads(Path(options.measured).read_text()) if options.measured else None
    if known:
        vars(options).update({name: value for name, value in known["options"].items() if name != "measured"})
    device = torch.device(options.device)
    measured = (
        {(row["model"], row["precision"], row["backward"]): {"taken": row["taken"]} for row in known["plans"]} if known else {}
    )
    result, rows = begin(options), []
    columns = f"{'planned MiB':>13}{'at most MiB':>13}{'actual MiB':>11}{'error':>8}{'seconds':>9}"
    print(f"{'model':15}{'precision':>10}{'backward':>12}{columns}")
    for name in options.models:
        for precision in options.precisions:
            for backward in options.backwards:
                started = time.perf_counter()
                planner = planner_of(name, precision == "bf16", options)
                footprint = planner.footprint(backward)
                planned, bound = footprint.peak, footprint.bound
                seconds = time.perf_counter() - started
                if (found := measured.get((name, precision, backward))) is None:
                    model = planner.make_model(backward, None).to(device)
                    found = peaks_of(planner.make_step(model, options.batch), device)
                    del model
                gc.collect()
                taken, row = found["taken"], {"model": name, "precision": precision, "backward": backward}
                row |= {"planned": planned, "bound": bound} | found
                rows.append(row | {"error": planned / taken - 1, "seconds": seconds})
                figures = (
                    f"{planned / 2**20:13.1f}{bound / 2**20:13.1f}{taken / 2**20:11.1f}{planned / taken - 1:8.2%}{seconds:9.2f}"
                )
                print(f"{name:15}{precision:>10}{backward:>12}{figures}", flush=True)
                if "reserved" in row:
                    what = f"{name}, {precision}, {backward}: reserved / allocated"
                    verdict(result, what, row["reserved"] / taken, 1.15)
                save(result | {"plans": rows}, options.json)
    worst = max(rows, key=lambda row: abs(row["error"]))
    which = f"{worst['model']}, {worst['precision']}, {worst['backward']}"
    verdict(result, f"largest error of a planned peak ({which})", abs(worst["error"]), 0.05)
    over = [row["bound"] / row["taken"] - 1 for row in rows]
    print(f"at most / actual: {min(over):+.1%} to {max(over):+.1%}")
    save(result | {"plans": rows}, options.json)


if __name__ == "__main__":
    main()
