"""When a training is validated: as asked for, and at the latest where it ends."""

import pytest

from holotrain.config.build_trainer import validation
from holotrain.config.objects import ObjectConfig
from holotrain.config.structured import group_defaults, object_config


def trainer_of(**options) -> ObjectConfig:
    plain = {"_target_": "lightning.pytorch.Trainer", "max_epochs": 16, **options}
    return object_config("trainer", group_defaults("trainer", plain))


@pytest.mark.parametrize(
    ("options", "batches", "expected"),
    [
        ({}, 10, (1.0, 1)),
        ({"val_check_interval": 0.5}, 10, (0.5, 1)),
        ({"val_check_interval": 4}, 10, (4, None)),  # counted through epochs
        ({"val_check_interval": 400, "max_epochs": 16}, 4, (64, None)),  # 64 batches are all there are
        ({"val_check_interval": 400, "max_epochs": -1, "max_steps": 100}, 4, (100, None)),
        ({"max_steps": 3}, 10, (3, None)),  # ends in its first epoch
        ({"max_steps": 30}, 10, (1.0, 1)),
        ({"max_epochs": 3, "check_val_every_n_epoch": 5}, 10, (30, None)),
        # the last batches of an epoch step as well, though they are fewer: 2 steps an epoch of 5 batches
        ({"val_check_interval": 400, "max_epochs": -1, "max_steps": 4, "accumulate_grad_batches": 4}, 5, (10, None)),
        ({"val_check_interval": 400, "max_epochs": -1, "max_steps": 3, "accumulate_grad_batches": 4}, 5, (9, None)),
        ({"val_check_interval": 400, "max_epochs": 2, "limit_train_batches": 3}, 10, (6, None)),
        ({"val_check_interval": 400, "max_epochs": 2, "limit_train_batches": 0.5}, 10, (10, None)),
        ({"max_epochs": -1, "max_time": "00:01:00:00"}, 10, (1.0, 1)),
    ],
)
def test_a_training_is_validated_before_it_ends(options, batches, expected):
    found = validation(trainer_of(**options), batches)
    assert (found["val_check_interval"], found["check_val_every_n_epoch"]) == expected
