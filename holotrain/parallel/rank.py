"""Rank and size of this process, from the variables that torchrun sets."""

from __future__ import annotations

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
    """The rank in torchrun's environment variables; None for a single process.

    Raises:
        UserError: the machines have different numbers of processes; or srun started several without torchrun.
    """
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} <= os.environ.keys():
        if (tasks := int(os.environ.get("SLURM_STEP_NUM_TASKS", 1))) > 1:
            raise UserError(
                f"srun started {tasks} processes, which cannot find each other; let it start torchrun, once a machine"
            )
        return None
    rank, size, local_rank = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if size % local_size or local_rank >= local_size:
        raise UserError(f"the launcher started {size} processes; each machine must have the same number")
    return ProcessRank(rank, size, local_rank, local_size) if size > 1 else None
