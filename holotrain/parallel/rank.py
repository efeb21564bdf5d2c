"""Rank and size of this process, from torchrun, srun or holotrain itself."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from holotrain.errors import UserError


@dataclass(frozen=True)
class ProcessRank:
    """Rank of this process and number of processes, in the whole run and on this machine."""

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
    launched = {"WORLD_SIZE", "LOCAL_RANK"}  # Lightning sets the second alone, in a process that it has not started
    if not launched <= os.environ.keys() and int(os.environ.get("SLURM_STEP_NUM_TASKS", 1)) > 1:
        _set_from_slurm()
    if not launched <= os.environ.keys() or (size := int(os.environ["WORLD_SIZE"])) == 1:
        return None
    local_rank = int(os.environ["LOCAL_RANK"])
    rank = int(os.environ.setdefault("RANK", str(local_rank)))  # Lightning's launcher sets none
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if size % local_size or local_rank >= local_size:
        raise UserError(f"the launcher started {size} processes; each machine must have the same number")
    return ProcessRank(rank, size, local_rank, local_size)


def _set_from_slurm() -> None:
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    slurm = os.environ
    size, nodes = int(slurm["SLURM_STEP_NUM_TASKS"]), int(slurm.get("SLURM_STEP_NUM_NODES", 1))
    address = SLURMEnvironment.resolve_root_node_address(slurm.get("SLURM_STEP_NODELIST", "127.0.0.1"))
    slurm.setdefault("MASTER_ADDR", address)
    # the job id is unique and known to all its processes
    slurm.setdefault("MASTER_PORT", str(15000 + int(slurm.get("SLURM_JOB_ID", "0")) % 10000))
    slurm.update(RANK=slurm["SLURM_PROCID"], WORLD_SIZE=str(size))
    slurm.update(LOCAL_RANK=slurm["SLURM_LOCALID"], LOCAL_WORLD_SIZE=str(math.ceil(size / nodes)))
