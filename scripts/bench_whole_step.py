"""Memory and time of a whole fine-tuning step: embedding, blocks, head, loss and AdamW in fp32. Needs transformers and timm.

    python scripts/bench_whole_step.py --json scripts/results/whole_step_cpu.json
    python scripts/bench_whole_step.py --shapes qwen3 --tokens 8192 --longest
    python scripts/bench_whole_step.py --shapes gpt2 --tokens 2048 --time 5 --methods checkpoint "checkpoint8 in tiles"
    python scripts/bench_whole_step.py --amp --trains 4 --shapes gpt2 --planned scripts/results/whole_step_cpu.json

Memory is that of the plan (holotrain.planning): KiB a token above weights, gradients and optimizer state. --longest finds the
longest sequence whose plan, all of the step, fits into 8 and 24 GiB: from plans of two lengths, confirmed by one of that
length. --time R measures steps of --tokens tokens, R alternating rounds, and their peak of tracked bytes.
--trains GIB looks for the longest sequence that trains in so much memory, near the one that follows from the KiB a token of an
earlier plan. --planned takes over an earlier plan, and --toy takes two narrow layers of each shape. Frozen or 8-bit
weights, and steps within the backward, would leave more of a budget to activations, for all methods alike.

Methods: gradient checkpointing of transformers, also with the loss in tiles (as Liger's), and with MLPs in tiles too (as
ALST's); the same with block inputs in main memory (as Unsloth's: "offload", planned as on a GPU), and in 8 bits. Causal models
also in chunks of their sequence, of which blocks keep everything ("chunks") or their inputs.
"heads": attention takes one head of keys and values at a time, too.
"""

from __future__ import annotations

import gc
import json
import math
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from pathlib import Path
from typing import Any

import timm
import torch
import transformers
from bench_common import DEVICE, alternating, arguments, begin, median_ratio, save, timed, verdict, waited
from bench_plan import peaks_of
from torch import nn

from holotrain.planning import TrainingStep, simulate_step
from holotrain.planning.devices import ALLOCATORS, cuda_rules
from holotrain.planning.fake_tensors import fake_parameters, fake_tensors
from holotrain.reversible import recompute
from holotrain.reversible.side_stream import assuming_a_side_stream
from holotrain.reversible.tiled_loss import tile_loss

TILE = 512
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
QWEN3 = {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "head_dim": 128}
QWEN3 |= {"num_attention_heads": 16, "num_key_value_heads": 8, "tie_word_embeddings": True}
LLAMA = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 16}
LLAMA |= {"num_attention_heads": 32, "num_key_value_heads": 4}
LLAMA_1B = {"vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64}
LLAMA_1B |= {"num_attention_heads": 32, "num_key_value_heads": 8, "tie_word_embeddings": True}
TOY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 16}
TOY |= {"num_attention_heads": 4, "num_key_value_heads": 4}
SHAPES = {
    "gpt2": ("AutoModelForCausalLM", "gpt2", NO_DROPOUT, "n_positions"),
    "qwen3": ("AutoModelForCausalLM", "qwen3", QWEN3, "max_position_embeddings"),
    "llama": ("AutoModelForCausalLM", "llama", LLAMA, "max_position_embeddings"),
    "llama-1b": ("AutoModelForCausalLM", "llama", LLAMA_1B, "max_position_embeddings"),
    "modernbert": ("AutoModelForMaskedLM", "modernbert", {}, "max_position_embeddings"),
    "vit": None,
}
"""GPT-2 small, the shapes of Qwen3-0.6B, a Llama of 16 x 2,048 and Llama-3.2-1B, ModernBERT-base;
ViT-B, of which a token is a patch."""

METHODS: dict[str, Callable[[nn.Module], object]] = {
    "plain": lambda model: None,
    "checkpoint": lambda model: recompute(model) if hasattr(model, "pretrained_cfg") else enable(model),
    "checkpoint, loss in tiles": lambda model: (enable(model), tile_loss(model)),
    "checkpoint in tiles": lambda model: recompute(model, tile=TILE),
    "offload in tiles": lambda model: recompute(model, backward="offload", tile=TILE),
    "chunks": lambda model: recompute(model, backward="chunks", chunk=TILE),
    "checkpoint in chunks": lambda model: recompute(model, chunk=TILE),
    "checkpoint8 in tiles": lambda model: recompute(model, backward="checkpoint8", tile=TILE),
    "checkpoint in tiles and heads": lambda model: recompute(model, tile=TILE, heads=1),
    "checkpoint8 in tiles and heads": lambda model: recompute(model, backward="checkpoint8", tile=TILE, heads=1),
}


def enable(model: Any) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False})


def made(shape: str, tokens: int) -> nn.Module:
    if shape == "vit":
        return timm.create_model("vit_base_patch16_224", img_size=16 * round(tokens**0.5))
    auto, kind, sizes, length = SHAPES[shape]
    config = transformers.AutoConfig.for_model(kind, **sizes | {length: tokens})
    return getattr(transformers, auto).from_config(config)


def step_of(shape: str, method: str, model: nn.Module, tokens: int, amp: bool = False, foreach: bool = False) -> TrainingStep:
    place = next(model.parameters()).device
    if shape == "vit":
        side = 16 * round(tokens**0.5)
        x, labels = torch.zeros(1, 3, side, side, device=place), torch.zeros(1, dtype=torch.long, device=place)
        loss = lambda: nn.functional.cross_entropy(model(x), labels)  # noqa: E731
    else:
        x = labels = torch.zeros(1, tokens, dtype=torch.long, device=place)
        cached = {} if shape == "modernbert" else {"use_cache": False}
        loss = lambda: model(input_ids=x, labels=labels, **cached).loss  # noqa: E731
    METHODS[method](model.train())
    optimizer = torch.optim.AdamW(model.parameters(), foreach=foreach)
    autocast = partial(torch.autocast, place.type, torch.bfloat16, enabled=amp)
    return TrainingStep(model, loss, optimizer, autocast, held={"batch": [x, labels]})


@cache
def planned(shape: str, method: str, tokens: int, device: str, amp: bool) -> tuple[int, float]:
    """The bytes of the step on a device, and KiB a token above weights, gradients and optimizer state."""
    with torch.device("meta"):
        model = made(shape, tokens)
    with ExitStack() as stack:
        if device == "cuda":
            stack.enter_context(cuda_rules())
        if device == "cuda" or method.startswith("offload"):
            stack.enter_context(assuming_a_side_stream())
        stack.enter_context(fake_tensors())
        step = step_of(shape, method, fake_parameters(model, torch.device("cpu")), tokens, amp, device == "cuda")
        plan = simulate_step(step, ALLOCATORS[device])
    phases = [part for phase, part in plan.parts_by_phase.items() if phase != "update"]
    return plan.peak, max(part["activations"] + part["head"] + part["temporary"] for part in phases) / 2**10 / tokens


def longest(shape: str, method: str, budget: int, options) -> int:
    """The longest sequence that fits, in steps of 512 tokens, on the line through two plans and confirmed by a third."""
    tokens, plan = options.tokens, lambda length: planned(shape, method, length, options.device, options.amp)[0]
    short, long = plan(tokens // 2), plan(tokens)
    slope = (long - short) / (tokens - tokens // 2)
    found = int((tokens + (budget - long) / slope) // TILE) * TILE
    while found > 0 and plan(found) > budget:
        found -= max(found // 100 // TILE, 1) * TILE
    return max(found, 0)


def measured(shape: str, methods: list[str], tokens: int, options) -> dict[str, dict[str, float]]:
    device = torch.device(options.device)
    plans = json.loads(options.planned.read_text())[shape] if options.planned else {}

    def make(method: str) -> TrainingStep:
        torch.manual_seed(0)
        return step_of(shape, method, made(shape, tokens).to(device), tokens, options.amp, device.type == "cuda")

    found = {method: peaks_of(make(method), device) for method in methods}
    steps = {method: make(method) for method in methods}

    def differentiate(step: TrainingStep) -> None:
        step.model.zero_grad()
        with step.autocast():
            loss = step.loss()
        loss.backward()

    runs = {method: timed(lambda step=step: differentiate(step), device.type) for method, step in steps.items()}
    seconds = alternating(runs, options.time)
    for method in methods:
        known = plans.get(method, {}).get("bytes") if tokens == plans.get("tokens") else None
        plan = known or planned(shape, method, tokens, options.device, options.amp)[0]
        ratio = median_ratio(seconds[method], seconds["checkpoint"]) if "checkpoint" in methods else None
        found[method] |= {"planned": plan, "seconds": seconds[method], "over checkpoint": ratio}
        print(f"{shape}, {tokens} tokens, {method:26s} time {ratio or 0:.3f} of checkpoint's, "
              f"measured {found[method]['taken'] / 2**20:.0f} MiB, planned {plan / 2**20:.0f}")  # fmt: skip
    return found


def expected_tokens(shape: str, plan: dict[str, float], budget: int) -> int:
    """What is left beside weights, gradients and AdamW's states in fp32, over the bytes a token of a plan."""
    with torch.device("meta"):
        sizes = [sum(p.numel() for p in made(shape, length).parameters()) for length in (TILE, 2 * TILE)]
    positions = (sizes[1] - sizes[0]) / TILE  # weights of each token
    return int((budget - 16 * (sizes[0] - TILE * positions)) / (2**10 * plan["KiB a token"] + 16 * positions))


def trained(shape: str, method: str, expected: int, amp: bool) -> dict[str, float]:
    """The longest sequence, near the expected one, whose step does not run out of memory, and its tokens a second."""
    for share in (1.25, 1.1, 1.0, 0.93, 0.85, 0.7, 0.5):
        length = max(int(share * expected) // TILE, 1) * TILE
        try:
            with torch.device(DEVICE):
                step = step_of(shape, method, made(shape, length), length, amp, DEVICE == "cuda")
            run = waited(lambda step=step: (step.differentiate(), step.update()), DEVICE)
            return {"tokens": length, "tokens a second": length / min(run() for _ in range(3)), "expected": expected}
        except torch.OutOfMemoryError:
            print(f"  {method}: {length} tokens do not fit", flush=True)
        finally:
            step = run = None
            gc.collect()
            if DEVICE == "cuda":
                torch.cuda.empty_cache()
    return {"tokens": 0, "tokens a second": 0.0, "expected": expected}


def train_longest(options, results: dict) -> None:
    plans, budget = json.loads(options.planned.read_text()), int(options.trains * 2**30)
    if DEVICE == "cuda":
        torch.cuda.set_per_process_memory_fraction(budget / torch.cuda.get_device_properties(0).total_memory)
    for shape in options.shapes:
        results[shape] = rows = {}
        for method in options.methods:
            expected = min(expected_tokens(shape, plans[shape][method], budget), options.tokens)
            rows[method] = row = trained(shape, method, expected, options.amp)
            print(f"{shape}, {method:26s} {row['tokens']} tokens, {row['tokens a second']:.0f} a second", flush=True)
            what = f"{shape} in {options.trains:g} GiB, {method}: tokens"
            verdict(results, what, row["tokens"], expected // TILE * TILE, least=True)
            save(results, options.json)
        if {"checkpoint in tiles", "checkpoint8 in tiles"} <= rows.keys():
            ours, theirs = (rows[method]["tokens a second"] for method in ("checkpoint8 in tiles", "checkpoint in tiles"))
            verdict(
                results, f"{shape}: speed of checkpoint8 / checkpoint, in tiles", ours / (theirs or math.nan), 0.9, least=True
            )
    save(results, options.json)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--tokens", type=int, default=16384, help="of the sequence; for vit, patches of the image: 4096")
    parser.add_argument("--longest", action="store_true")
    parser.add_argument("--memory", type=int, nargs="+", default=[8, 24], help="GiB")
    parser.add_argument("--time", type=int, default=0, metavar="ROUNDS")
    parser.add_argument("--trains", type=float, metavar="GIB", help="needs --planned; --tokens is then the most")
    parser.add_argument("--planned", type=Path, help="JSON of an earlier run")
    parser.add_argument("--toy", action="store_true")
    parser.add_argument("--amp", action="store_true", help="bf16 autocast")
    parser.add_argument("--device", default=DEVICE, help="of the plan, and of measured steps")
    options = parser.parse_args()
    if options.trains and not options.planned:
        parser.error("--trains needs --planned")
    for sizes in (NO_DROPOUT, QWEN3, LLAMA, LLAMA_1B) if options.toy else ():
        sizes.update(TOY)
    results = begin(options)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    if options.trains:
        return train_longest(options, results)
    for shape in options.shapes:
        tokens = min(options.tokens, 4096) if shape == "vit" else options.tokens
        left_out = {"vit": ("loss", "chunks"), "modernbert": ("chunks",)}.get(shape, ())
        methods = [each for each in options.methods if not any(word in each for word in left_out)]
        if options.time:
            results[shape] = found = measured(shape, methods, tokens, options)
            for method, row in found.items():
                error = abs(row["planned"] / row["taken"] - 1)
                verdict(results, f"{shape}, {method}: error of the planned peak", error, 0.05)
                if "reserved" in row:
                    verdict(results, f"{shape}, {method}: reserved / allocated", row["reserved"] / row["taken"], 1.15)
            save(results, options.json)
            continue
        results[shape] = found = {"tokens": tokens}
        for method in methods:
            peak, each = planned(shape, method, tokens, options.device, options.amp)
            found[method] = {"bytes": peak, "KiB a token": each}
            if options.longest:
                fits = {f"{gib} GiB": longest(shape, method, gib * 2**30, options) for gib in options.memory}
                found[method]["longest"] = fits
            print(
                f"{shape}, {tokens} tokens, {method:26s} {each:8.1f} KiB a token  {found[method].get('longest', '')}",
                flush=True,
            )
            save(results, options.json)


if __name__ == "__main__":
    main()
