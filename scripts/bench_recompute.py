"""Compares ways to train a stack of residual blocks as it is: memory of a step, its growth with each block, and step time.

    python scripts/bench_recompute.py --json recompute_cpu.json
    python scripts/bench_recompute.py --shape gpt2 --tokens 512 --batch 1
    python scripts/bench_recompute.py --shape llama --tokens 2048 --batch 1 --depths 6 12 --methods checkpoint checkpoint8

Needs only torch. The methods: plain autograd; torch.utils.checkpoint of each block (which is also Hugging Face's
gradient_checkpointing_enable); the same with the results of matrix products stored (selective); saved tensors offloaded to the
host (on a CPU that saves nothing, so it is left out there); and holotrain's recompute, with block inputs as they are and in 8
bits, by itself and by torch.compile (compiled, compiled8, and with a memory budget of 0.3). A step is a forward and a backward.

Memory: the peak of what a step allocates, above weights and gradients, as PyTorch's allocator reports it; the scratch memory of
libraries is in it. Growth: the increase with each block from the smallest to the largest depth. Step time: the methods
alternate in one process at the smallest depth; ratios to checkpointing, or to what --over names, are medians over rounds.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import statistics
from collections.abc import Callable

import torch
from bench_common import DEVICE, alternating, arguments, begin, median_ratio, save, timed
from measured_memory import peak_of as allocated_peak
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from holotrain.reversible import recompute

SHAPES = {
    "tiny": {"dim": 128, "heads": 4},
    "narrow": {"dim": 192, "heads": 3},
    "vit": {"dim": 384, "heads": 6},
    "gpt2": {"dim": 768, "heads": 12, "causal": True},
    "llama": {"dim": 512, "heads": 8, "causal": True, "gated": True},
}


class Block(nn.Module):
    """A pre-norm block: attention, then an MLP, or with ``gated`` RMS norms and a SwiGLU as in Llama."""

    def __init__(self, dim: int, heads: int, causal: bool = False, gated: bool = False) -> None:
        super().__init__()
        norm = nn.RMSNorm if gated else nn.LayerNorm
        self.norm1, self.norm2 = norm(dim), norm(dim)
        self.qkv, self.outer = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        hidden = 8 * dim // 3 if gated else 4 * dim
        self.gate = nn.Linear(dim, hidden) if gated else None
        self.widen, self.narrow = nn.Linear(dim, hidden), nn.Linear(hidden, dim)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.outer(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal).transpose(1, 2).flatten(-2))
        y = self.norm2(x)
        hidden = F.gelu(self.widen(y)) if self.gate is None else F.silu(self.gate(y)) * self.widen(y)
        return x + self.narrow(hidden)


class Stack(nn.Module):
    def __init__(self, depth: int, shape: dict) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(**shape) for _ in range(depth))
        self.call: Callable[[nn.Module, Tensor], Tensor] = lambda block, x: block(x)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.call(block, x)
        return x


def checkpointed(net: Stack, **options) -> Callable[[Tensor], Tensor]:
    net.call = functools.partial(checkpoint, use_reentrant=False, **options)
    return net


def selective(net: Stack) -> Callable[[Tensor], Tensor]:
    aten = torch.ops.aten
    products = [aten.mm.default, aten.addmm.default, aten._scaled_dot_product_flash_attention.default]
    products += [aten._scaled_dot_product_flash_attention_for_cpu.default, aten._scaled_dot_product_efficient_attention.default]
    return checkpointed(net, context_fn=functools.partial(create_selective_checkpoint_contexts, products))


def offloaded(net: Stack) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu(pin_memory=x.is_cuda):
            return net(x)

    return run


METHODS: dict[str, Callable[[Stack], Callable[[Tensor], Tensor]]] = {
    "autograd": lambda net: net,
    "checkpoint": checkpointed,
    "selective": selective,
    "offload": offloaded,
    "recompute": functools.partial(recompute, blocks="blocks"),
} | {
    name: functools.partial(recompute, blocks="blocks", backward=name)
    for name in ("checkpoint8", "compiled", "compiled:0.3", "compiled8")
}


def step_of(method: str, net: Stack, x: Tensor, amp: bool) -> Callable[[], None]:
    run = METHODS[method](net)

    def step() -> None:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=amp):
            loss = run(x).float().square().mean()
        loss.backward()

    return step


def peak_of(method: str, depth: int, shape: dict, x: Tensor, amp: bool) -> int:
    torch.manual_seed(0)
    net = Stack(depth, shape).to(x.device)
    step = step_of(method, net, x, amp)
    step()  # makes the gradients
    gc.collect()
    return allocated_peak(step, x.device)


def measure(options: argparse.Namespace) -> dict:
    device = DEVICE
    shape = SHAPES[options.shape]
    x = torch.randn(options.batch, options.tokens, shape["dim"], device=device)
    few, many = min(options.depths), max(options.depths)
    results = {}
    for method in options.methods:
        peaks = {depth: peak_of(method, depth, shape, x, options.amp) for depth in sorted(set(options.depths))}
        growth = (peaks[many] - peaks[few]) / max(many - few, 1)
        results[method] = {"peak_bytes": peaks, "growth_bytes": growth, "growth_bits_per_element": 8 * growth / x.numel()}
        said = ", ".join(f"{depth} blocks {peak / 2**20:.2f} MiB" for depth, peak in peaks.items())
        print(f"{method}: {said}; growth {growth / 2**20:.4f} MiB a block, {8 * growth / x.numel():.2f} bits an element")
    if options.rounds:
        torch.manual_seed(0)
        net = Stack(few, shape).to(device)
        steps = {method: timed(step_of(method, copy.deepcopy(net), x, options.amp), device) for method in options.methods}
        seconds = alternating(steps, options.rounds)
        base = options.over if options.over in seconds else options.methods[0]
        for method, taken in seconds.items():
            ratio = median_ratio(taken, seconds[base])
            results[method] |= {"seconds": taken, f"time_over_{base}": ratio}
            print(f"{method}: {statistics.median(taken) * 1e3:.1f} ms a step, {ratio:.3f} of {base}")
    return results


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="narrow", help="width and kind of the blocks")
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 24, 48], help="numbers of blocks")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=197)
    usual = [method for method in METHODS if method != "offload" or torch.cuda.is_available()]
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=usual)
    parser.add_argument("--over", choices=METHODS, default="checkpoint", help="what step times are divided by")
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each method; 0: memory alone")
    parser.add_argument("--amp", action="store_true", help="bf16 autocast")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    save(begin(options) | {"results": measure(options)}, options.json)


if __name__ == "__main__":
    main()
