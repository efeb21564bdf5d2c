"""The time of a training step on several devices, on paper: from a single device's times and the times of a link.

Each strategy is a schedule of computation and collectives on a link that carries one message at a time. Data parallel ones
(DDP, FSDP2) give every device a batch of its own; tensor parallel (TP) gives all devices the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from holotrain.overlap import Job, Link, Predictor
from holotrain.overlap.groups import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from holotrain.overlap.pipeline import makespan
from holotrain.overlap.waves import SMS_LOST
from holotrain.planning.rank_memory import Unit

FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes of gradients at which DDP sends a bucket: small at first, so that something travels soon."""

SLOWER_LINK = 0.7
"""Share of the link's bandwidth that is reached at the slow end of a band."""

UNDIVIDED = 0.1
"""Share of what tensor parallel layers save that is not saved at the slow end of a band: norms and sums are whole on every
device, and narrow products are less efficient."""


@dataclass(frozen=True)
class Times:
    """Seconds on a single device.

    Args:
        forward, backward: of one batch.
        update: what is done with the gradients.
        batches: whose gradients add up to one step.
    """

    forward: float
    backward: float
    update: float
    batches: int = 1

    @property
    def step(self) -> float:
        return self.batches * (self.forward + self.backward) + self.update


@dataclass(frozen=True)
class Setting:
    """What is assumed of several devices.

    Args:
        link: between them.
        slowdown: how many times as long a computation takes beside a collective.
        undivided: share of what tensor parallel layers save that is not saved.
    """

    link: Link
    slowdown: float = 1.0
    undivided: float = 0.0


@dataclass(frozen=True)
class Divided:
    """What tensor parallel leaves each device to do.

    Args:
        forward, backward: in parts of the single device's arithmetic.
        forward_sums, backward_sums: the products whose results are summed over devices, and how often each is, in one batch.
        flops: of one batch on a single device, forward and backward.
        peak: bytes of a rank.
    """

    forward: float
    backward: float
    forward_sums: Mapping[Job, int]
    backward_sums: Mapping[Job, int]
    flops: float
    peak: int


@dataclass(frozen=True)
class Band:
    low: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """Of one strategy; on paper.

    Args:
        strategy: its name.
        memory: bytes of a rank at its peak; None where it is not possible.
        seconds: of a step.
        throughput: samples a second of all devices.
        efficiency: throughput over that of so many single devices.
        reason: why it is not possible.
    """

    strategy: str
    memory: int | None = None
    seconds: Band | None = None
    throughput: Band | None = None
    efficiency: Band | None = None
    reason: str = ""


def ddp_seconds(times: Times, units: Sequence[Unit], devices: int, setting: Setting) -> float:
    """Of a step: buckets of gradients travel while the backward goes on; of added-up gradients the last batch's alone.

    Args:
        units: of the model, first to last.
    """
    if devices == 1:
        return times.step
    ready, sizes, after = buckets(units)
    backward = times.backward * setting.slowdown
    carried = [setting.link.seconds(ALL_REDUCE, size, devices) for size in sizes]
    reduced = makespan([share * backward for share in ready], carried, after=after * backward)
    return times.step - times.backward + reduced


def buckets(units: Sequence[Unit]) -> tuple[list[float], list[int], float]:
    """DDP's buckets in the order in which they are full: from the last gradients of the model to the first.

    Returns:
        the share of the backward between each and the one before, the bytes of each, the share behind the last.
    """
    ready, sizes, elapsed, filled = [], [], 0.0, 0
    for unit in reversed(units):
        elapsed += unit.work
        for size in reversed(unit.gradients):
            filled += size
            if filled >= (BUCKET if sizes else FIRST_BUCKET):
                ready.append(elapsed)
                sizes.append(filled)
                elapsed, filled = 0.0, 0
    if filled:
        ready.append(elapsed)
        sizes.append(filled)
        elapsed = 0.0
    return ready, sizes, elapsed


def fsdp_seconds(times: Times, units: Sequence[Unit], devices: int, setting: Setting) -> float:
    """Of a step of FSDP2 (full shard): a block is gathered while the one before is computed, and again in the backward.

    What lies outside of blocks is gathered once, before the forward, and kept. Gradients are reduced and scattered behind
    their block. The update is of a rank's share of every tensor, but counted whole: of many small ones it takes as long.
    """
    if devices == 1:
        return times.step

    def gathering(size: int) -> float:
        return setting.link.seconds(ALL_GATHER, size, devices) if size else 0.0

    def scattering(size: int) -> float:
        return setting.link.seconds(REDUCE_SCATTER, size, devices) if size else 0.0

    rest = [unit for unit in units if not unit.block]
    blocks = [unit for unit in units if unit.block]
    # All that is outside of blocks is computed behind them (the head, above all), but gathered before them.
    gathers = [gathering(sum(unit.parameters for unit in rest)), *(gathering(unit.parameters) for unit in blocks), 0.0]
    works = [0.0, *(unit.work for unit in blocks), sum(unit.work for unit in rest)]
    gradients = [sum(sum(unit.gradients) for unit in rest), *(sum(unit.gradients) for unit in blocks), 0]
    scatters = [scattering(size) for size in gradients]
    forward = one_ahead(gathers, [work * times.forward * setting.slowdown for work in works], [0.0] * len(works))
    gathers[0] = 0.0
    there_and_back = [work * times.backward * setting.slowdown for work in reversed(works)]
    backward = one_ahead(gathers[::-1], there_and_back, scatters[::-1])
    return times.batches * (forward + backward) + times.update


def one_ahead(gathers: Sequence[float], computes: Sequence[float], scatters: Sequence[float]) -> float:
    """Seconds until all is computed and has travelled, in order, where each is gathered while the one before is computed.

    Args:
        gathers: seconds that each travels before it can be computed.
        computes: seconds of each.
        scatters: seconds that what it leaves travels; behind the next one's gathering, since that is launched first.
    """
    link = ready = gathers[0]
    done = 0.0
    for number, (compute, scatter) in enumerate(zip(computes, scatters, strict=True)):
        begun = max(done, ready)
        if number + 1 < len(gathers):
            if gathers[number + 1]:
                link = max(link, begun) + gathers[number + 1]
                ready = link
            else:
                ready = 0.0
        done = begun + compute
        if scatter:
            link = max(link, done) + scatter
    return max(done, link)


def tp_seconds(times: Times, divided: Divided, devices: int, setting: Setting, overlapped: bool) -> float:
    """Of a step of tensor parallel layers: what is left of the work, and the sums over devices. The update counts whole.

    Args:
        overlapped: a product's rows travel in groups, each behind the computation of the next (FlashOverlap's recurrence,
            :class:`~holotrain.overlap.Predictor`); products take the time that the step's mean rate gives them.
    """
    if devices == 1:
        return times.step
    forward, backward = (
        seconds * (share + setting.undivided * (1 - share))
        for seconds, share in ((times.forward, divided.forward), (times.backward, divided.backward))
    )
    rate = divided.flops / (times.forward + times.backward)
    summed = 0.0
    for job, count in [*divided.forward_sums.items(), *divided.backward_sums.items()]:
        carried = setting.link.seconds(ALL_REDUCE, job.message(job.rows), devices)
        summed += count * (carried - (_hidden(job, carried, rate, setting) if overlapped else 0.0))
    return times.batches * (forward + backward + summed) + times.update


def _hidden(job: Job, carried: float, rate: float, setting: Setting) -> float:
    """Seconds that groups save of a product and its sum; none where one group is as fast."""

    def product(job: Job, rows: int) -> float:
        return 2 * job.product_rows(rows) * job.inputs * job.outputs / rate

    predictor = Predictor(lambda job, rows: product(job, rows) * setting.slowdown, setting.link)
    in_turn = product(job, job.rows) * (2 if job.covered else 1) + carried
    return max(in_turn - predictor.best(job)[1], 0.0)


def settings_of(link: Link, sms: int | None) -> tuple[Setting, Setting]:
    """The favourable one and the unfavourable one.

    Args:
        sms: streaming multiprocessors of the device, of which a collective takes two; None: it has none.
    """
    slower = replace(link, bandwidth=SLOWER_LINK * link.bandwidth)
    return Setting(link), Setting(slower, sms / (sms - SMS_LOST) if sms else 1.0, UNDIVIDED)


def predicted(
    strategy: str,
    memory: int,
    devices: int,
    times: tuple[Times, Times] | None,
    settings: tuple[Setting, Setting],
    seconds: Callable[[Times, Setting], float],
    samples: float,
    one_batch: bool = False,
) -> Prediction:
    """
    Args:
        memory: bytes of a rank.
        times: the fastest and the slowest of a single device; None: nobody knows.
        settings: the favourable and the unfavourable one.
        seconds: of a step under given times and setting.
        samples: of a step of a single device.
        one_batch: all devices work on the batch of one; else each has one of its own.
    """
    if times is None:
        return Prediction(strategy, memory)
    # All four ends: it is the fastest device whose efficiency suffers most.
    ends = [(time.step, seconds(time, setting)) for time in times for setting in settings]
    low, high = min(taken for _, taken in ends), max(taken for _, taken in ends)
    of_all, work = (samples, 1 / devices) if one_batch else (devices * samples, 1.0)
    shares = [work * alone / taken for alone, taken in ends]
    return Prediction(strategy, memory, Band(low, high), Band(of_all / high, of_all / low), Band(min(shares), max(shares)))
