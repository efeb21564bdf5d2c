"""The data of a run, which all of its processes have to find alike."""

from pathlib import Path

import lightning.pytorch as pl
import torch.distributed as dist

from holotrain.commands.checkpoint import tokenizer_for
from holotrain.commands.run_folder import Run
from holotrain.config.build import build_data
from holotrain.config.command_options import RunConfig
from holotrain.data.loader import LoadingModule
from holotrain.errors import UserError
from holotrain.parallel.process_group import local_rank_zero_first


def shared_data(stage: str, config: RunConfig, checkpoint: Path | None, run: Run) -> pl.LightningDataModule:
    """The data, set up for a stage.

    Args:
        checkpoint: from which the run starts.

    Raises:
        UserError: a mistake in the data, or two processes have different data.
    """
    data = build_data(config, tokenizer_for(config, checkpoint))
    with local_rank_zero_first(run.process):
        data.prepare_data()
    data.setup(stage)
    if run.process is not None and isinstance(data, LoadingModule):  # a module of others may give each process a share
        _check_alike([None] * run.process.size, data.fingerprint())
    return data


def _check_alike(fingerprints: list, own: dict) -> None:
    dist.all_gather_object(fingerprints, own)
    for rank, found in enumerate(fingerprints):
        for name, value in fingerprints[0].items():
            if (other := found.get(name)) != value:
                raise UserError(
                    f"data: rank {rank} has other data than rank 0; {name}: {other} in rank {rank}, {value} in rank 0"
                )
