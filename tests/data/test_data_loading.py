"""The order of epochs, seeded augmentation, taking up an epoch in its middle, and what each of several processes reads."""

import numpy as np
import pytest
import torch
from compared import assert_equal
from resumed_loaders import assert_resumes, same, stream

from holotrain.data import Digits
from holotrain.data.sampler import EpochBatchSampler, FixedBatches, data_shard, in_batches, mixed_seed, set_data_shard
from holotrain.errors import UserError


def digits(**options) -> Digits:
    data = Digits(**{"batch_size": 64, "classes": [3, 5], **options})
    data.setup()
    return data


def test_the_order_is_a_function_of_seed_and_epoch():
    orders = {}
    for seed in (0, 1):
        for epoch in (0, 1):
            sampler = EpochBatchSampler(10, 3, seed)
            sampler.set_epoch(epoch)
            keys = [key for batch in sampler for key in batch]
            assert keys == [key for batch in sampler for key in batch]
            assert {key[0] for key in keys} == {epoch}
            assert len({key[1] for key in keys}) == 9
            orders[seed, epoch] = tuple(index for _, index in keys)
    assert len(set(orders.values())) == 4


def test_mixed_seeds_differ_and_are_stable():
    seeds = {mixed_seed(a, b, c) for a in range(10) for b in range(10) for c in range(10)}
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert mixed_seed(1, 2) == mixed_seed(1, 2) != mixed_seed(2, 1)


def test_a_batch_larger_than_the_data_is_the_data():
    assert [len(batch) for batch in EpochBatchSampler(5, 100)] == [5]


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_at_any_batch_continues_the_stream(workers):
    per_epoch = len(digits().train_dataloader())
    positions = range(per_epoch + 1) if workers == 0 else (2,)
    assert_resumes(lambda workers: digits(num_workers=workers).train_dataloader(), workers, positions)


def test_seeds_and_epochs_change_what_is_seen():
    per_epoch = len(digits().train_dataloader())
    reference = stream(digits().train_dataloader())
    assert not same(reference[:per_epoch], reference[per_epoch:])
    assert not same(stream(digits(seed=1).train_dataloader()), reference)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_global_random_state_is_left_alone(workers):
    data = digits(num_workers=workers)
    state = torch.get_rng_state()
    for loader in (data.train_dataloader(), data.val_dataloader(), data.test_dataloader()):
        list(loader)
    assert_equal(torch.get_rng_state(), state)


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
