"""Tokens per second of text encoders on padded batches: packed sequences over a padding mask. Needs only torch.

    python scripts/bench_padding.py
    python scripts/bench_padding.py --batch 8 --tokens 512 --rounds 3 --json scripts/results/padding_cpu_512.json

A step is a forward and a backward of a RevRoBERTa with random weights, an evaluation its forward. Lengths rise evenly to
``--tokens``, so that ``--padding`` of the batch is padding. Ratios are medians over rounds that alternate in one process; the
losses of evaluation are compared, too. Tokens are those that are no padding. Whether attention read packed sequences is seen;
a measurement that does not compare the two forms ends with an error. A GPU computes in bf16 and without dropout of attention
weights, as its kernel for packed sequences needs it.
"""

import statistics
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from bench_common import DEVICE, alternating, arguments, begin, median_ratio, save, sizes_of, timed

from holotrain.models import RevRoBERTa, RoBERTa, roberta
from holotrain.models.layers import packing


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--size", choices=sizes_of("roberta"), default="tiny")
    parser.add_argument("--plain", action="store_true", help="use the non-reversible model")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="length of the longest sequence")
    parser.add_argument("--padding", type=float, default=0.4, help="share of the batch, up to 0.5")
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    device = DEVICE
    torch.manual_seed(0)
    dropout = {"dropout": options.dropout, "attention_dropout": options.dropout if device == "cpu" else 0.0}
    kind = RoBERTa if options.plain else RevRoBERTa
    model = kind(**sizes_of("roberta")[options.size], vocab=260, context=options.tokens, **dropout).to(device)
    lengths = (torch.linspace(1 - 2 * options.padding, 1, options.batch) * options.tokens).round().clamp_min(1)
    mask = torch.arange(options.tokens) < lengths[:, None]
    tokens = torch.randint(260, mask.shape)
    targets = tokens.where(mask & (torch.rand(mask.shape) < 0.15), -100).to(device)
    tokens = tokens.to(device)
    make, ran = packing.padding_context, defaultdict(set)

    def loss(form: str) -> torch.Tensor:
        def seen(*given: Any) -> dict[str, Any]:
            context = make(*given)
            ran[form].update(context)
            return context

        packing.LEAST_PADDING, roberta.padding_context = (0 if form == "packed" else 2), seen
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            return model(tokens, mask, targets)

    def evaluated(form: str) -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            found = loss(form)
        model.train()
        return found

    works = {"step": lambda form: loss(form).backward(), "evaluation": evaluated}
    precision = "fp32" if device == "cpu" else "bf16"
    padding = 1 - mask.float().mean().item()
    begun = begin(options)
    begun["machine"] |= {"model": kind.__name__, "padding": padding, "precision": precision} | dropout
    difference = abs(evaluated("packed") - evaluated("masked")).item()
    print(f"the losses of packed and masked evaluation differ by {difference:.1e}")
    rows = {}
    for name, work in works.items():
        ran.clear()
        forms = {form: timed(partial(work, form), device) for form in ("packed", "masked")}
        seconds = alternating(forms, options.rounds)
        contexts = {form: sorted(ran[form]) for form in forms}
        if contexts != {"packed": ["packing"], "masked": ["mask"]}:
            raise SystemExit(f"{name}: attention had {contexts}, so packed sequences were not compared with a mask")
        rates = {form: mask.sum().item() / statistics.median(values) for form, values in seconds.items()}
        rows[name] = {
            "attention": contexts,
            "tokens_per_second": rates,
            "packed_over_masked": median_ratio(seconds["masked"], seconds["packed"]),
        }
        shown = ", ".join(f"{form} {rate:.0f} tokens/s" for form, rate in rates.items())
        print(f"{name:<11}{shown}, ratio {rows[name]['packed_over_masked']:.2f}")
    save(begun | {"loss_difference": difference} | rows, options.json)


if __name__ == "__main__":
    main()
