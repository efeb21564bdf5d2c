"""What a training reaches with a few bits kept between blocks, for each method.

    python scripts/bench_finetuning.py --json scripts/results/finetuning_12_cpu.json
    python scripts/bench_finetuning.py --pretrain 0 --steps 1200 --seeds 1        # from scratch
    python scripts/bench_finetuning.py --depth 24 --methods plain "2 bits"
    python scripts/bench_finetuning.py --task digits --batch 64 --pretrain 600 --pretrain-rate 1e-3 --steps 300

A network is trained on one set of data with plain autograd. Copies of it are then trained on another, one with each method, on
the same batches, and tested in evaluation mode on data that nobody trained on.

text      A GPT on bytes: from the source of Python's standard library to the English help texts that Python ships (pydoc_data).
          Bits per byte of the last tenth of the help texts. Needs only torch.
digits    A ViT on 2 x 2 patches: from handwritten digits that are turned by 90 degrees to the same digits upright. Per cent of
          wrong answers on two fifths of them. Needs scikit-learn.

Methods: plain autograd; make_reversible with bits=1 to bits=4 and more at both ends, as printed, and with 2 bits for all
blocks; two streams, which is another network (make_reversible with split); and Dr2Net (https://arxiv.org/abs/2401.04105), whose
network moves away from the plain one: x[k+1] = f(x[k]) + alpha x[k] + beta x[k-1], where alpha goes from 1 to 0.3 and beta from
0.1 to 0.7 over the first half of the training. All train with backward="autograd", which computes the same as "reversible" and
is faster.
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
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from bench_common import DEVICE, arguments, begin, save
from bench_training import Attention
from holotrain.reversible.stack import stacks_in
from holotrain.reversible.two_step import bits_in_words
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.reversible import make_reversible


class Block(nn.Module):
    def __init__(self, dim: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.attention = Attention(dim, heads, causal)
        self.mlp = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Net(nn.Module):
    """Blocks between an embedding of ``tokens`` tokens and a head."""

    def __init__(self, options: argparse.Namespace, embed: nn.Module, tokens: int, outputs: int, causal: bool) -> None:
        super().__init__()
        self.embed, self.positions = embed, nn.Parameter(0.02 * torch.randn(tokens, options.dim))
        self.blocks = nn.ModuleList(Block(options.dim, options.heads, causal) for _ in range(options.depth))
        self.norm, self.head = nn.LayerNorm(options.dim), nn.Linear(options.dim, outputs)
        if isinstance(embed, nn.Embedding):
            nn.init.normal_(embed.weight, std=0.02)
        for block in self.blocks:
            for last in (block.attention.project, block.mlp[-1]):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * options.depth))

    def stream(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed(inputs)
        return self.head(self.norm(self.stream(x + self.positions[: x.shape[1]])))


class Dr2Net(Net):
    """The same network with two residual connections, after :func:`dr2net`."""

    done = 0.0  # of the training

    def stream(self, x: Tensor) -> Tensor:
        share = min(1.0, 2 * self.done)
        alpha, beta, before = 1 - 0.7 * share, 0.1 + 0.6 * share, torch.zeros_like(x)
        for block in self.blocks:
            before, x = x, block(x) + (alpha - 1) * x + beta * before
        return x


def dr2net(net: Net) -> nn.Module:
    net.__class__, net.done = Dr2Net, 0.0
    return net


def source_text() -> bytes:
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return b"\n".join(path.read_bytes() for path in files)


def help_text() -> bytes:
    return "\n".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics)).encode()


class Text:
    """Bytes (B, T) -> logits (B, T, 256)."""

    unit = "bits per byte"

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        first, second = (torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in (source_text(), help_text()))
        self.first, self.tuned, self.held_out = first, second[: len(second) * 9 // 10], second[len(second) * 9 // 10 :]

    def network(self) -> Net:
        return Net(self.options, nn.Embedding(256, self.options.dim), self.options.context, 256, causal=True)

    def batch(self, data: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        places = torch.randint(len(data) - self.options.context, (self.options.batch, 1), generator=generator)
        rows = data[places + torch.arange(self.options.context + 1)].long()
        return rows[:, :-1], rows[:, 1:]

    @torch.no_grad()
    def score(self, net: nn.Module, device: str) -> float:
        net.eval()
        context, data = self.options.context, self.held_out
        rows = data[: (len(data) - 1) // context * context + 1]
        inputs, targets = rows[:-1].view(-1, context).long(), rows[1:].view(-1, context).long()
        total = 0.0
        for some, wanted in zip(inputs.split(32), targets.split(32), strict=True):
            total += F.cross_entropy(net(some.to(device)).flatten(0, 1), wanted.to(device).flatten(), reduction="sum").item()
        return total / targets.numel() / math.log(2)


class Digits:
    """Images of 8 x 8 pixels as (B, 16, 4) -> logits (B, 16, 10), one answer from each patch; their mean counts."""

    unit = "% wrong"

    def __init__(self, options: argparse.Namespace) -> None:
        from sklearn.datasets import load_digits

        self.options = options
        images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
        images, order = images.float().view(-1, 8, 8) / 8 - 1, torch.randperm(len(labels), generator=torch.manual_seed(0))
        train, test = order[: len(order) * 3 // 5], order[len(order) * 3 // 5 :]
        self.first = images[train].rot90(1, (1, 2)), labels[train]
        self.tuned, self.held_out = (images[train], labels[train]), (images[test], labels[test])

    def network(self) -> Net:
        return Net(self.options, nn.Linear(4, self.options.dim), 16, 10, causal=False)

    def patches(self, images: Tensor) -> Tensor:
        return images.unfold(1, 2, 2).unfold(2, 2, 2).flatten(3).flatten(1, 2)

    def batch(self, data: tuple[Tensor, Tensor], generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(len(data[1]), (self.options.batch,), generator=generator)
        return self.patches(data[0][rows]), data[1][rows, None].expand(-1, 16)

    @torch.no_grad()
    def score(self, net: nn.Module, device: str) -> float:
        net.eval()
        answers = net(self.patches(self.held_out[0]).to(device)).mean(1).argmax(-1).cpu()
        return 100 * (answers != self.held_out[1]).float().mean().item()


TASKS = {"text": Text, "digits": Digits}


def train(net: nn.Module, task: Text | Digits, data: object, steps: int, rate: float, seed: int, name: str) -> None:
    """AdamW with a warm-up of a tenth and a cosine to a tenth of the learning rate."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1)
    device, begun = next(net.parameters()).device, time.monotonic()
    net.train()
    for step in range(steps):
        net.done = (step + 1) / steps
        scale = min((step + 1) / (steps / 10), 0.55 + 0.45 * math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate * scale
        inputs, targets = task.batch(data, generator)
        loss = F.cross_entropy(net(inputs.to(device)).flatten(0, 1), targets.to(device).flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 100 == 0:
            spent = time.monotonic() - begun
            print(f"  {name}: step {step + 1} of {steps}, loss {loss.item():.3f}, {spent:.0f} s", file=sys.stderr)


METHODS: dict[str, Callable[[Net], nn.Module]] = {
    "plain": lambda net: net,
    **{
        f"{bits} bit{'s' * (bits > 1)}": lambda net, bits=bits: make_reversible(net, "blocks", bits=bits, backward="autograd")
        for bits in (1, 2, 3, 4)
    },
    "2 bits, even": lambda net: make_reversible(net, "blocks", bits=[2] * (len(net.blocks) - 1), backward="autograd"),
    "two streams": lambda net: make_reversible(
        net, "blocks", split=lambda block: (block.attention, block.mlp), backward="autograd"
    ),
    "Dr2Net": dr2net,
}


def measure(options: argparse.Namespace) -> Iterator[dict]:
    """Yields the results after each seed."""
    device = DEVICE
    task = TASKS[options.task](options)
    found: dict[str, dict[str, list[float]]] = {
        method: {"begun": [], "reached": [], "over_plain": []} for method in options.methods
    }
    bits = {}
    for seed in range(options.seeds):
        torch.manual_seed(seed)
        start = task.network().to(device)
        train(start, task, task.first, options.pretrain, options.pretrain_rate, seed, f"seed {seed}, first data")
        for method, values in found.items():
            net = METHODS[method](copy.deepcopy(start))
            bits[method] = "; ".join(bits_in_words(stack.bits) for stack in stacks_in(net))
            values["begun"].append(task.score(net, device))
            train(net, task, task.tuned, options.steps, options.rate, 100 + seed, f"seed {seed}, {method}")
            values["reached"].append(task.score(net, device))
            if "plain" in found:
                values["over_plain"].append(values["reached"][-1] - found["plain"]["reached"][-1])
            print(f"seed {seed}, {method}: {values['begun'][-1]:.4f} -> {values['reached'][-1]:.4f} {task.unit}", flush=True)
        yield {method: values | {"bits": bits[method]} for method, values in found.items()}
    for method, values in found.items():
        if values["over_plain"]:
            each = [round(apart, 4) for apart in values["over_plain"]]
            kept = f" ({bits[method]})" if bits[method] else ""
            print(f"{method}{kept}: {statistics.mean(values['over_plain']):+.4f} {task.unit} over plain (each seed: {each})")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--task", choices=TASKS, default="text")
    parser.add_argument("--depth", type=int, default=12, help="number of blocks")
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128, help="bytes of a sample")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pretrain", type=int, default=1000, help="steps on the first data; 0: from scratch")
    parser.add_argument("--pretrain-rate", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=250, help="steps on the second data")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    begun = begin(options)
    for found in measure(options):
        save(begun | {"results": found}, options.json)


if __name__ == "__main__":
    main()
