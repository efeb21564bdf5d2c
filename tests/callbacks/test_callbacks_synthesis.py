"""SynthesisCallback against a plain loop: where it stands between backward, unscaling, clipping and the optimizer's step."""

import warnings
from itertools import count
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from compared import assert_equal_parameters
from lightning.pytorch.plugins.precision import MixedPrecision
from small_trainings import Memo, quiet_trainer
from torch import nn

from holotrain import clock
from holotrain.callbacks import SynthesisCallback
from holotrain.checkpoints.saving import ExactCheckpoint
from holotrain.synthesis import HolographicSynthesis

BATCHES = list(torch.randn(12, 6, 5, generator=torch.Generator().manual_seed(1)) + 0.5)


class Regression(pl.LightningModule):
    def __init__(self, optimizers: int = 1, **optimizer) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3))
        self.optimizer, self.count = {"lr": 0.002, **optimizer}, optimizers
        self.automatic_optimization = optimizers == 1

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, batch_idx):
        return self(batch).square().sum()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.layers.parameters(), **self.optimizer) for _ in range(self.count)]


def fit(callback, epochs=2, module=None, checkpoint=None, callbacks=(), **options):
    module = module or Regression()
    saving = any(isinstance(callback, ExactCheckpoint) for callback in callbacks)
    options = {"max_epochs": epochs, "callbacks": [callback, *callbacks], "enable_checkpointing": saving} | options
    loader = torch.utils.data.DataLoader(BATCHES, batch_size=None, shuffle=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        trainer = quiet_trainer(**options)
        trainer.fit(module, loader, ckpt_path=checkpoint, weights_only=True)
    return module, trainer


def loop(options, epochs=2, accumulate=1, clip=None, scaler=None, **optimizer_options):
    """The same training in plain PyTorch."""
    module = Regression()
    optimizer = torch.optim.SGD(module.layers.parameters(), **{"lr": 0.002} | optimizer_options)
    synthesis = HolographicSynthesis(module, **options)
    for _ in range(epochs):
        for start in range(0, len(BATCHES), accumulate):
            for batch in BATCHES[start : start + accumulate]:
                with torch.autocast("cpu", torch.float16, enabled=scaler is not None):
                    loss = module(batch).square().sum() / accumulate
                (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.unscale_(optimizer)
            synthesis.step()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
    return module, synthesis


@pytest.mark.parametrize(("options", "accumulate", "clip"), [({}, 4, 0.5), ({"cosine_floor": 0.5, "split": "cpu"}, 1, None)])
def test_it_is_the_plain_loop_and_leaves_no_hooks(options, accumulate, clip):
    module, _ = fit(SynthesisCallback(**options), accumulate_grad_batches=accumulate, gradient_clip_val=clip)
    assert_equal_parameters(module, loop(options, accumulate=accumulate, clip=clip)[0])
    assert not any(part._forward_hooks for part in module.modules())


def scaler():
    return torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=8)


def test_scaled_gradients_that_overflow():
    """16-mixed: the scale is too large at first, and grows too large again; those steps are skipped, the rest is the loop's."""
    callback, seen = SynthesisCallback(), []
    callback.on_train_end = lambda trainer, module: seen.append((callback.synthesis.steps, callback.synthesis.skipped))
    module, _ = fit(callback, plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler())], gradient_clip_val=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        twin, synthesis = loop({}, clip=1.0, scaler=scaler())
    assert_equal_parameters(module, twin)
    assert seen == [(synthesis.steps, synthesis.skipped)]
    assert synthesis.skipped > 1 and synthesis.steps > 10


def test_a_fused_optimizer_with_scaled_gradients_and_several_optimizers_are_refused():
    with pytest.raises(ValueError, match="fused=False"):
        fit(SynthesisCallback(), module=Regression(fused=True), plugins=[MixedPrecision("16-mixed", "cpu", scaler=scaler())])
    with pytest.raises(ValueError, match="one optimizer; this training has 2"):
        fit(SynthesisCallback(), module=Regression(optimizers=2))


def test_a_module_within_and_patterns_that_select_its_parameters():
    module, _ = fit(SynthesisCallback("bind", module="layers"))
    assert_equal_parameters(module, loop({"mode": "bind"})[0])
    callback = SynthesisCallback(cover=["*weight", "2.*"], exclude=["0.*"], module="layers")
    covered = callback.applied_to(Regression()).state_dict()["geometry"]["parameters"]
    assert [name.split()[0] for name in covered] == ["2.weight", "2.bias"]


@pytest.mark.parametrize(
    ("chosen", "words"),
    [
        ({"module": "nothing"}, "module='nothing'"),
        ({"exclude": ["*"]}, "leave no parameter"),
        ({"cover": ["wieght"]}, "cover: 'wieght' matches no"),
    ],
)
def test_what_covers_nothing_is_refused(chosen, words):
    with pytest.raises(ValueError, match=words):
        fit(SynthesisCallback(**chosen))


def test_scalars_say_how_long_and_how_alike(monkeypatch):
    """On a clock that is read at 0, 1, 4, 9, ... seconds."""
    monkeypatch.setattr(clock, "time", SimpleNamespace(perf_counter=(n**2 for n in count()).__next__))
    memo = Memo()
    fit(SynthesisCallback(every_n_steps=5), logger=memo)
    assert memo.of("synthesis/milliseconds") == [(5, 1e3), (10, 5e3), (15, 9e3), (20, 13e3)]
    for _, row in memo.rows:
        assert row.keys() == {f"synthesis/{name}" for name in ("milliseconds", "gradient_cosine", "update_norm", "skipped")}
        assert 0 < row["synthesis/gradient_cosine"] < 1 and row["synthesis/skipped"] == 0
        assert row["synthesis/update_norm"] > 0


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "fp16", "ema": 0.9, "key_ema": 0.9},
        {"mode": "shared", "ema": 0.5, "subsample": 0.5, "split": "cpu"},
        {"mode": "bind", "representation": "flattened", "split": "cpu", "mix": 0.5, "dtype": "fp16"},
    ],
)
def test_resuming_is_the_same_bit_for_bit(tmp_path, options):
    saving = ExactCheckpoint(tmp_path, filename="{step}", every_n_epochs=1, save_top_k=-1)
    whole, _ = fit(SynthesisCallback(**options), epochs=3, callbacks=[saving])
    resumed, trainer = fit(SynthesisCallback(**options), epochs=3, checkpoint=tmp_path / "step=12.ckpt")
    assert trainer.global_step == 36
    assert_equal_parameters(resumed, whole)
