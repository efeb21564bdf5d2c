"""Which process this is, as launchers say."""

import pytest

from holotrain.errors import UserError
from holotrain.parallel.rank import rank_from_environment

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4", "SLURM_JOB_ID": "123456", "SLURM_NODELIST": "node[7-8]",
}  # fmt: skip


def test_the_place_that_torchrun_gives():
    rank = rank_from_environment(TORCHRUN)
    assert (rank.rank, rank.size, rank.local_rank, rank.local_size) == (5, 8, 1, 4)
    assert (rank.node, rank.nodes, rank.is_main) == (1, 2, False)
    assert rank_from_environment(TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}).is_main
    assert rank_from_environment(TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}) is None and rank_from_environment({}) is None
    assert rank_from_environment(SLURM | TORCHRUN) == rank  # torchrun, started by srun
    without_size = rank_from_environment({name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"})
    lightning = {"LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "29500"}
    assert rank_from_environment(SLURM | lightning).rank == 1  # started by a process that srun started alone
    assert (without_size.local_size, without_size.node, without_size.nodes) == (8, 0, 1)


@pytest.mark.parametrize(
    ("launcher", "wrong", "said"),
    [
        (TORCHRUN, {"RANK": "x"}, "not numbers"),
        (TORCHRUN, {"RANK": "8"}, "RANK=8 WORLD_SIZE=8"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "16"}, "LOCAL_RANK=1 LOCAL_WORLD_SIZE=16"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "0", "LOCAL_RANK": "0"}, "LOCAL_RANK=0 LOCAL_WORLD_SIZE=0"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "3"}, "8 processes; each machine must have the same number"),
        (SLURM, {"SLURM_JOB_ID": "12.3"}, "not numbers"),
        (SLURM, {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, "srun started 2 and 1 processes"),
    ],
)
def test_invalid_launcher_variables_are_refused(launcher, wrong, said):
    with pytest.raises(UserError, match=said):
        rank_from_environment(launcher | wrong)


def of_slurm(**changed):
    """The place, and the variables that torch reads, of the same names as those of torchrun."""
    environment = {name: value for name, value in (SLURM | changed).items() if value is not None}
    return rank_from_environment(environment), environment


def test_the_place_that_slurm_gives():
    rank, environment = of_slurm()
    assert (rank.rank, rank.size, rank.local_rank, rank.local_size, rank.node) == (2, 4, 0, 2, 1)
    assert (environment["MASTER_ADDR"], environment["MASTER_PORT"]) == ("node7", "18456")
    assert rank_from_environment(environment) == rank
    assert of_slurm(SLURM_STEP_NODELIST="node8")[1]["MASTER_ADDR"] == "node8"  # a step need not have all of the job's nodes
    assert of_slurm(SLURM_STEP_NUM_TASKS=None)[0] is None  # no srun
    assert of_slurm(SLURM_STEP_NUM_TASKS="1", SLURM_PROCID="0")[0] is None
    assert of_slurm(SLURM_JOB_ID=None)[1]["MASTER_PORT"] == "15000"
    _, given = of_slurm(MASTER_ADDR="a", MASTER_PORT="29500")
    assert (given["MASTER_ADDR"], given["MASTER_PORT"]) == ("a", "29500")


@pytest.mark.parametrize(("tasks", "size", "of_each"), [("4", 4, 4), ("1(x3)", 3, 1), ("2,2", 4, 2), ("2(x2),2", 6, 2)])
def test_the_tasks_of_each_node(tasks, size, of_each):
    found_here = rank_from_environment(SLURM | {"SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_TASKS_PER_NODE": tasks})
    assert (found_here.local_size, found_here.nodes) == (of_each, size // of_each)
