"""Which process this is, as launchers say; how evaluation is dealt out."""

import numpy as np
import pytest

from holotrain.data.fixed import FixedBatches, in_batches
from holotrain.errors import UserError
from holotrain.ranks.place import found
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
    with pytest.raises(UserError, match="no numbers"):
        found(TORCHRUN | {"RANK": "x"})


def test_the_place_that_slurm_gives():
    place = found(SLURM)
    assert (place.rank, place.size, place.local_rank, place.local_size, place.node) == (2, 4, 0, 2, 1)
    assert (place.address, place.port) == ("node7", 18456) and not place.hosts and found(SLURM | {"SLURM_PROCID": "0"}).hosts
    assert found({name: value for name, value in SLURM.items() if not name.startswith("SLURM_STEP")}) is None  # no srun


@pytest.mark.parametrize("size", [2, 7, 64, 143])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("parts", [1, 2])
def test_evaluation_reads_every_sample_once_in_equally_many_batches(size, batch, parts):
    shares = [list(FixedBatches(in_batches(size, batch), rank, parts)) for rank in range(parts)]
    assert len({len(own) for own in shares}) == 1
    assert sorted(index for own in shares for samples in own for index in samples) == list(range(size))


def test_fewer_samples_than_processes_are_refused():
    with pytest.raises(UserError, match="2 samples cannot be dealt out to 3"):
        FixedBatches([np.arange(2)], 0, 3)


def test_processes_that_share_layers_read_the_same():
    assert share() == (0, 1)
    set_share(1, 4)
    assert share() == (1, 4)
    set_share()
    assert share() == (0, 1)
