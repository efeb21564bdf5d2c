"""Linear layers in 1 to 16 groups: predicted and measured time, and how much communication is hidden.

    python scripts/bench_overlap.py --json scripts/results/overlap.json --picture overlap.png
    python scripts/bench_overlap.py --parts gloo --groups 1 2 4 8          # two processes on this machine

Shapes: the projections of GPT-2 small and medium and of ViT-L, sharded over ``--ranks``. Row-parallel layers (attention out,
MLP down) are timed in the forward, column-parallel ones (qkv, MLP up) in the backward, with the weight gradient.

emulated  a link that takes time and transfers nothing (``--bandwidth``, ``--latency``). It tests the predictor with the matrix
          products of this machine, and says nothing about a real link. Times are minima over rounds, if possible of runs that
          were not interrupted by other processes (``--tries``), because long runs are interrupted more often
gloo      two processes: errors against a plain linear layer in fp64, and times. Both processes and gloo share the cores of
          this machine, so these times do not show the speedup on several GPUs
exchange  layers of experts with an all-to-all, on the emulated link and between two processes, where also the errors against
          linear and all_to_all_single in fp64 are shown: the time relative to one group, all groupings in turn
columns   few rows on the emulated link, by rows and by columns: the time relative to one group, all groupings in turn
cuda      one GPU, with copies in its memory instead of a collective: the hidden fraction of the shorter of product and copy,
          with one kernel per group and with one signaling kernel; and the time of that kernel relative to cuBLAS
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from bench_common import alternating, arguments, begin, draw_to, plotter, save, verdict
from emulated_collectives import EmulatedCollectives
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn.functional import linear

from holotrain.overlap import all_to_all_linear, column_parallel_linear, linear_all_to_all, row_parallel_linear
from holotrain.overlap.groups import ALL_TO_ALL, Collectives, Columns, Grouping, Job, equal_sizes
from holotrain.overlap.predictor import Link, MeasuredLink, Predictor, fewest_groups, interpolated
from holotrain.overlap.tuner import Run, median_seconds, one_run, product_seconds, products_in_turn, timed

MODELS = {"GPT-2 small": (768, 1024), "GPT-2 medium": (1024, 1024), "ViT-L": (1024, 4 * 197)}
"""Width and number of tokens per batch."""

PROJECTIONS = {"attention out": (1, 1, True), "MLP down": (4, 1, True), "qkv": (1, 3, False), "MLP up": (1, 4, False)}
"""Input and output features in multiples of the width, and whether the layer is row-parallel."""


class StandIn:
    """Replaces a collective by copies in the memory of one GPU, on a separate stream.

    The copies use memory bandwidth and some SMs or a copy engine, like a collective. They do not model a link.
    """

    def __init__(self, job: Job, copies: int) -> None:
        self.ranks, self.rank, self.name = job.ranks, 0, "stand-in"
        self.copies = copies
        self.message = torch.zeros(job.rows, job.outputs, dtype=job.dtype, device=job.device)
        self._aside = torch.empty_like(self.message)
        self._stream = torch.cuda.Stream(job.device) if job.device.type == "cuda" else None

    def all_reduce(self, tensor: Tensor) -> Copied:
        if self._stream:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for _ in range(self.copies):
                self._aside[: len(tensor)].copy_(tensor)
            return Copied(self._stream and self._stream.record_event())

    def seconds(self, rows: int) -> float:
        return median_seconds(lambda: self.all_reduce(self.message[:rows]).wait(), self.message.device)


class Copied:
    def __init__(self, done: torch.cuda.Event | None) -> None:
        self._done = done

    def wait(self) -> None:
        if self._done:
            torch.cuda.current_stream().wait_event(self._done)


PAUSE = 0.25
"""Seconds before another try, because the interrupting process may have finished by then."""


class Undisturbed:
    """Times runs on a CPU that is shared with other processes; ``disturbed`` is the fraction of interrupted runs."""

    def __init__(self, tries: int) -> None:
        self.tries, self.asked, self.lost = tries, 0, 0

    @property
    def disturbed(self) -> float:
        return self.lost / self.asked

    def __call__(self, run: Run) -> float:
        """Seconds of a run without interruption or, after all tries, of the fastest run."""
        self.asked += 1
        taken = []
        for _ in range(self.tries):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
            taken.append(timed(run, torch.device("cpu")))
            if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == before:
                return taken[-1]
            time.sleep(PAUSE)
        self.lost += 1
        return min(taken)


def errors_against_plain(job: Job, groups: int, group: dist.ProcessGroup) -> float:
    """The largest relative error of output and gradients against the full layer in fp64, on 33 rows."""
    rank, ranks, row = dist.get_rank(group), dist.get_world_size(group), not job.covered
    generator = torch.Generator().manual_seed(0)
    inputs, outputs = (job.inputs * ranks, job.outputs) if row else (job.outputs, job.inputs * ranks)
    x, weight = (torch.randn(n, inputs, dtype=torch.float64, generator=generator) for n in (33, outputs))
    grad = torch.randn(33, outputs, dtype=torch.float64, generator=generator)
    whole_x, whole_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    y = linear(whole_x, whole_weight)
    y.backward(grad)
    mine = (lambda t: t.chunk(ranks, 1)[rank]) if row else (lambda t: t)
    dim = 1 if row else 0
    my_x = mine(x).clone().requires_grad_()
    my_weight = weight.chunk(ranks, dim)[rank].clone().requires_grad_()
    ours = (row_parallel_linear if row else column_parallel_linear)(my_x, my_weight, group=group, groups=groups)
    theirs = (lambda t: t) if row else (lambda t: t.chunk(ranks, 1)[rank])
    ours.backward(theirs(grad))
    pairs = [(ours, theirs(y)), (my_x.grad, mine(whole_x.grad)), (my_weight.grad, whole_weight.grad.chunk(ranks, dim)[rank])]
    return worst(pairs)


def errors_against_all_to_all(job: Job, groups: int, group: dist.ProcessGroup) -> float:
    """The largest relative error of output and gradients against linear and all_to_all_single in fp64, 33 rows each way."""
    generator = torch.Generator().manual_seed(dist.get_rank(group))
    rows = 33 * dist.get_world_size(group)
    own = [torch.randn(n, job.inputs, dtype=torch.float64, generator=generator) for n in (rows, job.outputs)]
    grad = torch.randn(rows, job.outputs, dtype=torch.float64, generator=generator)
    (x, weight), (my_x, my_weight) = ([tensor.clone().requires_grad_() for tensor in own] for _ in range(2))

    def exchanged(rows: Tensor) -> Tensor:
        return all_to_all_single_autograd(rows, None, None, group)

    y = linear(exchanged(x), weight) if job.before else exchanged(linear(x, weight))
    y.backward(grad)
    ours = (all_to_all_linear if job.before else linear_all_to_all)(my_x, my_weight, group=group, groups=groups)
    ours.backward(grad)
    return worst([(ours, y), (my_x.grad, x.grad), (my_weight.grad, weight.grad)])


def worst(pairs: list[tuple[Tensor, Tensor]]) -> float:
    return max(((a - b).abs().max() / b.abs().max()).item() for a, b in pairs)


def jobs(options, dtype: torch.dtype, device: torch.device) -> dict[str, Job]:
    made = {}
    for model, (width, tokens) in MODELS.items():
        for projection, (inputs, outputs, row) in PROJECTIONS.items():
            features = (inputs * width // options.ranks, width) if row else (outputs * width // options.ranks, width)
            made[f"{model}, {projection}"] = Job(tokens, *features, "all_reduce", options.ranks, dtype, device, covered=not row)
    return made


def emulated(options) -> dict[str, dict]:
    """Predicted and measured seconds of every shape, by number of groups."""
    link = Link(options.bandwidth, options.latency)
    found = {}
    for name, job in jobs(options, torch.float32, torch.device("cpu")).items():
        print(f"\n{name}: {job.rows} x {job.inputs} x {job.outputs}", file=sys.stderr)
        collectives = EmulatedCollectives(link, options.ranks)
        contestants, undisturbed = {}, Undisturbed(options.tries)
        for groups in options.groups:
            run, rows = one_run(job, groups, collectives), equal_sizes(job.rows, groups)[0]
            places = products_in_turn(job, rows)
            contestants[f"product {rows}"] = partial(behind_another, places, undisturbed)
            contestants[f"job {groups}"] = lambda run=run, seconds=undisturbed: seconds(run)
        least = {key: min(times) for key, times in alternating(contestants, options.rounds).items()}
        products = {int(key.split()[1]): seconds for key, seconds in least.items() if key.startswith("product")}
        predictor = Predictor(lambda job, rows, products=products: interpolated(products, rows), link)
        predicted = {groups: predictor.seconds(job, equal_sizes(job.rows, groups)) for groups in options.groups}
        found[name] = compared(job, predicted, {groups: least[f"job {groups}"] for groups in options.groups})
        found[name]["disturbed"] = undisturbed.disturbed
        print_row(name, found[name])
    errors = [error for row in found.values() for error in row["errors"]]
    behind = max(row["behind_best"] for row in found.values())
    print(f"median error {statistics.median(errors):.1%}, predicted best at most {behind:.1%} slower than the true best")
    return found


def behind_another(products: Iterator[Run], seconds: Undisturbed) -> float:
    """Time of a product after another one, with the matrix in the cache, as between the groups of a layer."""
    next(products)()
    return seconds(lambda: next(products)())


def compared(job: Job, predicted: dict[int, float], measured: dict[int, float]) -> dict:
    chosen, _ = fewest_groups(predicted.items(), groups=int)
    return {
        "shape": [job.rows, job.inputs, job.outputs],
        "predicted": predicted,
        "measured": measured,
        "errors": [abs(predicted[groups] / measured[groups] - 1) for groups in measured],
        "predicted_best": chosen,
        "true_best": min(measured, key=measured.get),
        "behind_best": measured[chosen] / min(measured.values()) - 1,
    }


def print_row(name: str, row: dict) -> None:
    best = row["predicted_best"]
    print(
        f"{name:<28} median error {statistics.median(row['errors']):6.1%}   groups: predicted best {best:>2}, true best "
        f"{row['true_best']:>2} ({row['behind_best']:.1%} slower)   {row['measured'][best] * 1e3:8.2f} ms"
        f"   disturbed {row['disturbed']:.0%}",
        flush=True,
    )


def exchanges(options, dtype: torch.dtype) -> dict[str, Job]:
    """One expert on each rank, as wide as the model: up after the tokens have arrived, down before they return."""
    made = {}
    for model, (width, tokens) in MODELS.items():
        rest = ALL_TO_ALL, options.ranks, dtype, torch.device("cpu")
        made[f"{model}, expert up"] = Job(tokens, width, width, *rest, before=True)
        made[f"{model}, expert down"] = Job(tokens, width, width, *rest)
    return made


def in_turn(name: str, job: Job, groupings: dict[str, Grouping], collectives: Collectives, rounds: int) -> dict[str, float]:
    """The time of each grouping relative to the first: the median of the ratios of all rounds."""
    runs = {label: partial(timed, one_run(job, groups, collectives), job.device) for label, groups in groupings.items()}
    taken = alternating(runs, rounds)
    (first, *_), ratios = taken.values(), {}
    for label, seconds in taken.items():
        ratios[label] = statistics.median(own / one for own, one in zip(seconds, first, strict=True))
    if collectives.rank == 0:
        shown = " ".join(f"{label}: {ratio:.2f}" for label, ratio in ratios.items())
        print(f"{name:<28} {statistics.median(first) * 1e3:8.2f} ms in one group   {shown}", flush=True)
    return {"one group": statistics.median(first), "ratios": ratios}


def exchange(options) -> dict[str, dict]:
    print("on the emulated link")
    collectives = EmulatedCollectives(Link(options.bandwidth, options.latency), options.ranks)
    groupings = {str(groups): groups for groups in options.groups}
    jobs = exchanges(options, torch.float32)
    found = {name: in_turn(name, job, groupings, collectives, options.rounds) for name, job in jobs.items()}
    print("between two processes", flush=True)
    return {"emulated": found, "gloo": in_two_processes("exchange")}


def exchange_rank(collectives: Collectives, options) -> dict[str, dict]:
    groupings = {str(groups): groups for groups in options.groups}
    found = {}
    for name, job in exchanges(options, torch.float32).items():
        found[name] = in_turn(name, job, groupings, collectives, options.rounds)
        error = max(errors_against_all_to_all(job, groups, collectives.group) for groups in options.groups)
        found[name]["worst_error_fp64"] = collectives.largest([error], job.device)[0]
    if collectives.rank == 0:
        print(f"largest error against torch in fp64: {max(row['worst_error_fp64'] for row in found.values()):.0e}", flush=True)
    return found


def columns(options) -> dict[str, dict]:
    collectives = EmulatedCollectives(Link(options.bandwidth, options.latency), options.ranks)
    found = {}
    for width in (1024, 4096):
        for rows in (4, 16, 64, 256):
            job = Job(rows, 4 * width // options.ranks, width, "all_reduce", options.ranks, torch.float32, torch.device("cpu"))
            cuts = {str(groups): groups for groups in options.groups if groups <= rows}
            cuts |= {f"{groups} columns": Columns(groups) for groups in options.groups if groups > 1}
            name = f"{rows} x {job.inputs} x {width}"
            found[name] = in_turn(name, job, cuts, collectives, options.rounds)
    return found


def gloo(options) -> dict[str, dict]:
    return in_two_processes("gloo")


def in_two_processes(part: str) -> dict[str, dict]:
    """Runs this script as two processes; returns the result of rank 0."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, *sys.argv[1:], "--as-rank"]
        ranks = [subprocess.Popen([*command, part, str(rank), folder]) for rank in (0, 1)]
        if any([rank.wait() for rank in ranks]):
            raise SystemExit(f"a process of the {part} part failed; see its output above")
        return json.loads((Path(folder) / "found.json").read_text())


def as_rank(part: str, rank: str, folder: str, options) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=int(rank), world_size=2)
    found = RANK_PARTS[part](Collectives(dist.group.WORLD), options)
    if rank == "0":
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def gloo_rank(collectives: Collectives, options) -> dict[str, dict]:
    found = {}
    for name, job in jobs(options, torch.float32, torch.device("cpu")).items():
        seconds = {}
        for groups in options.groups:
            here = median_seconds(one_run(job, groups, collectives), job.device, options.rounds)
            seconds[groups] = collectives.largest([here], job.device)[0]
        error = max(errors_against_plain(job, groups, collectives.group) for groups in options.groups)
        found[name] = {"seconds": seconds, "worst_error_fp64": collectives.largest([error], job.device)[0]}
        if collectives.rank == 0:
            times = " ".join(f"{groups}: {taken * 1e3:.1f}" for groups, taken in seconds.items())
            print(f"{name:<28} error {found[name]['worst_error_fp64']:.0e}   ms by groups  {times}", flush=True)
    return found


def cuda(options) -> dict[str, dict]:
    """Times of product, copy and both, by number of groups, in bf16. Without a GPU nothing signals."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    found = {"cubes": {size: beside_cublas(size, device, options) for size in options.cubes}}
    for size, row in found["cubes"].items():
        print(f"{size} cubed: cuBLAS {row['cublas'] * 1e6:.0f} us, signalling {row['over_cublas']:.3f} of it")
    for name, job in jobs(options, torch.bfloat16, device).items():
        row = found[name] = beside_copies(job, options)
        times = f"product {row['alone'] * 1e6:7.0f} us, copy {row['copy'] * 1e6:7.0f} us"
        hidden = ", ".join(f"{form} {max(by_groups.values()):.0%}" for form, by_groups in row["hidden"].items())
        print(f"{name:<28} {times}, hidden: {hidden}")
    return found


def beside_cublas(size: int, device: torch.device, options) -> dict[str, float]:
    job = Job(size, size, size, "all_reduce", options.ranks, torch.bfloat16, device)
    cublas = product_seconds(job, size, options.rounds)
    signalling = median_seconds(one_run(job, 1, StandIn(job, copies=0), signals=True), device, options.rounds)
    return {"cublas": cublas, "signalling": signalling, "over_cublas": signalling / cublas}


def beside_copies(job: Job, options) -> dict:
    stand_in = StandIn(job, options.copies)
    copy = stand_in.seconds(job.rows)
    alone = median_seconds(one_run(job, 1, StandIn(job, copies=0)), job.device, options.rounds)
    sizes = {size for groups in options.groups for size in equal_sizes(job.rows, groups)}
    products = {size: product_seconds(job, size) for size in sizes}
    sent = MeasuredLink({"all_reduce": {job.message(size): stand_in.seconds(size) for size in sizes}})
    predictor = Predictor(lambda job, rows: products[rows], sent)
    row = {"alone": alone, "copy": copy, "seconds": {}, "hidden": {}}
    row["predicted"] = {groups: predictor.seconds(job, equal_sizes(job.rows, groups)) for groups in options.groups}
    for form, signals in (("a product a group", False), ("signals", True)):
        runs = {groups: one_run(job, groups, stand_in, signals) for groups in options.groups}
        taken = {groups: median_seconds(run, job.device, options.rounds) for groups, run in runs.items()}
        row["seconds"][form] = taken
        row["hidden"][form] = {groups: (alone + copy - seconds) / min(alone, copy) for groups, seconds in taken.items()}
    return row


def draw(found: dict[str, dict], path: Path, title: str) -> None:
    """Draws predicted and measured time by number of groups, one panel per shape."""
    pyplot = plotter()

    figure, panels = pyplot.subplots(3, 4, figsize=(13, 8), sharex=True)
    for axes, (name, row) in zip(panels.flat, found.items(), strict=True):
        for key, marker in (("measured", "o"), ("predicted", "")):
            axes.plot(list(row[key]), [seconds * 1e3 for seconds in row[key].values()], marker=marker, label=key)
        axes.set_title(name, fontsize=9)
        axes.set_ylim(0, 1.1e3 * max(max(row[key].values()) for key in ("measured", "predicted")))
        axes.grid(alpha=0.3)
    panels[0][0].legend(fontsize=8)
    figure.supxlabel("groups")
    figure.supylabel("milliseconds")
    figure.suptitle(title, fontsize=10)
    draw_to(path, figure, dpi=110)


PARTS = {"emulated": emulated, "gloo": gloo, "exchange": exchange, "columns": columns, "cuda": cuda}
RANK_PARTS = {"gloo": gloo_rank, "exchange": exchange_rank}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, help="parts to run; default: all that this machine supports")
    parser.add_argument("--groups", type=int, nargs="+", default=list(range(1, 17)))
    parser.add_argument("--ranks", type=int, default=2, help="processes of a layer; must be 2 for the parts with two processes")
    parser.add_argument("--bandwidth", type=float, default=125e6, help="bandwidth of the emulated link in bytes/s")
    parser.add_argument("--latency", type=float, default=1e-4, help="latency of the emulated link in seconds")
    parser.add_argument("--copies", type=int, default=4, help="copies of a group that replace its collective on a GPU")
    parser.add_argument("--cubes", type=int, nargs="+", default=[4096, 6144, 8192], help="products that cuBLAS computes too")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tries", type=int, default=5, help="tries to get a run of the emulated part without interruption")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of torch's operations")
    parser.add_argument("--picture", type=Path, help="draw the results of the emulated part to this file")
    parser.add_argument("--as-rank", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.as_rank:
        as_rank(*options.as_rank, options)
        return

    result = begin(options)
    parts = options.parts or [part for part in PARTS if part != "cuda" or torch.cuda.is_available()]
    if options.ranks != 2 and (needing := sorted(RANK_PARTS.keys() & set(parts))):
        raise SystemExit(f"--parts {' '.join(needing)} needs --ranks 2")
    result["machine"]["usable_cores"] = len(os.sched_getaffinity(0))
    for part in parts:
        print(f"\n{part}")
        result[part] = PARTS[part](options)
    for size, row in result["cuda"]["cubes"].items() if "cuda" in result else ():
        verdict(result, f"signalling product / cuBLAS, {size} cubed", row["over_cublas"], 1.1)
    save(result, options.json)
    if options.picture and "emulated" in result:
        speed = f"{options.bandwidth / 1e6:g} MB/s and {options.latency * 1e6:g} us"
        draw(result["emulated"], options.picture, f"An emulated link of {speed}, products on {result['machine']['cpu']}")


if __name__ == "__main__":
    main()
