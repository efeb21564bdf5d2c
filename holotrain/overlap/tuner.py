"""Chooses groups by measuring: it times products and collectives, predicts, confirms the choice and saves it to a file."""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import count
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import nccl
from torch.utils._python_dispatch import _disable_current_modes

from holotrain.clock import Clock
from holotrain.files import read_json, write_json
from holotrain.overlap.functions import AllReduce, AllToAll, ReduceScatter, SendInput, SendResult
from holotrain.overlap.groups import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_TO_ALL,
    COLLECTIVES,
    REDUCE_SCATTER,
    Collectives,
    Columns,
    Grouping,
    Job,
    Sizes,
    in_proportion,
)
from holotrain.overlap.predictor import Carrier, MeasuredLink, Predictor
from holotrain.overlap.signals import Overlap, product, products

Run = Callable[[], object]

REPEATS = 7
MOST_PLACES = 8
"""Number of places among the rows of a job at which a product is timed, so that its input is as cold in the cache as later."""


def timed(run: Run, device: torch.device) -> float:
    """Seconds of one run; on CUDA without launch time. Waits for the device."""
    clock = Clock(device)
    with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        begun = clock.mark()
        run()
        return clock.waited_seconds(begun, clock.mark())


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
    for number in count():
        part = x.narrow(-2, number % places * rows, rows)
        yield partial(products if job.of_a_share else product, part, matrix)  # into new memory, like the output of a layer


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
    times = {each: [collective_seconds(collectives, each, size, job) for size in sizes] for each in COLLECTIVES}
    slowest = {each: collectives.largest(seconds, job.device) for each, seconds in times.items()}
    return MeasuredLink({each: dict(zip(sizes, seconds, strict=True)) for each, seconds in slowest.items()})


def job_seconds(job: Job, sizes: Sizes, collectives: Collectives) -> float:
    """Seconds of the whole job in groups of these sizes, with communication. Every rank must take part."""
    return median_seconds(one_run(job, lambda *_: sizes, collectives), job.device)


def one_run(job: Job, groups: Grouping, collectives: Collectives, signals: bool = False) -> Run:
    """Returns a function that runs the job once: the forward of a layer, or the backward if the weight gradient follows."""
    function = SendInput if job.arrives or job.covered else SendResult
    overlap = Overlap(collectives, groups, signals)
    way = (ReduceScatter if job.of_a_share else AllReduce)(overlap)
    shape = (job.rows,) if function is SendInput else _leading(job)
    if job.collective == ALL_TO_ALL:
        each = [math.ceil(job.rows / job.ranks)] * job.ranks
        way, shape = AllToAll(overlap, each, each, job.rows), (sum(each),)
    if not job.covered:
        return partial(function.apply, _filled(job, *shape, job.inputs), _filled(job, job.outputs, job.inputs), None, way)
    x = _filled(job, *shape, job.outputs).requires_grad_()
    weight = _filled(job, job.inputs, job.outputs).requires_grad_()
    y = function.apply(x, weight, None, way)
    return partial(torch.autograd.grad, y, (x, weight), torch.ones_like(y), retain_graph=True)


def _leading(job: Job) -> tuple[int, ...]:
    return (job.ranks, job.rows) if job.of_a_share else (job.rows,)


def _filled(job: Job, *shape: int) -> torch.Tensor:
    """Small random numbers, not zeros: products of zeros draw less power and run at a higher clock than those of training."""
    generator = torch.Generator(job.device).manual_seed(0)  # the random state of the training does not change
    return torch.rand(shape, generator=generator, dtype=torch.float32, device=job.device).to(job.dtype).sub_(0.5)


@dataclass(frozen=True)
class Tuned:
    """The choice for a job.

    Args:
        sizes: rows (or columns) of each group.
        predicted: seconds in these groups, predicted.
        confirmed: seconds in these groups, measured.
        in_one: seconds in one group, measured.
        columns: whether the groups are of columns instead of rows.
    """

    sizes: list[int]
    predicted: float
    confirmed: float
    in_one: float
    columns: bool = False


def described(job: Job, link: str) -> dict[str, object]:
    """The job, its device and its link, as plain JSON."""
    threads = torch.get_num_threads()
    device = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else f"{job.device.type}, {threads} threads"
    return asdict(job) | {"dtype": str(job.dtype).removeprefix("torch."), "device": device, "link": link}


def versions(device: torch.device) -> dict[str, str]:
    """What else the measured times depend on."""
    found = {"torch": torch.__version__}
    if device.type == "cuda":
        found["compute capability"] = "{}.{}".format(*torch.cuda.get_device_capability(device))
        found["CUDA"] = torch.version.cuda or f"ROCm {torch.version.hip}"
        found["NCCL"] = ".".join(map(str, nccl.version())) if dist.is_nccl_available() else "none"
    return found


def path_of(folder: Path, job: Job, link: str) -> Path:
    """The file of a job: its name has the shape, for people, and a digest of the job, the device and the link."""
    about = described(job, link)
    kind = f"{job.collective}{'_covered' * job.covered}{'_before' * job.before}-{job.rows}x{job.inputs}x{job.outputs}"
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]
    return folder / f"{kind}-{about['dtype']}-{job.ranks}_ranks-{digest}.json"


def read(path: Path, job: Job, link: str) -> Tuned | None:
    """Returns None if there is no file for this job and device. A warning names a file that is broken or of other versions."""
    try:
        found = read_json(path)
        if found["of"] != described(job, link):
            raise ValueError("of another job")
        if (before := found["with"]) != (now := versions(job.device)):
            changed = [f"{name} {before.get(name)}, now {value}" for name, value in now.items() if before.get(name) != value]
            warnings.warn(f"{path} was measured with {'; '.join(changed)}; measuring again", stacklevel=2)
            return None
        tuned = Tuned(**found["tuned"])
        sizes, total = tuned.sizes, job.outputs if tuned.columns else job.rows
        if not isinstance(sizes, list) or not all(type(size) is int and size > 0 for size in sizes) or sum(sizes) != total:
            raise ValueError(f"groups of {sizes} for {total}")
        for seconds in (tuned.predicted, tuned.confirmed, tuned.in_one):
            if not isinstance(seconds, float) or not 0 <= seconds < math.inf:
                raise ValueError(f"{seconds!r} seconds")
    except OSError:
        return None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        warnings.warn(f"{path} is not a valid choice of groups ({error!r}); measuring again", stacklevel=2)
        return None
    return tuned


def write(path: Path, job: Job, link: str, tuned: Tuned) -> None:
    """A folder that cannot be written does not stop the training."""
    choice = {"of": described(job, link), "with": versions(job.device), "tuned": asdict(tuned)}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, choice)
    except OSError as error:
        warnings.warn(f"cannot save the measured groups to {path}: {error.strerror or error}", stacklevel=2)


class Tuner:
    """Chooses group sizes for each shape when it first sees the shape. Pass it as ``groups``, to any number of layers.

    Shapes with similar numbers of rows (batches of documents, for example) share a choice: rows are rounded up to four binary
    digits.

    Every rank times the job's products, and the collectives unless ``link`` is given. The slowest rank counts, so that all
    ranks choose the same. The choice is then timed against a single group, which is taken unless it is slower. The files of
    rank 0 count for all ranks.

    Args:
        folder: of the files, one for each shape and device; by default ``holotrain/overlap`` in the user's cache.
        link: times of collectives, if they are known.

    New shapes are measured in the middle of a step, for about a second. This is not possible while a CUDA graph is captured:
    run one step before.
    """

    def __init__(self, folder: Path | None = None, link: Carrier | None = None) -> None:
        if folder is None:
            folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "holotrain" / "overlap"
        self.folder = Path(folder)
        self.link = link
        self.tuned: dict[tuple[Job, str], Tuned] = {}

    def __call__(self, job: Job, collectives: Collectives) -> Sizes:
        name = collectives.name if self.link is None else f"{collectives.name}_{self.link}"
        tuned_for = replace(job, rows=rounded_up(job.rows))
        key = tuned_for, name
        if key not in self.tuned:
            if job.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("groups of a new shape cannot be measured during a CUDA graph capture; run one step before")
            self.tuned[key] = self._found_or_measured(tuned_for, name, collectives)
        tuned = self.tuned[key]
        return Columns(tuned.sizes) if tuned.columns else [size for size in in_proportion(tuned.sizes, job.rows) if size]

    def _found_or_measured(self, job: Job, name: str, collectives: Collectives) -> Tuned:
        path = path_of(self.folder, job, name)
        found = collectives.agreed(read(path, job, name) if collectives.rank == 0 else None)
        if found is None:
            # Modes that count operations of the step (selective checkpointing, a FLOP counter) must not see the measurements.
            with _disable_current_modes(), torch.enable_grad(), torch.autocast(job.device.type, enabled=False):
                found = self._measured(job, collectives)
            if collectives.rank == 0:
                write(path, job, name, found)
        return found

    def _measured(self, job: Job, collectives: Collectives) -> Tuned:
        @cache
        def seconds(job: Job, rows: int) -> float:
            return collectives.largest([product_seconds(job, rows)], job.device)[0]

        predictor = Predictor(seconds, self.link or measured_link(collectives, job))
        sizes, predicted = predictor.best(job)
        one = [job.rows]
        times = [job_seconds(job, cut, collectives) for cut in ([one] if len(sizes) == 1 else [sizes, one])]
        slowest = collectives.largest(times, job.device)
        confirmed, in_one = slowest[0], slowest[-1]
        if in_one <= confirmed:
            sizes, predicted = one, predictor.seconds(job, one)
        columns = isinstance(sizes, Columns)
        return Tuned(sizes.of(job.outputs) if columns else [*sizes], predicted, min(confirmed, in_one), in_one, columns)

    def report(self) -> str:
        """One line per job: the number of groups, predicted and confirmed milliseconds, and milliseconds in one group."""
        lines = [f"{'job':<58}{'groups':>11}{'predicted':>12}{'confirmed':>12}{'in one':>12}"]
        for (job, _), tuned in self.tuned.items():
            shape = f"{job.product_rows(job.rows)} x {job.inputs} x {job.outputs}"
            behind = ", weight gradient follows" if job.covered else ""
            count = f"{len(tuned.sizes)}{' columns' if tuned.columns else ''}"
            times = (f"{seconds * 1e3:9.3f} ms" for seconds in (tuned.predicted, tuned.confirmed, tuned.in_one))
            lines.append(f"{job.collective + ' ' + shape + behind:<58}{count:>11}{''.join(times)}")
        return "\n".join(lines)

    def __deepcopy__(self, memo: dict) -> Tuner:
        return self  # measurements are valid for copies of a model too


def rounded_up(rows: int) -> int:
    """Rounds up to four binary digits: eight values between one power of two and the next."""
    step = 1 << max(rows.bit_length() - 4, 0)
    return -(-rows // step) * step
