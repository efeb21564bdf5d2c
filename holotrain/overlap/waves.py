"""What a GPU computes at once: a wave of output tiles, one on each of its streaming multiprocessors (SMs)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import torch

from holotrain.overlap.groups import Job
from holotrain.overlap.pipeline import WAVES_SEARCHED

TILE_ROWS, TILE_COLUMNS = 128, 128
"""Of the output tile that one SM computes."""

SMS_LOST = 2
"""That a collective takes for itself while it runs (FlashOverlap)."""


@dataclass(frozen=True)
class Waves:
    """
    Args:
        sms: of the device.
        tile_rows, tile_columns: of the output tile that one SM computes.
    """

    sms: int
    tile_rows: int = TILE_ROWS
    tile_columns: int = TILE_COLUMNS

    def tiles(self, rows: int, columns: int) -> int:
        return math.ceil(rows / self.tile_rows) * math.ceil(columns / self.tile_columns)

    def slowdown(self, tiles: int) -> float:
        """By what factor a product takes longer beside a collective: ``ceil(tiles / (SM - 2)) / ceil(tiles / SM)``."""
        return math.ceil(tiles / (self.sms - SMS_LOST)) / math.ceil(tiles / self.sms)

    def rows(self, columns: int) -> int:
        """Rows of an output of ``columns`` that make a wave, in whole tiles, at least one."""
        return max(self.sms // math.ceil(columns / self.tile_columns), 1) * self.tile_rows


def waves_of(device: torch.device) -> Waves | None:
    """None for a device that does not compute in waves."""
    return _waves_of_gpu(device) if device.type == "cuda" else None


@cache
def _waves_of_gpu(device: torch.device) -> Waves:
    return Waves(torch.cuda.get_device_properties(device).multi_processor_count)


def unit_of(job: Job, waves: Waves | None) -> int:
    """Rows of the job that are computed in the time of one; without waves a tenth of them."""
    if waves is None:
        return math.ceil(job.rows / WAVES_SEARCHED)
    return math.ceil(waves.rows(job.outputs) * job.rows / job.product_rows(job.rows))
