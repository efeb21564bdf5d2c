"""Time of holographic weight synthesis, for vectors and for whole models, compared with an optimizer step and a training step.

    python scripts/bench_synthesis.py                                  # vectors of 2^10 to 2^24, ViT-S
    python scripts/bench_synthesis.py --models small base --json scripts/results/synthesis.json

Needs only torch. Runs alternate in one process; times and ratios are medians over rounds. On CUDA, times are between two CUDA
events, without synchronization in between.

Vectors: binding as published (two transforms of the whole vector, one inverse), in blocks of 1024, with a Hadamard transform in
blocks of 256, and as a CUDA graph. For comparison "as published": host time with the allocations, the copy of the gradient into
one vector and, on CUDA, the synchronization.

Models: one step of HolographicSynthesis over all parameters with several recipes; AdamW (foreach and fused) and SGD with
momentum; forward and backward of a batch, with and without the hooks that collect keys. State is relative to the size of the
parameters, which is the size of momentum.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from bench_common import DEVICE, alternating, arguments, begin, median_ratio, save, sizes_of, timed, verdict, waited
from torch import Tensor

from holotrain.models import ViT
from holotrain.synthesis import HolographicSynthesis
from holotrain.synthesis.binding import hadamard_bind, phasor_bind

PARTS = 16
"""Number of gradients that the published form copies into one vector."""


def graphed(work: Callable[[], Tensor]) -> Callable[[], None]:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        work()
    return graph.replay


def as_published(gradients: list[Tensor], representation: Tensor) -> list[Tensor]:
    """Algorithm 1 as published: one vector for all gradients, new memory for every result."""
    vector = torch.cat([gradient.flatten() for gradient in gradients])
    bound = phasor_bind(vector, representation)[: len(vector)]
    return [part.view_as(g) for part, g in zip(bound.split([g.numel() for g in gradients]), gradients, strict=True)]


def vectors(options) -> list[dict]:
    device, rows = options.device, []
    print(f"\n{'length':>10}{'whole':>12}{'blocks':>12}{'hadamard':>12}{'graphed':>12}{'as published':>14}   milliseconds")
    for power in range(options.shortest, options.longest + 1, 2):
        n = 2**power
        gradient, key = torch.randn(n, device=device), torch.randn(min(n, 384), device=device)
        parts = list(gradient.chunk(PARTS))
        work = {
            "whole": lambda g=gradient, k=key: phasor_bind(g, k),
            "blocks": lambda g=gradient, k=key: phasor_bind(g, k, block_length=1024),
            "hadamard": lambda g=gradient, k=key: hadamard_bind(g, k, block_length=256),
        }
        repeats = max(1, 2**16 // n)
        contestants = {name: timed(run, device, repeats=repeats) for name, run in work.items()}
        if device == "cuda":
            contestants["graphed"] = timed(graphed(work["blocks"]), device, repeats=repeats)
        contestants["as published"] = waited(lambda p=parts, k=key: as_published(p, k), device)
        seconds = alternating(contestants, options.rounds)
        milliseconds = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
        rows.append({"length": n, "milliseconds": milliseconds})
        columns = [milliseconds.get(name) for name in ("whole", "blocks", "hadamard", "graphed")]
        shown = "".join(f"{'-' if value is None else format(value, '.3f'):>12}" for value in columns)
        print(f"{n:>10}{shown}{milliseconds['as published']:>14.3f}", flush=True)
    return rows


def recipes(options) -> dict[str, dict]:
    made = {
        "bind, whole model (as published)": {"mode": "bind"},
        "bind, flattened output": {"mode": "bind", "representation": "flattened"},
        "bind, blocks": {"mode": "bind", "block_length": 1024},
        "associative, whole layers": {"block_length": 0},
        "associative": {},
        "associative, blocks of 256": {"block_length": 256},
        "associative, bf16": {"dtype": "bf16"},
        "associative, a quarter of entries": {"subsample": 0.25},
        "associative, descent guaranteed": {"cosine_floor": 0.1},
        "associative, hadamard": {"transform": "hadamard", "block_length": 256},
        "shared by 8": {"mode": "shared"},
    }
    if options.device == "cuda":
        made["associative, graphed"] = {"cuda_graph": True}
    return {name: recipe for name, recipe in made.items() if not options.recipes or name in options.recipes}


def model_rows(size: str, options) -> dict:
    """Compares each recipe with AdamW's foreach step, one at a time, so that only one hologram is in memory."""
    device = options.device
    model = ViT(**sizes_of("vit")[size]).to(device)
    parameters = list(model.parameters())
    images = torch.randn(options.batch, 3, 224, 224, device=device)

    def train() -> None:
        model(images).square().mean().backward()

    train()
    kept = [parameter.grad.clone() for parameter in parameters]

    def restore() -> None:
        for parameter, gradient in zip(parameters, kept, strict=True):
            parameter.grad = gradient.clone()

    def drop() -> None:
        for parameter in parameters:
            parameter.grad = None

    reference = timed(torch.optim.AdamW(parameters, lr=0.0, foreach=True).step, device, restore)
    rows = {}
    print(f"\nViT-{size}, {sum(p.numel() for p in parameters) / 1e6:.1f} M parameters, batch {options.batch}")
    print(f"{'':<36}{'ms':>10}{'/ AdamW foreach':>17}{'/ training step':>17}{'state':>8}")

    def measure(name: str, contestant: Callable[[], float], state: float | None = None) -> None:
        seconds = alternating({"reference": reference, name: contestant}, options.rounds)
        over = median_ratio(seconds[name], seconds["reference"])
        training = rows.get("training step", {}).get("over_adamw")
        row = rows[name] = {"milliseconds": statistics.median(seconds[name]) * 1e3, "over_adamw": over, "state": state}
        row["over_training"] = over / training if training else None
        shown = f"{over / training:>17.3f}" if training else f"{'':>17}"
        print(
            f"{name:<36}{row['milliseconds']:>10.2f}{over:>17.3f}{shown}{'' if state is None else format(state, '8.2f')}",
            flush=True,
        )

    measure("training step", timed(train, device, drop))
    gathering = HolographicSynthesis(model)
    measure("training step, keys gathered", timed(train, device, drop))
    gathering.remove()
    measure("AdamW fused", timed(torch.optim.AdamW(parameters, lr=0.0, fused=True).step, device, restore))
    momentum = torch.optim.SGD(parameters, lr=0.0, momentum=0.9, foreach=True)
    measure("SGD with momentum", timed(momentum.step, device, restore))
    for name, recipe in recipes(options).items():
        synthesis = HolographicSynthesis(model, **recipe)
        model(images[:1])  # the keys
        state = sum(tensor.nbytes for tensor in synthesis.state_tensors)
        measure(name, timed(synthesis.step, device, restore), state / sum(p.nbytes for p in parameters))
        synthesis.remove()
    return rows


def judge(result: dict[str, Any]) -> None:
    """Compares what a GPU has measured with what is expected of it."""
    for row in result["vectors"]:
        if row["length"] == 2**17:
            best = min(taken for form, taken in row["milliseconds"].items() if form != "as published")
            verdict(result, "milliseconds of the synthesis of 2^17 elements", best, 0.03)
    for size, rows in result["models"].items():
        ratio = rows["associative"]["milliseconds"] / rows["AdamW fused"]["milliseconds"]
        verdict(result, f"synthesis of ViT-{size} / fused AdamW", ratio, 3.5)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--models", nargs="*", default=["small"], choices=list(sizes_of("vit")))
    parser.add_argument("--batch", type=int, default=8, help="batch size of the training step")
    parser.add_argument("--recipes", nargs="*", help="only these recipes")
    parser.add_argument("--shortest", type=int, default=10, help="log2 of the shortest vector")
    parser.add_argument("--longest", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--device", default=DEVICE)
    options = parser.parse_args()
    result = begin(options)
    result["vectors"] = vectors(options)
    result["models"] = {size: model_rows(size, options) for size in options.models}
    if options.device == "cuda":
        judge(result)
    save(result, options.json)


if __name__ == "__main__":
    main()
