"""The arithmetic of a training step, and its time on one device: measured, or estimated from the peak of a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from holotrain.clock import Clock
from holotrain.numeric import counted
from holotrain.overlap import Job
from holotrain.planning.allocators import ALLOCATORS
from holotrain.planning.planner import Backward, Planner
from holotrain.planning.scaling import TensorParallelWork, Times, Unit, Unsharded
from holotrain.planning.training_step import TrainingStep, simulate_step


@dataclass(frozen=True)
class Work:
    """
    Args:
        forward, backward: FLOPs of one batch.
        units: the parts of the model, first to last.
        batches: number of batches whose gradients are accumulated in one step.
        whole: what the optimizer does not divide.
    """

    forward: float
    backward: float
    units: list[Unit]
    batches: int
    whole: Unsharded


Divide = Callable[[nn.Module, int], Any]
"""Replaces layers of a model by one rank's part, given the number of ranks, as :func:`holotrain.models.division.divide`.

It returns a record of later runs: ``jobs``, the products whose results are summed over ranks, and ``whole``, which layers are
not split, and why. A ValueError says why no layer can be split.
"""


def work_of(planner: Planner, backward: Backward) -> Work:
    """
    Raises:
        Unplannable: an operation needs the values of its inputs.
    """
    with planner.fake_step(planner.fake_model(backward)) as step:
        of_forward, of_backward, of_sequences = _flops(step)
        units = _units(step, [flops / of_forward for flops in of_sequences])
        return Work(of_forward, of_backward, units, step.batches, Unsharded.of(step.optimizer))


def tensor_parallel_work(
    planner: Planner, backward: Backward, divide: Divide, devices: int, whole: Work
) -> tuple[TensorParallelWork | None, str]:
    """The work of a tensor parallel rank, and the layers that are not sharded; or None and the reason.

    Args:
        whole: the work of a single device.

    Raises:
        Unplannable: an operation needs the values of its inputs.
    """
    model = planner.fake_model(backward)
    try:
        sums = divide(model, devices)
    except ValueError as error:
        return None, f"no layer can be sharded: {error}"
    with planner.fake_step(model) as step:
        bound = simulate_step(step, ALLOCATORS[planner.device]).bound
        sums.jobs.clear()
        there: list[Job] = []
        of_forward, of_backward, _ = _flops(step, lambda: there.extend(sums.jobs))
    found = TensorParallelWork(
        of_forward / whole.forward,
        of_backward / whole.backward,
        Counter(there),
        Counter(sums.jobs[len(there) :]),
        whole.forward + whole.backward,
        bound,
    )
    return found, ", ".join(sums.whole)


def _flops(step: TrainingStep, between: Callable[[], object] = lambda: None) -> tuple[float, float, list[float]]:
    """FLOPs of the forward, of the backward, and of the forward of each sequence of blocks. ``between``: after the forward."""
    found = [0.0] * len(step.sequences)
    with FlopCounterMode(display=False) as counter:

        def count(number: int, sign: int) -> None:
            found[number] += sign * counter.get_total_flops()

        for number, run in enumerate(step.sequences):
            first, last = run.ends
            first.register_forward_pre_hook(lambda *_, number=number: count(number, -1))
            last.register_forward_hook(lambda *_, number=number: count(number, 1))
        with step.autocast():
            loss = step.loss()
        forward = counter.get_total_flops()
        between()
        loss.backward()
        return forward, counter.get_total_flops() - forward, found


def _units(step: TrainingStep, shares: list[float]) -> list[Unit]:
    """The parts of the model, given the shares of its sequences in its arithmetic; the rest is counted as the last part's."""
    works, owners = [], {}
    for run, share in zip(step.sequences, shares, strict=True):
        for block in run.blocks:
            owners |= {parameter: len(works) for parameter in block.parameters()}
            works.append(share / len(run.blocks))
    units = []
    for owner, group in groupby(step.model.parameters(), owners.get):
        parameters = list(group)
        size = sum(parameter.nbytes for parameter in parameters)
        gradients = tuple(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        units.append(Unit(size, gradients, 0.0 if owner is None else works[owner], block=owner is not None))
    last = Unit(0, (), 0.0, block=False) if units[-1].block else units.pop()
    return [*units, replace(last, work=1 - sum(works))]


UTILISATION = (0.35, 0.55)
"""Fraction of a GPU's peak that transformers commonly reach: low and high."""

ROUNDS = 5
"""Number of timed steps."""

SECONDS = 6.0
"""Time for these steps."""


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Args:
        name: such as ``"H100"``.
        precision: of the training, in Lightning's words.
        peak: FLOP/s in this precision; None: not known.
        sms: number of streaming multiprocessors; None: not known.
    """

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
        gpu: name of the GPU to estimate for; None: measure on this machine's device.
        known: what is known of a GPU, given its name.
        fits: whether the step fits the device's memory; None: not known.
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
        found = [_timed(step, place) for _ in range(rounds)]
    grown = batch.value / part
    times = [Times(grown * t.forward, grown * t.backward, t.update, step.batches) for t in found]
    fast, slow = (choose(times, key=lambda each: each.step) for choose in (min, max))
    how = f"the fastest and the slowest of {rounds} steps" if rounds > 1 else "one step"
    return (fast, slow), how + (f" with {batch.name}={part}, in proportion" if part != batch.value else "")


def _timed(step: TrainingStep, place: torch.device) -> Times:
    clock = Clock(place)
    step.begin()
    marks = []
    step.differentiate(lambda phase: marks.append(clock.mark()))
    marks.append(clock.mark())
    step.update()
    marks.append(clock.mark())
    forward, backward, update = (clock.waited_seconds(one, other) for one, other in pairwise(marks))
    return Times(forward, backward, update)
