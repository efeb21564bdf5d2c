"""Norms of gradients and updates, and histograms, against what the training did."""

import lightning.pytorch as pl
import pytest
import torch
from memo import Memo
from shown_runs import Logged, adamw, fit, images
from small_trainings import quiet_trainer
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from holotrain.callbacks import Histograms, OptimizationMonitor
from holotrain.callbacks.optimization import parts_of

NORM, RATIO = "optimization/gradient_norm", "optimization/update_ratio"


class Regression(pl.LightningModule):
    """Notes the norm of every gradient before clipping, and the relative size of every update."""

    def __init__(self, optimizer=adamw):
        super().__init__()
        self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.optimizer = optimizer
        self.norms, self.ratios = [], []

    def training_step(self, batch, batch_idx):
        return self.model(batch).square().mean() * 100

    def on_before_optimizer_step(self, optimizer):
        self.norms.append(get_total_norm([p.grad for p in self.parameters()]).item())

    def optimizer_step(self, *args, **kwargs):
        before = [p.detach().clone() for p in self.parameters()]
        super().optimizer_step(*args, **kwargs)
        change = get_total_norm([p.detach() - b for p, b in zip(self.parameters(), before, strict=True)])
        self.ratios.append((change / get_total_norm(before)).item())

    def configure_optimizers(self):
        return self.optimizer(self)


def run(module, *callbacks, **options):
    memo = Memo()
    trainer = quiet_trainer(**{"max_epochs": 1, "log_every_n_steps": 2} | options, logger=memo, callbacks=[*callbacks])
    trainer.fit(module, DataLoader(torch.randn(24, 4, generator=torch.Generator().manual_seed(0)), batch_size=2))
    return memo


@pytest.mark.parametrize("options", [{}, {"gradient_clip_val": 0.01}, {"accumulate_grad_batches": 3}])
def test_logged_norms_are_those_of_the_step_before_clipping(options):
    module = Regression()
    memo = run(module, OptimizationMonitor(), **options)
    steps = len(module.norms)
    assert steps == (4 if "accumulate_grad_batches" in options else 12)
    logged = range(2, steps + 1, 2)
    assert memo.of(NORM) == [(step, pytest.approx(module.norms[step - 1], rel=1e-5)) for step in logged]
    assert memo.of(RATIO) == [(step, pytest.approx(module.ratios[step - 1], rel=1e-4)) for step in logged]


def test_the_norm_of_each_part_adds_up_to_the_total():
    memo = run(Regression(), OptimizationMonitor(every_n_steps=5, per_block=True))
    rows = [row for _, row in memo.rows if NORM in row]
    assert len(rows) == 2 and {tag for tag in rows[0] if tag.startswith(NORM)} == {NORM, f"{NORM}/0", f"{NORM}/2"}
    for row in rows:
        assert row[NORM] == pytest.approx((row[f"{NORM}/0"] ** 2 + row[f"{NORM}/2"] ** 2) ** 0.5, rel=1e-6)
    names = ["model.embed.weight", "model.blocks.blocks.0.f.a", "model.blocks.blocks.0.g.0.b", "model.blocks.blocks.11.f.a"]
    assert list(parts_of(names)) == ["embed", "blocks.blocks.0", "blocks.blocks.11"]
    assert list(parts_of(["weight", "bias"])) == ["weight", "bias"]


class HalfPrecision(pl.plugins.precision.MixedPrecision):
    """16-mixed on a CPU: scales and unscales gradients, and computes in fp32."""

    def __init__(self):
        super().__init__("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))

    def autocast_context_manager(self):
        return torch.autocast("cpu", enabled=False)


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients_are_measured_without_their_scale(fused):
    def optimizer(module):
        made = torch.optim.SGD(module.parameters(), lr=1e-3, fused=fused)
        assert getattr(made, "_step_supports_amp_scaling", False) == fused
        return made

    torch.manual_seed(0)
    plain = run(Regression(optimizer), OptimizationMonitor(every_n_steps=3)).of(NORM)
    torch.manual_seed(0)
    scaled = run(Regression(optimizer), OptimizationMonitor(every_n_steps=3), plugins=[HalfPrecision()]).of(NORM)
    assert len(plain) == 4 and scaled == [(step, pytest.approx(norm, rel=1e-4)) for step, norm in plain]


class Look(pl.Callback):
    """Keeps weights and gradients of a step, and then spoils some gradients."""

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 5:
            layer = pl_module.model[1]
            self.weights, self.gradients = layer.weight.detach().clone(), layer.weight.grad.clone()
            layer.bias.grad.fill_(float("nan"))
            pl_module.model[4].bias.grad[0] = float("inf")


def test_histograms_hold_the_finite_weights_and_gradients_of_a_step(tmp_path):
    look = Look()
    task, data = images()
    fit(task, data, [look, Histograms(every_n_steps=6)], tmp_path)
    logged = Logged(tmp_path)
    assert len(logged.tags["histograms"]) == 7 and "gradients/model.1.bias" not in logged.tags["histograms"]
    for kind, expected in (("weights", look.weights), ("gradients", look.gradients)):
        (event,) = logged.events.Histograms(f"{kind}/model.1.weight")
        found = event.histogram_value
        assert (event.step, found.num) == (6, expected.numel())
        figures = [expected.min().item(), expected.max().item(), expected.sum().item()]
        assert [found.min, found.max, found.sum] == pytest.approx(figures, rel=1e-4)
    assert logged.events.Histograms("gradients/model.4.bias")[0].histogram_value.num == 9
