"""Compares ways to train a stack of residual blocks as it is: memory of a step, its growth with each block, and step time.

    python scripts/bench_make_reversible.py --json scripts/results/make_reversible_cpu.json
    python scripts/bench_make_reversible.py --shape gpt2 --tokens 512 --batch 1
    python scripts/bench_make_reversible.py --shape llama --tokens 2048 --batch 1 --depths 6 12 --methods checkpoint "2 bits"

Needs only torch. The methods: plain autograd, torch.utils.checkpoint of each block (which is also Hugging Face's
gradient_checkpointing_enable), the same with the results of matrix products stored (selective), saved tensors offloaded to the
host (on a CPU that saves nothing, so it is left out there), and holotrain's make_reversible with some bits. A step is a forward
and a backward.

Memory: the most bytes of live tensors in a step, above weights and gradients, counted tensor by tensor, so that it is the same
on every machine. Growth: the increase with each block from the smallest to the largest depth. Step time: the methods alternate
in one process at the smallest depth; ratios to checkpointing are medians over rounds.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import statistics
import sys
import weakref
from collections.abc import Callable
from pathlib import Path

import torch
from bench_common import alternating, machine, median_ratio, save, settings_of, timed
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).parents[1]))

from holotrain.reversible import make_reversible

SHAPES = {
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
    **{f"{bits} bit{'s' * (bits > 1)}": functools.partial(make_reversible, blocks="blocks", bits=bits) for bits in (1, 2, 4)},
}


class Alive(TorchDispatchMode):
    """``peak``: the most bytes of live tensors that operations have made, but for those of the given ones."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._sizes: dict[int, weakref.ref] = {}
        self.alive = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._sizes or storage.data_ptr() in self._known:
            return

        def freed(_) -> None:
            del self._sizes[key]
            self.alive -= size

        self._sizes[key] = weakref.ref(storage, freed)
        self.alive += size
        self.peak = max(self.peak, self.alive)


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
    step()  # makes the gradients, and chooses the grid
    gc.collect()
    with Alive([tensor for p in net.parameters() for tensor in (p, p.grad)]) as memory:
        step()
    return memory.peak


def measure(options: argparse.Namespace) -> dict:
    device = "cuda" if torch.cuda.is_available() else "cpu"
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
        base = "checkpoint" if "checkpoint" in seconds else options.methods[0]
        for method, taken in seconds.items():
            ratio = median_ratio(taken, seconds[base])
            results[method] |= {"seconds": taken, f"time_over_{base}": ratio}
            print(f"{method}: {statistics.median(taken) * 1e3:.1f} ms a step, {ratio:.3f} of {base}")
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="narrow", help="width and kind of the blocks")
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 24, 48], help="numbers of blocks")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=197)
    usual = [method for method in METHODS if method != "offload" or torch.cuda.is_available()]
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=usual)
    parser.add_argument("--rounds", type=int, default=20, help="timed steps of each method; 0: memory alone")
    parser.add_argument("--amp", action="store_true", help="bf16 autocast")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    where = machine()
    print(where)
    save({"machine": where, "options": settings_of(options), "results": measure(options)}, options.json)


if __name__ == "__main__":
    main()
