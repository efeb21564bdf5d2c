"""When a training is validated: as asked for, and at the latest where it ends; and which value of a sweep is wrong."""

import os
from pathlib import Path

import pytest

from holotrain.config.build_trainer import validation_and_logging
from holotrain.config.objects import ObjectConfig
from holotrain.config.structured import group_defaults, object_config
from holotrain.folders import run_folder


def trainer_of(**options) -> ObjectConfig:
    plain = {"_target_": "lightning.pytorch.Trainer", "max_epochs": 16, **options}
    return object_config("trainer", group_defaults("trainer", plain))


@pytest.mark.parametrize(
    ("options", "batches", "expected"),
    [
        ({}, 10, (1.0, 1)),
        ({"val_check_interval": 0.5}, 10, (0.5, 1)),
        ({"val_check_interval": 4}, 10, (4, None)),  # counted through epochs
        ({"val_check_interval": 400, "max_epochs": 16, "max_steps": 1000}, 4, (1.0, 1)),  # short epochs, which end it
        ({"val_check_interval": 400, "max_epochs": 16, "check_val_every_n_epoch": None}, 4, (64, None)),  # through epochs
        ({"val_check_interval": 400, "max_epochs": -1, "max_steps": 100}, 4, (100, None)),
        ({"max_steps": 3}, 10, (3, None)),  # ends in its first epoch
        ({"max_steps": 30}, 10, (1.0, 1)),
        ({"max_epochs": 3, "check_val_every_n_epoch": 5}, 10, (30, None)),
        # the last batches of an epoch step as well, though they are fewer: 2 steps an epoch of 5 batches
        ({"val_check_interval": 400, "max_epochs": -1, "max_steps": 4, "accumulate_grad_batches": 4}, 5, (10, None)),
        ({"val_check_interval": 400, "max_epochs": -1, "max_steps": 3, "accumulate_grad_batches": 4}, 5, (9, None)),
        ({"val_check_interval": 400, "max_epochs": 2, "limit_train_batches": 3}, 10, (1.0, 1)),
        ({"val_check_interval": 400, "max_epochs": 2, "limit_train_batches": 0.5}, 10, (1.0, 1)),
        ({"max_epochs": -1, "max_time": "00:01:00:00"}, 10, (1.0, 1)),
        ({"val_check_interval": 400, "max_epochs": 20, "overfit_batches": 1}, 10, (1.0, 1)),
    ],
)
def test_a_training_is_validated_before_it_ends(options, batches, expected):
    found = validation_and_logging(trainer_of(**options), batches)
    assert (found["val_check_interval"], found["check_val_every_n_epoch"]) == expected


def test_a_short_training_is_logged():
    assert validation_and_logging(trainer_of(max_steps=8, log_every_n_steps=20), 100)["log_every_n_steps"] == 8
    assert validation_and_logging(trainer_of(max_steps=80, log_every_n_steps=20), 100)["log_every_n_steps"] == 20
    assert validation_and_logging(trainer_of(max_steps=8, log_every_n_steps=0), 100)["log_every_n_steps"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("model.depth=1,two seed=1,2", "job 2 (model.depth=two seed=1): model.depth: 'two' is not a whole number; no job was"),
        ("data.batch_size=8,auto backward=reversible,auto", "job 3 (data.batch_size=auto backward=auto): data.batch_size=auto"),
        ("seed=1,2 optimizer.lrr=1", "job 0 (seed=1): optimizer.lrr: there is no 'lrr' in optimizer."),
    ],
)
def test_the_job_and_its_values_are_named_before_any_job_starts(holotrain, words, said):
    status, out, err = holotrain("fit", "-m", *words.split())
    assert (status, out) == (2, "") and err.startswith(f"holotrain: {said}") and err.count("\n") == 1
    assert not Path("runs").exists()


def test_a_sweep_without_a_job_is_not_resumed(tmp_path):
    """Such as one that was refused."""
    (tmp_path / "fit/sweeps/begun/0").mkdir(parents=True)
    (tmp_path / "fit/sweeps/refused").mkdir()
    (tmp_path / "fit/sweeps/refused/multirun.yaml").touch()
    os.utime(tmp_path / "fit/sweeps/begun/0", (0, 0))
    assert run_folder("fit/sweeps", str(tmp_path), resume=True) == str(tmp_path / "fit/sweeps/begun")
