"""Compares the ways to keep what runs between the blocks of a model: memory, time, gradients, and the loss after fine-tuning.

    python scripts/bench_ways.py --parts models --json scripts/results/ways_cpu.json
    python scripts/bench_ways.py --parts growth --json scripts/results/ways_growth_cpu.json
    python scripts/bench_ways.py --parts tuning --json scripts/results/ways_tuning_cpu.json

The ways: plain autograd, and recompute() with each schedule (offload on a GPU alone).

Memory: of a forward and a backward of five models, above weights and gradients: the peak by the plan, and as it is, on a CPU
that of the tensors which operations make; and what one more block keeps after the forward, by the plan. Time: the ways
alternate in one process; ratios to checkpoint are medians over rounds. Gradient error: of all gradients together, relative,
against autograd of the plain model. Loss: a GPT of 24 blocks is trained on the source of Python's standard library and saved.
Then it is fine-tuned on Python's English help texts with each way, from the same weights and on the same samples: all weights
in fp32 or under bf16 autocast, or LoRA matrices of rank 8. Bits per byte of held-out help texts are reported, less those with
autograd.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from bench_common import DEVICE, alternating, arguments, begin, fine_tune, median_ratio, save, those_that_work, timed
from bench_recompute import SHAPES, Block, Stack
from measured_memory import peak_of
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.planning import TrainingStep, simulate_step
from holotrain.planning.fake_tensors import fake_parameters, fake_tensors
from holotrain.planning.tracker import AllocationTracker
from holotrain.reversible import recompute, undo
from holotrain.schedules import EAGER

WAYS: dict[str, Callable[..., nn.Module]] = {name: partial(recompute, backward=name) for name in EAGER}
WORD = 100


def hugging_face(name: str, config: str, layers: str, depth: int = 12, **sizes: Any) -> tuple[nn.Module, dict[str, Tensor]]:
    import transformers

    model = getattr(transformers, name)(getattr(transformers, config)(**{layers: depth}, vocab_size=WORD, **sizes))
    tokens = torch.randint(WORD, (4, 128))
    return model, {"input_ids": tokens, "labels": tokens}


def vit(depth: int = 12) -> tuple[nn.Module, dict[str, Tensor]]:
    import timm

    model = timm.models.VisionTransformer(img_size=64, patch_size=6, embed_dim=192, depth=depth, num_heads=3, num_classes=10)
    return model, {"x": torch.randn(4, 3, 64, 64)}


SIZES = {"hidden_size": 192, "num_attention_heads": 3, "intermediate_size": 512}
TOKENS = {f"{name}_token_id": number for number, name in enumerate(("pad", "bos", "eos", "cls", "sep"))}
GPT = {"use_cache": False, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LAYERS = "num_hidden_layers"
MODELS: dict[str, Callable[..., tuple[nn.Module, dict[str, Tensor]]]] = {
    "stack": lambda depth=12: (Stack(depth, SHAPES["narrow"]), {"x": torch.randn(4, 128, 192)}),
    "gpt2": partial(hugging_face, "GPT2LMHeadModel", "GPT2Config", "n_layer", n_embd=192, n_head=3, n_positions=128, **GPT),
    "llama": partial(
        hugging_face, "LlamaForCausalLM", "LlamaConfig", LAYERS, use_cache=False, **SIZES, max_position_embeddings=128
    ),
    "vit": vit,
    "modernbert": partial(hugging_face, "ModernBertForMaskedLM", "ModernBertConfig", LAYERS, **SIZES, **TOKENS),
}


def loss_of(output: Any) -> Tensor:
    return output.loss if hasattr(output, "loss") else output.float().square().mean()


def gradients(loss: Callable[[], Tensor], model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    loss().backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def error_of(found: list[Tensor], true: list[Tensor]) -> float:
    off = sum((a.double() - b).square().sum() for a, b in zip(found, true, strict=True))
    return math.sqrt(off / sum(b.double().square().sum() for b in true))


def tracked_peak(make: Callable[..., tuple[nn.Module, dict[str, Tensor]]], way: str, depth: int = 12) -> int:
    """Bytes of activations and temporary tensors, as operations make them; in a plan, of fake ones."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
    with torch.device("meta" if fake else "cpu"):
        model, inputs = make(depth=depth)
        model = WAYS[way](model).train()
    if fake:
        fake_parameters(model, torch.device("cpu"))
        inputs = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in inputs.items()}
    step = TrainingStep(model, lambda: loss_of(model(**inputs)), torch.optim.SGD(model.parameters(), 0.0))
    parts = simulate_step(step).parts
    return parts["activations"] + parts["head"] + parts["temporary"]


def planned_peak(make: Callable[..., tuple[nn.Module, dict[str, Tensor]]], way: str, depth: int = 12) -> int:
    with torch.device("meta"):
        made = make(depth=depth)
    with fake_tensors():
        return tracked_peak(lambda depth: made, way, depth)


def of_models(names: list[str], rounds: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    torch.manual_seed(0)
    for name, (model, inputs) in those_that_work({name: MODELS[name] for name in names})[0].items():
        model, inputs = model.to(DEVICE).train(), {key: value.to(DEVICE) for key, value in inputs.items()}
        losses = {way: loss_with(way, model, inputs) for way in usual_ways()}
        true = gradients(*losses["autograd"])
        rows = {way: figures(MODELS[name], way, *loss, true) for way, loss in losses.items()}
        seconds = alternating(
            {way: timed(lambda loss=loss: loss[0]().backward(), DEVICE) for way, loss in losses.items()}, rounds
        )
        for way, row in rows.items():
            row |= {"seconds": seconds[way], "time_over_checkpoint": median_ratio(seconds[way], seconds["checkpoint"])}
            sizes = " / ".join(f"{row[key] / 2**20:.2f}" for key in ("planned_bytes", "peak_bytes") if key in row)
            print(f"{name}, {way}: {sizes} MiB, time {row['time_over_checkpoint']:.3f}, gradients {row['gradient_error']:.4f}")
        found[name] = rows
    return found


def kept_after_forward(make: Callable[..., tuple[nn.Module, dict[str, Tensor]]], way: str, depth: int) -> int:
    """Bytes, by the plan."""
    with torch.device("meta"):
        model, inputs = make(depth=depth)
        model = WAYS[way](model).train()
    with fake_tensors():
        fake_parameters(model, torch.device("cpu"))
        inputs = {key: torch.zeros(value.shape, dtype=value.dtype) for key, value in inputs.items()}
        tracker = AllocationTracker()
        tracker.label("held", [*model.parameters(), *model.buffers(), *inputs.values()])
        held = tracker.alive
        with tracker.tracking():
            loss = loss_of(model(**inputs))
        kept = tracker.alive - held
        del loss
    return kept


def of_growth(names: list[str]) -> dict[str, dict[str, float]]:
    """Bits for each element of a block's input that one more block keeps: the input itself has 32."""
    found = {}
    for name in those_that_work({name: MODELS[name] for name in names})[0]:
        more = {
            way: (kept_after_forward(MODELS[name], way, 24) - kept_after_forward(MODELS[name], way, 12)) for way in usual_ways()
        }
        found[name] = {way: 32 * each / more["checkpoint"] for way, each in more.items()}
        print(f"{name}: " + ", ".join(f"{way} {bits:.2f}" for way, bits in found[name].items()) + " bits an element")
    return found


def loss_with(way: str, model: nn.Module, inputs: dict[str, Tensor]) -> tuple[Callable[[], Tensor], nn.Module]:
    own = WAYS[way](copy.deepcopy(model))
    return lambda: loss_of(own(**inputs)), own


def figures(make: Callable, way: str, loss: Callable[[], Tensor], model: nn.Module, true: list[Tensor]) -> dict[str, Any]:
    torch.manual_seed(0)
    row = {"gradient_error": error_of(gradients(loss, model), true)}
    if DEVICE == "cuda":
        return row | {"peak_bytes": peak_of(lambda: loss().backward(), torch.device(DEVICE))}
    return row | {
        "peak_bytes": tracked_peak(make, way),
        "planned_bytes": planned_peak(make, way),
    }


def usual_ways() -> list[str]:
    return [way for way in WAYS if way != "offload" or DEVICE == "cuda"]


class Gpt(nn.Module):
    """Tokens are bytes."""

    def __init__(self, depth: int, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(256, dim), nn.Parameter(torch.randn(context, dim) * 0.02)
        self.blocks = nn.ModuleList(Block(dim, heads, causal=True) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256)
        nn.init.normal_(self.embed.weight, std=0.02)
        for block in self.blocks:
            for narrow in (block.outer, block.narrow):
                nn.init.normal_(narrow.weight, std=0.02 / math.sqrt(2 * depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Adapted(nn.Module):
    """A frozen linear layer and the product of two narrow matrices beside it (LoRA)."""

    def __init__(self, linear: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.narrow, self.widen = (
            nn.Linear(linear.in_features, rank, bias=False),
            nn.Linear(rank, linear.out_features, bias=False),
        )
        nn.init.zeros_(self.widen.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.widen(self.narrow(x))


def adapt(model: Gpt) -> Gpt:
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "outer", "widen", "narrow"):
            setattr(block, name, Adapted(getattr(block, name)))
    return model


def texts() -> tuple[Tensor, Tensor, Tensor]:
    """Source code; help texts to train on, and others to validate on."""
    from pydoc_data import topics

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    source, helps = (
        "\n".join(parts).encode() for parts in ((file.read_text("utf-8") for file in files), topics.topics.values())
    )
    source, helps = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (source, helps))
    return source, helps[: len(helps) * 9 // 10], helps[len(helps) * 9 // 10 :]


def train(model: Gpt, text: Tensor, steps: int, options: argparse.Namespace, seed: int, lr: float, amp: bool = False) -> None:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - options.context - 1, (steps, options.batch), generator=generator)

    def loss_of(some: Tensor) -> Tensor:
        rows = text[some[:, None] + torch.arange(options.context + 1)].long().to(DEVICE)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=amp):
            return F.cross_entropy(model(rows[:, :-1]).flatten(0, 1).float(), rows[:, 1:].flatten())

    fine_tune(model, map(loss_of, starts), steps, lr)


@torch.no_grad()
def bits_per_byte(model: Gpt, text: Tensor, options: argparse.Namespace) -> float:
    rows = text[: options.windows * options.context + 1].long().to(DEVICE)
    inputs, targets = (each.view(options.windows, -1) for each in (rows[:-1], rows[1:]))
    pairs = zip(inputs.split(16), targets.split(16), strict=True)
    return statistics.mean(F.cross_entropy(model.eval()(x).flatten(0, 1), y.flatten()).item() for x, y in pairs) / math.log(2)


def pretrained(options: argparse.Namespace, source: Tensor) -> Gpt:
    torch.manual_seed(0)
    model = Gpt(options.depth, options.dim, options.dim // 32, options.context).to(DEVICE)
    path = options.folder / f"gpt_{options.depth}_{options.dim}_{options.begin}.pt"
    if path.is_file():
        model.load_state_dict(torch.load(path, weights_only=True))
        return model
    train(model, source, options.begin, options, 0, 2e-3)
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), path)
    return model


def of_tuning(options: argparse.Namespace, begun: Gpt, tuned: Tensor, held_out: Tensor) -> dict[str, Any]:
    found: dict[str, Any] = {"before": bits_per_byte(begun, held_out, options)}
    print(f"before fine-tuning: {found['before']:.4f} bits per byte")
    for kind in options.kinds:
        rows: dict[str, list[float]] = {way: [] for way in usual_ways()}
        for seed in range(1, options.seeds + 1):
            for way, row in rows.items():
                row.append(reached(options, begun, tuned, held_out, kind, way, seed))
        for way, row in rows.items():
            more = statistics.mean(a - b for a, b in zip(row, rows["autograd"], strict=True))
            print(f"{kind}, {way}: {', '.join(f'{each:.6f}' for each in row)}; {more:+.6f}")
        found[kind] = rows
    return found


def reached(options: argparse.Namespace, begun: Gpt, tuned: Tensor, held_out: Tensor, kind: str, way: str, seed: int) -> float:
    model, lr = copy.deepcopy(begun), 5e-4
    if kind == "lora":
        torch.manual_seed(seed)
        model, lr = adapt(model).to(DEVICE), 3e-3
    model = WAYS[way](model, "blocks")
    train(model, tuned, options.steps, options, seed, lr, kind == "bf16")
    return bits_per_byte(undo(model), held_out, options)


def main() -> None:
    parser = arguments(__doc__)
    parts = ["models", "growth", "tuning"]
    parser.add_argument("--parts", nargs="+", default=parts, choices=parts)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=4, help="timed steps of each way")
    parser.add_argument("--depth", type=int, default=24)
    parser.add_argument("--dim", type=int, default=64, help="a multiple of 64")
    parser.add_argument("--context", type=int, default=64)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--begin", type=int, default=800, help="steps of the training before")
    parser.add_argument("--steps", type=int, default=40, help="of the fine-tuning")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--kinds", nargs="*", default=["fp32", "bf16", "lora"], choices=["fp32", "bf16", "lora"])
    parser.add_argument("--windows", type=int, default=64, help="of the held-out text")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/holotrain_ways"), help="of the trained GPT")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    sys.stdout.reconfigure(line_buffering=True)
    found = begin(options)
    if "models" in options.parts:
        found["models"] = of_models(options.models, options.rounds)
    if "growth" in options.parts:
        found["growth"] = of_growth(options.models)
    source, tuned, held_out = texts()
    if "tuning" in options.parts:
        found["tuning"] = of_tuning(options, pretrained(options, source), tuned, held_out)
    save(found, options.json)


if __name__ == "__main__":
    main()
