"""Rank, size and rendezvous address of this process."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from holotrain.errors import UserError


@dataclass(frozen=True)
class Place:
    """
    Args:
        rank, size: rank of this process, and number of processes.
        local_rank, local_size: the same on this machine.
        address, port: address of the store.
        hosts: whether this process hosts the store; False if the launcher does.
        attempt: how often the launcher has restarted the processes.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    hosts: bool
    attempt: str = "0"

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

    def environment(self, rank: int) -> dict[str, str]:
        """torchrun's environment variables for another rank on this machine."""
        return {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(rank - self.rank + self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def found(environment: Mapping[str, str] = os.environ) -> Place | None:
    """The place from torchrun, srun or our own launcher; None for a single process.

    Raises:
        UserError: the launcher's variables are not valid.
    """
    place = None
    try:
        if {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= environment.keys():
            place = _of_torchrun(environment)
        elif {"SLURM_PROCID", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"} <= environment.keys():
            place = _of_slurm(environment)
    except ValueError as error:
        raise UserError(f"the launcher's environment variables are not numbers: {error}") from error
    if place is not None:
        _check(place)
    return place


def _check(place: Place) -> None:
    """Checks the numbers, because waiting for a process that does not exist takes long."""
    if not (0 <= place.rank < place.size and 0 <= place.local_rank < place.local_size <= place.size):
        here = f"local rank {place.local_rank} of {place.local_size}"
        raise UserError(
            f"the launcher's environment variables are not valid: rank {place.rank} of {place.size} processes, {here}"
        )
    if place.size % place.local_size:
        raise UserError(f"the launcher started {place.size} processes; each machine must have the same number")
    if not 0 < place.port < 2**16:
        raise UserError(f"MASTER_PORT={place.port} is not a port; give a number from 1 to 65535")


def _of_torchrun(environment: Mapping[str, str]) -> Place | None:
    rank, size = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if size == 1:
        return None
    return Place(
        rank,
        size,
        int(environment["LOCAL_RANK"]),
        int(environment.get("LOCAL_WORLD_SIZE", size)),
        environment["MASTER_ADDR"],
        int(environment["MASTER_PORT"]),
        hosts=rank == 0 and environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


def _of_slurm(environment: Mapping[str, str]) -> Place | None:
    size = int(environment["SLURM_STEP_NUM_TASKS"])
    if size == 1:
        return None
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    # such as 4(x2),3: 4 on each of two machines, 3 on the next
    tasks = re.sub(r"\(x\d+\)", "", environment.get("SLURM_STEP_TASKS_PER_NODE", str(size))).split(",")
    if len(set(tasks)) > 1:
        raise UserError(f"srun started {' and '.join(tasks)} processes on the machines; each machine must have the same number")
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_NODELIST", "127.0.0.1")
    rank = int(environment["SLURM_PROCID"])
    return Place(
        rank,
        size,
        int(environment["SLURM_LOCALID"]),
        int(tasks[0]),
        environment.get("MASTER_ADDR") or SLURMEnvironment.resolve_root_node_address(nodes),
        # the job id is unique and known to all its processes
        int(environment.get("MASTER_PORT") or 15000 + int(environment.get("SLURM_JOB_ID", "0")) % 10000),
        hosts=rank == 0,
    )
