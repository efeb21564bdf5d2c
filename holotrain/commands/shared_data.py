"""The data of a run, which all of its processes have to find alike."""

from pathlib import Path

import lightning.pytorch as pl

from holotrain.commands.checkpoint import tokenizer_for
from holotrain.commands.run_folder import Run
from holotrain.config.build import build_data
from holotrain.config.command_options import RunConfig
from holotrain.data.loader import LoadingModule
from holotrain.errors import UserError
from holotrain.parallel.process_group import Processes


def shared_data(stage: str, config: RunConfig, checkpoint: Path | None, run: Run) -> pl.LightningDataModule:
    """The data, set up for a stage.

    Args:
        checkpoint: from which the run starts.

    Raises:
        UserError: a mistake in the data of any process, or two processes have different data.
    """
    with run.together("data"):
        data = build_data(config, tokenizer_for(config, checkpoint))
    with run.together("data are set up"):
        with run.local_rank_zero_first("data are prepared"):
            data.prepare_data()
        data.setup(stage)
    if run.processes is not None and isinstance(data, LoadingModule):  # a module of others may give each process a share
        _check_alike(data, run.processes)
    return data


def _check_alike(data: LoadingModule, processes: Processes) -> None:
    with processes.together("fingerprints are taken"):
        mine = data.fingerprint()
    first, rank = processes.agreed("fingerprint", mine), processes.process.rank
    with processes.together("data are alike"):
        for name, value in first.items():
            if (here := mine.get(name)) != value:
                raise UserError(
                    f"data: rank {rank} has other data than rank 0; {name}: {here} in rank {rank}, {value} in rank 0"
                )
