"""Tokens per second of generation: with and without KV cache, and with weights in few bits. Needs only torch.

    python scripts/bench_generation.py
    python scripts/bench_generation.py --size small --tokens 256 --compile --bits 8 4 --json scripts/results/generation_cpu.json

Generates ``--tokens`` tokens greedily from a prompt of 8 random tokens, with a RevGPT with random weights and a vocabulary of
bytes (size tiny) or 50,257 words. Ratios are medians over alternating rounds in one process. The texts of cached and uncached
generation are compared and must be equal. ``--bits`` needs torchao.
"""

import copy
import statistics
import time

import torch
from bench_common import DEVICE, alternating, arguments, begin, median_ratio, save, sizes_of, verdict
from torch import Tensor, nn

from holotrain.models import GPT, RevGPT, generate
from holotrain.models.generation import Sampling
from holotrain.models.quantised import quantise

PROMPT = 8
GREEDY = Sampling(temperature=0)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--size", choices=sizes_of("gpt"), default="tiny")
    parser.add_argument("--plain", action="store_true", help="use the non-reversible model")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--compared", type=int, default=256, help="number of tokens of the compared texts")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="also measure torch.compile")
    parser.add_argument("--bits", type=int, nargs="+", choices=(8, 4), default=[], help="also measure weights in few bits")
    options = parser.parse_args()
    device = torch.device(DEVICE)
    torch.manual_seed(0)
    context = PROMPT + max(options.tokens, options.compared)
    sizes = sizes_of("gpt")[options.size] | {"context": context, "vocab": 260 if options.size == "tiny" else 50257}
    model = (GPT if options.plain else RevGPT)(**sizes).to(device).eval()
    with torch.no_grad():  # an untrained model repeats its input, because the head is tied to the embedding
        model.norm.weight.normal_()
    prompts = [torch.randint(sizes["vocab"], (PROMPT,), device=device) for _ in range(options.batch)]

    contestants = {
        "cached": lambda: timed(cached, model, prompts, options.tokens),
        "uncached": lambda: timed(uncached, model, prompts, options.tokens),
    }
    if options.batch > 1:  # attention needs a mask then
        unlike = [*prompts[:-1], prompts[-1][:-1]]
        contestants["unlike prompts"] = lambda: timed(cached, model, unlike, options.tokens)
    if options.compile:
        contestants["compiled"] = lambda: timed(cached, model, prompts, options.tokens, compiled=True)
    for bits in options.bits:
        small = copy.deepcopy(model).requires_grad_(False)
        quantise(small, bits)
        contestants[f"{bits} bits"] = lambda small=small: timed(cached, small, prompts, options.tokens)
    result = begin(options) | {"model": type(model).__name__}
    text, expected = (form(model, prompts, options.compared) for form in (cached, uncached))
    same, words = torch.equal(text, expected), len(expected.unique())
    alike = "the same" if same else "NOT THE SAME"
    print(f"cached and uncached texts of {options.compared} tokens, {words} words in them, are {alike}")

    seconds = alternating(contestants, options.rounds)
    ratios = {name: median_ratio(seconds["uncached"], values) for name, values in seconds.items()}
    rates = {name: options.batch * options.tokens / statistics.median(values) for name, values in seconds.items()}
    for name, rate in rates.items():
        print(f"{name:<15}{rate:9.1f} tokens/s  {ratios[name]:6.2f} x uncached")
    verdict(result, "texts of cached and uncached generation that differ", float(not same), 0)
    verdict(result, "cached / uncached generation: speed", ratios["cached"], 2, least=True)
    result |= {"same": same, "seconds": seconds, "times_uncached": ratios}
    save(result | {"tokens_per_second": rates}, options.json)


def cached(model: nn.Module, prompts: list[Tensor], count: int, compiled: bool = False) -> Tensor:
    """Generation as in ``holotrain generate``: (B, count)."""
    return torch.stack(list(generate(model, prompts, count, GREEDY, compiled=compiled)), dim=1)


@torch.inference_mode()
def uncached(model: nn.Module, prompts: list[Tensor], count: int) -> Tensor:
    """Generation without a cache: processes all tokens for each new one: (B, count)."""
    tokens = torch.stack(prompts)
    for _ in range(count):
        last = model.hidden(tokens)[:, -1:]
        tokens = torch.cat((tokens, model.logits(last).argmax(-1)), dim=1)
    return tokens[:, PROMPT:]


def timed(run, *arguments, **options) -> float:
    started = time.perf_counter()
    run(*arguments, **options).cpu()  # synchronizes with a GPU
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
