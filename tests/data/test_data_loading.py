"""The order of epochs, seeded augmentation, taking up an epoch in its middle, and what each of several processes reads."""

import json

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from compared import assert_equal
from data_files import write_saved_images
from lightning.pytorch.callbacks import ModelCheckpoint
from resumed_loaders import assert_resumes, same, stream
from small_trainings import quiet_trainer

from holotrain.data import Digits, HubImages, TextFiles
from holotrain.data.sampler import EpochBatchSampler, FixedBatches, in_batches
from holotrain.errors import UserError


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Sixty small images of three classes, numbered lines, and sixty lines of three classes, of 1 to 60 letters."""
    folder = tmp_path_factory.mktemp("loading")
    write_saved_images(folder / "images")
    (folder / "a.txt").write_text("".join(f"{number:05d}\n" for number in range(1000)))
    (folder / "a.jsonl").write_text(
        "\n".join(json.dumps({"text": "xyz"[n % 3] * n, "kind": "xyz"[n % 3]}) for n in range(1, 61))
    )
    return folder


HELD = {"val_fraction": 0.2, "test_fraction": 0.2, "cache_dir": "cache"}
DOCUMENTS = {"files": "a.jsonl", "layout": "documents", "context": 32, "max_tokens": 128, **HELD}
DATA = {
    "digits": (Digits, {"batch_size": 64, "classes": [3, 5]}),
    "images of the Hub": (HubImages, {"name": "images", "image_size": 16, "batch_size": 4, "cache_dir": "cache"}),
    "packed": (TextFiles, {"files": "a.txt", "unit": "line", "context": 16, "batch_size": 8, **HELD}),
    "documents": (TextFiles, DOCUMENTS),
    "answers": (TextFiles, {"files": "a.jsonl", "prompt": "kind", "completion": "text", "batch_size": 4, **HELD}),
    "documents of all lengths": (TextFiles, DOCUMENTS | {"bucketing": False}),
}


@pytest.fixture(params=DATA)
def ready(request, folder, monkeypatch):
    monkeypatch.chdir(folder)
    made_of, chosen = DATA[request.param]

    def made(**options):
        data = made_of(**chosen | options)
        data.prepare_data()
        data.setup()
        return data

    return made


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_at_any_batch_continues_the_stream(ready, workers):
    per_epoch = len(ready().train_dataloader())
    assert per_epoch > 3
    positions = (0, 1, per_epoch // 2, per_epoch) if workers == 0 else (2,)
    assert_resumes(lambda workers: ready(num_workers=workers).train_dataloader(), workers, positions, epochs=(1, 2))


def test_seeds_and_epochs_change_what_is_seen(ready):
    first, second = (stream(ready().train_dataloader(), [epoch]) for epoch in (0, 1))
    assert same(first, stream(ready().train_dataloader(), [0])) and not same(first, second)
    assert not same(first, stream(ready(seed=1).train_dataloader(), [0]))


@pytest.mark.parametrize("workers", [0, 2])
def test_evaluation_is_the_same_with_workers_and_leaves_the_global_random_state_alone(ready, workers):
    data, state = ready(num_workers=workers), torch.get_rng_state()
    loader = ready(num_workers=workers, pin_memory=True).train_dataloader()
    assert (loader.num_workers, loader.persistent_workers, loader.pin_memory) == (workers, workers > 0, True)
    evaluated, *_ = [list(loader) for loader in (data.val_dataloader(), data.train_dataloader(), data.test_dataloader())]
    assert_equal(torch.get_rng_state(), state)
    assert same(evaluated, list(ready().val_dataloader()))


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_processes_share_an_epoch_of_keys(ranks):
    drawn = []
    for rank in range(ranks):
        sampler = EpochBatchSampler(31, 4, seed=1, shard=(rank, ranks))
        batches = list(sampler)
        assert len(batches) == len(sampler) == 31 // ranks // 4
        drawn += [key for batch in batches for key in batch]
    assert len(set(drawn)) == len(drawn) == 31 // ranks // 4 * 4 * ranks


@pytest.mark.parametrize(("size", "batch", "parts"), [(2, 16, 2), (143, 16, 2), (7, 1, 1), (7, 1, 2)])
def test_evaluation_reads_every_sample_once_in_equally_many_batches(size, batch, parts):
    shares = [list(FixedBatches(in_batches(np.arange(size), batch), (rank, parts))) for rank in range(parts)]
    assert len({len(own) for own in shares}) == 1
    assert sorted(index for own in shares for samples in own for index in samples) == list(range(size))


def test_few_samples_make_one_batch_or_are_refused():
    assert [len(batch) for batch in EpochBatchSampler(5, 100)] == [5]
    assert len(EpochBatchSampler(3, 8, shard=(2, 3))) == 1
    for made in (lambda: EpochBatchSampler(2, 8, shard=(0, 3)), lambda: FixedBatches([np.arange(2)], (0, 3))):
        with pytest.raises(UserError, match="2 samples cannot be split among 3"):
            made()


class Seen(pl.LightningModule):
    """Keeps the training batches of each epoch."""

    def __init__(self):
        super().__init__()
        self.weight, self.seen = torch.nn.Parameter(torch.zeros(())), {}

    def training_step(self, batch, batch_idx):
        self.seen.setdefault(self.current_epoch, []).append(batch["tokens"] if isinstance(batch, dict) else batch)
        return self.weight

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_overfitting_continues_with_the_same_batches(ready, tmp_path):
    module, saving = Seen(), ModelCheckpoint(tmp_path, save_last=True)
    begun = quiet_trainer(overfit_batches=2, max_epochs=1, callbacks=[saving], enable_checkpointing=True)
    begun.fit(module, datamodule=ready())
    quiet_trainer(overfit_batches=2, max_epochs=2).fit(module, datamodule=ready(), ckpt_path=tmp_path / "last.ckpt")
    assert len(module.seen[1]) == 2 and same(module.seen[0], module.seen[1])
