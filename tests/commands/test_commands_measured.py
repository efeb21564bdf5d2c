"""What a checkpoint says of what was measured: a file may hold anything."""

from types import SimpleNamespace

import pytest
import torch

from holotrain.commands.measured import Measured

TRAINER = SimpleNamespace(callbacks=[], callback_metrics={"val/loss": torch.tensor(0.5)})


@pytest.mark.parametrize("kept", [None, [], {"metrics": 3}, {"command": 1, "status": "completed", "step_seconds": "fast"}])
def test_what_is_no_measurement_is_left_out(kept):
    measured = Measured(resumed=True)
    measured.on_load_checkpoint(TRAINER, None, {"measured": kept})
    assert measured.results(TRAINER) == {"metrics": {"val/loss": 0.5}}


@pytest.mark.parametrize("resumed", [True, False])
def test_only_a_resumed_training_has_the_numbers_of_its_checkpoint(resumed):
    measured = Measured(resumed)
    held = {"metrics": {"train/loss": 2.0, "val/loss": 3.0, 4: 5.0}, "step_seconds": 0.1}
    measured.on_load_checkpoint(TRAINER, None, {"measured": held})
    before = {"metrics": {"train/loss": 2.0, "val/loss": 0.5}, "step_seconds": 0.1}
    assert measured.results(TRAINER) == (before if resumed else {"metrics": {"val/loss": 0.5}})
