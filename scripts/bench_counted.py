"""Counts, on fake tensors and without a GPU, what a tile of the loss costs one: kernels, and bytes that they read and write.

    python scripts/bench_counted.py --json scripts/results/counted.json
    python scripts/bench_counted.py --time                  # on a GPU: the kernel with other blocks and numbers of warps

One tile of a loss in tiles, forward and backward, by torch's operations and by one Triton kernel: the difference of three tiles
and two. Matrix products are left out, since they are the same: what is counted is the work on elements, which waits for memory.
A kernel reads its inputs and writes its outputs once. Views cost nothing.

The kernel reads a row twice. Whether the second time it is still in the L2 cache depends on how many rows are under way at
once: with 8 warps each some thousand, which is 100 MB of GPT-2's logits; with 32 warps a quarter of that. --time shows it.
"""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from bench_common import DEVICE, arguments, begin, save, those_that_work, timed, verdict
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holotrain.planning.fake_tensors import fake_parameters, fake_tensors
from holotrain.reversible import loss_ops, pending, tiled_loss

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "attention", "convolution", "linear")
"""Parts of the names of operations that are the same in all ways of training."""

ALLOCATING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach", "lift_fresh", "_unsafe_view"}


class Counting(TorchDispatchMode):
    """Counts kernels, and the bytes of their inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.bytes = 0, 0

    def __torch_dispatch__(self, func, types, args: Any = (), kwargs: Any = None):
        made = func(*args, **(kwargs or {}))
        name = func.name().partition("::")[2].partition(".")[0]
        if func.is_view or name in ALLOCATING or any(part in name for part in PRODUCTS):
            return made
        read, written = tensors((args, kwargs)), tensors(made)
        if not written and not func._schema.is_mutable:  # such as a question about a device
            return made
        self.kernels += 1
        storages = {(id(each.untyped_storage()), each.storage_offset()): each for each in read}
        new = [each for each in written if (id(each.untyped_storage()), each.storage_offset()) not in storages]
        changed = [args[place] for place, each in enumerate(func._schema.arguments) if each.is_write and place < len(args)]
        moved = sum(each.nbytes for each in (*storages.values(), *new, *tensors(changed)))
        self.bytes += moved + correction(name, args)
        return made


def correction(name: str, args: Any) -> int:
    """Bytes of an operation that does not read each of its inputs once."""
    if name == "cross_entropy":  # reads the logits twice
        return args[0].nbytes
    if name == "scale_gradients":  # by one, in tiles: neither reads nor writes them
        return -2 * args[0].nbytes
    if name in ("nll_loss_forward", "nll_loss_backward"):  # reads one logit of a row, and none
        return -args[name == "nll_loss_backward"].nbytes
    return 0


def tensors(node: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(node) if isinstance(leaf, Tensor)]


HEADS = {"GPT-2": (768, 50257), "Qwen3-0.6B": (1024, 151936)}
"""The width and the words of a head, whose weight and tokens are in bf16."""


def counted_tiles(width: int, words: int, tiles: int, fused: bool) -> Counting:
    """A model with nothing but a head, whose loss is taken in some tiles of the size that a GPU has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        config = LlamaConfig(hidden_size=width, vocab_size=words, num_hidden_layers=0, num_attention_heads=8, use_cache=False)
        model = LlamaForCausalLM(config).bfloat16().train()
    model.model.norm = nn.Identity()
    size = pending.MOST_LOGITS["cuda"]
    tiled_loss.tile_loss(model, most_logits=size)
    with fake_tensors(), patch.object(loss_ops, "is_fused", lambda logits: fused):
        fake_parameters(model, torch.device("cpu"))
        with patch.object(loss_ops, "adds_in_product", lambda total, operands: fused):
            for _ in range(2):
                embedded = torch.empty(1, size // words * tiles, width, dtype=torch.bfloat16).requires_grad_()
                with Counting() as found:
                    model(inputs_embeds=embedded, labels=torch.zeros(embedded.shape[:2], dtype=torch.long)).loss.backward()
    return found


def tile_rows(name: str) -> dict[str, dict[str, float]]:
    """The figures of one tile."""
    width, words = HEADS[name]
    rows: dict[str, dict[str, float]] = {}
    for way, fused in (("torch's operations", False), ("one kernel", True)):
        less, more = (counted_tiles(width, words, tiles, fused) for tiles in (2, 3))
        rows[way] = {"kernels": more.kernels - less.kernels, "bytes": more.bytes - less.bytes}
        logits = pending.MOST_LOGITS["cuda"] // words * words
        rows[way]["bytes_a_logit"] = rows[way]["bytes"] / logits
    return rows


def timed_kernel(words: int, block: int, warps: int) -> float:
    """Seconds of the kernel for a tile of 2^27 logits in bf16, which it reads twice and writes once."""
    from holotrain.reversible.loss_kernels import _cross_entropy

    rows = 2**27 // words
    logits = torch.randn(rows, words, device=DEVICE, dtype=torch.bfloat16)
    labels, losses = torch.zeros(rows, device=DEVICE, dtype=torch.long), torch.empty(rows, device=DEVICE)
    constants = {"DIFFERENTIATE": True, "BLOCK": block, "num_warps": warps}
    launch = partial(_cross_entropy[(rows,)], logits, labels, losses, words, words, -100, **constants)
    launch()
    return timed(launch, DEVICE, repeats=20)()


def time_kernels(results: dict[str, Any]) -> None:
    """Of each head; expected of the sizes that are in use: within a tenth of the fastest."""
    sizes = [(block, warps) for block in (4096, 16384) for warps in (8, 16, 32)]
    for name, (_, words) in HEADS.items():
        makers = {f"{block} words, {warps} warps": partial(timed_kernel, words, block, warps) for block, warps in sizes}
        seconds, left_out = those_that_work(makers)
        results[f"the kernel of the loss, {name}"] = {"seconds": seconds, "left_out": left_out}
        for size, each in seconds.items():
            print(f"{name}, {size}: {1e3 * each:.2f} ms, {6 * 2**27 / each / 1e12:.2f} TB/s", flush=True)
        if seconds:
            used = next(iter(seconds.values()))
            verdict(results, f"{name}: time of the kernel / with the fastest sizes", used / min(seconds.values()), 1.1)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--time", action="store_true", help="measure the kernel on a GPU, and count nothing")
    options = parser.parse_args()
    results = begin(options)
    if options.time:
        time_kernels(results)
        return save(results, options.json)
    for name in HEADS:
        results[f"a tile of the loss, {name}"] = tile_rows(name)
        for way, row in results[f"a tile of the loss, {name}"].items():
            moved = f"{row['bytes'] / 2**20:,.0f} MiB, {row['bytes_a_logit']:.1f} bytes a logit"
            print(f"a tile of the loss, {name}; {way}: {row['kernels']:.0f} kernels, {moved}")
    save(results, options.json)


if __name__ == "__main__":
    main()
