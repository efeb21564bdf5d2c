"""Schedules of a training that goes on longer than planned, that advance by epoch, or whose number of steps changes."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from small_trainings import quiet_trainer
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader

import holotrain
from holotrain.config.build import make_scheduler
from holotrain.errors import UserError
from holotrain.tasks.schedules import cosine
from holotrain.tasks.task import Task

BATCHES = 4


class Constant(Task):
    """A loss that falls in no epoch; keeps the learning rate of each step."""

    monitored = {"val/loss": "min", "val/rising": "max"}

    def __init__(self, scheduler, **options):
        options = {"lr": 1.0} | options
        super().__init__(nn.Linear(1, 1), lambda model: torch.optim.SGD(model.parameters(), **options), scheduler)
        self.rates = []

    def inputs(self, batch):
        return batch

    def loss(self, x):
        return self.model(x).sum() * 0

    def training_step(self, batch, batch_idx):
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", torch.tensor(1.0), batch_size=1)
        self.log("val/rising", torch.tensor(float(self.current_epoch)), batch_size=1)


def rates_of(scheduler, epochs, folder=None, start=None, callbacks=(), batches=BATCHES, task=None, **options):
    """The learning rate of each step, for a schedule, of a training that continues from a checkpoint, if there is one."""
    task, data = task or Constant(scheduler), DataLoader(torch.ones(batches, 1), collate_fn=lambda rows: (torch.stack(rows),))
    saving = [] if folder is None else [ModelCheckpoint(folder, save_last=True)]
    trainer = quiet_trainer(
        max_epochs=epochs, callbacks=[*callbacks, *saving], enable_checkpointing=folder is not None, **options
    )
    trainer.fit(task, data, data, ckpt_path=start)
    return task.rates


SCHEDULES = {
    "cosine": lambda optimizer, steps: cosine(optimizer, steps, warmup=0.1),
    "OneCycleLR": lambda optimizer, steps: OneCycleLR(optimizer, 1.0, total_steps=steps),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_training_that_is_lengthened_follows_the_longer_schedule_from_its_first_step(tmp_path, schedule):
    whole = rates_of(SCHEDULES[schedule], 4)
    rates_of(SCHEDULES[schedule], 2, tmp_path)
    rest = rates_of(SCHEDULES[schedule], 4, start=tmp_path / "last.ckpt")
    assert rest == pytest.approx(whole[2 * BATCHES :], rel=1e-12) and rest[0] > 0.1


CHANGED = {
    "none": (None, None),
    "cosine": (SCHEDULES["cosine"],) * 2,
    "its warm-up": (SCHEDULES["cosine"], lambda optimizer, steps: cosine(optimizer, steps, warmup=0.7)),
    "step": (lambda optimizer, steps: StepLR(optimizer, 3, 0.5),) * 2,
    "a factor": tuple(lambda optimizer, steps, gamma=gamma: ExponentialLR(optimizer, gamma) for gamma in (1.0, 0.5)),
    "OneCycleLR": tuple(
        lambda optimizer, steps, most=most: OneCycleLR(optimizer, most, total_steps=16) for most in (1.0, 0.25)
    ),
}


@pytest.mark.parametrize("name", CHANGED)
def test_options_that_a_resumed_training_is_given_are_applied(tmp_path, name):
    """As if it had had them from the first step on; a factor, from then on."""
    before, now = CHANGED[name]
    given = {"lr": 0.25, "weight_decay": 9.0}
    rates_of(before, 2, tmp_path)
    whole = rates_of(now, 4, task=Constant(now, **given))
    rest = rates_of(now, 4, start=tmp_path / "last.ckpt", task=(task := Constant(now, **given)))
    expected = [0.25 * 0.5**step for step in range(2 * BATCHES)] if name == "a factor" else whole[2 * BATCHES :]
    assert rest == pytest.approx(expected, rel=1e-12)
    assert task.trainer.optimizers[0].param_groups[0]["weight_decay"] == 9.0


def test_an_option_that_a_callback_has_changed_stays_so_in_a_resumed_training(tmp_path):
    class Decays(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            trainer.optimizers[0].param_groups[0]["weight_decay"] += 1

    rates_of(None, 2, tmp_path, callbacks=[Decays()])
    rates_of(None, 3, start=tmp_path / "last.ckpt", task=(task := Constant(None)))
    assert task.trainer.optimizers[0].param_groups[0]["weight_decay"] == 2 * BATCHES


def composed_schedule(*words, of="cosine"):
    config = holotrain.compose("fit", [f"scheduler={of}", *(f"scheduler.{word}" for word in words)]).scheduler
    return lambda optimizer, steps: make_scheduler(config, 3, optimizer, steps)


def test_a_schedule_by_epoch():
    of_torch = "_target_=torch.optim.lr_scheduler."
    steps = rates_of(composed_schedule("milestones=[1,2]", "gamma=0.5", of="multistep"), 3)
    assert steps == [rate for rate in (1.0, 0.5, 0.25) for _ in range(BATCHES)]
    halved = rates_of(composed_schedule(f"{of_torch}ReduceLROnPlateau", "patience=0", "factor=0.5"), 3)
    assert halved == [rate for rate in (1.0, 1.0, 0.5) for _ in range(BATCHES)]
    rising = rates_of(composed_schedule(f"{of_torch}ReduceLROnPlateau", "patience=0", "monitor=val/rising"), 3)
    assert set(rising) == {1.0}  # what rises gets better


@pytest.mark.parametrize(
    ("words", "every"),
    [
        (("ReduceLROnPlateau", "patience=1", "factor=0.5"), 2),  # is not shown a metric twice
        (("StepLR", "step_size=1", "interval=epoch"), 1),
    ],
)
def test_a_schedule_by_epoch_continues_where_it_was(tmp_path, words, every):
    schedule = composed_schedule(f"_target_=torch.optim.lr_scheduler.{words[0]}", *words[1:])
    whole = rates_of(schedule, 8, check_val_every_n_epoch=every)
    rates_of(schedule, 3, tmp_path, check_val_every_n_epoch=every)
    rest = rates_of(schedule, 8, start=tmp_path / "last.ckpt", check_val_every_n_epoch=every)
    assert rest == whole[-len(rest) :] and len(rest) >= 4 * BATCHES


def test_a_metric_that_the_task_does_not_log_is_refused():
    plateau = composed_schedule("_target_=torch.optim.lr_scheduler.ReduceLROnPlateau", "monitor=val/los")
    with pytest.raises(UserError, match="scheduler.monitor: .* Did you mean 'val/loss'"):
        rates_of(plateau, 1)
