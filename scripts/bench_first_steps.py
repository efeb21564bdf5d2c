"""The first three bf16 steps of a fresh process, in which no attention ran before: do they work, and does the host never wait?

    python scripts/bench_first_steps.py                       # versions, the order of attention kernels, and all cases
    python scripts/bench_first_steps.py --cases GPT-2 --json first_steps.json

PyTorch puts its attention kernels in another order when the first of them runs, and libraries tune themselves at their first
call, so what is rebuilt could differ from what was computed first. Each case runs in a process of its own. Anything that is
rebuilt with other bits is an error. From the third step on so is waiting for the GPU; where the plain model waits, too, that is
said. Cases of transformers and timm have random weights. Without a GPU there is no StepGraphs, and nothing waits.
"""

from __future__ import annotations

import os

os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # asking for a GPU must not make forks unusable

import argparse
import multiprocessing
import warnings
from collections.abc import Callable
from importlib import metadata

import torch
from bench_common import DEVICE, arguments, begin, in_short, save, verdict
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.layers.blocks import transformer_branches
from holotrain.reversible import ReversibleBlock, ReversibleSequence, recompute
from holotrain.reversible.graphs import StepGraphs

DEPTH, HEADS, VOCAB = 4, 4, 1024
ORDER = "order of attention kernels"
MODELING = [f"transformers.models.{kind}.modeling_{kind}" for kind in ("gpt2", "llama", "mixtral")]


def two_streams(options: argparse.Namespace, backward: str = "reversible") -> tuple[nn.Module, Tensor]:
    blocks = [ReversibleBlock(f, g) for f, g in transformer_branches(options.dim, DEPTH, HEADS)]
    net = ReversibleSequence(blocks, backward=backward, exact=True, on_mismatch="error")
    return net, torch.randn(options.batch, options.tokens, options.dim)


def language_model(options: argparse.Namespace, kind: str, **sizes) -> tuple[nn.Module, Tensor]:
    import transformers

    if kind == "gpt2":
        sizes = {"n_embd": options.dim, "n_layer": DEPTH, "n_head": HEADS, "n_positions": options.tokens}
    else:
        sizes |= {"hidden_size": options.dim, "intermediate_size": 2 * options.dim, "num_hidden_layers": DEPTH}
        sizes |= {"num_attention_heads": HEADS, "num_key_value_heads": 2}
    config = transformers.AutoConfig.for_model(kind, **sizes, vocab_size=VOCAB, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model, torch.randint(VOCAB, (options.batch, options.tokens))


def image_model(options: argparse.Namespace, name: str, pixels: int, **sizes) -> tuple[nn.Module, Tensor]:
    import timm

    return timm.create_model(name, **sizes), torch.randn(options.batch, 3, pixels, pixels)


def vit(options: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    sizes = {"depth": DEPTH, "embed_dim": options.dim, "num_heads": HEADS, "img_size": 64}
    return image_model(options, "vit_tiny_patch16_224", 64, **sizes)


def convnext(options: argparse.Namespace) -> tuple[nn.Module, Tensor]:
    width = options.dim // 8
    return image_model(options, "convnext_atto", 64, depths=(2, 2, 4, 2), dims=tuple(width * 2**k for k in range(4)))


STAGES = [f"stages.{number}.blocks" for number in range(4)]
CASES: dict[str, tuple[Callable, dict | None]] = {
    "ReversibleSequence": (two_streams, None),
    "pareprop": (lambda options: two_streams(options, "pareprop"), None),
    "GPT-2": (lambda options: language_model(options, "gpt2"), {}),
    "Llama": (lambda options: language_model(options, "llama"), {}),
    "mixture of experts": (lambda options: language_model(options, "mixtral", num_local_experts=4), {}),
    "ViT": (vit, {}),
    "ConvNeXt": (convnext, {"blocks": STAGES}),
    "GPT-2 in tiles": (lambda options: language_model(options, "gpt2"), {"tile": True}),
    "Llama, checkpoint8": (lambda options: language_model(options, "llama"), {"backward": "checkpoint8"}),
    "Llama, offload": (lambda options: language_model(options, "llama"), {"backward": "offload"}),
    "StepGraphs": (lambda options: language_model(options, "gpt2"), {}),
}
"""How each case makes a model and its input, and with what recompute changes it; None: it is reversible."""


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast(DEVICE, torch.bfloat16):
        if not x.is_floating_point():
            return model(input_ids=x, labels=x).loss
        out = sum(model(x, x)) if isinstance(model, ReversibleSequence) else model(x)
        return out.float().square().mean()


def three_steps(name: str, options: argparse.Namespace, plain: bool = False) -> None:
    torch.manual_seed(0)
    make, changed = CASES[name]
    model, x = make(options)
    if changed is not None and not plain:
        tiled = {"tile": max(options.tokens // 4, 1)} if "tile" in changed else {}
        recompute(model, **changed | tiled)
    model, x = model.to(DEVICE).train(), x.to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    graphed = StepGraphs(lambda x: loss_of(model, x), model) if name == "StepGraphs" else None
    warm_ups = 0 if graphed is None else 2  # the fourth call is captured
    try:
        for step in range(3 + warm_ups):
            if DEVICE == "cuda" and step == 2 + warm_ups:
                torch.cuda.set_sync_debug_mode("error")
            optimizer.zero_grad()
            if graphed is None:
                loss_of(model, x).backward()
            else:
                graphed(x)
            optimizer.step()
    finally:
        if DEVICE == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    if isinstance(model, ReversibleSequence):
        model.checks.begin()  # raises for the last step
    if not all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None):
        raise RuntimeError("a gradient is not finite")


def order(options: argparse.Namespace) -> list[list[str]]:
    """The attention kernels in the order in which PyTorch tries them, before and after the first attention."""
    from torch.nn.attention import SDPBackend

    x, orders = torch.randn(1, 1, 64, 64, device=DEVICE, dtype=torch.bfloat16), []
    for _ in range(2):
        orders.append([SDPBackend(number).name for number in torch._C._get_sdp_priority_order()])
        F.scaled_dot_product_attention(x, x, x)
    return orders


def work(name: str, options: argparse.Namespace, answer) -> None:
    torch.set_num_threads(1 if DEVICE == "cpu" else torch.get_num_threads())
    warnings.filterwarnings("ignore", category=UserWarning)
    try:
        answer.send(order(options) if name == ORDER else three_steps(name, options))
    except Exception as error:
        said = in_short(error)
        if "synchronizing" in said and CASES[name][1] is not None:
            try:
                three_steps(name, options, plain=True)
            except Exception as plain:
                said += f"; the plain model: {in_short(plain)}"
        answer.send(said)


def in_a_process(name: str, options: argparse.Namespace) -> object:
    """What a case returns, in a process that has imported, and run nothing."""
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=work, args=(name, options, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        return ours.recv()
    except EOFError:
        process.join()
        return f"its process ended with status {process.exitcode}"


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES), help="none: the order of kernels alone")
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=2)
    options = parser.parse_args()
    multiprocessing.get_context("forkserver").set_forkserver_preload(["__main__", "timm", *MODELING] if options.cases else [])
    orders = in_a_process(ORDER, options)
    errors = {name: in_a_process(name, options) for name in options.cases if name != "StepGraphs" or DEVICE == "cuda"}
    result = begin(options) | {"versions": versions(), "order": orders, "errors": errors}
    print(result["versions"])
    print(f"attention kernels before the first attention, and after it: {orders}")
    for name, error in errors.items():
        print(f"{name}: {error or 'three steps'}")
    if options.cases:
        verdict(result, f"of {len(errors)} cases, those that fail in three steps", sum(map(bool, errors.values())), 0)
    save(result, options.json)


def versions() -> dict[str, str]:
    found = {"CUDA": torch.version.cuda, "cuDNN": str(torch.backends.cudnn.version())}
    for name in ("torch", "triton", "transformers", "timm", "peft", "lightning", "pytest", "hydra-core"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


if __name__ == "__main__":
    main()
