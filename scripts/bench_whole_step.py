"""Memory and time of a whole fine-tuning step: embedding, blocks, head, loss and AdamW in fp32. Needs transformers and timm.

    python scripts/bench_whole_step.py --json scripts/results/whole_step_cpu.json
    python scripts/bench_whole_step.py --shapes qwen3 --tokens 8192 --longest
    python scripts/bench_whole_step.py --shapes gpt2 --tokens 2048 --time 5 --methods checkpoint "4 bits in tiles"

Memory is that of the plan (holotrain.planning): KiB a token above weights, gradients and optimizer state. --longest finds the
longest sequence whose plan, all of the step, fits into 8 and 24 GiB: from plans of two lengths, confirmed by one of that
length. --time R measures steps of --tokens tokens, R alternating rounds, and their peak of tracked bytes. Frozen or 8-bit
weights, and steps within the backward, would leave more of a budget to activations, for all methods alike.

A plan of two-step blocks is that of their first batch, whose streams are in fp64. "Later batches" are in fp32, unless a few
elements of the streams are much larger than the others.

Methods: gradient checkpointing of transformers, also with the loss in tiles (as Liger's), and with MLPs in tiles too (as
ALST's); the same with block inputs in main memory (as Unsloth's: "offload", planned as on a GPU); with 8-bit inputs; two-step
blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Any

import timm
import torch
import transformers
from bench_common import alternating, arguments, begin, median_ratio, save, timed
from torch import nn

from holotrain.planning import simulate_step
from holotrain.planning.fake_tensors import fake_parameters, fake_tensors
from holotrain.planning.training_step import TrainingStep, measured_peak
from holotrain.reversible import make_reversible, recompute
from holotrain.reversible.side_stream import assuming_a_side_stream
from holotrain.reversible.stack import stacks_in
from holotrain.reversible.tiled_loss import tile_loss

TILE = 512
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
QWEN3 = {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128}
QWEN3 |= {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}
LLAMA = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 4}
SHAPES = {
    "gpt2": ("AutoModelForCausalLM", "gpt2", NO_DROPOUT, "n_positions"),
    "qwen3": ("AutoModelForCausalLM", "qwen3", QWEN3, "max_position_embeddings"),
    "llama": ("AutoModelForCausalLM", "llama", LLAMA, "max_position_embeddings"),
    "modernbert": ("AutoModelForMaskedLM", "modernbert", {}, "max_position_embeddings"),
    "vit": None,
}
"""GPT-2 small, the shape of Qwen3-0.6B, a Llama of 16 x 2,048, ModernBERT-base; ViT-B, of which a token is a patch."""

METHODS: dict[str, Callable[[nn.Module], object]] = {
    "plain": lambda model: None,
    "checkpoint": lambda model: recompute(model) if hasattr(model, "pretrained_cfg") else enable(model),
    "checkpoint, loss in tiles": lambda model: (enable(model), tile_loss(model)),
    "checkpoint in tiles": lambda model: recompute(model, tile=TILE),
    "offload in tiles": lambda model: recompute(model, backward="offload", tile=TILE),
    "checkpoint8 in tiles": lambda model: recompute(model, backward="checkpoint8", tile=TILE),
    "4 bits in tiles": lambda model: make_reversible(model, bits=4, tile=TILE),
    "4 bits in tiles, later batches": lambda model: later(make_reversible(model, bits=4, tile=TILE)),
    "2 bits in tiles": lambda model: make_reversible(model, bits=2, tile=TILE),
}


def later(model: nn.Module) -> None:
    """As after the first batch, where the streams are small enough for fp32."""
    for stack in stacks_in(model):
        stack.stream_dtype = torch.float32


def enable(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def made(shape: str, tokens: int) -> nn.Module:
    if shape == "vit":
        return timm.create_model("vit_base_patch16_224", img_size=16 * round(tokens**0.5))
    auto, kind, sizes, length = SHAPES[shape]
    config = transformers.AutoConfig.for_model(kind, **sizes | {length: tokens})
    return getattr(transformers, auto).from_config(config)


def step_of(shape: str, method: str, model: nn.Module, tokens: int) -> TrainingStep:
    if shape == "vit":
        side = 16 * round(tokens**0.5)
        x, labels = torch.zeros(1, 3, side, side), torch.zeros(1, dtype=torch.long)
        loss = lambda: nn.functional.cross_entropy(model(x), labels)  # noqa: E731
    else:
        x = labels = torch.zeros(1, tokens, dtype=torch.long)
        cached = {} if shape == "modernbert" else {"use_cache": False}
        loss = lambda: model(input_ids=x, labels=labels, **cached).loss  # noqa: E731
    METHODS[method](model.train())
    return TrainingStep(model, loss, torch.optim.AdamW(model.parameters()), held={"batch": [x, labels]})


@cache
def planned(shape: str, method: str, tokens: int) -> tuple[int, float]:
    """The bytes of the step, and KiB a token above weights, gradients and optimizer state."""
    with torch.device("meta"):
        model = made(shape, tokens)
    on_a_gpu = assuming_a_side_stream() if method.startswith("offload") else nullcontext()
    with fake_tensors(), on_a_gpu:
        plan = simulate_step(step_of(shape, method, fake_parameters(model, torch.device("cpu")), tokens))
    phases = [part for phase, part in plan.parts_by_phase.items() if phase != "update"]
    return plan.peak, max(part["activations"] + part["head"] + part["temporary"] for part in phases) / 2**10 / tokens


def longest(shape: str, method: str, tokens: int, budget: int) -> int:
    """The longest sequence that fits, in steps of 512 tokens, on the line through two plans and confirmed by a third."""
    short, long = planned(shape, method, tokens // 2)[0], planned(shape, method, tokens)[0]
    slope = (long - short) / (tokens - tokens // 2)
    found = int((tokens + (budget - long) / slope) // TILE) * TILE
    while found > 0 and planned(shape, method, found)[0] > budget:
        found -= max(found // 100 // TILE, 1) * TILE
    return max(found, 0)


def measured(shape: str, methods: list[str], tokens: int, rounds: int) -> dict[str, dict[str, float]]:
    steps = {}
    for method in methods:
        torch.manual_seed(0)
        steps[method] = step_of(shape, method, made(shape, tokens), tokens)
    peaks = {method: measured_peak(step, torch.device("cpu")) for method, step in steps.items()}

    def differentiate(step: TrainingStep) -> None:
        step.model.zero_grad()
        step.loss().backward()

    runs = {method: timed(lambda step=step: differentiate(step), "cpu") for method, step in steps.items()}
    seconds = alternating(runs, rounds)
    found = {}
    for method in methods:
        plan = planned(shape, method, tokens)[0]
        ratio = median_ratio(seconds[method], seconds["checkpoint"]) if "checkpoint" in methods else None
        found[method] = {"measured": peaks[method], "planned": plan, "seconds": seconds[method], "over checkpoint": ratio}
        print(f"{shape}, {tokens} tokens, {method:26s} time {ratio or 0:.3f} of checkpoint's, "
              f"measured {peaks[method] / 2**20:.0f} MiB, planned {plan / 2**20:.0f}")  # fmt: skip
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=16384, help="of the sequence; for vit, patches of the image: 4096")
    parser.add_argument("--longest", action="store_true")
    parser.add_argument("--memory", type=int, nargs="+", default=[8, 24], help="GiB")
    parser.add_argument("--time", type=int, default=0, metavar="ROUNDS")
    options = parser.parse_args()
    results = begin(options)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    for shape in options.shapes:
        tokens = min(options.tokens, 4096) if shape == "vit" else options.tokens
        methods = [each for each in options.methods if shape != "vit" or "loss" not in each]
        if options.time:
            results[shape] = measured(shape, methods, tokens, options.time)
            save(results, options.json)
            continue
        results[shape] = found = {"tokens": tokens}
        for method in methods:
            peak, each = planned(shape, method, tokens)
            found[method] = {"bytes": peak, "KiB a token": each}
            if options.longest:
                fits = {f"{gib} GiB": longest(shape, method, tokens, gib * 2**30) for gib in options.memory}
                found[method]["longest"] = fits
            print(
                f"{shape}, {tokens} tokens, {method:26s} {each:8.1f} KiB a token  {found[method].get('longest', '')}",
                flush=True,
            )
            save(results, options.json)


if __name__ == "__main__":
    main()
