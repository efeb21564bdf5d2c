"""TraceProfiler in any Trainer: what it leaves, and that it leaves the training alone."""

import gzip
import json
import xml.etree.ElementTree as ElementTree

import lightning.pytorch as pl
import pytest
import torch
from compared import assert_equal_parameters
from small_trainings import quiet_trainer
from torch import nn
from torch.utils.data import DataLoader

from holotrain.callbacks import TraceProfiler, trace
from holotrain.callbacks.trace import POINTS, curve_of, memory_picture, ranges_of
from holotrain.reversible import ReversibleBlock, ReversibleSequence

LEFT = {"trace.json", "trace-operators.txt", "trace-memory.svg"}


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


def names(folder):
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    named = sorted((e for e in events if e.get("cat") == "user_annotation"), key=lambda e: e["ts"])
    return [event["name"] for event in named]


def test_a_few_batches_are_traced_and_the_rest_is_left_alone(tmp_path):
    module = fit(TraceProfiler(tmp_path), 20)
    assert {path.name for path in tmp_path.iterdir()} == LEFT
    assert [number for number, on in enumerate(module.profiled, 1) if on] == [1, 4, 5, 6, 7]
    seen = names(tmp_path)
    assert [name for name in seen if name.startswith("batch ")] == ["batch 4", "batch 5", "batch 6"]
    assert seen.count("forward 1") == seen.count("recompute 0.f") == 3
    assert any(name.endswith(".backward") for name in seen)
    operators = (tmp_path / "trace-operators.txt").read_text()
    assert "aten::addmm" in operators and "recompute 1.g" in operators
    assert "memory during training batch 7" in (tmp_path / "trace-memory.svg").read_text()


@pytest.mark.parametrize("batches, traced, memory", [(1, [1], 1), (2, [2], 1), (3, [2], 3), (6, [3, 4, 5], 6)])
def test_a_short_training_leaves_a_trace_of_what_there_was(tmp_path, batches, traced, memory):
    fit(TraceProfiler(tmp_path), batches)
    assert [name for name in names(tmp_path) if name.startswith("batch ")] == [f"batch {number}" for number in traced]
    assert f"memory during training batch {memory}" in (tmp_path / "trace-memory.svg").read_text()


def test_an_epochs_end_ends_what_is_recorded(tmp_path):
    module = fit(TraceProfiler(tmp_path), 5, max_epochs=4)  # the first epoch ends with batch 5
    assert [number for number, on in enumerate(module.profiled, 1) if on] == [1, 4, 5, 6]
    assert [name for name in names(tmp_path) if name.startswith("batch ")] == ["batch 4", "batch 5"]


def test_a_training_that_fails_leaves_a_trace(tmp_path):
    class Failing(Module):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().training_step(batch, batch_idx)

    with pytest.raises(torch.OutOfMemoryError):
        fit(TraceProfiler(tmp_path), 6, Failing())
    assert [name for name in names(tmp_path) if name.startswith("batch ")] == ["batch 3", "batch 4"]
    assert not torch.autograd.profiler._is_profiler_enabled


def test_tracing_changes_no_weight(tmp_path):
    traced, alone = fit(TraceProfiler(tmp_path), 6), fit(None, 6)
    assert_equal_parameters(traced, alone)


def test_a_large_trace_is_zipped_and_takes_the_place_of_a_small_one(tmp_path, monkeypatch):
    fit(TraceProfiler(tmp_path), 1)
    monkeypatch.setattr(trace, "LARGE", 1)
    fit(TraceProfiler(tmp_path), 1)
    assert {path.name for path in tmp_path.iterdir()} == LEFT - {"trace.json"} | {"trace.json.gz"}
    assert json.loads(gzip.decompress((tmp_path / "trace.json.gz").read_bytes()))["traceEvents"]


def test_a_full_disk_ends_no_training(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.warns(UserWarning, match="cannot write the trace"):
        module = fit(TraceProfiler(tmp_path / "file"), 2)
    assert len(module.profiled) == 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_on_a_gpu_allocations_are_left_too(tmp_path):
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, max_epochs=1, profiler=TraceProfiler(tmp_path), logger=False, enable_checkpointing=False
    )
    trainer.fit(Module(), DataLoader(torch.ones(12, 4), 2))
    assert {path.name for path in tmp_path.iterdir()} == LEFT | {"trace-allocations.pickle"}
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert "device 0: peak" in (tmp_path / "trace-memory.svg").read_text()


def memory(ts, size, total=0, kind=0, number=-1):
    args = {"Bytes": size, "Total Allocated": total, "Device Type": kind, "Device Id": number}
    return {"name": "[memory]", "ph": "i", "ts": ts, "args": args}


def span(name, ts, dur):
    return {"name": name, "cat": "user_annotation", "ts": ts, "dur": dur}


MIB = 2**20
STEP = [
    memory(1, 2 * MIB),
    memory(5, 6 * MIB),
    memory(8, -7 * MIB),
    span("forward 0", 0, 3),
    span("recompute 0.g", 4, 2),
    span("[Strategy]SingleDeviceStrategy.backward", 3, 5),
    span("[LightningModule]Module.optimizer_step", 0, 10),
    span("[Callback]Other.on_after_backward", 8, 1),
]


def test_the_picture_tells_peak_and_what_ran_then():
    picture = memory_picture(STEP, "a <title>")
    texts = [text.text for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    assert "a <title>" in texts
    assert "CPU: peak 8.0 MiB above the start of the step at 0.0 ms, during recompute 0.g; 1.0 MiB at the end" in texts
    assert {"forward", "recompute", "step"} <= set(texts) and "gradients" not in texts


def test_the_optimizers_own_time_is_what_follows_the_backward():
    found = {(r.row, r.name): (r.begin, r.end) for r in ranges_of(STEP)}
    assert found == {
        ("forward", "forward 0"): (0, 3),
        ("recompute", "recompute 0.g"): (4, 6),
        ("step", "backward"): (3, 8),
        ("step", "optimizer"): (8, 10),
    }


def test_an_accelerators_memory_comes_before_the_hosts():
    events = [memory(1, 10), memory(2, 20, total=120, kind=1, number=0), memory(3, -5, total=115, kind=1, number=0)]
    assert curve_of(events) == ([(2, 120), (3, 115)], "device 0")


def test_a_picture_of_nothing_says_so():
    assert "no allocations" in memory_picture([], "nothing")


def test_a_long_curve_is_thinned_and_keeps_its_peak():
    sizes = [1, -1] * 25_000 + [1000, -1000] + [1, -1] * 25_000
    picture = memory_picture([memory(ts, size) for ts, size in enumerate(sizes)], "long")
    curve = picture[picture.index('<path d="M90 380.0H') :].partition('"/>')[0]
    assert "V60.0" in curve and curve.count("H") <= 1.5 * POINTS + 3
