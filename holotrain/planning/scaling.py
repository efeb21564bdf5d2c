"""Predicts memory and time of a training step on several devices, from those of a single device and of a link.

Each strategy is a schedule of computation and collectives on a link that carries one message at a time. With data parallel
(DDP, FSDP2) every device has its own batch; with tensor parallel (TP) all devices share one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from torch.optim import Optimizer

from holotrain.optimizers import CombinedOptimizer
from holotrain.overlap import Job, Predictor
from holotrain.overlap.groups import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER
from holotrain.overlap.links import Link
from holotrain.overlap.predictor import SMS_LOST, makespan
from holotrain.planning.tracker import Footprint

SHARDED = ("parameters", "gradients", "optimizer", "average", "hologram")
"""Kinds of memory that FSDP2 shards over the ranks, but for optimizers that keep their state whole."""


@dataclass(frozen=True)
class Unit:
    """Parameters whose gradients are complete at the same time: those of a block, or those between blocks.

    Args:
        parameters: bytes of all parameters.
        gradients: bytes of each gradient, in the order of the model's parameters; frozen parameters have none.
        work: share of the model's arithmetic.
        block: whether it is a block, which is gathered by itself; the rest of the model is gathered together.
    """

    parameters: int
    gradients: tuple[int, ...]
    work: float
    block: bool


@dataclass(frozen=True)
class Unsharded:
    """What an optimizer does not divide under FSDP2.

    Args:
        state: whether each rank keeps the whole state.
        copies: bytes of the largest parameter that is gathered for its step, and of what is computed like it on shards.
    """

    state: bool = False
    copies: int = 0

    @classmethod
    def of(cls, optimizer: Optimizer) -> Unsharded:
        """By the attributes of an optimizer that gathers parameters: ``whole_state`` and ``whole_copies``, their number."""
        parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else [optimizer]
        copies = [
            part.whole_copies * parameter.nbytes
            for part in parts
            if hasattr(part, "whole_copies")
            for group in part.param_groups
            for parameter in group["params"]
        ]
        return cls(any(getattr(part, "whole_state", False) for part in parts), max(copies, default=0))


def ddp_bytes(footprint: Footprint, units: Sequence[Unit]) -> int:
    """The bound in bytes over the three phases, each with all gradients, which are views of permanent buckets.

    This holds with ``gradient_as_bucket_view=True``, which holotrain's DDP uses. Without it gradients would be stored twice.
    """
    buckets = sum(sum(unit.gradients) for unit in units)
    return max(
        buckets + sum(parts.values()) - parts["gradients"] + footprint.scratch_by_phase.get(phase, 0)
        for phase, parts in footprint.parts_by_phase.items()
    )


def fsdp_bytes(footprint: Footprint, units: Sequence[Unit], devices: int, whole: Unsharded = Unsharded()) -> int:
    """The bound in bytes over the three phases, each as on one device except for what is sharded.

    Parameters, gradients, optimizer state, averaged weights, holograms and the temporary memory of an update are divided by the
    number of devices, except for what ``whole`` says: an optimizer that gathers parameters computes with them as on one device,
    and holds the copies, too. The forward also holds the parameters outside of blocks and two whole blocks: one in use and one
    gathered ahead. The backward also holds their gradients until they are reduced. Activations, buffers and batch stay whole.
    """
    rest, blocks = _apart(units)
    gathered = sum(unit.parameters for unit in rest) + _two_blocks([unit.parameters for unit in blocks])
    reduced = sum(sum(unit.gradients) for unit in rest) + _two_blocks([sum(unit.gradients) for unit in blocks])
    beside = {"forward": gathered, "backward": gathered + reduced, "update": whole.copies}
    lasting = {*SHARDED} - ({"optimizer"} if whole.state else set())
    found = []
    for phase, parts in footprint.parts_by_phase.items():
        divided = lasting | {"temporary"} if phase == "update" and not whole.copies else lasting
        shares = sum(-(-size // devices) if kind in divided else size for kind, size in parts.items())
        found.append(beside[phase] + shares + footprint.scratch_by_phase.get(phase, 0))
    return max(found)


def _apart(units: Sequence[Unit]) -> tuple[list[Unit], list[Unit]]:
    """The units outside of blocks, and the blocks."""
    return [unit for unit in units if not unit.block], [unit for unit in units if unit.block]


def _two_blocks(sizes: Sequence[int]) -> int:
    """The largest sum of two neighbours."""
    return max((one + other for one, other in pairwise(sizes)), default=sum(sizes))


FIRST_BUCKET, BUCKET = 2**20, 25 * 2**20
"""Bytes of gradients at which DDP sends a bucket; the first is small, so that communication starts early."""

SLOWER_LINK = 0.7
"""Share of the link's bandwidth at the slow end of a band."""

UNDIVIDED = 0.1
"""Share of the work saved by tensor parallel layers that is not saved at the slow end of a band: every device computes norms
and sums whole, and narrow products are less efficient."""


@dataclass(frozen=True)
class Times:
    """Seconds on a single device.

    Args:
        forward, backward: of one batch.
        update: of clipping and the optimizer step.
        batches: number of batches whose gradients are accumulated in one step.
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
    """Assumptions about several devices.

    Args:
        link: between the devices.
        slowdown: factor by which a collective slows computation down.
        undivided: share of the work saved by tensor parallel layers that is not saved.
    """

    link: Link
    slowdown: float = 1.0
    undivided: float = 0.0


@dataclass(frozen=True)
class TensorParallelWork:
    """The work of each device under tensor parallel.

    Args:
        forward, backward: share of the single device's arithmetic.
        forward_sums, backward_sums: the products whose results are summed over devices, with their counts in one batch.
        flops: of one batch on a single device, forward and backward.
        bound: bytes that a rank needs at most.
    """

    forward: float
    backward: float
    forward_sums: Mapping[Job, int]
    backward_sums: Mapping[Job, int]
    flops: float
    bound: int


@dataclass(frozen=True)
class Band:
    """The lowest and the highest value that something may have, in its unit.

    Args:
        low, high: the lowest and the highest value.
    """

    low: float
    high: float


@dataclass(frozen=True)
class Prediction:
    """The prediction for one strategy.

    Args:
        strategy: its name.
        memory: bytes that a rank needs at most; None if the strategy is not possible.
        seconds: of a step.
        throughput: samples per second of all devices.
        efficiency: throughput over that of the same number of independent devices.
        reason: why the strategy is not possible.
    """

    strategy: str
    memory: int | None = None
    seconds: Band | None = None
    throughput: Band | None = None
    efficiency: Band | None = None
    reason: str = ""


def ddp_seconds(times: Times, units: Sequence[Unit], devices: int, setting: Setting) -> float:
    """Seconds of a DDP step. Buckets of gradients are reduced during the backward (of the last accumulated batch)."""
    ready, sizes, after = buckets(units)
    backward = times.backward * setting.slowdown
    carried = [setting.link.seconds(ALL_REDUCE, size, devices) for size in sizes]
    reduced = makespan([share * backward for share in ready], carried, after=after * backward)
    return times.step - times.backward + reduced


def buckets(units: Sequence[Unit]) -> tuple[list[float], list[int], float]:
    """DDP's buckets in the order in which they fill: from the last gradients of the model to the first.

    Returns:
        the share of the backward before each bucket, the bytes of each bucket, and the share after the last one.
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
    """Seconds of an FSDP2 step (full shard). A block is gathered while the previous one runs, and again in the backward.

    Parameters outside of blocks are gathered once, before the forward, and kept. Gradients are reduce-scattered after their
    block. The update is counted whole, although a rank updates only its share: with many small tensors it takes as long.
    """

    def carried(collective: str, sizes: list[int]) -> list[float]:
        return [setting.link.seconds(collective, size, devices) if size else 0.0 for size in sizes]

    rest, blocks = _apart(units)
    # Layers outside of blocks are counted after the blocks (mainly the head), but gathered before them.
    gathers = carried(ALL_GATHER, [sum(unit.parameters for unit in rest), *(unit.parameters for unit in blocks), 0])
    works = [0.0, *(unit.work for unit in blocks), sum(unit.work for unit in rest)]
    gradients = [sum(sum(unit.gradients) for unit in rest), *(sum(unit.gradients) for unit in blocks), 0]
    scatters = carried(REDUCE_SCATTER, gradients)
    forward = one_ahead(gathers, [work * times.forward * setting.slowdown for work in works], [0.0] * len(works))
    gathers[0] = 0.0
    there_and_back = [work * times.backward * setting.slowdown for work in reversed(works)]
    backward = one_ahead(gathers[::-1], there_and_back, scatters[::-1])
    return times.batches * (forward + backward) + times.update


def one_ahead(gathers: Sequence[float], computes: Sequence[float], scatters: Sequence[float]) -> float:
    """Seconds until everything is computed and communicated, if each unit is gathered while the previous one is computed.

    Args:
        gathers: seconds to gather each unit before it is computed.
        computes: seconds to compute each unit.
        scatters: seconds to scatter its gradients, after the next unit is gathered, which is launched first.
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


def tp_seconds(times: Times, divided: TensorParallelWork, devices: int, setting: Setting, overlapped: bool = False) -> float:
    """Seconds of a step with tensor parallel layers: the remaining work and the sums over devices. The update counts whole.

    Args:
        overlapped: whether the rows of a product are communicated in groups during the computation of the next group
            (FlashOverlap's recurrence, :class:`~holotrain.overlap.Predictor`); products run at the step's mean FLOP/s.
    """
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
    """Seconds that groups save on a product and its sum; 0 if one group is as fast."""

    def product(job: Job, rows: int) -> float:
        return 2 * job.product_rows(rows) * job.inputs * job.outputs / rate

    predictor = Predictor(lambda job, rows: product(job, rows) * setting.slowdown, setting.link)
    in_turn = product(job, job.rows) * (2 if job.covered else 1) + carried
    return max(in_turn - predictor.best(job)[1], 0.0)


def settings_of(link: Link, sms: int | None) -> tuple[Setting, Setting]:
    """Returns the favourable and the unfavourable setting.

    Args:
        sms: number of streaming multiprocessors of the device, of which a collective takes two; None: not a GPU.
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
        times: the fastest and the slowest times of a single device; None: unknown.
        seconds: of a step, given times and a setting.
        samples: in a step of a single device.
        one_batch: all devices share one batch; otherwise each device has its own.
    """
    if times is None:
        return Prediction(strategy, memory)
    # All four combinations: the efficiency of the fastest device is the lowest.
    ends = [(time.step, seconds(time, setting)) for time in times for setting in settings]
    low, high = min(taken for _, taken in ends), max(taken for _, taken in ends)
    of_all, work = (samples, 1 / devices) if one_batch else (devices * samples, 1.0)
    shares = [work * alone / taken for alone, taken in ends]
    return Prediction(strategy, memory, Band(low, high), Band(of_all / high, of_all / low), Band(min(shares), max(shares)))
