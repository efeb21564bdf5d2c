"""``data.batch_size=auto``: the largest batch that fits into memory, by the plan.

Lightning's BatchSizeFinder doubles the size until CUDA runs out of memory: it only finds the initial size times a power of two,
needs a GPU, and kills the process on a CPU. The plan has none of these limits.
"""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl

from holotrain.config.budget import too_little
from holotrain.config.build_plan import Planner
from holotrain.config.schema import RunConfig
from holotrain.config.schema.backward import BackwardConfig
from holotrain.data.example import batch_unit
from holotrain.planning import MARGIN, largest


def largest_batch(
    planner: Planner,
    backward: BackwardConfig,
    budget: int,
    most: int | None = None,
    begin: Callable[[int], object] = lambda size: None,
) -> int:
    """The largest batch that fits: number of images, packed blocks or documents, or of tokens; 0 if nothing fits.

    Args:
        most: upper limit, if any.
        begin: called with each size that is tried.
    """
    unit = batch_unit(planner.data)

    def bound(size: int) -> int:
        begin(size)
        return planner.footprint(size, backward).bound

    size = planner.config.batch_option[1]
    start = unit if size == "auto" else max(size // unit, 1) * unit
    return largest(bound, budget, min(start, most) if most else start, unit, most)


def smallest_batch(config: RunConfig) -> RunConfig:
    """The configuration with the smallest batch, for use until the batch size is chosen."""
    return config.with_batch(config.data.context if config.batch_option[0] == "data.max_tokens" else 1)


def choose_batch(config: RunConfig, data: pl.LightningDataModule, device: str, budget: int) -> RunConfig:
    """The configuration with the largest batch that fits. Also sets the batch size of ``data``.

    Args:
        data: set up, with the smallest batch.
        budget: memory budget in bytes.

    Raises:
        UserError: not even the smallest batch fits.
        Unplannable: an operation needs the values of its inputs.
    """
    option, _ = config.batch_option
    most = len(data.train_dataloader()) if option == "data.batch_size" else None
    planner, least = Planner(config, data, device), smallest_batch(config).batch_option[1]
    size = largest_batch(planner, config.backward, int(budget * (1 - MARGIN)), most)
    if size < least:  # a batch must hold the longest document
        raise too_little(budget, planner.footprint(least, config.backward).bound, f"{option}={least}")
    setattr(data, option.removeprefix("data."), size)
    return config.with_batch(size)
