"""What a training reaches with a few bits kept between blocks: bits per byte of a small language model, for each method.

    python scripts/bench_finetuning.py --seeds 3 --json scripts/results/finetuning_16_cpu.json
    python scripts/bench_finetuning.py --pretrain 0 --steps 1200 --seeds 1        # from scratch
    python scripts/bench_finetuning.py --depth 24 --methods plain "2 bits"

Needs only torch. A GPT on bytes is trained on the source of Python's standard library with plain autograd. Copies of it are
then trained on the English help texts that Python ships (pydoc_data), one with each method, on the same batches. The figure is
the loss on the last tenth of the help texts, which nobody trained on, in evaluation mode, in bits per byte.

Methods: plain autograd; make_reversible with 1 to 4 bits, and with 2 bits for all blocks instead of more at both ends; and two
streams, which is another network (make_reversible with split).
"""

from __future__ import annotations

import argparse
import copy
import math
import pydoc_data.topics
import statistics
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_common import machine, save, settings_of
from torch import Tensor, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))

from holotrain.reversible import make_reversible


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm, self.qkv, self.outer, self.heads = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.outer(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.attention = Attention(dim, heads)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class GPT(nn.Module):
    """Bytes (B, T) -> logits (B, T, 256)."""

    def __init__(self, depth: int, dim: int, heads: int, context: int) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, dim), nn.Parameter(0.02 * torch.randn(context, dim))
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256)
        nn.init.normal_(self.bytes.weight, std=0.02)
        for block in self.blocks:
            for last in (block.attention.outer, block.mlp[-1]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * depth))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def source_text() -> bytes:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"\n".join(path.read_bytes() for path in files)


def help_text() -> bytes:
    return "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).encode()


def batches(text: Tensor, size: int, context: int, generator: torch.Generator):
    while True:
        places = torch.randint(len(text) - context, (size, 1), generator=generator)
        rows = text[places + torch.arange(context + 1)].long()
        yield rows[:, :-1], rows[:, 1:]


def train(net: GPT, text: Tensor, steps: int, rate: float, options: argparse.Namespace, seed: int, name: str) -> None:
    """AdamW with a warm-up of a tenth and a cosine to a tenth of the learning rate."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    device, begun = next(net.parameters()).device, time.monotonic()
    net.train()
    for step, (tokens, targets) in zip(range(steps), batches(text, options.batch, options.context, generator), strict=False):
        warm, done = steps / 10, step / steps
        scale = min((step + 1) / warm, 0.55 + 0.45 * math.cos(math.pi * done))
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
        loss = F.cross_entropy(net(tokens.to(device)).flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            spent = time.monotonic() - begun
            bits = loss.item() / math.log(2)
            print(f"  {name}: step {step + 1} of {steps}, {bits:.3f} bits per byte, {spent:.0f} s", file=sys.stderr)


@torch.no_grad()
def bits_per_byte(net: GPT, text: Tensor, context: int) -> float:
    net.eval()
    rows = text[: (len(text) - 1) // context * context + 1]
    inputs, targets = rows[:-1].view(-1, context).long(), rows[1:].view(-1, context).long()
    device, total = next(net.parameters()).device, 0.0
    for some, wanted in zip(inputs.split(32), targets.split(32), strict=True):
        total += F.cross_entropy(net(some.to(device)).flatten(0, 1), wanted.to(device).flatten(), reduction="sum").item()
    return total / targets.numel() / math.log(2)


METHODS: dict[str, Callable[[GPT], nn.Module]] = {
    "plain": lambda net: net,
    **{
        f"{bits} bit{'s' * (bits > 1)}": lambda net, bits=bits: make_reversible(net, "blocks", bits=bits)
        for bits in (1, 2, 3, 4)
    },
    "2 bits, even": lambda net: make_reversible(net, "blocks", bits=[2] * (len(net.blocks) - 1)),
    "two streams": lambda net: make_reversible(net, "blocks", split=lambda block: (block.attention, block.mlp)),
}


def measure(options: argparse.Namespace) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    first, second = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (source_text(), help_text()))
    tuned, held_out = second[: len(second) * 9 // 10], second[len(second) * 9 // 10 :]
    found: dict[str, dict[str, list[float]]] = {method: {"begun": [], "reached": []} for method in options.methods}
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        start = GPT(options.depth, options.dim, options.heads, options.context).to(device)
        train(start, first, options.pretrain, options.pretrain_rate, options, seed, f"seed {seed}, source")
        for method in options.methods:
            net = METHODS[method](copy.deepcopy(start))
            found[method]["begun"].append(bits_per_byte(net, held_out, options.context))
            train(net, tuned, options.steps, options.rate, options, 100 + seed, f"seed {seed}, {method}")
            found[method]["reached"].append(bits_per_byte(net, held_out, options.context))
            print(
                f"seed {seed}, {method}: {found[method]['begun'][-1]:.4f} -> {found[method]['reached'][-1]:.4f} bits per byte"
            )
    if "plain" in found:
        for method, values in found.items():
            apart = [a - b for a, b in zip(values["reached"], found["plain"]["reached"], strict=True)]
            values["over_plain"] = apart
            print(
                f"{method}: {statistics.mean(apart):+.4f} bits per byte over plain (each seed: {[round(a, 4) for a in apart]})"
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--depth", type=int, default=16, help="number of blocks")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128, help="bytes of a sample")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pretrain", type=int, default=1000, help="steps on the source; 0: from scratch")
    parser.add_argument("--pretrain-rate", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=250, help="steps on the help texts")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where = machine()
    print(where)
    save({"machine": where, "options": settings_of(options), "results": measure(options)}, options.json)


if __name__ == "__main__":
    main()
