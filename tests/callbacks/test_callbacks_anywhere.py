"""All callbacks of a run, with a module and data that have little of what they look at."""

import re
import warnings
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from small_trainings import Memo, quiet_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holotrain
from holotrain import callbacks
from holotrain.callbacks import BestCheckpoint, progress

PACKAGE = Path(holotrain.__file__).parent


class Regression(pl.LightningModule):
    """Knows nothing of holotrain: no classes, no metrics, no tokens."""

    def __init__(self, net=None):
        super().__init__()
        self.net = net or nn.Linear(4, 4)

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return self(inputs_of(batch)).square().mean()

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self(inputs_of(batch)).square().mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def inputs_of(batch):
    return batch if isinstance(batch, torch.Tensor) else batch["x" if isinstance(batch, dict) else 0]


DATA = {
    "dictionary": [{"x": x} for x in torch.ones(8, 4)],
    "list of one tensor": TensorDataset(torch.ones(8, 4)),
    "tensor": torch.ones(8, 4),
}


def fit(module, folder, added, data=DATA["dictionary"]):
    loader, logger = DataLoader(data, batch_size=4), Memo()
    trainer = pl.Trainer(
        max_epochs=2, accelerator="cpu", logger=logger, log_every_n_steps=1, callbacks=added, enable_model_summary=False,
        default_root_dir=folder,
    )  # fmt: skip
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        trainer.fit(module, loader, loader)
    ours = [str(one.message) for one in said if Path(one.filename).is_relative_to(PACKAGE)]
    return {tag for _, row in logger.rows for tag in row}, ours


MONITORS = (
    *("MemoryMonitor", "DriftMonitor", "ErrorDiffusionMonitor", "OptimizationMonitor", "Predictions"),
    *("ConfusionMatrix", "Samples", "ThroughputMonitor"),
)


@pytest.mark.parametrize("data", DATA)
def test_what_does_not_apply_does_nothing(data, tmp_path):
    added = [progress("lines"), *(getattr(callbacks, name)() for name in MONITORS), BestCheckpoint(tmp_path / "checkpoints")]
    logged, said = fit(Regression(), tmp_path, added, DATA[data])
    assert not said and {tag.partition("/")[0] for tag in logged - {"epoch"}} == {"memory", "optimization", "throughput", "val"}
    assert not list(tmp_path.rglob("*.ckpt"))  # no metric chooses one


class Constant(Regression):
    def validation_step(self, batch, batch_idx):
        self.log("val/accuracy", 0.75)


@pytest.mark.parametrize("mode", ["max", "min"])
@pytest.mark.parametrize(("save_top_k", "kept"), [(1, 1), (2, 2), (-1, 2)])
def test_of_equal_values_the_latest_is_kept_and_the_best(tmp_path, mode, save_top_k, kept):
    best = BestCheckpoint(tmp_path, "val/accuracy", mode, save_top_k)
    fit(Constant(), tmp_path, [progress("lines"), best])
    assert sorted(path.name for path in tmp_path.glob("*.ckpt"))[-kept:][-1] == Path(best.best_model_path).name
    assert len(list(tmp_path.glob("*.ckpt"))) == kept and Path(best.best_model_path).name == "best-epoch2-step4.ckpt"


class Explodes(Regression):
    """Each batch takes ten seconds; the metrics have names of its own, and sizes of all kinds."""

    def training_step(self, batch, batch_idx):
        self.now[0] += 10
        self.log("cost", 2.3125, prog_bar=True)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log_dict({"val/perplexity": 20312362.0, "val/loss": 1.25})


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        ({"max_epochs": 1}, ["10 min", "10 min"]),
        ({"max_steps": 32}, ["5 min", "5 min"]),
        ({"max_steps": 64, "max_time": "00:00:02:00"}, ["2 min", "2 min"]),
        ({"max_steps": 64, "max_time": "00:00:01:40"}, ["90 s", "80 s"]),
    ],
)
def test_the_lines_of_a_long_epoch_come_early_and_say_how_long_it_takes(monkeypatch, capsys, tmp_path, limits, left):
    module = Explodes()
    module.now = now = [0.0]
    for clock in ("holotrain.callbacks.shown.time", "lightning.pytorch.callbacks.timer.time"):
        monkeypatch.setattr(clock, SimpleNamespace(monotonic=lambda: now[0]))
    loader = DataLoader([{"x": x} for x in torch.ones(64, 4)], batch_size=1)
    quiet_trainer(**limits, callbacks=[progress("lines")], num_sanity_val_steps=0, default_root_dir=tmp_path).fit(
        module, loader, DataLoader([{"x": torch.ones(4)}])
    )
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("epoch 1")]
    steps = [int(line.split("  ")[1].removeprefix("step ")) for line in lines]
    assert steps[:4] == [1, 2, 4, 8] and "cost 2.312  10.0 s" in lines[0] and "val/" not in lines[1]
    assert [line.split("  ")[-1] for line in lines[:2]] == [f"10.0 s, about {left[0]} left", f"20.0 s, about {left[1]} left"]
    assert "cost 2.312  val/loss 1.25  val/perplexity 2.031e+07  640.0 s" in lines[-1] or "max_epochs" not in limits


def test_the_bar_counts_epochs_and_writes_numbers_as_the_lines_do(capsys, tmp_path):
    module, loader = Explodes(), DataLoader(DATA["tensor"], batch_size=2)
    module.now, bar = [0.0], progress("bar")
    shown = []
    texts = type(bar).get_metrics
    bar.get_metrics = lambda *of: shown.append((bar.progress.tasks[0].description, found := texts(bar, *of))) or found
    trainer = quiet_trainer(max_epochs=2, callbacks=[bar], enable_progress_bar=True, default_root_dir=tmp_path)
    trainer.fit(module, loader)
    assert [description for description, _ in shown][::4] == ["epoch 1/2", "epoch 1/2", "epoch 2/2"]
    assert re.fullmatch("[0-9]+ s", shown[0][1]["left"]) and shown[-1][1] == {"cost": 2.3125, "left": "-"}
    assert [*bar._metric_component._generate_metrics_texts()] == ["cost: 2.312", "left: -"]


class Evaluated(Explodes):
    def validation_step(self, batch, batch_idx):
        self.log("val/cost", 1.0)


@pytest.mark.parametrize("style", ["bar", "lines"])
def test_evaluations_before_and_without_a_training_are_shown(style, tmp_path):
    module, loader = Evaluated(), DataLoader(DATA["tensor"], batch_size=2)
    module.now = [0.0]
    options = {"callbacks": [progress(style)], "enable_progress_bar": style == "bar", "default_root_dir": tmp_path}
    quiet_trainer(max_epochs=1, num_sanity_val_steps=2, **options).fit(module, loader, loader)
    assert quiet_trainer(**options | {"callbacks": [progress(style)]}).validate(module, loader) == [{"val/cost": 1.0}]
