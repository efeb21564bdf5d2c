"""Are streams rebuilt bit for bit, whatever runs in the blocks, and whatever else runs on the GPU? Needs only torch.

    python scripts/bench_bits.py --json scripts/results/cuda/bits.json

Blocks that make_reversible couples, and two streams on a grid (exact), in bf16 autocast: attention by each kernel of PyTorch,
causal, with a mask and with dropout; convolutions; blocks that torch.compile compiled. Each trains for some steps, alone and
while matrix products run on another stream. Every backward compares a checksum of the stream that it rebuilt; here a wrong one
is an error, in the first step, too. A kernel that this machine lacks, or that takes no mask, is left out.
"""

from __future__ import annotations

import argparse
import itertools
import warnings
from collections.abc import Callable
from functools import partial

import torch
from bench_common import DEVICE, arguments, begin, last_line, save, verdict
from holotrain.reversible.stack import stacks_in
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from holotrain.reversible import ReversibleBlock, ReversibleSequence, make_reversible

KERNELS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
KERNELS |= {"efficient": SDPBackend.EFFICIENT_ATTENTION, "math": SDPBackend.MATH}
DEPTH, HEADS, STEPS = 4, 4, 3


class Attention(nn.Module):
    """Pre-norm attention by one kernel. ``masked``: some keys are left out; else it is causal."""

    def __init__(self, dim: int, kernel: SDPBackend, masked: bool, dropout: float) -> None:
        super().__init__()
        self.norm, self.qkv, self.outer = nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.kernel, self.masked, self.dropout = kernel, masked, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        tokens = x.shape[1]
        mask = (torch.arange(tokens, device=x.device) % 7 != 3).expand(tokens, tokens) if self.masked else None
        with sdpa_kernel(self.kernel):
            y = F.scaled_dot_product_attention(q, k, v, mask, self.dropout, is_causal=not self.masked)
        return self.outer(y.transpose(1, 2).flatten(-2))


class Convolution(nn.Module):
    """A depthwise convolution over a square of tokens, as in ConvNeXt."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.mixed, self.outer = nn.Conv2d(dim, dim, 7, padding=3, groups=dim), nn.Conv2d(dim, dim, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        side = round(x.shape[1] ** 0.5)
        return self.outer(self.mixed(x.transpose(1, 2).unflatten(-1, (side, side)))).flatten(2).transpose(1, 2)


def mlp(dim: int, dropout: float) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.GELU(), nn.Dropout(dropout), nn.Linear(4 * dim, dim))


class Residual(nn.Module):
    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.f(x)
        return x + self.g(x)


def attention(dim: int, kernel: SDPBackend, masked: bool, dropout: float) -> tuple[nn.Module, nn.Module]:
    return Attention(dim, kernel, masked, dropout), mlp(dim, dropout)


def branches() -> dict[str, Callable[[int], tuple[nn.Module, nn.Module]]]:
    """From a width, the two branches of a block, by name."""
    found = {}
    for (name, kernel), masked, dropout in itertools.product(KERNELS.items(), (False, True), (0.0, 0.1)):
        what = f"{name}{', mask' * masked}{', dropout' * bool(dropout)}"
        found[what] = partial(attention, kernel=kernel, masked=masked, dropout=dropout)
    found["convolutions"] = lambda dim: (Convolution(dim), mlp(dim, 0.0))
    return found


def network(way: str, pairs: list[tuple[nn.Module, nn.Module]], compiled: bool) -> nn.Module:
    if way == "exact":
        blocks = [ReversibleBlock(f, g) for f, g in pairs]
        for part in itertools.chain(*pairs) if compiled else ():
            part.compile()
        return ReversibleSequence(blocks, exact=True, on_mismatch="error")
    net = nn.Sequential(nn.Sequential(*(Residual(f, g) for f, g in pairs)))
    for block in net[0] if compiled else ():
        block.compile()
    return make_reversible(net, "0", on_mismatch="error")


def train(way: str, make: Callable, compiled: bool, noisy: bool, options: argparse.Namespace) -> None:
    """Some steps. Raises for a stream that was rebuilt with other bits."""
    torch.manual_seed(0)
    net = network(way, [make(options.dim) for _ in range(DEPTH)], compiled).to(DEVICE).train()
    x = torch.randn(options.batch, options.tokens, options.dim, device=DEVICE)
    for _ in range(STEPS):
        if noisy:
            make_noise(options.noise)
        with torch.autocast(DEVICE, torch.bfloat16):
            out = net(x, x)[0] if way == "exact" else net(x)
        out.float().square().mean().backward()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    (net.checks if way == "exact" else stacks_in(net)[0].checks).begin()  # raises for the last step


def make_noise(products: int) -> None:
    """Matrix products on another stream, which run while the host goes on."""
    with torch.cuda.stream(torch.cuda.Stream()):
        matrix = torch.randn(2048, 2048, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(products):
            matrix = matrix @ matrix


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024, help="a square number")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--noise", type=int, default=300, help="products on the other stream, of about 0.03 ms each")
    options = parser.parse_args()
    torch.backends.cudnn.benchmark = True  # kernels are tuned at their first call
    warnings.filterwarnings("ignore", category=UserWarning)  # a kernel says why it cannot be used
    result = begin(options)
    noises = (False, True) if DEVICE == "cuda" else (False,)
    for compiled in (False, True):  # which takes the most time
        names = ("flash", "convolutions") if compiled else branches()
        cases = itertools.product(("make_reversible", "exact"), names, noises)
        rows = {", ".join((*case[:2], *["beside noise"] * case[2])): outcome(*case, compiled, options) for case in cases}
        ran = [state for state in rows.values() if state != "left out"]
        result["compiled" if compiled else "cases"] = rows
        what = f"of {len(ran)} {'compiled ' * compiled}cases, those with other bits"
        verdict(result, what, sum(state != "bit for bit" for state in ran), 0)
        if DEVICE == "cuda":
            verdict(result, f"share of {'compiled ' * compiled}cases that have a kernel", len(ran) / len(rows), 0.5, least=True)
        save(result, options.json)


def outcome(way: str, name: str, noisy: bool, compiled: bool, options: argparse.Namespace) -> str:
    try:
        train(way, branches()[name], compiled, noisy, options)
        found = "bit for bit"
    except Exception as error:
        lacks = "No available kernel" in str(error) or "No viable backend" in str(error)
        found = "left out" if lacks else last_line(error)
    print(f"{way}, {name}{', compiled' * compiled}{', beside noise' * noisy}: {found}", flush=True)
    return found


if __name__ == "__main__":
    main()
