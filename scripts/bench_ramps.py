"""Where along a stack of blocks should make_reversible keep its bits?

    python scripts/bench_ramps.py --json scripts/results/ramps_cpu.json
    python scripts/bench_ramps.py --depths 12 --ramps "| 4 |" "6 5 | 4 | 5 6" "size 3"
    python scripts/bench_ramps.py --depths 3 --steps 3 --pretrain 3 --seeds 2      # at toy size

A GPT on bytes is trained on the source of Python's standard library, one for each depth and seed. Copies of it are fine-tuned
on the English help texts that Python ships, each through the recurrence of make_reversible (holotrain/reversible/two_step.py)
with the bits of one ramp, and one with plain autograd. All copies of a seed see the same batches and signs. The result is the
increase over plain autograd of the bits per byte of the last tenth of the help texts, in evaluation mode.

"6 5 | 4 | 5 6"   6 and 5 bits for the first blocks, 5 and 6 for the last, 4 for those between; where both ends meet, the larger
"| 4 |"           4 bits for every block
"size 3"          3 bits on average, more for blocks that are evaluated further off: bits by bits, to the block with the largest
                  2^-bits times the size of the update before it in the trained model
"loss 3"          3 bits on average, by what 2 bits at this block alone add to the trained model's loss on the help texts

The control is plain autograd on the same samples in another order. What a ramp adds is noise as long as controls add as much.

"Before" is the increase of the loss in the forward of the training before the first step, which has next to no noise.

All copies are computed side by side, as one network whose weights have one more dimension, so that a GPU has enough to do. The
recurrence is computed in floating point: a grid of 2^-18 and what a backward rebuilds play no part here.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from bench_common import DEVICE, arguments, begin, save
from bench_finetuning import help_text, source_text
from holotrain.reversible.two_step import weights
from torch import Tensor, nn
from torch.nn import functional as F

RAMPS = (
    *("| 6 |", "| 4 |", "| 3 |", "| 2 |"),
    *("6 5 | 4 | 5 6", "6 5 | 4 |", "| 4 | 5 6"),
    *("6 5 4 | 3 | 4 5 6", "6 5 4 | 3 |", "| 3 | 4 5 6", "8 7 6 5 4 | 3 |", "8 7 6 5 4 | 3 | 4 5 6", "6 6 5 5 4 4 | 3 | 4 5 6"),
    *("6 5 4 3 | 2 | 3 4 5 6", "8 7 6 5 4 3 | 2 |", "8 7 6 5 4 3 | 2 | 3 4 5 6", "6 5 4 3 2 | 1 | 2 3 4 5 6"),
    *("size 4", "size 3", "size 2", "loss 3", "loss 2"),
)
"""make_reversible's own are those that fall from 6 at both ends."""
PLAIN = "plain"
EXACT = math.inf
"""Bits of a block that computes what the model computes."""


class Networks(nn.Module):
    """GPTs on bytes of one shape, side by side. The first dimension of each weight counts them."""

    def __init__(self, options: argparse.Namespace, depth: int, count: int) -> None:
        super().__init__()
        dim, self.heads = options.dim, options.heads

        def normal(*shape: int, std: float) -> nn.Parameter:
            return nn.Parameter(std * torch.randn(count, *shape))

        def linear(inputs: int, outputs: int, *depth: int, std: float | None = None) -> nn.ParameterList:
            std = 1 / math.sqrt(3 * inputs) if std is None else std
            return nn.ParameterList([normal(*depth, inputs, outputs, std=std), normal(*depth, 1, outputs, std=0.0)])

        def norm(*depth: int) -> nn.ParameterList:
            one = nn.Parameter(torch.ones(count, *depth, 1, dim))
            return nn.ParameterList([one, normal(*depth, 1, dim, std=0.0)])

        last = 0.02 / math.sqrt(2 * depth)
        self.embed, self.positions = normal(256, dim, std=0.02), normal(1, options.context, dim, std=0.02)
        self.blocks = nn.ModuleList(
            [
                norm(depth),
                linear(dim, 3 * dim, depth),
                linear(dim, dim, depth, std=last),
                norm(depth),
                linear(dim, 4 * dim, depth),
                linear(4 * dim, dim, depth, std=last),
            ]
        )
        self.norm, self.head = norm(), linear(dim, 256)

    def copies(self, which: Sequence[int]) -> Networks:
        """Networks of which the n-th is a copy of number ``which[n]`` of these."""
        found = copy.deepcopy(self)
        for parameter in found.parameters():
            parameter.data = parameter.data[list(which)].clone()
        return found

    def forward(self, tokens: Tensor, bits: Bits | None = None, sizes: list[Tensor] | None = None) -> Tensor:
        """
        Args:
            tokens: (networks, batch, tokens).
            bits: of each block; None: the plain model.
            sizes: takes the root mean square of each block's update.

        Returns:
            logits (networks, batch * tokens, 256).
        """
        count, shape = len(tokens), tokens.shape
        first = 256 * torch.arange(count, device=tokens.device).view(-1, 1, 1)
        x = F.embedding(tokens + first, self.embed.flatten(0, 1)).view(count, shape[1], shape[2], -1)
        x = before = (x + self.positions[:, :, : shape[2]]).flatten(1, 2)
        parts = [list(zip(*(weight.unbind(1) for weight in part), strict=True)) for part in self.blocks]
        for index, block in enumerate(zip(*parts, strict=True)):
            update = self.update(x, shape, *block)
            if sizes is not None:
                sizes.append(update.detach().float().square().mean().sqrt())
            x, before = bits.step(index, x, before, update) if bits else (x + update, x)
        return linear(normed(x, self.norm), self.head)

    def update(self, x: Tensor, shape: torch.Size, norm1, attend, project, norm2, widen, narrow) -> Tensor:
        """What a block adds to its input (networks, batch * tokens, dim)."""
        heads = linear(normed(x, norm1), attend).view(-1, shape[2], 3, self.heads, x.shape[-1] // self.heads)
        found = F.scaled_dot_product_attention(*heads.permute(2, 0, 3, 1, 4).unbind(0), is_causal=True)
        attended = linear(found.transpose(1, 2).reshape(x.shape), project)
        return attended + linear(F.gelu(linear(normed(x + attended, norm2), widen)), narrow)


def linear(x: Tensor, weight: Sequence[Tensor]) -> Tensor:
    return torch.baddbmm(weight[1], x, weight[0])


def normed(x: Tensor, weight: Sequence[Tensor]) -> Tensor:
    return torch.addcmul(weight[1], F.layer_norm(x, x.shape[-1:]), weight[0])


class Bits:
    """The recurrence of :mod:`holotrain.reversible.two_step` for networks side by side.

    Args:
        each: for each network, the bits of each block but the first.
        tokens: of a sample.
    """

    def __init__(self, each: Sequence[Sequence[float]], tokens: int, device: str) -> None:
        above, below = (torch.tensor([weights(bits, sign) for bits in each]) for sign in (1, -1))
        gains = torch.tensor([[0.0, *(2.0**-m for m in bits)] for bits in each])
        tables = (gains, (above + below) / 2, (above - below) / 2)
        self._tables = [table.t()[:, :, None, None].to(device) for table in tables]
        self._tokens = tokens

    def draw(self, sign: Tensor) -> Bits:
        """Takes the signs (networks, batch) of the next forward."""
        sign = sign.repeat_interleave(self._tokens, 1)[:, :, None]
        gains, middle, apart = self._tables
        self._gains, self._weights = gains * sign, middle + apart * sign
        return self

    def step(self, index: int, x: Tensor, before: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """x[k+1] and x[k]."""
        moved = torch.addcmul(x, self._weights[index], update)
        return (torch.addcmul(moved, self._gains[index], before - x) if index else moved), x


class Text:
    """The two texts on the device, and the samples of each seed, drawn before the training so that no step waits for them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        first, second = (
            torch.frombuffer(bytearray(text), dtype=torch.uint8).to(DEVICE) for text in (source_text(), help_text())
        )
        self.first, self.tuned, self.held_out = first, second[: len(second) * 9 // 10], second[len(second) * 9 // 10 :]

    def samples(self, data: Tensor, steps: int, seed: int, order: int = 0) -> Tensor:
        """Where the samples of a training begin, (steps, batch). An order other than 0 is another order of the same ones."""
        generator = torch.Generator().manual_seed(seed)
        places = torch.randint(len(data) - self.options.context, (steps * self.options.batch,), generator=generator)
        if order:
            places = places[torch.randperm(len(places), generator=generator.manual_seed(1000 * order + seed))]
        return places.view(steps, -1)

    def rows(self, data: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets (..., context) that begin at these places."""
        rows = data[places[..., None] + torch.arange(self.options.context + 1, device=data.device)].long()
        return rows[..., :-1], rows[..., 1:]

    @torch.no_grad()
    def score(self, net: Networks, bits: Bits | None = None) -> list[float]:
        """Bits per byte of the held-out text for each network, in fp32."""
        count, context = len(net.embed), self.options.context
        places = torch.arange(0, len(self.held_out) - context, context, device=DEVICE)[: self.options.windows]
        signs, total = torch.Generator().manual_seed(0), torch.zeros(count, device=DEVICE)
        for some in places.split(32):
            if bits is not None:
                bits.draw(random_signs((1, len(some)), signs).expand(count, -1).to(DEVICE))
            inputs, targets = self.rows(self.held_out, some.expand(count, -1))
            total += losses(net(inputs, bits), targets) * len(some)
        return (total / len(places) / math.log(2)).tolist()


def random_signs(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, shape, generator=generator).float() * 2 - 1


def losses(logits: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of each network."""
    each = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="none")
    return each.view(len(logits), -1).mean(1)


def train(net: Networks, text: Text, data: Tensor, places: Tensor, signs: Tensor, bits: Bits | None, rate: float, name: str):
    """AdamW with a warm-up of a tenth and a cosine to a tenth of the rate; gradients are clipped for each network.

    Args:
        places: of the samples, (networks, steps, batch).
        signs: of the same shape.
    """
    options, steps, begun = text.options, places.shape[1], time.monotonic()
    optimizer = torch.optim.AdamW(net.parameters(), lr=rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    places, signs = places.to(DEVICE), signs.to(DEVICE)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = rate * min((step + 1) / (steps / 10), 0.55 + 0.45 * math.cos(math.pi * step / steps))
        inputs, targets = text.rows(data, places[:, step])
        with torch.autocast(DEVICE, torch.bfloat16, enabled=options.precision == "bf16"):
            logits = net(inputs, None if bits is None else bits.draw(signs[:, step]))
        found = losses(logits, targets)
        optimizer.zero_grad()
        found.sum().backward()
        clip(net, 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0 or step + 1 == steps:
            spent, loss = time.monotonic() - begun, found.mean().item()
            print(f"  {name}: step {step + 1} of {steps}, loss {loss:.3f}, {spent:.1f} s", file=sys.stderr, flush=True)


def clip(net: Networks, largest: float) -> None:
    """Scales the gradient of each network to a norm of at most ``largest``."""
    gradients = [parameter.grad for parameter in net.parameters()]
    norms = sum(gradient.flatten(1).square().sum(1) for gradient in gradients).sqrt()
    scales = (largest / (norms + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scales.view(-1, *[1] * (gradient.dim() - 1)))


def bits_of(ramp: str, depth: int, sizes: Sequence[float], costs: Sequence[float]) -> list[float]:
    """The bits of each block but the first."""
    if ramp == PLAIN:
        return [EXACT] * (depth - 1)
    kind, _, average = ramp.partition(" ")
    if kind == "size":
        return weighted(sizes, 0.5, float(average))
    if kind == "loss":
        return weighted(costs, 0.25, float(average))
    front, middle, back = ([int(m) for m in part.split()] for part in ramp.split("|"))
    steps = depth - 1
    each = [max(middle)] * steps
    for index, m in enumerate(front[:steps]):
        each[index] = max(m, each[index])
    for index, m in enumerate(back[::-1][:steps]):
        each[steps - 1 - index] = max(m, each[steps - 1 - index])
    return each


def weighted(errors: Sequence[float], each_bit: float, average: float) -> list[int]:
    """Gives one bit after another to the block with the largest error, which a bit multiplies by ``each_bit``.

    Args:
        errors: of each block with 0 bits.
    """
    bits = [1] * len(errors)
    for _ in range(round((average - 1) * len(errors))):
        room = [index for index, m in enumerate(bits) if m < 8]
        bits[max(room, key=lambda index: errors[index] * each_bit ** bits[index])] += 1
    return bits


@torch.no_grad()
def what_bits_do(start: Networks, text: Text, depth: int) -> tuple[list[float], list[float]]:
    """For each block but the first: the size of the update before it, and what 2 bits here alone add to the loss.

    Each sample is taken with both signs, so that only what does not cancel is left. Means over the trained networks.
    """
    seeds, sizes, some = len(start.embed), [], 16
    places = text.samples(text.tuned, 1, seed=99)[0][:some].to(DEVICE)
    inputs, targets = (part.repeat(1, 2, 1) for part in text.rows(text.tuned, places.expand(seeds, -1)))
    plain = losses(start(inputs, sizes=sizes), targets)
    signs = torch.ones(seeds, len(inputs[0]), device=DEVICE)
    signs[:, : len(places)] = -1
    costs = []
    for block in range(depth - 1):
        each = [2 if index == block else EXACT for index in range(depth - 1)]
        bits = Bits([each] * seeds, text.options.context, DEVICE).draw(signs)
        costs.append((losses(start(inputs, bits), targets) - plain).mean())
    return torch.stack(sizes[:-1]).tolist(), torch.stack(costs).clamp(min=1e-9).tolist()


def measure(text: Text, depth: int) -> dict[str, dict]:
    """For each ramp and control: bits, and of each seed the increase before and after the training."""
    options, seeds, begun = text.options, list(range(text.options.seeds)), time.monotonic()
    torch.manual_seed(0)
    start = Networks(options, depth, len(seeds)).to(DEVICE)
    places = torch.stack([text.samples(text.first, options.pretrain, seed) for seed in seeds])
    train(start, text, text.first, places, places, None, options.pretrain_rate, f"{depth} blocks, first text")
    sizes, costs = what_bits_do(start, text, depth)
    orders = {PLAIN: 0, **{f"control {order}: another order": order for order in range(1, options.controls + 1)}}
    each = {name: bits_of(PLAIN if name in orders else name, depth, sizes, costs) for name in (*orders, *options.ramps)}
    places = {
        seed_and_order: text.samples(text.tuned, options.steps, 100 + seed_and_order[0], seed_and_order[1])
        for seed_and_order in ((seed, order) for seed in seeds for order in orders.values())
    }
    signs = [random_signs((options.steps, options.batch), torch.Generator().manual_seed(200 + seed)) for seed in seeds]
    todo = [(name, seed) for name in each for seed in seeds]
    begun_at, reached = {}, {}
    for first in range(0, len(todo), options.at_once):
        some = todo[first : first + options.at_once]
        net = start.copies([seed for _, seed in some])
        bits = Bits([each[name] for name, _ in some], options.context, DEVICE)
        begun_at |= dict(zip(some, text.score(net, bits), strict=True))
        orders_of = torch.stack([places[seed, orders.get(name, 0)] for name, seed in some])
        title = f"{depth} blocks, {first + len(some)} of {len(todo)} trainings"
        train(net, text, text.tuned, orders_of, torch.stack([signs[seed] for _, seed in some]), bits, options.rate, title)
        reached |= dict(zip(some, text.score(net), strict=True))
    print(f"{depth} blocks: {time.monotonic() - begun:.0f} s", file=sys.stderr, flush=True)
    rows = {}
    for name, kept in each.items():
        over = {
            key: [found[name, seed] - found[PLAIN, seed] for seed in seeds]
            for key, found in (("before", begun_at), ("after", reached))
        }
        rows[name] = {"bits": [m for m in kept if m != EXACT], "over_plain_before": over["before"], "over_plain": over["after"]}
    rows[PLAIN] |= {"begun": [begun_at[PLAIN, seed] for seed in seeds], "reached": [reached[PLAIN, seed] for seed in seeds]}
    return rows | {"sizes": sizes, "costs": costs}


def show(depth: int, rows: dict[str, dict]) -> None:
    begun, reached = (statistics.mean(rows[PLAIN][key]) for key in ("begun", "reached"))
    print(f"{depth} blocks: plain autograd goes from {begun:.4f} to {reached:.4f} bits per byte. What others add to this:")
    for name, row in rows.items():
        if name in (PLAIN, "sizes", "costs"):
            continue
        kept = f"{statistics.mean(row['bits']):.2f} bits" if row["bits"] else ""
        each = row["over_plain"]
        spread = max(each) - min(each)
        before = statistics.mean(row["over_plain_before"])
        print(f"  {name:32}{kept:10} {statistics.mean(each):+.5f} (range {spread:.5f}), before the training {before:+.5f}")


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 24, 30], help="numbers of blocks")
    parser.add_argument("--ramps", nargs="+", default=list(RAMPS))
    parser.add_argument("--controls", type=int, default=3, help="other orders of the samples")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128, help="bytes of a sample")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--pretrain", type=int, default=1000, help="steps on the first text")
    parser.add_argument("--pretrain-rate", type=float, default=2e-3)
    parser.add_argument("--steps", type=int, default=250, help="steps on the second text")
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--windows", type=int, help="how many samples of held-out text are scored; default: all")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--at-once", type=int, default=90 if DEVICE == "cuda" else 6, help="networks side by side")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    begun, results, text = begin(options), {}, Text(options)
    for depth in options.depths:
        results[str(depth)] = measure(text, depth)
        show(depth, results[str(depth)])
        save(begun | {"results": results}, options.json)


if __name__ == "__main__":
    main()
