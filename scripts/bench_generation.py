"""Tokens a second of generation: keys and values kept against everything read anew, fp32 against int8. Needs torch alone.

    python scripts/bench_generation.py
    python scripts/bench_generation.py --size small --tokens 256 --compile --int8 --json scripts/results/generation_cpu.json

Greedy, from a prompt of 8 random tokens to ``--tokens`` more, by a RevGPT of random weights over a vocabulary of bytes (size
tiny) or of 50,257 words. Ratios are medians of alternating rounds in one process. Texts of cached and uncached generation are
compared too: they must be the same. int8 takes part with ``--int8``, where torchao is installed.
"""

import argparse
import copy
import json
import statistics
import time
from pathlib import Path

import torch
from bench_common import alternating, machine, median_ratio, save
from torch import Tensor, nn

from holotrain.models import GPT, GPT_SIZES, RevGPT, Sampling, generate

PROMPT = 8
COMPARED = 256
"""Tokens of the texts that are compared."""

GREEDY = Sampling(temperature=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=GPT_SIZES, default="tiny")
    parser.add_argument("--plain", action="store_true", help="the plain twin")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="a compiled contestant too")
    parser.add_argument("--int8", action="store_true", help="one with weights in int8 too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    context = PROMPT + max(options.tokens, COMPARED)
    sizes = GPT_SIZES[options.size] | {"context": context, "vocab": 260 if options.size == "tiny" else 50257}
    model = (GPT if options.plain else RevGPT)(**sizes).to(device).eval()
    with torch.no_grad():  # a fresh model repeats what it was given, since the head is tied to the embedding
        model.norm.weight.normal_()
    prompts = [torch.randint(sizes["vocab"], (PROMPT,), device=device) for _ in range(options.batch)]

    contestants = {
        "cached": lambda: timed(cached, model, prompts, options.tokens),
        "uncached": lambda: timed(uncached, model, prompts, options.tokens),
    }
    if options.compile:
        contestants["compiled"] = lambda: timed(cached, model, prompts, options.tokens, compiled=True)
    if options.int8:
        from holotrain.models import quantise

        small = copy.deepcopy(model)
        quantise(small)
        contestants["int8"] = lambda: timed(cached, small, prompts, options.tokens)
    result = {"machine": machine(), "model": type(model).__name__, "size": options.size, "batch": options.batch}
    print(json.dumps(result))
    text, expected = cached(model, prompts, COMPARED), uncached(model, prompts, COMPARED)
    same, words = torch.equal(text, expected), len(expected.unique())
    print(
        f"cached and uncached texts of {COMPARED} tokens, {words} words in them, are {'the same' if same else 'NOT THE SAME'}"
    )

    seconds = alternating(contestants, options.rounds)
    ratios = {name: median_ratio(seconds["uncached"], values) for name, values in seconds.items()}
    for name, values in seconds.items():
        rate = options.batch * options.tokens / statistics.median(values)
        print(f"{name:<10}{rate:9.1f} tokens/s  {ratios[name]:6.2f} times uncached")
    save(result | {"same": same, "tokens": options.tokens, "seconds": seconds, "times_uncached": ratios}, options.json)


def cached(model: nn.Module, prompts: list[Tensor], count: int, compiled: bool = False) -> Tensor:
    """What ``holotrain generate`` does: (B, count)."""
    return torch.stack(list(generate(model, prompts, count, GREEDY, compiled=compiled)), dim=1)


@torch.inference_mode()
def uncached(model: nn.Module, prompts: list[Tensor], count: int) -> Tensor:
    """Reads all tokens so far for each new one: (B, count)."""
    tokens = torch.stack(prompts)
    for _ in range(count):
        last = model.hidden(tokens)[:, -1:]
        tokens = torch.cat((tokens, model.logits(last).argmax(-1)), dim=1)
    return tokens[:, PROMPT:]


def timed(run, *arguments, **options) -> float:
    started = time.perf_counter()
    run(*arguments, **options).cpu()  # waits for a GPU
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
