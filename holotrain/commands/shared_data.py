"""The data of a run, which all of its processes have to find alike."""

from pathlib import Path
from typing import cast

import lightning.pytorch as pl
import torch.distributed as dist

from holotrain.commands.checkpoint import tokenizer_for
from holotrain.commands.run_folder import Run
from holotrain.config.build import build_data
from holotrain.config.command_options import RunConfig
from holotrain.data.loader import LoadingModule
from holotrain.errors import UserError
from holotrain.parallel.processes import FOREVER


def shared_data(stage: str, config: RunConfig, checkpoint: Path | None, run: Run) -> pl.LightningDataModule:
    """The data, set up for a stage.

    Args:
        checkpoint: from which the run starts.

    Raises:
        UserError: a mistake in the data, or two processes have different data.
    """
    data = build_data(config, tokenizer_for(config, checkpoint))
    process = run.process
    # The first process of a machine prepares the data, which may take long; the others read what it has prepared.
    group = cast(dist.ProcessGroup, dist.new_group(backend="gloo", timeout=FOREVER)) if process is not None else None
    if process is not None and process.local_rank:
        dist.barrier(group)
    data.prepare_data()
    if process is not None and not process.local_rank:
        dist.barrier(group)
    data.setup(stage)
    if process is not None and isinstance(data, LoadingModule):  # a module of others may give each process a share
        _check_alike([None] * process.size, data.fingerprint())
    return data


def _check_alike(fingerprints: list, own: dict) -> None:
    dist.all_gather_object(fingerprints, own)
    for rank, found in enumerate(fingerprints):
        for name, value in fingerprints[0].items():
            if (other := found.get(name)) != value:
                raise UserError(
                    f"data: rank {rank} has other data than rank 0; {name}: {other} in rank {rank}, {value} in rank 0"
                )
