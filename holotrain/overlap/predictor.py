"""Predicts the time of a product whose groups are communicated while it runs, and chooses the fastest groups."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from holotrain.overlap.collectives import Collectives
from holotrain.overlap.groups import ALL_GATHER, REDUCE_SCATTER, Columns, Job, Sizes
from holotrain.overlap.links import Carrier
from holotrain.overlap.pipeline import candidates, makespan
from holotrain.overlap.waves import Waves, unit_of, waves_of

T = TypeVar("T")

ALIKE = 0.005
"""Relative difference of predicted times below which the smaller number of groups is chosen."""


def fewest_groups(tried: Iterable[tuple[T, float]], groups: Callable[[T], int] = len) -> tuple[T, float]:
    """Given candidates and their seconds, returns the one with the fewest groups among those that are about the fastest."""
    tried = list(tried)
    least = min(seconds for _, seconds in tried)
    alike = [way for way in tried if way[1] <= least * (1 + ALIKE)]
    return min(alike, key=lambda way: (groups(way[0]), way[1]))


@dataclass(frozen=True)
class Predictor:
    """Chooses groups from known times. Pass it as ``groups``.

    Args:
        product_seconds: seconds of a job's product over a number of its rows, when nothing else runs.
        link: gives the time of a collective: one of :data:`~holotrain.overlap.LINKS`, or a measured link.

    The recurrence is FlashOverlap's (:func:`~holotrain.overlap.pipeline.makespan`). On a GPU a group that is computed during a
    collective has two SMs less, so its product takes ``ceil(tiles / (SM - 2)) / ceil(tiles / SM)`` times as long.
    """

    product_seconds: Callable[[Job, int], float]
    link: Carrier

    def __call__(self, job: Job, collectives: Collectives | None = None) -> Sizes:
        return self.best(job)[0]

    def best(self, job: Job) -> tuple[Sizes, float]:
        """The fastest group sizes and their predicted seconds."""
        waves = waves_of(job.device)
        tried = list(candidates(job.rows, unit_of(job, waves)))
        if job.summed and job.product_rows(job.rows) < job.outputs:
            # Each group reads the other operand again: here the rows are the smaller one, so columns may be the better cut.
            tried += [Columns(sizes) for sizes in candidates(job.outputs, unit_of(job.turned, waves)) if len(sizes) > 1]
        return fewest_groups((sizes, self.seconds(job, sizes)) for sizes in tried)

    def seconds(self, job: Job, sizes: Sizes) -> float:
        """Seconds of the job in groups of these sizes, until the last group has arrived and everything is computed."""
        if isinstance(sizes, Columns):
            return self.seconds(job.turned, sizes.of(job.outputs))
        waves = waves_of(job.device)
        carried = [self.link.seconds(job.collective, job.message(size), job.ranks) for size in sizes]
        if job.arrives:
            # A group is computed while later ones arrive, so all but the last are slowed down.
            computed = [self._computed(job, size, waves, beside=number < len(sizes) - 1) for number, size in enumerate(sizes)]
            return makespan(carried, computed)
        computed = [self._computed(job, size, waves, beside=number > 0) for number, size in enumerate(sizes)]
        if not job.covered:
            return makespan(computed, carried)
        again = self.link.seconds(ALL_GATHER, job.message(job.rows), job.ranks) if job.collective == REDUCE_SCATTER else 0.0
        return makespan(computed, carried, busy=again, after=self._computed(job, job.rows, waves, beside=True))

    def _computed(self, job: Job, rows: int, waves: Waves | None, beside: bool) -> float:
        seconds = self.product_seconds(job, rows)
        if waves is not None and beside:
            seconds *= waves.slowdown(waves.tiles(job.product_rows(rows), job.outputs))
        return seconds
