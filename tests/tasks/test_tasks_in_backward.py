"""Steps in the backward under Lightning's loop: the same training, and what a trainer must not do."""

import lightning.pytorch as pl
import pytest
import torch
from compared import assert_equal
from covering import paired
from small_models import IMAGE
from small_trainings import Memo, quiet_trainer
from torch.utils.data import DataLoader

from holotrain.callbacks import SynthesisCallback
from holotrain.models import RevViT
from holotrain.optimizers import InBackward
from holotrain.tasks import ImageClassifier, optimizer_functions, schedules

MAKERS = {
    "sgd": lambda model: optimizer_functions.sgd(model, lr=0.1),
    "adamw": optimizer_functions.adamw,
    "muon": lambda model: optimizer_functions.muon(model, lr=0.01),
}


def task_of(make, in_backward, **options):
    torch.manual_seed(0)
    model = RevViT(**IMAGE, backward="reversible", drop_path=0.1)
    optimizer = (lambda model: InBackward(make(model))) if in_backward else make
    return ImageClassifier(model, 5, optimizer=optimizer, scheduler=schedules.cosine, **options)


def fit(task, steps=6, **options):
    images = torch.randn(48, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    data = DataLoader([*zip(images, torch.arange(48) % 5, strict=True)], batch_size=4)
    memo = Memo()
    trainer = quiet_trainer(**{"max_steps": steps, "log_every_n_steps": 1, "logger": memo, **options})
    torch.manual_seed(2)
    trainer.fit(task, data)
    return trainer, memo


@pytest.mark.parametrize(("make", "precision"), paired([*MAKERS.values()], ["bf16-mixed", "32-true"]))
def test_a_training_is_the_same_to_the_bit(make, precision):
    for clip in ({}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}):
        usual, ours = task_of(make, False), task_of(make, True)
        _, expected = fit(usual, precision=precision, **clip)
        trainer, logged = fit(ours, precision=precision, **clip)
        assert trainer.global_step == 6 and all(parameter.grad is None for parameter in ours.parameters())
        assert_equal(ours.state_dict(), usual.state_dict())
        assert logged.of("train/loss") == expected.of("train/loss") and logged.of("train/lr") == expected.of("train/lr")


class Scaling(pl.plugins.precision.MixedPrecision):
    def __init__(self):
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches above 1"),
        ({"gradient_clip_val": 1.0}, "gradient clipping by norm"),
        ({"plugins": Scaling}, "gradient scaling of 16-mixed"),
        ({"strategy": "ddp"}, "DDPStrategy"),
        ({"callbacks": lambda: [SynthesisCallback()]}, "a synthesis needs gradients"),
        ({"graphs": True}, "a CUDA graph needs gradients after the backward"),
    ],
)
def test_a_trainer_that_needs_the_gradients_is_refused(options, words, monkeypatch):
    options = {name: value() if callable(value) else value for name, value in options.items()}
    task = task_of(MAKERS["sgd"], True, graphs=options.pop("graphs", False))
    if "strategy" in options:
        for name, value in {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=words):
        fit(task, **options)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
