"""Step time and peak memory of RevViT under each backward schedule, on the same work.

    python scripts/bench_backward.py                     # width 384, batches of 16 images of 224x224
    python scripts/bench_backward.py --json scripts/results/backward_cpu.json

Step times: one process, the schedules in turn, medians of the ratios round by round. Peak memory: a fresh process for each
schedule and depth; on CUDA the allocator's figures, on a CPU the resident peak of one training step above what is resident
before it (weights, gradients and optimizer state are all there by then). On a CPU glibc is told to give freed memory back
(MALLOC_MMAP_THRESHOLD_), or its fragmentation, not the activations, would be measured.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from bench_common import alternating, machine, median_ratio, save

sys.path.insert(0, str(Path(__file__).parents[1]))

from holotrain.models import RevViT

SCHEDULES = ("autograd", "checkpoint", "reversible")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--depth", type=int, default=12, help="blocks, for the step times")
    parser.add_argument("--depths", type=int, nargs=2, default=(6, 24), help="blocks, for the growth of memory")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--image-size", type=int, default=224)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--measure", nargs=2, metavar=("SCHEDULE", "DEPTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(step_bytes(options, options.measure[0], int(options.measure[1]))))
        return

    result = {"machine": machine(), "options": {k: v for k, v in vars(options).items() if k not in ("json", "measure")}}
    print(json.dumps(result["machine"]))
    result["step"] = step_times(options)
    result["memory"] = memory_growth(options)
    save(result, options.json)


def training_step(options, schedule: str, depth: int):
    """A function that takes one training step (AdamW) and waits for it."""
    torch.manual_seed(0)
    model = RevViT(dim=options.dim, heads=options.heads, depth=depth, image_size=options.image_size, backward=schedule)
    model.to(options.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images = torch.randn(options.batch, 3, options.image_size, options.image_size, device=options.device)
    labels = torch.randint(0, 1000, (options.batch,), device=options.device)

    def step() -> float:
        started = time.perf_counter()
        optimizer.zero_grad(set_to_none=False)
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        if options.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    return step


def step_times(options) -> dict:
    seconds = alternating({name: training_step(options, name, options.depth) for name in SCHEDULES}, options.rounds)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = {
        "reversible / autograd": median_ratio(seconds["reversible"], seconds["autograd"]),
        "reversible / checkpoint": median_ratio(seconds["reversible"], seconds["checkpoint"]),
        "checkpoint / autograd": median_ratio(seconds["checkpoint"], seconds["autograd"]),
    }
    print(f"\nstep, {options.depth} blocks of width {options.dim}, batch {options.batch}")
    for name, value in medians.items():
        print(f"  {name:<12}{value:8.3f} s{options.batch / value:10.1f} images/s")
    for name, value in ratios.items():
        print(f"  {name:<26}{value:6.3f}")
    return {"seconds": seconds, "median_seconds": medians, "ratios": ratios}


def step_bytes(options, schedule: str, depth: int) -> int:
    """The peak of one step above what stands in memory before it, measured in a process of its own."""
    step = training_step(options, schedule, depth)
    step()
    step()
    if options.device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        return torch.cuda.max_memory_allocated() - before
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the resident peak starts anew from here
    step()
    return resident("VmHWM") - before


def resident(figure: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(figure))
    return int(line.split()[1]) * 1024


def memory_growth(options) -> dict:
    shallow, deep = options.depths
    common = [sys.executable, __file__, "--device", options.device]
    common += [f"--{name}={getattr(options, name.replace('-', '_'))}" for name in ("dim", "heads", "batch", "image-size")]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    peaks: dict[str, dict[int, int]] = {}
    print(f"\npeak of a step above weights, gradients and optimizer state, {shallow} and {deep} blocks")
    for schedule in SCHEDULES:
        peaks[schedule] = {}
        for depth in (shallow, deep):
            command = [*common, "--measure", schedule, str(depth)]
            output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
            peaks[schedule][depth] = int(output)
        low, high = (peaks[schedule][depth] / 2**20 for depth in (shallow, deep))
        print(f"  {schedule:<12}{low:9.1f} MiB{high:9.1f} MiB   growth {high - low:9.1f} MiB")
    growth = {name: peak[deep] - peak[shallow] for name, peak in peaks.items()}
    share = {name: value / growth["autograd"] for name, value in growth.items()}
    print("  growth over autograd's: " + ", ".join(f"{name} {value:.2%}" for name, value in share.items()))
    return {"peak_bytes": peaks, "growth_bytes": growth, "growth_over_autograd": share}


if __name__ == "__main__":
    main()
