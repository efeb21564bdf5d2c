"""What each of several processes reads."""

import numpy as np
import pytest

from holotrain.data.sampler import EpochBatchSampler, FixedBatches, data_shard, in_batches, set_data_shard
from holotrain.errors import UserError


@pytest.mark.parametrize("size", [2, 7, 64, 143])
@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("parts", [1, 2])
def test_evaluation_reads_every_sample_once_in_equally_many_batches(size, batch, parts):
    shares = [list(FixedBatches(in_batches(size, batch), (rank, parts))) for rank in range(parts)]
    assert len({len(own) for own in shares}) == 1
    assert sorted(index for own in shares for samples in own for index in samples) == list(range(size))


def test_fewer_samples_than_processes_are_refused():
    with pytest.raises(UserError, match="2 samples cannot be split among 3"):
        FixedBatches([np.arange(2)], (0, 3))


def test_fewer_samples_to_train_on_than_processes_are_refused():
    assert len(EpochBatchSampler(3, 8, shard=(2, 3))) == 1
    with pytest.raises(UserError, match="2 samples cannot be split among 3"):
        EpochBatchSampler(2, 8, shard=(0, 3))


def test_processes_that_share_layers_read_the_same():
    assert data_shard() == (0, 1)
    set_data_shard(1, 4)
    assert data_shard() == (1, 4)
    set_data_shard()
    assert data_shard() == (0, 1)
