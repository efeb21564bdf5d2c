"""Measured times of products, collectives and whole jobs on this device, as medians of several runs."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from holotrain.overlap.collectives import Collectives
from holotrain.overlap.column import ColumnAllReduce, ColumnReduceScatter
from holotrain.overlap.exchange import AllToAllLinear, Exchange, LinearAllToAll
from holotrain.overlap.groups import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, COLLECTIVES, REDUCE_SCATTER, Grouping, Job
from holotrain.overlap.links import MeasuredLink
from holotrain.overlap.products import product, products
from holotrain.overlap.row import RowAllReduce, RowReduceScatter
from holotrain.overlap.sending import Sender

Run = Callable[[], object]

SENDS_RESULT = {ALL_REDUCE: RowAllReduce, REDUCE_SCATTER: RowReduceScatter, ALL_TO_ALL: LinearAllToAll}
"""Layers that communicate their result, in the forward."""

SENDS_INPUT = {
    ALL_REDUCE: ColumnAllReduce,
    REDUCE_SCATTER: ColumnReduceScatter,
    ALL_GATHER: ColumnReduceScatter,
    ALL_TO_ALL: AllToAllLinear,
}
"""Layers that communicate their input in the forward, and its gradient in the backward."""

REPEATS = 7
MOST_PLACES = 8
"""Number of places among the rows of a job at which a product is timed, so that its input is as cold in the cache as later."""


def timed(run: Run, device: torch.device) -> float:
    """Seconds of one run. On CUDA measured with events on the current stream, without launch time. Waits for the device."""
    if device.type != "cuda":
        began = time.perf_counter()
        run()
        return time.perf_counter() - began
    begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.device(device):
        begun.record()
        run()
        ended.record()
        ended.synchronize()
    return begun.elapsed_time(ended) / 1e3


def median_seconds(run: Run, device: torch.device, repeats: int = REPEATS) -> float:
    """The median of ``repeats`` runs, after one warm-up run."""
    run()
    return statistics.median(timed(run, device) for _ in range(repeats))


def product_seconds(job: Job, rows: int, repeats: int = REPEATS) -> float:
    """Seconds of the product of ``rows`` rows of the job, at several places among its rows."""
    runs = products_in_turn(job, rows)
    next(runs)()
    return statistics.median(timed(next(runs), job.device) for _ in range(repeats))


def products_in_turn(job: Job, rows: int) -> Iterator[Run]:
    """Yields, without end, the product of ``rows`` rows of the job, at one place after the other."""
    matrix = _filled(job, job.outputs, job.inputs).t()
    x = _filled(job, *_leading(job), job.inputs)
    places = min(job.rows // rows, MOST_PLACES)
    while True:
        for place in range(places):
            cut = slice(place * rows, (place + 1) * rows)
            if x.dim() == 2:
                yield lambda cut=cut: product(x[cut], matrix)  # into new memory, like the output of a layer
            else:
                yield lambda cut=cut: products(x[:, cut], matrix)


def collective_seconds(collectives: Collectives, collective: str, size: int, job: Job) -> float:
    """Seconds of one collective over ``size`` bytes in the job's dtype. Every rank must take part."""
    ranks = collectives.ranks
    rows = max(size // job.dtype.itemsize // ranks, 1)
    parts, share = _filled(job, ranks, rows, 1), _filled(job, rows, 1)
    runs: dict[str, Run] = {
        ALL_REDUCE: lambda: collectives.all_reduce(parts).wait(),
        REDUCE_SCATTER: lambda: collectives.reduce_scatter(share, parts).wait(),
        ALL_GATHER: lambda: collectives.all_gather(parts, share).wait(),
        ALL_TO_ALL: lambda: collectives.all_to_all(parts.unbind(0), parts.unbind(0)).wait(),
    }
    return median_seconds(runs[collective], job.device)


def measured_link(collectives: Collectives, job: Job) -> MeasuredLink:
    """Times of all collectives, for messages from 4 KiB to the job's size. Every rank must take part; the slowest counts."""
    whole = job.message(job.rows)
    sizes = sorted({whole >> shift for shift in range(0, 20, 2) if whole >> shift >= 4096} | {whole})
    times = {}
    for collective in COLLECTIVES:
        seconds = [collective_seconds(collectives, collective, size, job) for size in sizes]
        times[collective] = dict(zip(sizes, collectives.largest(seconds, job.device), strict=True))
    return MeasuredLink(times)


def job_seconds(job: Job, sizes: Sequence[int], collectives: Collectives, repeats: int = REPEATS) -> float:
    """Seconds of the whole job in groups of these sizes, with communication. Every rank must take part."""
    return median_seconds(one_run(job, lambda *_: sizes, collectives), job.device, repeats)


def one_run(job: Job, groups: Grouping, collectives: Collectives, signals: bool = False) -> Run:
    """Returns a function that runs the job once: the forward of a layer, or the backward if the weight gradient follows."""
    functions = SENDS_INPUT if job.arrives or job.covered else SENDS_RESULT
    how: Sender | Exchange = Sender(collectives, groups, signals)
    shape = (job.rows,) if job.arrives or job.covered else _leading(job)
    if job.collective == ALL_TO_ALL:
        each = [math.ceil(job.rows / job.ranks)] * job.ranks
        how, shape = Exchange(how, each, each, job.rows), (sum(each),)
    if not job.covered:
        x, weight = _filled(job, *shape, job.inputs), _filled(job, job.outputs, job.inputs)
        return lambda: functions[job.collective].apply(x, weight, None, how)
    x = _filled(job, *shape, job.outputs).requires_grad_()
    weight = _filled(job, job.inputs, job.outputs).requires_grad_()
    y = functions[job.collective].apply(x, weight, None, how)
    grad = torch.ones_like(y)
    return lambda: torch.autograd.grad(y, (x, weight), grad, retain_graph=True)


def _leading(job: Job) -> tuple[int, ...]:
    return (job.ranks, job.rows) if job.of_a_share else (job.rows,)


def _filled(job: Job, *shape: int) -> torch.Tensor:
    """Small random numbers, not zeros: products of zeros draw less power and run at a higher clock than those of training."""
    generator = torch.Generator(job.device).manual_seed(0)  # the random state of the training does not change
    return torch.rand(shape, generator=generator, dtype=torch.float32, device=job.device).to(job.dtype).sub_(0.5)
