"""A resumed training equals the uninterrupted one, bit for bit, from whichever checkpoint it starts."""

import os
import random
import signal
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from compared import assert_equal
from covering import slow
from small_trainings import Residual, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, Dataset

from holotrain.callbacks import BestCheckpoint
from holotrain.callbacks.interrupt import Interrupted, SaveOnSignal
from holotrain.checkpoints.exact_resume import ExactResume
from holotrain.checkpoints.saving import ExactCheckpoint, last_checkpoint
from holotrain.data.loader import ResumableLoader

EPOCHS, STEPS = 3, 12
EVERY_STEP = [*range(1, STEPS + 1)]


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
        self.layers = nn.Sequential(nn.Linear(2, 8), Residual(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.seen = []
        self.validated = []

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return batch if not self.trainer.training else batch + torch.rand(())

    def training_step(self, batch, batch_idx):
        self.seen.append(batch.tolist())
        return self.layers(batch).pow(2).mean() * (1 + random.random()) * (1 + np.random.rand())

    def validation_step(self, batch, batch_idx):
        self.validated.append((self.global_step, self.layers[0].weight.sum().item()))
        self.log("val/loss", self.layers(batch.float()).mean())
        self.log("val/steps", float(self.global_step))

    def configure_optimizers(self):
        assert self.trainer.estimated_stepping_batches > 0  # it makes Lightning forget the loader's position
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


def fit(callbacks=(), checkpoint=None, workers=0, batch=3, **options):
    random.seed(1)
    np.random.seed(1)
    module = Noisy()
    torch.manual_seed(1)
    options |= {"max_epochs": EPOCHS, "num_sanity_val_steps": 0, "callbacks": [ExactResume(), *callbacks]}
    trainer = quiet_trainer(enable_checkpointing=bool(callbacks), **options)
    loader = ResumableLoader(Numbers(), batch, seed=5, num_workers=workers)
    validation = DataLoader(torch.ones(4, 2), generator=torch.Generator())
    trainer.fit(module, loader, validation, ckpt_path=checkpoint, weights_only=True)
    return module.seen, module.state_dict(), module.validated


def assert_resumed(resumed, reference, step):
    assert resumed[0] == reference[0][step:]
    assert_equal(resumed[1], reference[1])


def every_step(folder):
    return ExactCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)


@pytest.mark.parametrize(("workers", "steps"), [(0, EVERY_STEP), (2, [4, 5])])
def test_resuming_from_every_step(tmp_path, workers, steps):
    reference = fit([every_step(tmp_path)], workers=workers)
    assert len(reference[0]) == STEPS == len(list(tmp_path.glob("*.ckpt")))
    assert [int(batch[0][0]) for batch in reference[0]] == [0] * 4 + [1] * 4 + [2] * 4  # noise below 1 is on the epoch
    for step in steps:
        assert_resumed(fit(checkpoint=tmp_path / f"step={step}.ckpt", workers=workers), reference, step)


@pytest.mark.parametrize("batch", [1, 2, 4, 5, 12])
@pytest.mark.parametrize("step", [5, 7])
def test_an_epoch_goes_on_after_the_same_samples_with_batches_of_another_size(tmp_path, step, batch):
    fit([every_step(tmp_path)])
    before = {int(sample[1]) for seen in fit(max_steps=step)[0][4:] for sample in seen}
    resumed = fit(checkpoint=tmp_path / f"step={step}.ckpt", batch=batch)[0]
    epochs = [[int(sample[1]) for seen in resumed for sample in seen if int(sample[0]) == epoch] for epoch in (1, 2)]
    left = set(range(12)) - before
    assert set(epochs[0]) <= left and len(epochs[0]) == max(len(left) // batch * batch, min(batch, len(left)))
    assert len(epochs[1]) == 12 // batch * batch


@pytest.mark.parametrize(
    ("epoch_end", "options", "steps"),
    [(True, {}, (4, 8, 12)), (False, {}, (4, 8, 12)), (None, {"val_check_interval": 2}, (2, 4, 6, 8))],
)
def test_resuming_from_the_end_of_an_epoch_and_of_a_validation(tmp_path, epoch_end, options, steps):
    checkpoint = ExactCheckpoint(
        tmp_path, filename="{step}", monitor="val/loss", save_top_k=-1, save_on_train_epoch_end=epoch_end
    )
    reference = fit([checkpoint], **options)
    for step in steps:
        assert_resumed(fit(checkpoint=tmp_path / f"step={step}.ckpt", **options), reference, step)


ACCUMULATED = {"batch": 1, "accumulate_grad_batches": 5, "val_check_interval": 4}
"""Twelve batches an epoch: optimizer steps after 5, 10 and 12; validation falls due after 4, 8 and 12, and waits for them."""


class At(pl.Callback):
    """Calls ``act(trainer)`` in a hook of a batch, counted over epochs, or of the validation after it."""

    def __init__(self, batch, act, hook="on_train_batch_start"):
        self.batch, self.act = batch, act
        setattr(self, hook, self.called)

    def called(self, trainer, *rest):
        if trainer.fit_loop.epoch_loop.total_batch_idx == self.batch:
            self.batch = -1
            self.act(trainer)


def send(signum):
    return lambda *_: os.kill(os.getpid(), signum)


@pytest.fixture(scope="module")
def accumulated():
    return fit(**ACCUMULATED)


def test_validation_waits_for_the_optimizer_step(accumulated):
    """It measures the weights that a checkpoint then holds; what falls due twice within an accumulated batch is done once."""
    assert [step for step, _ in accumulated[2]] == [step for step in range(1, 10) for _ in range(4)]
    often = fit(**ACCUMULATED | {"val_check_interval": 1})
    assert often[2] == accumulated[2]
    counted = fit(**ACCUMULATED | {"val_check_interval": 13}, check_val_every_n_epoch=None)  # through the epochs
    assert [step for step, _ in counted[2][::4]] == [4, 7]
    assert all(torch.equal(counted[1][name], value) for name, value in accumulated[1].items())


def assert_a_signal_loses_nothing(folder, reference, at, hook="on_train_batch_start", **options):
    """Interrupted once and resumed: batches, weights and validations of both parts are those of the uninterrupted run."""
    parts, path = [], folder / f"{at}-{hook}.ckpt"
    for checkpoint in (None, path):
        noting = pl.Callback()  # beyond the training's end by a signal
        noting.on_validation_end = lambda trainer, module: (parts.extend(module.validated), module.validated.clear())
        stopping = [At(at, send(signal.SIGTERM), hook)] if checkpoint is None else []
        try:
            resumed = fit([*stopping, noting, SaveOnSignal(path)], checkpoint, **options)
        except Interrupted:
            assert checkpoint is None
    assert path.exists() and resumed[0] == reference[0][len(reference[0]) - len(resumed[0]) :]
    assert len(resumed[0]) < len(reference[0]) - at
    worst = max((resumed[1][name] - value).abs().max().item() for name, value in reference[1].items())
    assert worst == 0, f"SIGTERM in {hook} of batch {at}: weights differ by up to {worst:.2g}"
    assert parts == reference[2]


@pytest.mark.parametrize(
    ("at", "hook"),
    [
        (7, "on_train_batch_start"),  # in the middle of one; a validation is due
        (16, "on_validation_batch_start"),  # in a validation within an epoch
        slow(22, "on_after_backward"),  # in an epoch's last, shorter one
    ],
)
def test_a_signal_within_an_accumulated_batch(tmp_path, accumulated, at, hook):
    assert_a_signal_loses_nothing(tmp_path, accumulated, at, hook, **ACCUMULATED)


def test_no_checkpoint_holds_half_an_accumulated_batch(tmp_path, accumulated):
    """Those that follow a step, a validation, or a request to stop, each in a first and in a resumed training."""
    best = ExactCheckpoint(tmp_path, filename="best-{step}", monitor="val/loss", save_top_k=-1)
    fit([every_step(tmp_path), best], **ACCUMULATED)
    for step, batches in {1: 5, 2: 10, 3: 12, 5: 22}.items():
        for path in tmp_path.glob(f"*step={step}.ckpt"):
            assert_resumed(fit(checkpoint=path, **ACCUMULATED), accumulated, batches)
    again = tmp_path / "again"
    fit([every_step(again)], tmp_path / "step=2.ckpt", **ACCUMULATED)
    assert_resumed(fit(checkpoint=again / "step=3.ckpt", **ACCUMULATED), accumulated, 12)
    assert {path.name for path in again.iterdir()} == {f"step={step}.ckpt" for step in range(3, 10)}


@pytest.mark.parametrize(("signum", "step"), [(signal.SIGTERM, 4), (signal.SIGINT, 7), (signal.SIGHUP, 4), (signal.SIGUSR1, 4)])
def test_a_signal_saves_and_ends_and_the_rest_follows(tmp_path, signum, step):
    """In the middle of an epoch the checkpoint follows at once; at its last batch, after the epoch. Afterwards, and after a
    training without a signal, signals do what they did before."""
    path = tmp_path / "last.ckpt"
    handlers = [signal.getsignal(number) for number in SaveOnSignal.SIGNALS]
    reference = fit([SaveOnSignal(path)])
    assert [signal.getsignal(number) for number in SaveOnSignal.SIGNALS] == handlers
    with pytest.raises(Interrupted) as interrupted:
        fit([At(step, send(signum)), SaveOnSignal(path)])
    assert (interrupted.value.signum, interrupted.value.checkpoint) == (signum, path)
    assert [signal.getsignal(number) for number in SaveOnSignal.SIGNALS] == handlers
    assert torch.load(path, weights_only=True)["global_step"] == step + 1
    assert_resumed(fit(checkpoint=path), reference, step + 1)


def test_a_training_under_nohup_goes_on(tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        fit([At(4, send(signal.SIGHUP)), SaveOnSignal(tmp_path / "last.ckpt")])
    finally:
        signal.signal(signal.SIGHUP, before)
    assert not (tmp_path / "last.ckpt").exists()


def best_and_last(folder, save_top_k=1, mode="max"):
    """The last validation is the best one, or with ``min`` the first."""
    best = BestCheckpoint(folder, monitor="val/steps", mode=mode, save_top_k=save_top_k)
    return [best, last_checkpoint(folder / "last.ckpt")]


@pytest.mark.parametrize(
    ("before", "now", "mode", "kept"),
    [(3, 2, "max", [8, 12]), (2, 1, "max", [12]), (2, 2, "min", [4, 8])],
)
def test_a_resumed_training_keeps_as_many_best_files_as_it_is_told_now(tmp_path, before, now, mode, kept):
    """It knows what was best before: with ``min`` the first validation of all."""
    fit(best_and_last(tmp_path, before, mode), max_steps=8)
    best, last = best_and_last(tmp_path, now, mode)
    fit([best, last], tmp_path / "last.ckpt")
    names = [f"best-epoch{step // 4}-step{step}.ckpt" for step in kept]
    assert sorted(Path(path).name for path in best.best_k_models) == names
    assert all((tmp_path / name).exists() for name in names)
    assert best.best_model_score == (4 if mode == "min" else 12)
    assert Path(best.best_model_path).name == names[0 if mode == "min" else -1]
