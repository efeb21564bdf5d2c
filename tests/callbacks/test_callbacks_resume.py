"""A resumed training equals the uninterrupted one, bit for bit, from whichever checkpoint it starts."""

import os
import random
import signal

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from forked import Forked
from same_tensors import assert_same
from torch import nn
from torch.utils.data import DataLoader, Dataset

from holotrain.callbacks import ExactCheckpoint, ExactResume, Interrupted, SaveOnSignal, last_checkpoint
from holotrain.data import ResumableLoader

QUIET = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
EPOCHS, STEPS = 3, 12


class Numbers(Dataset):
    """Twelve samples that are their keys: (epoch, index)."""

    def __len__(self):
        return 12

    def __getitem__(self, key):
        return torch.tensor([float(key[0]), float(key[1])])


class Noisy(pl.LightningModule):
    """Draws from every global generator, in the step and on the way to the device, and notes what it saw."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.seen = []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch if not self.trainer.training else batch + torch.rand(())

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.tolist())
        return self.layers(batch).pow(2).mean() * (1 + random.random()) * (1 + np.random.rand())

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.layers(batch.float()).mean())

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0  # it makes Lightning forget the loader's position
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def fit(callbacks=(), checkpoint=None, workers=0, **options):
    random.seed(1)
    np.random.seed(1)
    module = Noisy()
    torch.manual_seed(1)
    trainer = pl.Trainer(
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        callbacks=[ExactResume(), *callbacks],
        enable_checkpointing=bool(callbacks),
        **QUIET,
        **options,
    )
    loader = ResumableLoader(Numbers(), 3, seed=5, num_workers=workers)
    validation = DataLoader(torch.ones(4, 2), generator=torch.Generator())
    trainer.fit(module, loader, validation, ckpt_path=checkpoint, weights_only=True)
    return module.seen, module.state_dict()


def assert_resumed(resumed, reference, step):
    assert resumed[0] == reference[0][step:]
    assert_same(resumed[1], reference[1])


def every_step(folder):
    return ExactCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.mark.parametrize(("workers", "steps"), [(0, [*range(1, STEPS + 1)]), (2, [4, 5])])
def test_resuming_from_every_step(tmp_path, workers, steps):
    reference = fit([every_step(tmp_path)], workers=workers)
    assert len(reference[0]) == STEPS == len(list(tmp_path.glob("*.ckpt")))
    assert [int(batch[0][0]) for batch in reference[0]] == [0] * 4 + [1] * 4 + [2] * 4  # noise below 1 is on the epoch
    for step in steps:
        assert_resumed(fit(checkpoint=tmp_path / f"step={step}.ckpt", workers=workers), reference, step)


@pytest.mark.parametrize("epoch_end", [True, False])
def test_resuming_from_the_end_of_an_epoch_and_of_a_validation(tmp_path, epoch_end):
    checkpoint = ExactCheckpoint(
        tmp_path, filename="{step}", monitor="val/loss", save_top_k=-1, save_on_train_epoch_end=epoch_end
    )
    reference = fit([checkpoint])
    for step in (4, 8, 12):
        assert_resumed(fit(checkpoint=tmp_path / f"step={step}.ckpt"), reference, step)


def test_resuming_from_a_validation_within_an_epoch(tmp_path):
    checkpoint = ExactCheckpoint(tmp_path, filename="{step}", monitor="val/loss", save_top_k=-1)
    reference = fit([checkpoint], val_check_interval=2)
    for step in (2, 4, 6, 8):
        assert_resumed(fit(checkpoint=tmp_path / f"step={step}.ckpt", val_check_interval=2), reference, step)


EVERY_STEP = [*range(1, STEPS + 1)]


@pytest.mark.parametrize(
    ("most", "steps"), [(STEPS, EVERY_STEP), (100, [4, 7]), pytest.param(100, EVERY_STEP, marks=pytest.mark.slow)]
)
def test_resuming_where_steps_are_bounded_too(tmp_path, most, steps):
    """After each step, at the ends of epochs too, and where a bound had ended the training within an epoch."""
    reference = fit([every_step(tmp_path)], max_steps=most)
    assert len(reference[0]) == STEPS
    for step in steps:
        assert_resumed(fit(checkpoint=tmp_path / f"step={step}.ckpt", max_steps=most), reference, step)
    fit([last_checkpoint(tmp_path / "ended.ckpt")], max_steps=6)
    assert torch.load(tmp_path / "ended.ckpt", weights_only=True)["global_step"] == 6
    assert_resumed(fit(checkpoint=tmp_path / "ended.ckpt", max_steps=most), reference, 6)


def test_resuming_with_accumulated_gradients(tmp_path):
    reference = fit([every_step(tmp_path)], accumulate_grad_batches=2)
    for step in (1, 2, 3, 5):
        assert_resumed(fit(checkpoint=tmp_path / f"step={step}.ckpt", accumulate_grad_batches=2), reference, 2 * step)


class SignalAt(pl.Callback):
    def __init__(self, step, signum):
        self.step, self.signum = step, signum

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), self.signum)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("step", [4, 7])
def test_a_signal_saves_and_ends_and_the_rest_follows(tmp_path, signum, step):
    """In the middle of an epoch the checkpoint follows at once; at its last batch, after the epoch."""
    reference = fit()
    path = tmp_path / "last.ckpt"
    handlers = [signal.getsignal(number) for number in SaveOnSignal.SIGNALS]
    with pytest.raises(Interrupted) as interrupted:
        fit([SignalAt(step, signum), SaveOnSignal(path)])
    assert (interrupted.value.signum, interrupted.value.checkpoint) == (signum, path)
    assert [signal.getsignal(number) for number in SaveOnSignal.SIGNALS] == handlers
    assert torch.load(path, weights_only=True)["global_step"] == step + 1
    assert_resumed(fit(checkpoint=path), reference, step + 1)


def test_after_a_training_signals_do_what_they_did_before(tmp_path):
    handlers = [signal.getsignal(number) for number in SaveOnSignal.SIGNALS]
    fit([SaveOnSignal(tmp_path / "last.ckpt")])
    assert [signal.getsignal(number) for number in SaveOnSignal.SIGNALS] == handlers


TWICE = """
import os, signal, sys, torch, lightning.pytorch as pl
from holotrain.callbacks import SaveOnSignal
class Signalled(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
    def training_step(self, batch, batch_idx):
        os.kill(os.getpid(), signal.SIGTERM)
        print("noted", flush=True)
        os.kill(os.getpid(), signal.SIGTERM)
        print("ignored", flush=True)
        return self.layer(batch).sum()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
trainer = pl.Trainer(max_epochs=1, logger=False, callbacks=[SaveOnSignal(sys.argv[1])], accelerator="cpu",
                     enable_progress_bar=False, enable_model_summary=False)
trainer.fit(Signalled(), torch.utils.data.DataLoader(torch.ones(4, 1)))
"""


def test_the_same_signal_again_acts_at_once(tmp_path):
    out, errors = tmp_path / "out", tmp_path / "errors"
    process = Forked(TWICE, tmp_path / "x.ckpt", folder=tmp_path, out=out, errors=errors)
    assert process.wait(100) == -signal.SIGTERM, errors.read_text()
    assert out.read_text() == "noted\n"
