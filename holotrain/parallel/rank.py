"""Rank and size of this process, from torchrun, srun or holotrain itself."""

from __future__ import annotations

import math
import os
from collections.abc import MutableMapping
from dataclasses import dataclass

from holotrain.errors import UserError


@dataclass(frozen=True)
class ProcessRank:
    """
    Args:
        rank, size: rank of this process, and number of processes.
        local_rank, local_size: the same on this machine.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def nodes(self) -> int:
        """The number of machines. All have the same number of processes."""
        return self.size // self.local_size


def rank_from_environment() -> ProcessRank | None:
    """The rank in the environment variables; None for a single process. Sets torchrun's variables from those of srun.

    Raises:
        UserError: the machines have different numbers of processes.
    """
    environment = os.environ  # now: another package may have replaced it
    if not {"WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
        if int(environment.get("SLURM_STEP_NUM_TASKS", 1)) == 1:
            return None
        _set_from_slurm(environment)
    rank, size, local_rank = (int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
    if size % local_size or local_rank >= local_size:
        raise UserError(f"the launcher started {size} processes; each machine must have the same number")
    return ProcessRank(rank, size, local_rank, local_size) if size > 1 else None


def _set_from_slurm(environment: MutableMapping[str, str]) -> None:
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    size, nodes = int(environment["SLURM_STEP_NUM_TASKS"]), int(environment.get("SLURM_STEP_NUM_NODES", 1))
    address = SLURMEnvironment.resolve_root_node_address(environment.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    environment.setdefault("MASTER_ADDR", address)
    # the job id is unique and known to all its processes
    environment.setdefault("MASTER_PORT", str(15000 + int(environment.get("SLURM_JOB_ID", "0")) % 10000))
    environment.update(RANK=environment["SLURM_PROCID"], WORLD_SIZE=str(size))
    environment.update(LOCAL_RANK=environment["SLURM_LOCALID"], LOCAL_WORLD_SIZE=str(math.ceil(size / nodes)))
