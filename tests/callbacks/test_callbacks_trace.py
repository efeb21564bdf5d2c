"""TraceProfiler in any Trainer: what it leaves, and that it leaves the training alone."""

import gzip
import json

import lightning.pytorch as pl
import torch
from compared import assert_equal_parameters
from small_trainings import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader

from holotrain.callbacks.trace import TraceProfiler
from holotrain.reversible import ReversibleBlock, ReversibleSequence

LEFT = {"trace.json.gz", "trace-operators.txt"}


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = ReversibleSequence([ReversibleBlock(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)])
        self.profiled = []

    def training_step(self, batch, batch_idx):
        self.profiled.append(torch.autograd.profiler._is_profiler_enabled)
        return sum(y.square().sum() for y in self.blocks(batch, batch))

    def validation_step(self, batch, batch_idx):
        assert not torch.autograd.profiler._is_profiler_enabled

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def fit(profiler, batches, module=None, **options):
    module = module or Module()
    trainer = quiet_trainer(**{"max_epochs": 1} | options, profiler=profiler, num_sanity_val_steps=0)
    data = torch.ones(2 * batches, 4)
    trainer.fit(module, DataLoader(data, 2), DataLoader(data[:2], 2))
    return module


def events_in(folder):
    return json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))["traceEvents"]


def names(folder):
    events = events_in(folder)
    named = sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: e["ts"])
    return [event["name"] for event in named]


def test_a_few_batches_are_traced_and_the_rest_is_left_alone(tmp_path):
    module = fit(TraceProfiler(tmp_path), 20)
    assert {path.name for path in tmp_path.iterdir()} == LEFT
    assert [number for number, on in enumerate(module.profiled, 1) if on] == [1, 2, 3, 4, 5, 6]
    seen = names(tmp_path)
    assert [name for name in seen if name.startswith("batch ")] == ["batch 4", "batch 5", "batch 6"]
    assert seen.count("forward 1") == seen.count("recompute 0.f") == 3
    assert any(name.endswith(".backward") for name in seen)
    operators = (tmp_path / "trace-operators.txt").read_text()
    assert "aten::addmm" in operators and "recompute 1.g" in operators
    assert_equal_parameters(module, fit(None, 20))
