"""Which process this is, as launchers say; how evaluation is dealt out."""

from dataclasses import replace

import numpy as np
import pytest

from holotrain.data.fixed import FixedBatches, in_batches
from holotrain.data.sampler import EpochBatchSampler
from holotrain.errors import UserError
from holotrain.ranks.place import Place, found
from holotrain.ranks.share import set_share, share

TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "29500",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
}  # fmt: skip
SLURM = {
    "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_NTASKS": "4", "SLURM_JOB_ID": "123456", "SLURM_NODELIST": "node[7-8]",
}  # fmt: skip


def test_the_place_that_torchrun_gives():
    place = found(TORCHRUN)
    assert (place.rank, place.size, place.local_rank, place.local_size) == (5, 8, 1, 4)
    assert (place.node, place.nodes, place.address, place.port, place.hosts) == (1, 2, "a", 29500, False)
    assert found(TORCHRUN | {"RANK": "0", "TORCHELASTIC_USE_AGENT_STORE": "False"}).hosts
    assert found(TORCHRUN | {"WORLD_SIZE": "1", "RANK": "0"}) is None and found({}) is None
    assert found(SLURM | TORCHRUN) == place  # torchrun, started by srun
    assert place.attempt == "0" and found(TORCHRUN | {"TORCHELASTIC_RESTART_COUNT": "2"}).attempt == "2"


def test_without_the_size_of_a_machine_there_is_one():
    place = found({name: value for name, value in TORCHRUN.items() if name != "LOCAL_WORLD_SIZE"})
    assert (place.local_size, place.node, place.nodes) == (8, 0, 1)


def test_the_places_of_processes_that_are_started_here():
    """What a main process tells the others is what they find; who hosts the store knows so."""
    main = Place(0, 3, 0, 3, "127.0.0.1", 1234, hosts=True)
    assert [found(main.environment(rank)) for rank in (1, 2)] == [
        replace(main, rank=r, local_rank=r, hosts=False) for r in (1, 2)
    ]


@pytest.mark.parametrize(
    ("launcher", "wrong", "said"),
    [
        (TORCHRUN, {"RANK": "x"}, "not numbers"),
        (TORCHRUN, {"MASTER_PORT": ""}, "not numbers"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "four"}, "not numbers"),
        (TORCHRUN, {"MASTER_PORT": "65536"}, "MASTER_PORT=65536 is not a port"),
        (TORCHRUN, {"MASTER_PORT": "0"}, "MASTER_PORT=0 is not a port"),
        (TORCHRUN, {"RANK": "8"}, "rank 8 of 8 processes"),
        (TORCHRUN, {"RANK": "-1"}, "rank -1 of 8 processes"),
        (TORCHRUN, {"LOCAL_RANK": "4"}, "local rank 4 of 4"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "16"}, "local rank 1 of 16"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "0", "LOCAL_RANK": "0"}, "local rank 0 of 0"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "3"}, "8 processes; each machine must have the same number"),
        (SLURM, {"SLURM_PROCID": "two"}, "not numbers"),
        (SLURM, {"SLURM_JOB_ID": "12.3"}, "not numbers"),
        (SLURM, {"SLURM_STEP_TASKS_PER_NODE": "many"}, "not numbers"),
        (SLURM, {"SLURM_STEP_NUM_TASKS": "5", "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"}, "srun started 2 and 1 processes"),
        (SLURM, {"SLURM_PROCID": "4"}, "rank 4 of 4 processes"),
    ],
)
def test_a_launcher_that_makes_no_sense_is_told_so(launcher, wrong, said):
    with pytest.raises(UserError, match=said):
        found(launcher | wrong)


def test_the_place_that_slurm_gives():
    place = found(SLURM)
    assert (place.rank, place.size, place.local_rank, place.local_size, place.node) == (2, 4, 0, 2, 1)
    assert (place.address, place.port) == ("node7", 18456) and not place.hosts and found(SLURM | {"SLURM_PROCID": "0"}).hosts
    assert found({name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}) is None  # no srun
    assert found(SLURM | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}) is None
    assert found({name: value for name, value in SLURM.items() if name != "SLURM_JOB_ID"}).port == 15000
    given = found(SLURM | {"MASTER_ADDR": "a", "MASTER_PORT": "29500"})
    assert (given.address, given.port) == ("a", 29500)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node7", "node7"),
        ("node[007-010]", "node007"),
        ("node[3]", "node3"),
        ("node[3,5-9]", "node3"),
        ("a1,node[3-4]", "a1"),
        ("rack2-n[3,5],rack1-n[1-2]", "rack2-n3"),
        ("gpu-a.example.org,gpu-b.example.org", "gpu-a.example.org"),
    ],
)
def test_processes_meet_on_the_first_of_slurms_nodes(nodes, first):
    """A step's own nodes, where it has not all of the job's."""
    assert found(SLURM | {"SLURM_NODELIST": nodes}).address == first
    assert found(SLURM | {"SLURM_STEP_NODELIST": nodes}).address == first


@pytest.mark.parametrize(("tasks", "size", "of_each"), [("4", 4, 4), ("1(x3)", 3, 1), ("2,2", 4, 2), ("2(x2),2", 6, 2)])
def test_the_tasks_of_each_node(tasks, size, of_each):
    found_here = found(SLURM | {"SLURM_STEP_NUM_TASKS": str(size), "SLURM_STEP_TASKS_PER_NODE": tasks})
    assert (found_here.local_size, found_here.nodes) == (of_each, size // of_each)


@pytest.mark.parametrize("size", [2, 7, 64, 143])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("parts", [1, 2])
def test_evaluation_reads_every_sample_once_in_equally_many_batches(size, batch, parts):
    shares = [list(FixedBatches(in_batches(size, batch), rank, parts)) for rank in range(parts)]
    assert len({len(own) for own in shares}) == 1
    assert sorted(index for own in shares for samples in own for index in samples) == list(range(size))


def test_fewer_samples_than_processes_are_refused():
    with pytest.raises(UserError, match="2 samples cannot be split among 3"):
        FixedBatches([np.arange(2)], 0, 3)


def test_fewer_samples_to_train_on_than_processes_are_refused():
    assert len(EpochBatchSampler(3, 8, rank=2, world_size=3)) == 1
    with pytest.raises(UserError, match="2 samples cannot be split among 3"):
        EpochBatchSampler(2, 8, rank=0, world_size=3)


def test_processes_that_share_layers_read_the_same():
    assert share() == (0, 1)
    set_share(1, 4)
    assert share() == (1, 4)
    set_share()
    assert share() == (0, 1)
