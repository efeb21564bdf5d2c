"""Compares ways to store or recompute activations on the same model: throughput, peak memory, gradient error.

    python scripts/bench_backward.py                                  # 12 blocks of width 384, batches of 4 x 196 tokens
    python scripts/bench_backward.py --batch 1 2 4 --json scripts/results/backward.json --picture backward.png
    python scripts/bench_backward.py --minrev ../minREV               # with a checkout of the PaReprop authors' code
    python scripts/bench_backward.py --compiled --budgets 0.3 0.5     # with torch.compile and its memory budgets
    python scripts/bench_backward.py --double --rounds 1              # gradient errors in fp64
    python scripts/bench_backward.py --trace                          # kernels that run together

Needs only torch; revlib and memcnn are included if installed, and --picture needs matplotlib. All engines run the same f and g
(pre-norm attention and MLP). A step is a forward and a backward. An engine that does not work on this machine is named and left
out.

Step times: the engines alternate in one process; ratios are medians over rounds. Peak memory: of one step, above weights and
gradients. On CUDA from the allocator (allocated and reserved). On a CPU the resident peak of a fresh process per engine, with
MALLOC_MMAP_THRESHOLD_ set so that glibc returns freed memory; otherwise fragmentation would be measured. Gradient error: the
norm of the difference from plain autograd in fp64, divided by the norm of those gradients.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import importlib.util
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch
from bench_common import (
    DEVICE,
    alternating,
    arguments,
    begin,
    draw_to,
    median_ratio,
    plotter,
    save,
    those_that_work,
    verdict,
    waited,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from holotrain.models.layers.blocks import transformer_branches
from holotrain.reversible import ReversibleBlock, ReversibleSequence
from holotrain.reversible.fused import compile_branch

WARM_UPS = 3
"""Steps before the first that is measured."""

Run = Callable[[Tensor], tuple[Tensor, Tensor]]


class Coupled(nn.Module):
    """y1 = x1 + f(x2), y2 = x2 + g(y1): the computation of all engines, in plain PyTorch."""

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x1: Tensor, x2: Tensor) -> tuple[Tensor, Tensor]:
        y1 = x1 + self.f(x2)
        return y1, x2 + self.g(y1)


def plain(branches) -> Run:
    return in_turn([Coupled(f, g) for f, g in branches])


def in_turn(blocks: list[Coupled]) -> Run:
    def run(x):
        y1 = y2 = x
        for block in blocks:
            y1, y2 = block(y1, y2)
        return y1, y2

    return run


def checkpointed(branches, **options) -> Run:
    blocks = [Coupled(f, g) for f, g in branches]

    def run(x):
        y1 = y2 = x
        for block in blocks:
            y1, y2 = checkpoint(block, y1, y2, use_reentrant=False, **options)
        return y1, y2

    return run


def selectively_checkpointed(branches) -> Run:
    """Stores matrix products and recomputes the rest."""
    aten = torch.ops.aten
    products = [aten.mm.default, aten.addmm.default, aten.bmm.default]
    products += [aten._scaled_dot_product_flash_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default]
    products += [aten._scaled_dot_product_efficient_attention.default, aten._scaled_dot_product_cudnn_attention.default]
    return checkpointed(branches, context_fn=functools.partial(create_selective_checkpoint_contexts, products))


def compiled(branches) -> Run:
    """torch.compile of each block; equal blocks share their code."""
    blocks = [Coupled(f, g) for f, g in branches]
    for block in blocks:
        block.compile()
    return in_turn(blocks)


def offloaded(branches) -> Run:
    run = plain(branches)

    def offloading(x):
        with torch.autograd.graph.save_on_cpu(pin_memory=True):
            return run(x)

    return offloading


def budgeted(branches, budget: float) -> Run:
    import torch._functorch.config as settings

    compiled = torch.compile(plain(copy.deepcopy(branches)))

    def run(x):
        with settings.patch(activation_memory_budget=budget):
            return compiled(x)

    return run


def ours(branches, **options) -> Run:
    net = ReversibleSequence([ReversibleBlock(f, g) for f, g in branches], **options)
    return lambda x: net(x, x)


def revlib(branches) -> Run:
    import revlib as library

    net = library.ReversibleSequential(*(part for pair in branches for part in pair), split_dim=-1)
    return lambda x: net(torch.cat((x, x), -1)).chunk(2, -1)


def memcnn(branches) -> Run:
    import memcnn as library

    net = nn.Sequential(
        *(library.InvertibleModuleWrapper(library.AdditiveCoupling(f, g, split_dim=-1), keep_input=False) for f, g in branches)
    )
    # Its wrapper frees the storage of input and output, so it gets a copy.
    return lambda x: tuple(part.clone() for part in net(torch.cat((x, x), -1)).chunk(2, -1))


def minrev(branches, checkout: str) -> Run:
    spec = importlib.util.spec_from_file_location("minrev", Path(checkout) / "rev.py")
    library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    layers = nn.ModuleList()
    for f, g in branches:
        layer = library.ReversibleBlock(dim=8, num_heads=1, enable_amp=False)
        layer.F, layer.G = f, g
        layers.append(layer)
    return lambda x: library.RevBackProp.apply(torch.cat((x, x), -1), layers).chunk(2, -1)


class Staggered(torch.autograd.Function):
    """Our own rewriting of minREV's backward (``fast_rev.py``), not its authors' program: recovers a block on one stream
    beside the gradients of the block behind it."""

    @staticmethod
    def forward(ctx, x: Tensor, branches: list) -> Tensor:
        ctx.branches, ctx.half = branches, torch.is_autocast_enabled(x.device.type)
        y1, y2 = x.chunk(2, -1)
        for f, g in branches:
            y1 = y1 + f(y2)
            y2 = y2 + g(y1)
        ctx.save_for_backward(y1, y2)
        return torch.cat((y1, y2), -1)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        cuda, half = gradient.is_cuda, torch.autocast(gradient.device.type, torch.bfloat16, enabled=ctx.half)
        streams = [torch.cuda.current_stream(), torch.cuda.Stream()] if cuda else [None, None]

        def after(event, tensors) -> tuple[Tensor, ...]:
            if cuda:
                event.synchronize()  # the host waits, as in minREV
                for tensor in tensors:
                    tensor.record_stream(torch.cuda.current_stream())
            return tuple(tensors)

        def recover(event, y1: Tensor, y2: Tensor, f: nn.Module, g: nn.Module) -> tuple:
            y1, y2 = after(event, (y1, y2))
            y1 = y1.detach().requires_grad_()
            with torch.enable_grad(), half:
                of_g = g(y1)
            x2 = (y2 - of_g).detach().requires_grad_()
            with torch.enable_grad(), half:
                of_f = f(x2)
            return (y1 - of_f).detach(), x2, y1, of_g, of_f

        def differentiate(event, recovered: tuple, d1: Tensor, d2: Tensor) -> tuple[Tensor, Tensor]:
            (d1, d2), (_, x2, y1, of_g, of_f) = after(event, (d1, d2)), recovered
            of_g.backward(d2.to(of_g.dtype))
            d1 = d1 + y1.grad
            of_f.backward(d1.to(of_f.dtype))
            return d1, d2 + x2.grad

        def recorded():
            return torch.cuda.current_stream().record_event() if cuda else None

        d1, d2 = gradient.chunk(2, -1)
        recovered, ready = ctx.saved_tensors, recorded()
        differentiated = ready
        for number, branches in enumerate(reversed(ctx.branches)):
            with torch.no_grad(), torch.cuda.stream(streams[number % 2]):
                before, recovered = recovered, recover(ready, *recovered[:2], *branches)
                ready = recorded()
            if number:
                with torch.cuda.stream(streams[(number - 1) % 2]):
                    d1, d2 = differentiate(differentiated, before, d1, d2)
                    differentiated = recorded()
        with torch.cuda.stream(streams[number % 2]):
            d1, d2 = differentiate(differentiated, recovered, d1, d2)
        if cuda:
            streams[0].wait_stream(streams[1])
        return torch.cat((d1, d2), -1), None


def minrev_like(branches) -> Run:
    return lambda x: Staggered.apply(torch.cat((x, x), -1), branches).chunk(2, -1)


def engines(options) -> dict[str, Callable[[list], Run]]:
    """Factories of the engines, by name."""
    half = options.depth // 2
    made = {
        "autograd": plain,
        "checkpoint": checkpointed,
        "selective checkpoint": selectively_checkpointed,
        "compile": compiled,
        "reversible": functools.partial(ours, backward="reversible"),
        "pareprop": functools.partial(ours, backward="pareprop"),
        "store half": functools.partial(ours, backward="reversible", store=half),
        "keep attention": functools.partial(ours, backward="reversible", keep=("attention",)),
        "keep matmul": functools.partial(ours, backward="reversible", keep=("matmul",)),
        "exact": functools.partial(ours, backward="reversible", exact=True),
    }
    if options.device == "cuda":
        made["offload"] = offloaded
        made["pareprop, store half"] = functools.partial(ours, backward="pareprop", store=half)
    for budget in options.budgets:
        made[f"compile, budget {budget}"] = functools.partial(budgeted, budget=budget)
    made |= {"minREV-like": minrev_like, "revlib": revlib, "memcnn": memcnn}
    if options.minrev:
        made["minREV"] = functools.partial(minrev, checkout=options.minrev)
    if options.compiled:  # dispatch modes do not work inside compiled code, and memcnn frees tensors that the compiler needs
        left_out = ("selective checkpoint", "keep attention", "keep matmul", "memcnn")
        made = {name: make for name, make in made.items() if name not in left_out}
    if options.engines:
        unknown = set(options.engines) - set(made)
        if unknown:
            raise SystemExit(f"no engine {', '.join(sorted(unknown))}; there are {', '.join(made)}")
        return {name: make for name, make in made.items() if name in {"autograd", *options.engines}}
    del made["compile"]
    return made


def make_branches(options) -> list:
    torch.manual_seed(0)
    branches = transformer_branches(options.dim, options.depth, options.heads)
    for pair in branches:
        for part in pair:
            part.to(options.device, torch.float64 if options.double else None)
            if options.compiled:
                compile_branch(part)
    return branches


def make_input(batch: int, options) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batch, options.tokens, options.dim, generator=generator)
    return x.to(options.device, torch.float64 if options.double else None).requires_grad_()


def loss_of(run: Run, x: Tensor, options) -> Tensor:
    amp = torch.autocast(options.device, torch.bfloat16) if options.amp else nullcontext()
    with amp:
        y1, y2 = run(x)
    return (y1.to(x.dtype) * y2.to(x.dtype)).mean()


def stepper(run: Run, branches, batch: int, options, standing: bool = False) -> Callable[[], float]:
    """A function that runs one step, synchronizes, and returns its seconds.

    ``standing``: gradients stay allocated and are set to zero, so that the peak above them is that of activations. Otherwise
    they are freed before a step, as optimizers do by default.
    """
    x = make_input(batch, options)
    parameters = [x, *parameters_of(branches)]

    def clear() -> None:
        for parameter in parameters:
            if standing and parameter.grad is not None:
                parameter.grad.zero_()
            else:
                parameter.grad = None

    return waited(lambda: loss_of(run, x, options).backward(), options.device, clear)


def settle(step: Callable[[], float]) -> None:
    for _ in range(WARM_UPS):
        step()


def together(step: Callable[[], float], device: str) -> dict[str, object]:
    """What a profile of a step says: milliseconds in which each stream is busy (CPU: thread), and in which more than one is."""
    kind = torch.profiler.ProfilerActivity.CUDA if device == "cuda" else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[kind]) as profiler:
        step()
    of_device = torch.autograd.DeviceType.CUDA if device == "cuda" else torch.autograd.DeviceType.CPU
    spans: dict[int, list[tuple[int, int]]] = {}
    for event in profiler.profiler.kineto_results.events():
        if event.device_type() == of_device and event.duration_ns() and not event.is_user_annotation():
            span = event.start_ns(), event.start_ns() + event.duration_ns()
            spans.setdefault(event.device_resource_id(), []).append(span)
    lines = [merged(found) for found in spans.values()]
    busy = sorted((length(line) for line in lines), reverse=True)
    any_busy = length(merged([span for line in lines for span in line]))
    shared = sum(busy) - any_busy  # of two streams; a third counts again
    figures = {"busy_ms": [taken / 1e6 for taken in busy], "together_ms": shared / 1e6}
    return figures | {"share_of_the_second": shared / busy[1] if len(busy) > 1 else 0.0}


def merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans that do not overlap, and cover the same."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def length(spans: list[tuple[int, int]]) -> int:
    return sum(end - start for start, end in spans)


def gradient_error(make, options) -> float:
    """Relative gradient error against plain autograd in fp64, for a batch of one."""
    branches = make_branches(options)
    in_double = [tuple(copy.deepcopy(part).double() for part in pair) for pair in branches]
    x = make_input(1, options)
    loss_of(make(branches), x, options).backward()
    true_x = x.detach().double().requires_grad_()
    y1, y2 = plain(in_double)(true_x)
    (y1 * y2).mean().backward()
    pairs = [(x, true_x)]
    if getattr(make, "func", None) is not budgeted:  # it trains copies of the parameters, so compare the gradient of the input
        pairs += zip(parameters_of(branches), parameters_of(in_double), strict=True)
    if any(one.grad is None for one, _ in pairs):
        return float("inf")
    difference = torch.cat([(one.grad - true.grad).flatten() for one, true in pairs])
    return (difference.norm() / torch.cat([true.grad.flatten() for _, true in pairs]).norm()).item()


def parameters_of(branches) -> list[nn.Parameter]:
    return [parameter for pair in branches for part in pair for parameter in part.parameters()]


def peak_bytes(name: str, batch: int, options) -> dict[str, int]:
    """Peak memory of one step above the memory before it."""
    if options.device == "cuda":
        branches = make_branches(options)
        step = stepper(engines(options)[name](branches), branches, batch, options, standing=True)
        settle(step)
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        figures = {"allocated": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        return figures | {"above_weights": figures["allocated"] - before}
    command = [sys.executable, __file__, *sys.argv[1:], "--measure", name, str(batch)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    output = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout
    return {"above_weights": int(output.splitlines()[-1])}


def resident_step_bytes(name: str, batch: int, options) -> int:
    branches = make_branches(options)
    step = stepper(engines(options)[name](branches), branches, batch, options, standing=True)
    settle(step)
    gc.collect()
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the resident peak
    step()
    return resident("VmHWM") - before


def resident(figure: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(figure))
    return int(line.split()[1]) * 1024


def draw(points: list[dict], path: Path, title: str) -> None:
    """Throughput against peak memory, one line per engine over the batch sizes."""
    pyplot = plotter()

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for number, name in enumerate(points[0]["engines"]):
        rows = [point["engines"][name] for point in points]
        memory = [row["peak"]["above_weights"] / 2**20 for row in rows]
        speed = [row["samples_per_second"] for row in rows]
        axes.plot(memory, speed, marker="os^vDP*X"[number % 8], label=name)
    axes.set(xlabel="peak memory of a step above weights and gradients, MiB", ylabel="samples/s", title=title)
    axes.set_xscale("log")
    axes.grid(alpha=0.3, which="both")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    draw_to(path, figure, dpi=110)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--dim", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--depth", type=int, default=12, help="blocks")
    parser.add_argument("--batch", type=int, nargs="+", default=[4], help="batch sizes; several give a curve for each engine")
    parser.add_argument("--tokens", type=int, default=196)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, help="CPU threads of torch's operations")
    parser.add_argument("--amp", action="store_true", help="use bf16 autocast")
    parser.add_argument("--compiled", action="store_true", help="compile f and g with torch.compile")
    parser.add_argument("--double", action="store_true", help="compute in fp64")
    parser.add_argument("--trace", action="store_true", help="also profile a step: how long streams are busy at the same time")
    parser.add_argument("--budgets", type=float, nargs="*", default=[], help="activation memory budgets of torch.compile")
    parser.add_argument("--engines", nargs="*", help="only these engines, and autograd; compile is only run if named")
    parser.add_argument("--no-peaks", action="store_true", help="measure no memory, which takes a process per engine on a CPU")
    parser.add_argument("--minrev", help="path of a checkout of github.com/karttikeya/minREV")
    parser.add_argument("--device", default=DEVICE)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.measure:
        print(resident_step_bytes(options.measure[0], int(options.measure[1]), options))
        return

    begun, points = begin(options), []
    for batch in options.batch:
        rows, left_out = measured(batch, options)
        points.append({"batch": batch, "engines": rows, "left_out": left_out})
    judge(begun, points[0]["engines"], options)
    begun["options"]["minrev"] = bool(options.minrev)
    save(begun | {"points": points}, options.json)
    if options.picture:
        where = begun["machine"]["gpu" if options.device == "cuda" else "cpu"]
        sizes = ", ".join(map(str, options.batch))
        draw(points, options.picture, f"{options.depth} blocks of width {options.dim}, batches of {sizes}, on {where}")


def judge(result: dict, engines: dict[str, dict], options) -> None:
    """Compares the engines at the first batch size with what is expected of them."""
    if options.double:
        worst = max(row["gradient_error"] for row in engines.values() if "gradient_error" in row)
        verdict(result, "largest relative error of a gradient in fp64", worst, 1e-12)
    if options.trace and "pareprop" in engines:
        together = engines["pareprop"]["together"]["together_ms"]
        verdict(result, "milliseconds with both streams of pareprop busy", together, 0.1, least=True)


def measured(batch: int, options) -> tuple[dict[str, dict], dict[str, str]]:
    """The results of every engine for one batch size, and why the others have none."""
    contestants = engines(options)
    branches = make_branches(options)

    def settled(make: Callable) -> Callable[[], float]:
        step = stepper(make(branches), branches, batch, options)
        settle(step)
        return step

    makers = {name: functools.partial(settled, make) for name, make in contestants.items()}
    steps, left_out = those_that_work(makers)
    seconds = alternating(steps, options.rounds)
    rows = {}
    print(f"\n{options.depth} blocks of width {options.dim}, {batch} x {options.tokens} tokens")
    print(f"{'engine':<24}{'step':>9}{'/ autograd':>12}{'samples/s':>11}{'peak':>12}{'reserved':>12}{'error':>10}")
    for name in steps:
        median = statistics.median(seconds[name])
        row = rows[name] = {
            "seconds": seconds[name],
            "over_autograd": median_ratio(seconds[name], seconds["autograd"]),
            "samples_per_second": batch / median,
        }
        peak = row["peak"] = {"above_weights": float("nan")} if options.no_peaks else peak_bytes(name, batch, options)
        row["gradient_error"] = gradient_error(contestants[name], options)
        if options.trace:
            row["together"] = together(steps[name], options.device)
        reserved = f"{peak['reserved'] / 2**20:8.0f} MiB" if "reserved" in peak else ""
        print(
            f"{name:<24}{median:8.3f}s{row['over_autograd']:12.3f}{row['samples_per_second']:11.2f}"
            f"{peak['above_weights'] / 2**20:8.1f} MiB{reserved:>12}{row['gradient_error']:10.1e}",
            flush=True,
        )
    return rows, left_out


if __name__ == "__main__":
    main()
