"""Norms of gradients and updates, against what the training did."""

import lightning.pytorch as pl
import pytest
import torch
from memo import Memo
from shown_runs import adamw
from small_trainings import quiet_trainer
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from holotrain.callbacks import OptimizationMonitor
from holotrain.callbacks.monitors import SAMPLED, norm_of, sample

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


def test_a_part_of_a_large_tensor_stands_for_all():
    torch.manual_seed(0)
    parameter = torch.randn(1024, 768) * torch.arange(1, 769) / 768  # columns differ
    part = sample(parameter)
    assert part.numel() <= SAMPLED and norm_of([part]).item() == pytest.approx(parameter.norm().item(), rel=0.02)


def test_the_norm_of_a_sparse_gradient_adds_up_repeated_entries():
    gradient = torch.sparse_coo_tensor([[1, 1, 2]], torch.tensor([[2.0], [1.0], [4.0]]), (4, 1))
    assert norm_of([gradient, torch.tensor([12.0])]).item() == 13
