"""The time of a training step on one device: measured, or estimated from the peak of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch

from holotrain.planning.clock import clock_of
from holotrain.planning.planner import Backward, Planner
from holotrain.planning.rehearsal import TrainingStep
from holotrain.planning.scaling import Times
from holotrain.planning.work import Work
from holotrain.sizes import counted

UTILISATION = (0.35, 0.55)
"""Fraction of a GPU's peak that transformers commonly reach: low and high."""

ROUNDS = 5
"""Number of timed steps."""

SECONDS = 6.0
"""Time for these steps."""


@dataclass(frozen=True)
class Gpu:
    """A GPU: its peak FLOP/s in the precision of the training, and its streaming multiprocessors; None: not known."""

    name: str
    precision: str = ""
    peak: float | None = None
    sms: int | None = None


@dataclass(frozen=True)
class StepTimes:
    """
    Args:
        band: the fastest and the slowest time; None: not known.
        source: where the times come from, or why they are not known.
        sms: number of streaming multiprocessors of the device; None: not known, or not a GPU.
    """

    band: tuple[Times, Times] | None
    source: str
    sms: int | None = None


def step_times(
    planner: Planner,
    backward: Backward,
    work: Work,
    gpu: str | None,
    known: Callable[[str], Gpu],
    fits: bool | None,
    begin: Callable[[str], object] = lambda what: None,
) -> StepTimes:
    """
    Args:
        work: the FLOPs of a step.
        gpu: name of the GPU to estimate for; None: measure on this machine's device.
        known: what is known of a GPU, given its name.
        fits: whether the step fits the device's memory; None: not known.
        begin: called with what is timed next.
    """
    here = planner.device == "cpu" or torch.cuda.is_available()
    sms = torch.cuda.get_device_properties(0).multi_processor_count if planner.device == "cuda" and here else None
    if gpu is not None:
        return estimated(work, known(gpu))
    if here and fits is not False:
        try:
            band, how = measured(planner, backward, begin)
            threads = counted(torch.get_num_threads(), "thread")
            place = torch.cuda.get_device_name() if planner.device == "cuda" else f"the CPU, {threads}"
            return StepTimes(band, f"measured on {place}: {how}", sms)
        except torch.OutOfMemoryError:
            return StepTimes(None, "not known: not enough memory to time a step; estimate with gpu=H100, for example", sms)
    if here and planner.device == "cuda":
        return estimated(work, known(torch.cuda.get_device_name()))
    why = "a step does not fit on this device" if here else "this machine has no such device"
    return StepTimes(None, f"not known: {why}; estimate with gpu=H100, for example", sms)


def estimated(work: Work, gpu: Gpu) -> StepTimes:
    """Estimates the times from the peak of a GPU."""
    if gpu.peak is None:
        return StepTimes(None, f"not known: the table has no peak of {gpu.name} in {gpu.precision}", gpu.sms)
    slow, fast = (
        Times(work.forward / (share * gpu.peak), work.backward / (share * gpu.peak), 0.0, work.batches) for share in UTILISATION
    )
    low, high = (f"{share:.0%}" for share in UTILISATION)
    source = (
        f"estimated, not measured: {(work.forward + work.backward) / 1e12:.4g} TFLOP per batch, with recomputation, "
        f"at {low} to {high} of the {gpu.peak / 1e12:.4g} TFLOP/s of {gpu.name} in {gpu.precision}; "
        "without the optimizer's update"
    )
    return StepTimes((fast, slow), source, gpu.sms)


def measured(planner: Planner, backward: Backward, begin: Callable[[str], object]) -> tuple[tuple[Times, Times], str]:
    """The fastest and the slowest of a few steps, and a description; with a smaller batch if they would take too long.

    Raises:
        torch.OutOfMemoryError: the GPU ran out of memory.
    """
    batch = planner.batch
    place = torch.device(planner.device)
    begin("timing steps: building the model")
    with torch.random.fork_rng():
        model = planner.make_model(backward, None).to(place)
        # A smaller batch never uses the device better, so its time per sample is an upper bound.
        part = min(batch.unit, batch.value)
        while True:
            step = planner.make_step(model, part)
            begin(f"timing steps: {batch.name}={part}")
            _timed(step, place)
            one = _timed(step, place)
            larger = min(4 * part, batch.value)
            if part == batch.value or one.step * larger / part * (1 + ROUNDS) > SECONDS:
                break
            part = larger
        rounds = max(1, min(ROUNDS, int(SECONDS / one.step)))
        found = sorted((_timed(step, place) for _ in range(rounds)), key=lambda times: times.step)
    grown = batch.value / part
    band = tuple(Times(grown * t.forward, grown * t.backward, t.update, step.batches) for t in (found[0], found[-1]))
    how = f"the fastest and the slowest of {rounds} steps" if rounds > 1 else "one step"
    return band, how + (f" with {batch.name}={part}, in proportion" if part != batch.value else "")


def _timed(step: TrainingStep, place: torch.device) -> Times:
    clock = clock_of(place)
    step.begin()
    marks = []
    step.differentiate(lambda phase: marks.append(clock.mark()))
    marks.append(clock.mark())
    step.update()
    marks.append(clock.mark())
    return Times(*(clock.seconds(one, other, wait=True) for one, other in pairwise(marks)))
