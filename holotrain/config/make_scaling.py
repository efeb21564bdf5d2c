"""Predicts memory and time of a training on several devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from holotrain.callbacks import GPUS
from holotrain.checks import one_of
from holotrain.config.build_plan import Planner
from holotrain.config.make_plan import Plan
from holotrain.config.schema import PlanConfig
from holotrain.config.schema.backward import BackwardConfig
from holotrain.config.step_times import StepTimes, step_times
from holotrain.models.divided import Sums, divide
from holotrain.models.division import Indivisible
from holotrain.models.schedules import sequences
from holotrain.overlap import LINKS, Link
from holotrain.overlap.waves import SMS_LOST
from holotrain.planning import (
    Divided,
    Prediction,
    Setting,
    Times,
    Unit,
    ddp_bytes,
    ddp_seconds,
    fsdp_bytes,
    fsdp_seconds,
    predicted,
    settings_of,
    tp_seconds,
)
from holotrain.planning.scaling import BUCKET, FIRST_BUCKET, SLOWER_LINK, UNDIVIDED

DDP, FSDP2, TP, TP_OVERLAPPED = "DDP", "FSDP2", "TP", "TP, overlapped"


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


def check_scaling(config: PlanConfig, device: str) -> None:
    """
    Args:
        device: device of the plan.

    Raises:
        UserError: the link or GPU is unknown, or a GPU is given for a plan on the CPU.
    """
    one_of("link", config.link, LINKS)
    if config.gpu is not None:
        one_of("gpu", config.gpu, GPUS)
        one_of("device", device, ["cuda"])


def make_scaling(
    config: PlanConfig, data: pl.LightningDataModule, plan: Plan, begin: Callable[[str], object] = lambda what: None
) -> Scaling:
    """
    Args:
        data: set up.
        plan: plan of a single device.
        begin: called with what is done next.

    Raises:
        Unplannable: an operation needs the values of its inputs.
    """
    devices, link, backward = config.devices, LINKS[config.link], plan.schedule
    planner = Planner(config, data, plan.device)
    option, size = config.batch_option
    begin("counting FLOPs")
    model, units = parts(planner, size, backward)
    begin("planning a tensor parallel rank")
    divided, words = _divided(planner, size, backward, devices, model)
    times = step_times(planner, backward, (model.forward, model.backward), config.gpu, plan.fits, begin)
    settings = settings_of(link, times.sms)
    batches = config.trainer.accumulate_grad_batches
    make = partial(predicted, devices=devices, times=times.band, settings=settings, samples=batches * size)
    footprint = plan.configured
    predictions = [
        make(DDP, ddp_bytes(footprint, units, devices), seconds=_of(ddp_seconds, units, devices)),
        make(FSDP2, fsdp_bytes(footprint, units, devices), seconds=_of(fsdp_seconds, units, devices)),
    ]
    for name, overlapped in ((TP, False), (TP_OVERLAPPED, True)):
        if divided is None:
            predictions.append(Prediction(name, reason=words))
        else:
            seconds = _of(tp_seconds, divided, devices, overlapped=overlapped)
            predictions.append(make(name, divided.bound, seconds=seconds, one_batch=True))
    unit = "tokens/s" if option == "data.max_tokens" else "samples/s"
    assumptions = _assumptions(config, link, times, settings[1], divided, words)
    return Scaling(devices, config.link, times, predictions, unit, assumptions)


def _of(seconds: Callable[..., float], *what: object, **options: Any) -> Callable[[Times, Setting], float]:
    return lambda times, setting: seconds(times, *what, setting=setting, **options)


@dataclass(frozen=True)
class Arithmetic:
    """FLOPs of a batch; ``sequences``: FLOPs of the forward of each sequence of blocks."""

    forward: float
    backward: float
    sequences: list[float]


def parts(planner: Planner, size: int, backward: BackwardConfig) -> tuple[Arithmetic, list[Unit]]:
    """The FLOPs of a step, and the parts of the model, first to last."""
    with planner.step(size, backward) as step:
        counted = _arithmetic(step.model, step)
        units = list(_units(step.model, counted))
    return counted, units


def _arithmetic(model: nn.Module, step: Any, between: Callable[[], object] = lambda: None) -> Arithmetic:
    """Counts the FLOPs of a step without running it.

    Args:
        between: called after the forward.
    """
    found: dict[int, float] = {}
    runs = sequences(model)
    with FlopCounterMode(display=False) as counter:

        def count(number: int, sign: int) -> None:
            found[number] = found.get(number, 0.0) + sign * counter.get_total_flops()

        for number, run in enumerate(runs):
            run.register_forward_pre_hook(lambda *_, number=number: count(number, -1))
            run.register_forward_hook(lambda *_, number=number: count(number, 1))
        with step.autocast():
            loss = step.loss()
        forward = counter.get_total_flops()
        between()
        loss.backward()
        return Arithmetic(forward, counter.get_total_flops() - forward, [found[number] for number in range(len(runs))])


def _units(model: nn.Module, counted: Arithmetic) -> Iterator[Unit]:
    works, owners = [], {}
    for run, flops in zip(sequences(model), counted.sequences, strict=True):
        for block in run.blocks:
            owners |= {parameter: len(works) for parameter in block.parameters()}
            works.append(flops / len(run.blocks) / counted.forward)
    groups: list[tuple[int | None, list[nn.Parameter]]] = []
    for parameter in model.parameters():
        owner = owners.get(parameter)
        if not groups or groups[-1][0] != owner:
            groups.append((owner, []))
        groups[-1][1].append(parameter)
    if groups[-1][0] is not None:
        groups.append((None, []))
    for number, (owner, parameters) in enumerate(groups):
        rest = 1 - sum(works) if number == len(groups) - 1 else 0.0
        yield Unit(
            sum(parameter.nbytes for parameter in parameters),
            tuple(parameter.nbytes for parameter in parameters if parameter.requires_grad),
            rest if owner is None else works[owner],
            block=owner is not None,
        )


def _divided(
    planner: Planner, size: int, backward: BackwardConfig, devices: int, alone: Arithmetic
) -> tuple[Divided | None, str]:
    """The work of a tensor parallel rank, and the layers that are not sharded; or None and the reason."""
    noted: list[Sums] = []
    part = Planner(planner.config, planner.data, planner.device, lambda model: noted.append(divide(model, devices)))
    try:
        footprint = part.footprint(size, backward)
    except Indivisible as error:
        return None, f"no layer can be sharded: {error}"
    forward: list[Any] = []
    with part.step(size, backward) as step:
        sums = noted[-1]
        counted = _arithmetic(step.model, step, lambda: forward.extend(sums.jobs))
    found = Divided(
        counted.forward / alone.forward,
        counted.backward / alone.backward,
        Counter(forward),
        Counter(sums.jobs[len(forward) :]),
        alone.forward + alone.backward,
        footprint.bound,
    )
    return found, ", ".join(sums.whole)


def _assumptions(
    config: PlanConfig, link: Link, times: StepTimes, bad: Setting, divided: Divided | None, whole: str
) -> list[str]:
    alone = f"one device: {times.source}"
    if config.devices == 1:
        return [alone, "no sharding and no communication"]
    ends = [
        f"link {config.link}: {link.bandwidth / 1e9:.4g} GB/s in one direction of a ring, {link.latency * 1e6:.4g} us per "
        f"collective, half the bandwidth at {link.ramp / 2**10:.4g} KiB; from a table, not measured",
        f"slow end of a range: the slower time of one device, {SLOWER_LINK:.0%} of the link's bandwidth"
        + (f", {SMS_LOST} of {times.sms} SMs always used by collectives" if bad.slowdown > 1 else "")
        + (f", {UNDIVIDED:.0%} of the time that TP saves is lost" if divided else ""),
    ]
    lines = [
        alone,
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
