"""The largest batch that memory holds, by the plan; ``data.batch_size=auto``.

Lightning's BatchSizeFinder tries sizes until CUDA refuses, doubling them: it ends at a power of two times its beginning, has to
be given a GPU, and on a CPU ends the process. The plan is asked instead.
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
    """The most that fits under a backward: images, blocks or documents, or tokens in whole documents; 0 if nothing does.

    Args:
        most: there are no more.
        begin: told each size that is rehearsed.
    """
    unit = batch_unit(planner.data)

    def bound(size: int) -> int:
        begin(size)
        return planner.footprint(size, backward).bound

    size = planner.config.batch_option[1]
    start = unit if size == "auto" else max(size // unit, 1) * unit
    return largest(bound, budget, min(start, most) if most else start, unit, most)


def smallest_batch(config: RunConfig) -> RunConfig:
    """The same with a batch that any data can give, until the right one is known."""
    return config.with_batch(config.data.context if config.batch_option[0] == "data.max_tokens" else 1)


def choose_batch(config: RunConfig, data: pl.LightningDataModule, device: str, budget: int) -> RunConfig:
    """The configuration with the largest batch that fits; ``data`` give such batches from now on.

    Args:
        data: set up, of the smallest batch.
        budget: bytes to keep within.

    Raises:
        UserError: not even the smallest fits.
        Unplannable: an operation cannot be imagined.
    """
    option, _ = config.batch_option
    most = len(data.train_dataloader()) if option == "data.batch_size" else None
    planner, least = Planner(config, data, device), smallest_batch(config).batch_option[1]
    size = largest_batch(planner, config.backward, int(budget * (1 - MARGIN)), most)
    if size < least:  # of documents: no batch may be smaller than the longest that may come
        raise too_little(budget, planner.footprint(least, config.backward).bound, f"{option}={least}")
    setattr(data, option.removeprefix("data."), size)
    return config.with_batch(size)
