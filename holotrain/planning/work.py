"""The arithmetic of a training step, and how it is spread over the model and over tensor parallel ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from holotrain.overlap import Job
from holotrain.planning.allocators import ALLOCATORS
from holotrain.planning.planner import Backward, Planner
from holotrain.planning.rank_memory import Unit, Whole
from holotrain.planning.rehearsal import TrainingStep, rehearse
from holotrain.planning.scaling import Divided


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
    whole: Whole


Divide = Callable[[nn.Module, int], Any]
"""Replaces layers of a model by one rank's part of them, given the number of ranks (:func:`holotrain.models.division.divide`).

It returns a record of later runs: ``jobs``, the products whose results are summed over ranks, and ``whole``, which layers are
not split, and why. A ValueError says why no layer can be split.
"""


def work_of(planner: Planner, backward: Backward) -> Work:
    """
    Raises:
        Unplannable: an operation needs the values of its inputs.
    """
    with planner.imagined_step(planner.imagined_model(backward)) as step:
        forward, backward, of_sequences = _flops(step)
        units = list(_units(step, [flops / forward for flops in of_sequences]))
        return Work(forward, backward, units, step.batches, Whole.of(step.optimizer))


def divided_work(planner: Planner, backward: Backward, divide: Divide, devices: int, whole: Work) -> tuple[Divided | None, str]:
    """The work of a tensor parallel rank, and the layers that are not sharded; or None and the reason.

    Args:
        devices: number of ranks.
        whole: the work of a single device.

    Raises:
        Unplannable: an operation needs the values of its inputs.
    """
    model = planner.imagined_model(backward)
    try:
        sums = divide(model, devices)
    except ValueError as error:
        return None, f"no layer can be sharded: {error}"
    with planner.imagined_step(model) as step:
        bound = rehearse(step, ALLOCATORS[planner.device]).bound
        sums.jobs.clear()
        there: list[Job] = []
        forward, backward, _ = _flops(step, lambda: there.extend(sums.jobs))
    found = Divided(
        forward / whole.forward,
        backward / whole.backward,
        Counter(there),
        Counter(sums.jobs[len(there) :]),
        whole.forward + whole.backward,
        bound,
    )
    return found, ", ".join(sums.whole)


def _flops(step: TrainingStep, between: Callable[[], object] = lambda: None) -> tuple[float, float, list[float]]:
    """FLOPs of the forward, of the backward, and of the forward of each sequence of blocks.

    Args:
        between: called after the forward.
    """
    found: dict[int, float] = {}
    with FlopCounterMode(display=False) as counter:

        def count(number: int, sign: int) -> None:
            found[number] = found.get(number, 0.0) + sign * counter.get_total_flops()

        for number, run in enumerate(step.sequences):
            first, last = run.ends
            first.register_forward_pre_hook(lambda *_, number=number: count(number, -1))
            last.register_forward_hook(lambda *_, number=number: count(number, 1))
        with step.autocast():
            loss = step.loss()
        forward = counter.get_total_flops()
        between()
        loss.backward()
        return forward, counter.get_total_flops() - forward, [found[number] for number in range(len(step.sequences))]


def _units(step: TrainingStep, shares: list[float]) -> Iterator[Unit]:
    """
    Args:
        shares: of the sequences in the model's arithmetic.
    """
    works, owners = [], {}
    for run, share in zip(step.sequences, shares, strict=True):
        for block in run.blocks:
            owners |= {parameter: len(works) for parameter in block.parameters()}
            works.append(share / len(run.blocks))
    groups: list[tuple[int | None, list[nn.Parameter]]] = []
    for parameter in step.model.parameters():
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
