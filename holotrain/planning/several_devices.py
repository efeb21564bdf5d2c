"""Memory and time of a training on several devices, under each strategy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from holotrain.overlap import LINKS
from holotrain.overlap.links import Link
from holotrain.overlap.predictor import SMS_LOST
from holotrain.planning.memory_plan import Plan
from holotrain.planning.planner import Planner
from holotrain.planning.scaling import (
    BUCKET,
    FIRST_BUCKET,
    SLOWER_LINK,
    UNDIVIDED,
    Prediction,
    Setting,
    TensorParallelWork,
    Times,
    ddp_bytes,
    ddp_seconds,
    fsdp_bytes,
    fsdp_seconds,
    predicted,
    settings_of,
    tp_seconds,
)
from holotrain.planning.step_times import Divide, Gpu, StepTimes, step_times, tensor_parallel_work, work_of


@dataclass(frozen=True)
class Scaling:
    """
    Args:
        devices: number of devices.
        link: name of the link.
        times: times of a step on one device.
        predictions: one per strategy.
        unit: unit of the throughput.
        assumptions: one line each.
    """

    devices: int
    link: str
    times: StepTimes
    predictions: list[Prediction]
    unit: str
    assumptions: list[str]

    def as_json(self) -> dict[str, Any]:
        """The prediction in plain containers; sizes in bytes, times in seconds."""
        single = self.times.band and {"low": self.times.band[0].step, "high": self.times.band[1].step}
        return {
            "devices": self.devices,
            "link": self.link,
            "on_paper": True,
            "single_device": {"seconds": single, "source": self.times.source},
            "throughput_of": self.unit,
            "strategies": [asdict(prediction) for prediction in self.predictions],
            "assumptions": self.assumptions,
        }


def make_scaling(
    planner: Planner,
    plan: Plan,
    devices: int,
    link: str,
    divide: Divide,
    gpu: str | None = None,
    known: Callable[[str], Gpu] = Gpu,
    unit: str = "samples/s",
    begin: Callable[[str], object] = lambda what: None,
) -> Scaling:
    """
    Args:
        plan: plan of a single device.
        devices: number of devices.
        link: name of the link between them, of :data:`~holotrain.overlap.LINKS`.
        divide: makes a model one tensor parallel rank's.
        gpu: name of the GPU to estimate times for; None: measure them on this machine's device.
        known: what is known of a GPU, given its name.
        unit: unit of the throughput.
        begin: called with what is done next.

    Raises:
        Unplannable: an operation needs the values of its inputs.
    """
    begin("counting FLOPs")
    work = work_of(planner, plan.schedule)
    begin("planning a tensor parallel rank")
    divided, words = tensor_parallel_work(planner, plan.schedule, divide, devices, work)
    times = step_times(planner, plan.schedule, work, gpu, known, plan.fits, begin)
    settings = settings_of(LINKS[link], times.sms)
    footprint, units = plan.configured, work.units

    def prediction(
        strategy: str, memory: int, seconds: Callable[..., float], *what: Any, one_batch: bool = False
    ) -> Prediction:
        def of_step(times: Times, setting: Setting) -> float:
            return times.step if devices == 1 else seconds(times, *what, devices, setting)

        memory = footprint.bound if devices == 1 else memory
        samples = work.batches * planner.batch.value
        return predicted(strategy, memory, devices, times.band, settings, of_step, samples, one_batch)

    predictions = [
        prediction("DDP", ddp_bytes(footprint, units), ddp_seconds, units),
        prediction("FSDP2", fsdp_bytes(footprint, units, devices, work.whole), fsdp_seconds, units),
    ]
    for name, seconds in {"TP": tp_seconds, "TP, overlapped": partial(tp_seconds, overlapped=True)}.items():
        if divided is None:
            predictions.append(Prediction(name, reason=words))
        else:
            predictions.append(prediction(name, divided.bound, seconds, divided, one_batch=True))
    assumptions = [f"one device: {times.source}", "no sharding and no communication"]
    if devices > 1:
        assumptions = _assumptions(link, LINKS[link], times, settings[1], divided, words)
    return Scaling(devices, link, times, predictions, unit, assumptions)


def _assumptions(
    name: str, link: Link, times: StepTimes, bad: Setting, divided: TensorParallelWork | None, whole: str
) -> list[str]:
    ends = [
        f"link {name}: {link.bandwidth / 1e9:.4g} GB/s in one direction of a ring, {link.latency * 1e6:.4g} us per "
        f"collective, half the bandwidth at {link.ramp / 2**10:.4g} KiB; from a table, not measured",
        f"slow end of a range: the slower time of one device, {SLOWER_LINK:.0%} of the link's bandwidth"
        + (f", {SMS_LOST} of {times.sms} SMs always used by collectives" if bad.slowdown > 1 else "")
        + (f", {UNDIVIDED:.0%} of the time that TP saves is lost" if divided else ""),
    ]
    lines = [
        f"one device: {times.source}",
        *(ends if times.band else []),
        f"DDP: buckets of {BUCKET >> 20} MiB (the first {FIRST_BUCKET >> 20} MiB) are all-reduced during the backward; "
        "they need as much memory as the gradients, for the whole training",
        "FSDP2, full shard: a block is all-gathered while the previous one is computed, in the forward and in the backward; "
        "gradients are reduce-scattered meanwhile; two blocks and all parameters outside blocks are unsharded at a time",
    ]
    if divided:
        there, back = (sum(sums.values()) for sums in (divided.forward_sums, divided.backward_sums))
        lines += [
            f"TP: {there} all-reduces in a forward and {back} in its backward, including those of recomputation, "
            "without overlap" + (f"; not sharded: {whole}" if whole else ""),
            "TP, overlapped: each group of rows is all-reduced while the next one is computed, at the step's mean FLOP/s "
            "(FlashOverlap's model); in the backward, the gradient of the weight overlaps with the last all-reduce",
        ]
    lines.append(
        "DDP and FSDP2: each device has a full batch; TP: all devices share one batch; updates take as long as on one device"
    )
    return [*lines, "not counted: data loading, stragglers, kernel launches"]
