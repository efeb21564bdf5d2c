"""The longest sequence, the deepest model and the largest batch whose training step fits into some memory, for each method.

    python scripts/bench_fits.py --json scripts/results/fits_cpu.json
    python scripts/bench_fits.py --shapes llama --memory 4 24 --methods checkpoint "2 bits"

Needs only torch. The step is one of AdamW in fp32 on plain pre-norm blocks without embedding and head, planned on tensors that
have no values (holotrain.planning), as on a CPU: weights, gradients, optimizer state and activations. Of batch, tokens and
depth one is the largest that fits, and the others are those of the shape. The plan of that size fits, and the plan of the next
does not. Scratch memory of libraries comes in addition. --confirm runs a step of each size found and measures it.

Methods: those of bench_make_reversible.py, and 2 bits with the optimizer's step in the backward, so that gradients are never
all in memory.
"""

from __future__ import annotations

import time

import torch
from bench_common import arguments, begin, save
from bench_make_reversible import METHODS, SHAPES, Stack

from holotrain.optimizers import InBackward
from holotrain.planning import simulate_step
from holotrain.planning.fake_tensors import fake_parameters, fake_tensors
from holotrain.planning.memory_plan import largest
from holotrain.planning.training_step import TrainingStep, measured_peak

SIZES = {
    "vit": {"batch": 32, "tokens": 197, "depth": 12},
    "gpt2": {"batch": 1, "tokens": 1024, "depth": 12},
    "llama": {"batch": 1, "tokens": 1024, "depth": 12},
    "llama, LoRA": {"batch": 1, "tokens": 1024, "depth": 12},
}
"""The sizes that stay while one of them grows."""

IN_BACKWARD = "2 bits, in the backward"
CONTESTANTS = ("autograd", "checkpoint", "selective", "4 bits", "2 bits", "1 bit", IN_BACKWARD)


def training_step(method: str, shape: str, batch: int, tokens: int, depth: int, device: str) -> TrainingStep:
    name, _, lora = shape.partition(", ")
    with torch.device(device):
        net = Stack(depth, SHAPES[name] | {"lora": bool(lora)})
    if device == "meta":
        net = fake_parameters(net, torch.device("cpu"))
    run = METHODS[method.partition(",")[0]](net)
    x = torch.zeros(batch, tokens, SHAPES[name]["dim"])
    optimizer = torch.optim.AdamW(net.parameters())
    if method == IN_BACKWARD:
        optimizer = InBackward(optimizer)
    return TrainingStep(net, lambda: run(x).square().mean(), optimizer, held={"x": [x]})


def peak(method: str, shape: str, **sizes: int) -> int:
    """Bytes of a training step, by the plan."""
    with fake_tensors():
        return simulate_step(training_step(method, shape, **sizes, device="meta")).peak


def largest_size(method: str, shape: str, name: str, budget: int) -> int:
    """The largest size that fits."""
    sizes = SIZES[shape]
    return largest(lambda size: peak(method, shape, **sizes | {name: size}), budget, start=sizes[name])


def confirm(method: str, shape: str, name: str, size: int, budget: int) -> float:
    """Runs a step of that size. Returns its peak, with the scratch memory of libraries, as a share of the budget."""
    step = training_step(method, shape, **SIZES[shape] | {name: size}, device="cpu")
    return measured_peak(step, torch.device("cpu")) / budget


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--memory", type=float, nargs="+", default=[8], help="GiB")
    parser.add_argument("--methods", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--columns", nargs="+", choices=["tokens", "depth", "batch"], default=["tokens", "depth", "batch"])
    parser.add_argument("--confirm", action="store_true", help="run a step of each size found, on this machine")
    options = parser.parse_args()
    begun, found = begin(options), {}
    for shape in options.shapes:
        for gibibytes in options.memory:
            print(f"{shape}, {gibibytes:g} GiB; {', '.join(f'{name} {size}' for name, size in SIZES[shape].items())}")
            for method in options.methods:
                started = time.monotonic()
                budget = int(gibibytes * 2**30)
                row = {name: largest_size(method, shape, name, budget) for name in options.columns}
                figures = ", ".join(f"{name} {size}" for name, size in row.items())
                print(f"  {method}: {figures} ({time.monotonic() - started:.0f} s)", flush=True)
                if options.confirm:
                    row["measured"] = {name: confirm(method, shape, name, size, budget) for name, size in row.items()}
                    print(f"    measured, of the budget: {row['measured']}", flush=True)
                found.setdefault(shape, {}).setdefault(f"{gibibytes:g} GiB", {})[method] = row
            save(begun | {"results": found}, options.json)


if __name__ == "__main__":
    main()
