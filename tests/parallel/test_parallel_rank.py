"""Rank and size of a process, from the variables of its launcher."""

import os

import pytest

from holotrain.errors import UserError
from holotrain.parallel.rank import ProcessRank, rank_from_environment

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_ID": "123456", "SLURM_NODELIST": "node[6-8]", "SLURM_STEP_NODELIST": "node[7-8]",
}  # fmt: skip


@pytest.fixture
def rank_of(monkeypatch):
    """The rank from environment variables, which it may add to."""

    def rank_of(variables: dict[str, str]) -> ProcessRank | None:
        monkeypatch.setattr(os, "environ", variables)
        return rank_from_environment()

    return rank_of


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (TORCHRUN, ProcessRank(5, 8, 1, 4)),
        (SLURM | TORCHRUN, ProcessRank(5, 8, 1, 4)),  # srun started torchrun
        ({name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"}, ProcessRank(5, 8, 1, 8)),
        (TORCHRUN | {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}, None),
        (SLURM, ProcessRank(2, 4, 0, 2)),
        (SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, None),
        ({"LOCAL_RANK": "0"}, None),  # left by a Trainer
        ({}, None),
    ],
)
def test_rank(rank_of, variables, expected):
    assert rank_of(dict(variables)) == expected


def test_slurm_sets_the_variables_that_torch_reads(rank_of):
    """A step need not have all of the job's nodes."""
    environment = dict(SLURM)
    rank = rank_of(environment)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("node7", "18456")
    assert rank_of(environment) == rank and rank.nodes == 2
    chosen = SLURM | {"MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    rank_of(chosen)
    assert (chosen["MASTER_ADDR"], chosen["MASTER_PORT"]) == ("a", "29500")


@pytest.mark.parametrize(
    "variables",
    [
        TORCHRUN | {"LOCAL_WORLD_SIZE": "3"},
        SLURM | {"SLURM_STEP_NUM_TASKS": "5"},
        SLURM | {"SLURM_LOCALID": "2"},  # three processes on this machine, one on the other
    ],
)
def test_machines_with_different_numbers_of_processes_are_refused(rank_of, variables):
    with pytest.raises(UserError, match="each machine must have the same number"):
        rank_of(dict(variables))
