"""All callbacks of a run, with a module and data that have little of what they look at."""

import warnings
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from small_trainings import Memo
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
