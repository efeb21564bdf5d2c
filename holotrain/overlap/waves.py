"""Waves of output tiles: a GPU computes one tile on each of its streaming multiprocessors (SMs) at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from holotrain.overlap.groups import Job
from holotrain.overlap.pipeline import WAVES_SEARCHED

TILE_ROWS, TILE_COLUMNS = 128, 128
"""Size of the output tile that one SM computes."""

SMS_LOST = 2
"""SMs that a running collective occupies (FlashOverlap)."""


@dataclass(frozen=True)
class Waves:
    """
    Args:
        sms: number of SMs of the device.
        tile_rows, tile_columns: size of the output tile that one SM computes.
    """

    sms: int
    tile_rows: int = TILE_ROWS
    tile_columns: int = TILE_COLUMNS

    def tiles(self, rows: int, columns: int) -> int:
        return math.ceil(rows / self.tile_rows) * math.ceil(columns / self.tile_columns)

    def slowdown(self, tiles: int) -> float:
        """The factor by which a collective slows a product down: ``ceil(tiles / (SM - 2)) / ceil(tiles / SM)``."""
        return math.ceil(tiles / (self.sms - SMS_LOST)) / math.ceil(tiles / self.sms)

    def rows(self, columns: int) -> int:
        """Rows of one wave of an output with ``columns`` columns, in whole tiles, at least one."""
        return max(self.sms // math.ceil(columns / self.tile_columns), 1) * self.tile_rows


def waves_of(device: torch.device) -> Waves | None:
    """The waves of a device; None if it does not compute in waves."""
    return _waves_of_gpu(device) if device.type == "cuda" else None


@cache
def _waves_of_gpu(device: torch.device) -> Waves:
    return Waves(torch.cuda.get_device_properties(device).multi_processor_count)


def unit_of(job: Job, waves: Waves | None) -> int:
    """Rows of the job that are computed in the time of one row; without waves a tenth of all rows."""
    if waves is None:
        return math.ceil(job.rows / WAVES_SEARCHED)
    return math.ceil(waves.rows(job.outputs) * job.rows / job.product_rows(job.rows))
