"""Tokens per second of text encoders on padded batches: packed sequences over a padding mask. Needs only torch.

    python scripts/bench_padding.py
    python scripts/bench_padding.py --batch 8 --tokens 512 --rounds 3 --json scripts/results/padding_cpu_512.json

A step is a forward and a backward of a RevRoBERTa with random weights, an evaluation its forward. Lengths rise evenly to
``--tokens``, so that ``--padding`` of the batch is padding. Ratios are medians over rounds that alternate in one process; the
losses of evaluation are compared, too. Tokens are those that are no padding.
"""

import argparse
import json
import statistics
from pathlib import Path

import torch
from bench_common import alternating, machine, median_ratio, save, settings_of, timed

from holotrain.models import ROBERTA_SIZES, RevRoBERTa, RoBERTa
from holotrain.models import roberta as module
from holotrain.models.layers.packing import packing_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=ROBERTA_SIZES, default="tiny")
    parser.add_argument("--plain", action="store_true", help="use the non-reversible model")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="length of the longest sequence")
    parser.add_argument("--padding", type=float, default=0.4, help="share of the batch, up to 0.5")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    dropout = {"dropout": options.dropout, "attention_dropout": options.dropout}
    kind = RoBERTa if options.plain else RevRoBERTa
    model = kind(**ROBERTA_SIZES[options.size], vocab=260, context=options.tokens, **dropout).to(device)
    lengths = (torch.linspace(1 - 2 * options.padding, 1, options.batch) * options.tokens).round().clamp_min(1)
    mask = (torch.arange(options.tokens) < lengths[:, None]).to(device)
    tokens = torch.randint(260, mask.shape, device=device)
    targets = tokens.where(mask & (torch.rand(mask.shape, device=device) < 0.15), -100)

    def loss(packed: bool) -> torch.Tensor:
        module.packing_of = packing_of if packed else lambda *_: None
        return model(tokens, mask, targets)

    def evaluated(packed: bool) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            found = loss(packed)
        model.train()
        return found

    module.LEAST_PADDING = 0
    works = {"step": lambda packed: loss(packed).backward(), "evaluation": evaluated}
    described = machine() | {"model": kind.__name__, "padding": 1 - mask.float().mean().item()}
    print(json.dumps(described))
    difference = abs(evaluated(True) - evaluated(False)).item()
    print(f"the losses of packed and masked evaluation differ by {difference:.1e}")
    rows = {}
    for name, work in works.items():
        contestants = {
            form: timed(lambda form=form, work=work: work(form == "packed"), device) for form in ("packed", "masked")
        }
        seconds = alternating(contestants, options.rounds)
        rates = {form: mask.sum().item() / statistics.median(values) for form, values in seconds.items()}
        rows[name] = {"tokens_per_second": rates, "packed_over_masked": median_ratio(seconds["masked"], seconds["packed"])}
        shown = ", ".join(f"{form} {rate:.0f} tokens/s" for form, rate in rates.items())
        print(f"{name:<11}{shown}, ratio {rows[name]['packed_over_masked']:.2f}")
    save({"machine": described, "options": settings_of(options), "loss_difference": difference} | rows, options.json)


if __name__ == "__main__":
    main()
