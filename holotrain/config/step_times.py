"""The time of a training step on one device: measured, or estimated from the peak of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import lightning.pytorch as pl
import torch

from holotrain.callbacks import multiprocessors, peak_flops
from holotrain.config.build import build_task
from holotrain.config.build_plan import Planner, doubled, training_step
from holotrain.config.devices import autocast_of
from holotrain.config.schema.backward import BackwardConfig
from holotrain.data.example import batch_unit, example_batch
from holotrain.planning import Times, TrainingStep
from holotrain.planning.clock import clock_of
from holotrain.tasks import Task

UTILISATION = (0.35, 0.55)
"""Fraction of a GPU's peak that transformers commonly reach: low and high."""

ROUNDS = 5
"""Number of timed steps."""

SECONDS = 6.0
"""Time for these steps."""


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
    backward: BackwardConfig,
    flops: tuple[float, float],
    gpu: str | None,
    fits: bool | None,
    begin: Callable[[str], object] = lambda what: None,
) -> StepTimes:
    """
    Args:
        flops: FLOPs of a forward and a backward.
        gpu: name of the GPU to estimate for; None: measure on this machine's device.
        fits: whether the step fits the device's memory; None: not known.
        begin: called with what is timed next.
    """
    here = planner.device == "cpu" or torch.cuda.is_available()
    sms = torch.cuda.get_device_properties(0).multi_processor_count if planner.device == "cuda" and here else None
    if gpu is not None:
        return estimated(planner, flops, gpu)
    if here and fits is not False:
        try:
            band, how = measured(planner, backward, begin)
            place = torch.cuda.get_device_name() if planner.device == "cuda" else f"the CPU, {torch.get_num_threads()} threads"
            return StepTimes(band, f"measured on {place}: {how}", sms)
        except torch.OutOfMemoryError:
            return StepTimes(None, "not known: not enough memory to time a step; estimate with gpu=H100, for example", sms)
    if here and planner.device == "cuda":
        return estimated(planner, flops, torch.cuda.get_device_name())
    why = "a step does not fit on this device" if here else "this machine has no such device"
    return StepTimes(None, f"not known: {why}; estimate with gpu=H100, for example", sms)


def estimated(planner: Planner, flops: tuple[float, float], gpu: str) -> StepTimes:
    """Estimates the times from the peak of the named GPU."""
    precision = planner.config.trainer.precision
    peak = peak_flops(gpu, precision)
    if peak is None:
        return StepTimes(None, f"not known: the table has no peak of {gpu} in {precision}", multiprocessors(gpu))
    slow, fast = (
        Times(*(count / (share * peak) for count in flops), 0.0, planner.config.trainer.accumulate_grad_batches)
        for share in UTILISATION
    )
    low, high = (f"{share:.0%}" for share in UTILISATION)
    source = (
        f"estimated, not measured: {sum(flops) / 1e12:.4g} TFLOP per batch, with recomputation, at {low} to {high} of the "
        f"{peak / 1e12:.4g} TFLOP/s of {gpu} in {precision}; without the optimizer's update"
    )
    return StepTimes((fast, slow), source, multiprocessors(gpu))


def measured(planner: Planner, backward: BackwardConfig, begin: Callable[[str], object]) -> tuple[tuple[Times, Times], str]:
    """The fastest and the slowest of a few steps, and a description; with a smaller batch if they would take too long.

    Raises:
        torch.OutOfMemoryError: the GPU ran out of memory.
    """
    config = replace(planner.config, backward=backward, compile=False)
    option, size = config.batch_option
    place = torch.device(planner.device)
    begin("timing steps: building the model")
    with torch.random.fork_rng():
        task = build_task(config, planner.data).to(place)
        if config.trainer.precision == "64-true":
            task = task.double()
        # A smaller batch never uses the device better, so its time per sample is an upper bound.
        unit = batch_unit(planner.data)
        part = min(unit, size)
        while True:
            step = _step(planner, task, part)
            begin(f"timing steps: {option}={part}")
            _timed(step, place)
            one = _timed(step, place)
            larger = min(4 * part, size)
            if part == size or one.step * larger / part * (1 + ROUNDS) > SECONDS:
                break
            part = larger
        rounds = max(1, min(ROUNDS, int(SECONDS / one.step)))
        found = sorted((_timed(step, place) for _ in range(rounds)), key=lambda times: times.step)
    grown, batches = size / part, config.trainer.accumulate_grad_batches
    band = tuple(Times(grown * t.forward, grown * t.backward, t.update, batches) for t in (found[0], found[-1]))
    how = f"the fastest and the slowest of {rounds} steps" if rounds > 1 else "one step"
    return band, how + (f" with {option}={part}, in proportion" if part != size else "")


def _step(planner: Planner, task: Task, size: int) -> TrainingStep:
    config, place = planner.config, torch.device(planner.device)
    batch = example_batch(planner.data, size)
    if config.trainer.precision == "64-true":
        batch = doubled(batch)
    step = training_step(config, task, pl.utilities.move_data_to_device(batch, place), planner.device)
    return replace(step, autocast=partial(autocast_of, config.trainer, planner.device))


def _timed(step: TrainingStep, place: torch.device) -> Times:
    clock = clock_of(place)
    step.begin()
    marks = []
    step.differentiate(lambda phase: marks.append(clock.mark()))
    marks.append(clock.mark())
    step.update()
    marks.append(clock.mark())
    return Times(*(clock.seconds(one, other, wait=True) for one, other in pairwise(marks)))
