"""Rank and size of this process, from torchrun, srun or Lightning's launcher."""

from __future__ import annotations

import os
import re
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
    def node(self) -> int:
        """The index of this machine. All machines have the same number of processes."""
        return self.rank // self.local_size

    @property
    def nodes(self) -> int:
        return self.size // self.local_size


def rank_from_environment(environment: MutableMapping[str, str] | None = None) -> ProcessRank | None:
    """The rank in the environment variables; None for a single process. Sets torchrun's variables from those of srun.

    Raises:
        UserError: the launcher's variables are not valid.
    """
    environment = os.environ if environment is None else environment  # now: another package may have replaced it
    try:
        if not {"WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            if not {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"} <= environment.keys():
                return None
            environment.update(_of_slurm(environment))
        if (size := int(environment.get("WORLD_SIZE", 1))) == 1:
            return None
        environment.setdefault("RANK", environment["LOCAL_RANK"])  # Lightning's launcher sets none
        rank, local_rank = int(environment["RANK"]), int(environment["LOCAL_RANK"])
        local_size = int(environment.get("LOCAL_WORLD_SIZE", size))
    except ValueError as error:
        raise UserError(f"the launcher's environment variables are not numbers: {error}") from error
    # Waiting for a process that does not exist takes long.
    if not (0 <= rank < size and 0 <= local_rank < local_size <= size):
        raise UserError(
            f"the launcher's environment variables are not valid: RANK={rank} WORLD_SIZE={size} LOCAL_RANK={local_rank} "
            f"LOCAL_WORLD_SIZE={local_size}"
        )
    if size % local_size:
        raise UserError(f"the launcher started {size} processes; each machine must have the same number")
    return ProcessRank(rank, size, local_rank, local_size)


def _of_slurm(environment: MutableMapping[str, str]) -> dict[str, str]:
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    if int(size := environment["SLURM_STEP_NUM_TASKS"]) == 1:
        return {}
    # such as 4(x2),3: 4 on each of two machines, 3 on the next
    tasks = re.sub(r"\(x\d+\)", "", environment.get("SLURM_STEP_TASKS_PER_NODE", size)).split(",")
    if len(set(tasks)) > 1:
        raise UserError(f"srun started {' and '.join(tasks)} processes on the machines; each machine must have the same number")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "127.0.0.1")
    address = environment.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(nodes)
    # the job id is unique and known to all its processes
    port = environment.get("MASTER_PORT") or str(15000 + int(environment.get("SLURM_JOB_ID", "0")) % 10000)
    rank, local_rank = environment["SLURM_PROCID"], environment["SLURM_LOCALID"]
    named = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": tasks[0]}
    return named | {"MASTER_ADDR": address, "MASTER_PORT": port}
