"""Chooses groups by measuring: it times products and collectives, predicts, confirms the choice and saves it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from torch.utils._python_dispatch import _disable_current_modes

from holotrain.overlap.collectives import Collectives
from holotrain.overlap.groups import Columns, Job, Sizes, in_proportion
from holotrain.overlap.links import Carrier
from holotrain.overlap.measuring import job_seconds, measured_link, product_seconds
from holotrain.overlap.predictor import Predictor
from holotrain.overlap.store import Tuned, default_folder, path_of, read, write


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
        self.folder = default_folder() if folder is None else Path(folder)
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
        columns = isinstance(sizes, Columns)
        if len(sizes) == 1:
            (in_one,) = collectives.largest([job_seconds(job, sizes, collectives)], job.device)
            return Tuned(sizes, predicted, in_one, in_one)
        times = [job_seconds(job, cut, collectives) for cut in (sizes, [job.rows])]
        confirmed, in_one = collectives.largest(times, job.device)
        if in_one <= confirmed:
            return Tuned([job.rows], predictor.seconds(job, [job.rows]), in_one, in_one)
        return Tuned(list(sizes.sizes) if columns else sizes, predicted, confirmed, in_one, columns)

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
