"""What a new length costs: twelve lengths in training, and 64 generated tokens. Needs transformers.

    python scripts/bench_shapes.py --json scripts/results/cuda/shapes.json

A GPT-2 with random weights trains plain, with gradient checkpointing, and with recompute in tiles. A new length costs
the first step with it less the second one. A generated token has a new length, too: 64 are generated in eval(), where the
blocks that recompute changed are the model's own.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from bench_common import DEVICE, arguments, begin, save, verdict, waited
from torch import Tensor, nn

from holotrain.reversible import recompute

WAYS: dict[str, Callable[[nn.Module, int], object]] = {
    "plain": lambda model, tile: None,
    "checkpointing": lambda model, tile: model.gradient_checkpointing_enable({"use_reentrant": False}),
    "recompute in tiles": lambda model, tile: recompute(model, tile=tile),
}
GENERATED, LENGTHS = 64, 12


def gpt2(options: argparse.Namespace) -> nn.Module:
    import transformers

    sizes = {"n_embd": options.dim, "n_layer": options.depth, "n_head": options.dim // 64, "n_positions": 2 * options.tokens}
    config = transformers.GPT2Config(**sizes, vocab_size=options.vocab, bos_token_id=0, eos_token_id=0)
    torch.manual_seed(0)
    return transformers.GPT2LMHeadModel(config).to(DEVICE)


def training(model: nn.Module, options: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Milliseconds of the first step with each length, and of the second, after some steps with another length."""

    def step(tokens: Tensor) -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()

    lengths = [options.tokens * (2 * LENGTHS - number) // (2 * LENGTHS) for number in range(LENGTHS + 1)]
    first, second = [], []
    for length in lengths:
        run = waited(lambda length=length: step(torch.randint(options.vocab, (2, length), device=DEVICE)), DEVICE)
        first.append(1e3 * run())
        second.append(1e3 * min(run(), run()))
    return first[1:], second[1:]


def generation(model: nn.Module, options: argparse.Namespace) -> float:
    """Milliseconds a token."""
    prompt = torch.randint(1, options.vocab, (1, options.tokens // 4), device=DEVICE)
    sizes = {"min_new_tokens": GENERATED, "max_new_tokens": GENERATED, "do_sample": False, "pad_token_id": 0}
    run = waited(lambda: model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), **sizes), DEVICE)
    run()
    return 1e3 * min(run(), run()) / GENERATED


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dim", type=int, default=768, help="a multiple of 64")
    parser.add_argument("--depth", type=int, default=12)
    parser.add_argument("--vocab", type=int, default=50257)
    parser.add_argument("--tokens", type=int, default=1024, help="of the longest sequence")
    options = parser.parse_args()
    result, rows = begin(options), {}
    for way, change in WAYS.items():
        model = gpt2(options).train()
        change(model, max(options.tokens // 4, 1))
        first, second = training(model, options)
        new = statistics.median(a - b for a, b in zip(first, second, strict=True))
        rows[way] = {"first": first, "second": second, "new": new, "token": generation(model, options)}
        print(
            f"{way}: {statistics.median(second):.1f} ms a step, {new:.1f} more a new length, {rows[way]['token']:.2f} a token"
        )
    ours, theirs = rows["recompute in tiles"], rows["checkpointing"]
    verdict(result, "milliseconds of a new length in training", ours["new"], 30)
    verdict(result, "step time with a new length / checkpointing's", sum(ours["first"]) / sum(theirs["first"]), 1.3)
    verdict(result, "time of a generated token / the plain model's", ours["token"] / rows["plain"]["token"], 1.06)
    save(result | {"ways": rows}, options.json)


if __name__ == "__main__":
    main()
