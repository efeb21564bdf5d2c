"""Counts, on fake tensors and without a GPU, what a block costs one: kernels, and bytes that they read and write.

    python scripts/bench_counted.py --json scripts/results/counted.json

    python scripts/bench_counted.py --measure --json measured.json    # on a GPU: kernels and milliseconds, against that table

One block, forward and backward, of a model that is trained plain, with gradient checkpointing, and with make_reversible, whose
streams are in fp32 or fp64. Matrix products and attention are left out, since they are the same: what is counted is the work on
elements, which waits for memory. A kernel reads its inputs and writes its outputs once. Views cost nothing. The figures are the
difference of two depths, so that they hold for a block in the middle. A GPU is expected to need as many kernels more than
checkpointing as were counted, and for their bytes the time of 70 % of the memory bandwidth of an H200.

Likewise one tile of a loss in tiles, forward and backward, by torch's operations and by one Triton kernel: the difference of
three tiles and two.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from bench_common import DEVICE, arguments, begin, save, timed, verdict
from holotrain.reversible.stack import stacks_in
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holotrain.planning.fake_tensors import fake_parameters, fake_tensors
from holotrain.reversible import loss_ops, make_reversible, tiled_loss, two_step

COUNTED = Path(__file__).parent / "results" / "counted.json"
BANDWIDTH = 0.7 * 4.8e12
"""Bytes a second."""

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
    if name == "uncouple":  # only writes its first two
        return -sum(each.nbytes for each in args[:2] if each is not args[2])
    if name == "cross_entropy":  # reads the logits twice
        return args[0].nbytes
    if name == "scale_gradients":  # by one, in tiles: neither reads nor writes them
        return -2 * args[0].nbytes
    if name in ("nll_loss_forward", "nll_loss_backward"):  # reads one logit of a row, and none
        return -args[name == "nll_loss_backward"].nbytes
    return 0


def tensors(node: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(node) if isinstance(leaf, Tensor)]


def llama(depth: int, width: int = 4096, inner: int = 11008) -> nn.Module:
    from transformers import LlamaConfig, LlamaModel

    sizes = {"hidden_size": width, "intermediate_size": inner, "num_attention_heads": width // 128, "vocab_size": 64}
    config = LlamaConfig(**sizes, num_hidden_layers=depth, use_cache=False, attn_implementation="sdpa")
    return LlamaModel(config).bfloat16()


def gpt2(depth: int) -> nn.Module:
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(n_layer=depth, vocab_size=64, use_cache=False, attn_implementation="sdpa")
    return GPT2Model(config)


MODELS = {
    "Llama 4096/11008, 2,048 tokens, bf16": (llama, (1, 2048), False),
    "GPT-2 768, 8 x 1,024, bf16 autocast": (gpt2, (8, 1024), True),
}
"""Each model with the shape of its batch, and whether it trains under autocast."""

TOYS = {"a toy": (partial(llama, width=128, inner=256), (1, 16), False)}


def coupled(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    make_reversible(model)
    for stack in stacks_in(model):
        stack.stream_dtype = dtype
    return model


def checkpointed(model: nn.Module) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": False})  # ty: ignore[call-non-callable]
    return model


WAYS: dict[str, tuple[Callable[[nn.Module], nn.Module], bool]] = {
    "plain": (lambda model: model, False),
    "checkpointing": (checkpointed, False),
    "make_reversible, several kernels": (partial(coupled, dtype=torch.float32), False),
    "make_reversible": (partial(coupled, dtype=torch.float32), True),
    "make_reversible, fp64 streams": (partial(coupled, dtype=torch.float64), True),
}
"""How a model is trained, and whether Triton's kernels couple its blocks, as on a GPU."""


def counted(make: Callable[[int], nn.Module], way: Callable, depth: int, shape: tuple[int, int], mixed: bool) -> Counting:
    with torch.device("meta"):
        model = way(make(depth).train())
    with fake_tensors():
        fake_parameters(model, torch.device("cpu"))
        for _ in range(2):  # the first one also makes the gradients
            embedded = torch.empty(*shape, model.config.hidden_size, dtype=model.dtype).requires_grad_()
            with Counting() as found:
                with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
                    out = model(inputs_embeds=embedded).last_hidden_state
                out.backward(torch.empty_like(out))
    return found


def width_of(make: Callable[[int], nn.Module]) -> int:
    with torch.device("meta"):
        return make(1).config.hidden_size  # ty: ignore[unresolved-attribute]


def rows_of(name: str) -> dict[str, dict[str, float]]:
    """The figures of a model, by the way it is trained."""
    make, shape, mixed = MODELS[name]
    rows: dict[str, dict[str, float]] = {}
    for way, (change, fused) in WAYS.items():
        with patch.object(two_step, "is_fused", lambda stream, fused=fused: fused), patch.object(two_step, "PIECES", 1):
            less, more = (counted(make, change, depth, shape, mixed) for depth in (4, 6))
        rows[way] = row = {"kernels": (more.kernels - less.kernels) / 2, "bytes": (more.bytes - less.bytes) / 2}
        if "make_reversible" in way:
            row["kernels_over_checkpointing"], moved = (row[key] - rows["checkpointing"][key] for key in ("kernels", "bytes"))
            row["bytes_an_element"] = moved / (shape[0] * shape[1] * width_of(make))
    return rows


def measured(make: Callable[[int], nn.Module], way: Callable, shape: tuple[int, int], mixed: bool) -> dict[str, float]:
    """Kernels and milliseconds of a block."""
    found = []
    for depth in (4, 6):
        with torch.device(DEVICE):
            model = way(make(depth).train())
            embedded = torch.randn(*shape, model.config.hidden_size, dtype=model.dtype, requires_grad=True)

        def step(model=model, embedded=embedded) -> None:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=mixed):
                out = model(inputs_embeds=embedded).last_hidden_state
            out.backward(torch.ones_like(out))

        for _ in range(3):
            step()
        run = timed(step, DEVICE)
        milliseconds = 1e3 * statistics.median(run() for _ in range(10))
        with torch.profiler.profile() as profiler:
            step()
            if DEVICE == "cuda":
                torch.cuda.synchronize()
        events = profiler.profiler.kineto_results.events()
        found.append((sum(event.device_type() == torch.autograd.DeviceType.CUDA for event in events), milliseconds))
    less, more = found
    return {"kernels": (more[0] - less[0]) / 2, "milliseconds": (more[1] - less[1]) / 2}


def measure(results: dict[str, Any]) -> None:
    """On a GPU, the models that were counted; elsewhere a toy beside the table of a Llama."""
    table = json.loads(COUNTED.read_text())
    for name, (make, shape, mixed) in (MODELS if DEVICE == "cuda" else TOYS).items():
        counts = table.get(name) or table[next(iter(MODELS))]
        rows = results[name] = {way: measured(make, WAYS[way][0], shape, mixed) for way in ("checkpointing", "make_reversible")}
        more = {key: rows["make_reversible"][key] - rows["checkpointing"][key] for key in ("kernels", "milliseconds")}
        moved = counts["make_reversible"]["bytes"] - counts["checkpointing"]["bytes"]
        expected = counts["make_reversible"]["kernels_over_checkpointing"]
        verdict(results, f"{name}: kernels of a block more than checkpointing", more["kernels"], expected)
        verdict(results, f"{name}: milliseconds of a block more", more["milliseconds"], 1e3 * moved / BANDWIDTH)


HEADS = {"GPT-2": (768, 50257), "Qwen3-0.6B": (1024, 151936)}
"""The width and the words of a head, whose weight and tokens are in bf16."""


def counted_tiles(width: int, words: int, tiles: int, fused: bool) -> Counting:
    """A model with nothing but a head, whose loss is taken in some tiles of the size that a GPU has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        config = LlamaConfig(hidden_size=width, vocab_size=words, num_hidden_layers=0, num_attention_heads=8, use_cache=False)
        model = LlamaForCausalLM(config).bfloat16().train()
    model.model.norm = nn.Identity()
    size = tiled_loss.MOST_LOGITS["cuda"]
    tiled_loss.tile_loss(model, most_logits=size)
    with fake_tensors(), patch.object(loss_ops, "is_fused", lambda logits: fused):
        fake_parameters(model, torch.device("cpu"))
        with patch.object(loss_ops, "adds_in_product", lambda total, operands: fused):
            for _ in range(2):
                embedded = torch.empty(1, size // words * tiles + 1, width, dtype=torch.bfloat16).requires_grad_()
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
        logits = tiled_loss.MOST_LOGITS["cuda"] // words * words
        rows[way]["bytes_a_logit"] = rows[way]["bytes"] / logits
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--measure", action="store_true", help="run it, on a GPU if there is one")
    options = parser.parse_args()
    results = begin(options)
    if options.measure:
        measure(results)
        return save(results, options.json)
    for name in MODELS:
        results[name] = rows_of(name)
        for way, row in results[name].items():
            over = ""
            if "bytes_an_element" in row:
                kernels, moved = row["kernels_over_checkpointing"], row["bytes_an_element"]
                over = f"; over checkpointing {kernels:.0f} kernels and {moved:.1f} bytes an element"
            print(f"{name}; {way}: {row['kernels']:.0f} kernels, {row['bytes'] / 2**20:,.0f} MiB{over}")
    for name in HEADS:
        results[f"a tile of the loss, {name}"] = tile_rows(name)
        for way, row in results[f"a tile of the loss, {name}"].items():
            moved = f"{row['bytes'] / 2**20:,.0f} MiB, {row['bytes_a_logit']:.1f} bytes a logit"
            print(f"a tile of the loss, {name}; {way}: {row['kernels']:.0f} kernels, {moved}")
    save(results, options.json)


if __name__ == "__main__":
    main()
