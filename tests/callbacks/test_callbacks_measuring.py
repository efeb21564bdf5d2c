"""Memory, throughput, FLOPs, and norms of gradients and updates as the monitors report them."""

import mmap

import lightning.pytorch as pl
import pytest
import torch
from shown_runs import adamw
from small_trainings import Memo, quiet_trainer
from torch import nn
from torch.nn.utils import get_total_norm
from torch.utils.data import DataLoader

from holotrain.callbacks import DriftMonitor, MemoryMonitor, OptimizationMonitor, ThroughputMonitor
from holotrain.callbacks.throughput import peak_flops, training_flops
from holotrain.models import RevViT
from holotrain.planning.memory_tracker import LinuxProbe
from holotrain.reversible import ReversibleBlock, ReversibleSequence

MIB = 2**20
RESETTABLE = pytest.mark.skipif(not LinuxProbe.works(), reason="the kernel does not let a process reset its peak")


class Module(pl.LightningModule):
    """Calls what it is given with the number of each batch of the training, and of the validation."""

    def __init__(self, in_training=None, in_validation=None):
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.in_training, self.in_validation = in_training, in_validation

    def training_step(self, batch, batch_idx):
        if self.in_training:
            self.in_training(batch_idx)
        return self.layer(batch).sum()

    def validation_step(self, batch, batch_idx):
        if self.in_validation:
            self.in_validation(batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(module, *callbacks, samples=8, batch=2, validation=False, **options):
    memo = Memo()
    usual = {"max_epochs": 1, "num_sanity_val_steps": 0, "log_every_n_steps": 1}
    trainer = quiet_trainer(**usual | options, logger=memo, callbacks=[*callbacks])
    loaders = [DataLoader(torch.ones(samples, 1), batch_size=batch)]
    if validation:
        loaders.append(DataLoader(torch.ones(2, 1)))
    trainer.fit(module, *loaders)
    return memo


def eat(mib):
    """Takes memory for a moment, from the kernel: an allocator may hold that much from an earlier test, and would not grow."""
    with mmap.mmap(-1, mib * MIB) as pages:
        torch.frombuffer(pages, dtype=torch.uint8).fill_(1)


@RESETTABLE
def test_a_peak_is_seen_in_its_phase_and_forgotten_after():
    monitor = MemoryMonitor()
    memo = fit(Module(lambda batch: batch == 1 and eat(200), lambda batch: eat(400)), monitor, validation=True)
    phase = dict(memo.of("memory/forward_backward_peak_MiB"))
    optimizer = dict(memo.of("memory/optimizer_peak_MiB"))
    assert list(phase) == [1, 2, 3, 4]
    assert phase[2] - phase[1] > 150 and phase[2] - phase[3] > 150
    assert phase[2] - optimizer[2] > 150
    peak = dict(memo.of("memory/peak_MiB"))  # the last value is the result of the run
    assert peak[1] < phase[2] == peak[2] == peak[3]
    validation = memo.of("memory/validation_peak_MiB")[-1][1]
    assert validation - phase[2] > 150 and monitor.peak_bytes == validation * MIB
    assert all(memo.of(f"memory/{mark}_MiB") for mark in ("forward", "backward", "step", "validation"))
    assert not memo.of("memory/reserved_MiB")


class Wide(Module):
    """A layer of 1 MiB, whose optimizer has two states."""

    def __init__(self, in_training=None):
        super().__init__(in_training)
        self.layer = nn.Linear(512, 512, bias=False)

    def training_step(self, batch, batch_idx):
        super().training_step(batch.expand(-1, 512), batch_idx)
        return self.layer(batch.expand(-1, 512)).sum()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), foreach=False)


def test_the_peak_of_a_step_is_that_of_its_tensors():
    monitor = MemoryMonitor()
    memo = fit(Wide(), monitor)
    assert 4 < monitor.step_peak_bytes / MIB < 6.1  # weights, gradients, two states; and two of an update
    assert memo.of("memory/step_peak_MiB")[-1][1] == monitor.step_peak_bytes / MIB
    compiled = Wide()
    compiled.layer.compile(backend="eager")
    fit(compiled, monitor := MemoryMonitor())
    assert monitor.step_peak_bytes is None


class Ticks:
    """A clock that advances by what the training says that it took; it may lag behind, as a GPU does."""

    def __init__(self, lag=0):
        self.now, self.lag, self.asked = 0.0, lag, 0

    def mark(self):
        return self.now

    def seconds(self, earlier, later, wait=False):
        self.asked += 1
        return None if not wait and self.asked <= self.lag else later - earlier

    def take(self, seconds):
        self.now += seconds


def timed_fit(lag=0, monitor=None, **options):
    """Every training batch takes 2 s, every validation batch 100 s."""
    clock = Ticks(lag)
    monitor = monitor or ThroughputMonitor()
    monitor.clock = clock
    return monitor, fit(Module(lambda _: clock.take(2), lambda _: clock.take(100)), monitor, **options)


@pytest.mark.parametrize("lag", [0, 3, 1000])
def test_throughput_is_what_the_clock_says(lag):
    monitor, memo = timed_fit(lag, samples=12, batch=3)
    assert memo.of("throughput/samples_per_second") == [(step, 1.5) for step in (1, 2, 3, 4)]
    assert memo.of("throughput/step_seconds") == [(step, 2.0) for step in (1, 2, 3, 4)]
    assert (monitor.samples_per_second, monitor.step_seconds, monitor.tokens_per_second) == (1.5, 2.0, None)
    assert not memo.of("throughput/mfu") and not memo.of("throughput/tokens_per_second")


def test_validation_does_not_count_and_all_accumulated_batches_do():
    accumulated = {"samples": 24, "batch": 2, "accumulate_grad_batches": 3, "max_epochs": 2, "log_every_n_steps": 3}
    _, memo = timed_fit(validation=True, val_check_interval=6, **accumulated)
    assert memo.of("throughput/step_seconds") == [(step, 6.0) for step in (2, 4, 6, 8)]
    assert memo.of("throughput/samples_per_second") == [(step, 1.0) for step in (2, 4, 6, 8)]


def test_tokens_and_utilisation():
    flops = {"model_flops_per_sample": 100, "hardware_flops_per_sample": 130, "peak_flops": 1000}
    monitor = ThroughputMonitor(count_tokens=lambda batch: 7 * len(batch), **flops)
    monitor, memo = timed_fit(monitor=monitor, samples=8, batch=4)
    first = [memo.of(f"throughput/{name}")[0] for name in ("tokens_per_second", "mfu", "hfu")]
    assert first == [(1, 14.0), (1, pytest.approx(0.2)), (1, pytest.approx(0.26))]
    assert monitor.tokens_per_second == 14.0


def test_flops_of_a_linear_layer():
    """2 B I O forward, the same for the gradient in the weight; the gradient in the input is not needed."""
    assert training_flops(nn.Linear(30, 50), (torch.zeros(4, 30),)) == 2 * (2 * 4 * 30 * 50)


def test_a_reversible_model_recomputes_its_blocks_once():
    def flops(backward, depth):
        with torch.device("meta"):
            model = RevViT(image_size=32, patch_size=8, dim=24, depth=depth, heads=3, classes=5, backward=backward)
        return training_flops(model, (torch.zeros(1, 3, 32, 32),))

    block_step = (flops("autograd", 4) - flops("autograd", 2)) / 2
    assert flops("reversible", 4) - flops("autograd", 4) == pytest.approx(4 * block_step / 3)


@pytest.mark.parametrize(
    ("name", "precision", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16-mixed", 989.5),
        ("NVIDIA H100 PCIe", "16-mixed", 756),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "bf16-mixed", None),
        ("NVIDIA H100", "64-true", None),
    ],
)
def test_peaks_are_of_the_card_named(name, precision, tera):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else before)
    try:
        assert peak_flops(name, precision.replace("tf32", "32-true")) == (None if tera is None else tera * 1e12)
    finally:
        torch.set_float32_matmul_precision(before)


class Reversible(Module):
    """A deep reversible stack, whose branches are as coarse as bf16."""

    def __init__(self, **engine):
        super().__init__()

        pairs = [[nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(2)] for _ in range(24)]
        self.net = ReversibleSequence([ReversibleBlock(f, g) for f, g in pairs], **engine)

    def training_step(self, batch, batch_idx):
        x = torch.linspace(-1, 1, 64).view(4, 16) * (batch_idx + 1)
        with torch.autocast("cpu", torch.bfloat16):
            y1, y2 = self.net(x, x.tanh())
        return (y1 * y2).mean()


def test_drift_is_measured_in_one_step_of_a_window():
    module = Reversible(backward="reversible")
    memo = fit(module, DriftMonitor(every_n_steps=2))
    drifts = memo.of("reversible/drift")
    assert [step for step, _ in drifts] == [1, 3]
    assert all(1e-8 < drift < 1e-1 for _, drift in drifts)


@pytest.mark.parametrize(("engine", "drifts"), [({"exact": True}, [0.0] * 4), ({"backward": "checkpoint"}, [])])
def test_drift_of_what_is_exact_or_stored(engine, drifts):
    memo = fit(Reversible(**engine), DriftMonitor())
    assert [drift for _, drift in memo.of("reversible/drift")] == drifts


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
