"""TraceProfiler: profiles a few training batches with torch.profiler and writes the results as files."""

import gzip
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.profilers import Profiler
from torch.autograd import DeviceType
from torch.profiler import profile, record_function

from holotrain.files import replacing
from holotrain.numeric import counted

TRACE, OPERATORS, ALLOCATIONS = "trace.json", "trace-operators.txt", "trace-allocations.pickle"
ZIPPED = TRACE + ".gz"

WARM_UP = 3
"""Batches before the traced ones, in which libraries choose kernels and allocate."""

LARGE = 16 * 2**20
"""Traces of at least this many bytes are compressed; Perfetto and Chrome read both."""

MOST = 5
"""Operators that are named at the end."""

BATCH = "run_training_batch"
EPOCH = "run_training_epoch"
"""Lightning's names of these actions."""


class TraceProfiler(Profiler):
    """Traces a few training batches, for any Lightning Trainer. The other batches run without a profiler.

        Trainer(profiler=TraceProfiler("my_run"))

    In Lightning's PyTorchProfiler a step ends with the forward, and modules stay labeled for the whole training. Here a batch
    consists of forward, backward and optimizer step, and nothing is recorded afterwards.

    It traces the first batch, so that even a training of one batch has a trace, then ``active`` batches after the engine has
    finished its measurements (earlier in a short training), which replace the files of the first one. The end of an epoch or a
    validation ends a recording.

    Args:
        folder: folder of the files, which are written atomically.
        active: number of consecutive batches to trace.
        stacks: also record the Python calls around each operator in the trace, but not of the first batch. The traced batches
            and the writing take longer then, and the trace is many times as large.

    Writes ``trace.json`` (``trace.json.gz`` if large) for ui.perfetto.dev or chrome://tracing, with counters of the memory in
    use; ``trace-operators.txt``, the operators and ranges that took longest; on a CUDA device also
    ``trace-allocations.pickle``, every allocation with its stack, for pytorch.org/memory_viz. In distributed training only
    the first process of each machine writes. After the training, the Trainer's log names the files and the operators that took
    the most time.

    Attributes:
        most_expensive: a line for each of the five operators that took the most time in themselves, the most expensive first.
    """

    _lightning_module: pl.LightningModule  # set by the Trainer

    def __init__(self, folder: str | Path, active: int = 3, stacks: bool = False) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.active, self.stacks = active, stacks
        self.most_expensive: list[str] = []
        self._batches = 0
        self._opened = 0
        self._later: range
        self._profile: profile | None = None
        self._ranges: list[tuple[str, record_function]] = []

    def start(self, action_name: str) -> None:
        if action_name == BATCH and not self._local_rank:
            self._begin_batch()
        elif "on_validation" in action_name:
            self._finish()
        # Of callbacks there are dozens of actions per batch, and most do nothing.
        if self._profile is not None and not action_name.startswith("[Callback]"):
            span = record_function(f"batch {self._batches + 1}" if action_name == BATCH else action_name)
            span.__enter__()
            self._ranges.append((action_name, span))

    def stop(self, action_name: str) -> None:
        if self._ranges and self._ranges[-1][0] == action_name:
            self._ranges.pop()[1].__exit__(None, None, None)
        if action_name == EPOCH:
            self._finish()
        elif action_name == BATCH and not self._local_rank:
            self._end_batch()

    def teardown(self, stage: str | None) -> None:
        self._finish()
        super().teardown(stage)

    def summary(self) -> str:
        """What the Trainer logs at the end: the most expensive operators, and where the table and the trace are."""
        if not self.most_expensive:
            return ""
        files = [path for path in (self.folder / OPERATORS, self.folder / TRACE, self.folder / ZIPPED) if path.exists()]
        title = f"most expensive operators of the traced batches, all in {' and '.join(map(str, files))}"
        return "\n  ".join([title, *self.most_expensive])

    def _begin_batch(self) -> None:
        if self._batches == 0:
            self._later = self._planned()
        if self._profile is None and (self._batches == 0 or self._batches in self._later):
            self._open()

    def _end_batch(self) -> None:
        self._batches += 1
        if self._batches == 1 or self._batches >= self._later.stop:
            self._finish()

    def _planned(self) -> range:
        """The batches to trace after the first, counted from 0."""
        trainer = self._lightning_module.trainer
        bounds = [WARM_UP + self.active]
        done = trainer.fit_loop.epoch_loop.total_batch_idx
        if trainer.fit_loop.max_epochs not in (None, -1):
            bounds.append(trainer.fit_loop.max_epochs * trainer.num_training_batches - done)
        if trainer.max_steps not in (None, -1):
            bounds.append((trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
        stop = int(min(bounds))
        return range(max(1, stop - self.active), stop)

    def _open(self) -> None:
        self._opened = self._batches
        # No stacks of the first batch, in which libraries are imported: that is millions of calls.
        stacks = self.stacks and self._batches > 0
        self._profile = profile(record_shapes=True, profile_memory=True, with_stack=stacks)
        self._cuda = self._lightning_module.device.type == "cuda"
        if self._cuda:
            torch.cuda.memory._record_memory_history(stacks="python")
        self._profile.start()

    def _finish(self) -> None:
        """Ends the current recording, if any, and writes it."""
        if self._profile is None:
            return
        while self._ranges:
            self._ranges.pop()[1].__exit__(None, None, None)
        if self._cuda:
            torch.cuda.synchronize()  # launched kernels belong to the batches
        ended, self._profile = self._profile, None
        ended.stop()
        if self._opened in self._later:  # do not restart a recording that the end of an epoch cut short
            self._later = range(self._batches, self._batches)
        try:
            self._write(ended)
        except OSError as error:
            warnings.warn(f"cannot write the trace: {error}", stacklevel=2)

    def _write(self, ended: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=f".{TRACE}.") as aside:
            exported = Path(aside) / TRACE
            ended.export_chrome_trace(str(exported))
            trace = json.loads(exported.read_text(encoding="utf-8"))
        trace["traceEvents"] += memory_counters(trace["traceEvents"])
        self._write_trace(json.dumps(trace).encode())
        with replacing(self.folder / OPERATORS) as path:
            path.write_text(_tables(ended, operators := _operators(ended), self._cuda), encoding="utf-8")
        self.most_expensive = _most_expensive(operators, self._cuda)
        if self._cuda:
            with replacing(self.folder / ALLOCATIONS) as path:
                torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write_trace(self, content: bytes) -> None:
        large = len(content) >= LARGE
        with replacing(self.folder / (ZIPPED if large else TRACE)) as path:
            path.write_bytes(gzip.compress(content, compresslevel=5) if large else content)
        (self.folder / (TRACE if large else ZIPPED)).unlink(missing_ok=True)  # left by the first batch or an earlier run


def memory_counters(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The bytes in use after each allocation and release as counters, which Perfetto draws as curves.

    Args:
        events: ``traceEvents`` of torch.profiler with ``profile_memory=True``. It writes allocations as instants.

    Returns:
        Events, one counter for each device. The CPU's bytes count from the first event, those of others from the start of the
        process.
    """
    counters, on_cpu = [], 0
    for event in sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"]):
        memory = event["args"]
        if memory["Device Type"] == 0:
            on_cpu += memory["Bytes"]
            name, in_use = "memory of the CPU", on_cpu
        else:
            name, in_use = f"memory of device {memory['Device Id']}", memory["Total Allocated"]
        counters.append({"ph": "C", "name": name, "pid": event["pid"], "ts": event["ts"], "args": {"bytes": in_use}})
    return counters


def _operators(ended: profile, **grouping: Any) -> Any:
    """Averages of operators, as torch's list: in place, because the list object knows its device. Ranges would count their
    operators twice."""
    averages = ended.key_averages(**grouping)
    averages[:] = [row for row in averages if not row.is_user_annotation]
    return averages


def _most_expensive(operators: Any, cuda: bool) -> list[str]:
    """The operators that took the most time in themselves: name, share of the time of all, and time in so many calls.

    On a CUDA device an operator's row has the time of its kernels, which also have rows of their own: those are left out.
    """
    own = "self_device_time_total" if cuda else "self_cpu_time_total"
    rows = [row for row in operators if row.device_type == DeviceType.CPU]
    times = sorted(((getattr(row, own), row.count, row.key) for row in rows), reverse=True)
    whole = sum(time for time, _, _ in times) or 1
    return [
        f"{name}: {time / whole:.1%}, {time / 1e3:.3f} ms in {counted(count, 'call')}" for time, count, name in times[:MOST]
    ]


def _tables(ended: profile, operators: Any, cuda: bool) -> str:
    """Tables of the most expensive operators, of operators by input shapes, and of the named ranges."""
    sort_by = "self_device_time_total" if cuda else "self_cpu_time_total"
    tables = {"operators": operators, "operators by input shapes": _operators(ended, group_by_input_shape=True)}
    widths = {"max_name_column_width": 50, "max_shapes_column_width": 60}
    parts = []
    for title, averages in tables.items():
        table = averages.table(sort_by=sort_by, row_limit=30, **widths)
        parts.append(f"{title}, by self time\n{table}")
    whole = "device_time_total" if cuda else "cpu_time_total"
    rows = [(getattr(row, whole) / 1e3, row.count, row.key) for row in ended.key_averages() if row.is_user_annotation]
    parts.append(f"ranges, by total time\n{'total ms':>10}  {'average ms':>10}  {'count':>5}  name")
    parts += [f"{total:10.3f}  {total / count:10.3f}  {count:5}  {name}" for total, count, name in sorted(rows, reverse=True)]
    return "\n".join(parts) + "\n"
