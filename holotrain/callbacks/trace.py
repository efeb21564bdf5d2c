"""TraceProfiler: profiles a few training batches with torch.profiler and writes the results as files."""

import gzip
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.profilers import Profiler
from torch.profiler import profile, record_function

from holotrain.callbacks.memory_picture import memory_picture

TRACE, OPERATORS, MEMORY, ALLOCATIONS = "trace.json", "trace-operators.txt", "trace-memory.svg", "trace-allocations.pickle"
ZIPPED = TRACE + ".gz"

WARM_UP = 3
"""Batches before the traced ones, in which libraries choose kernels and allocate."""

LARGE = 16 * 2**20
"""Traces of at least this many bytes are compressed; Perfetto and Chrome read both."""

BATCH = "run_training_batch"
EPOCH = "run_training_epoch"
"""Lightning's names of these actions."""


class TraceProfiler(Profiler):
    """Traces a few training batches, for any Lightning Trainer. The other batches run without a profiler.

        Trainer(profiler=TraceProfiler("my_run"))

    In Lightning's PyTorchProfiler a step ends with the forward, and modules stay labeled for the whole training. Here a batch
    consists of forward, backward and optimizer step, and nothing is recorded afterwards.

    It traces the first batch, so that even a training of one batch has a trace, then ``active`` batches after the engine has
    finished its measurements (earlier in a short training), which replace the files of the first one, and one more batch for
    memory, because torch.profiler cannot record all threads and memory together. The end of an epoch or a validation ends a
    recording.

    Args:
        folder: folder of the files, which are written atomically.
        active: number of consecutive batches to trace.

    Writes ``trace.json`` (``trace.json.gz`` if large) for ui.perfetto.dev or chrome://tracing; ``trace-operators.txt``, the
    operators and ranges that took longest; ``trace-memory.svg``, memory during one batch; on a CUDA device also
    ``trace-allocations.pickle``, every allocation with its stack, for pytorch.org/memory_viz. In distributed training only
    the first process of each machine writes. On a CPU the memory of a second thread (pareprop) is not recorded.
    """

    def __init__(self, folder: str | Path, active: int = 3) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.active = active
        self._batches = 0
        self._opened = 0
        self._later: range | None = None
        self._profile: profile | None = None
        self._ranges: list[tuple[str, record_function]] = []

    def start(self, action_name: str) -> None:
        if action_name == BATCH and not self._local_rank:
            self._begin_batch()
        elif "on_validation" in action_name:
            self._finish()
        if self._profile is not None and not action_name.startswith(
            "[Callback]"
        ):  # there are dozens per batch, and most do nothing
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

    def _begin_batch(self) -> None:
        if self._later is None:
            self._later = self._planned()
        if self._profile is not None:
            return
        if self._batches == 0:
            self._open(traced=True, memory=True)
        elif self._batches in self._later:
            self._open(traced=True, memory=False)
        elif self._batches == self._later.stop:
            self._open(traced=False, memory=True)

    def _end_batch(self) -> None:
        self._batches += 1
        if self._batches == 1 or self._batches >= self._later.stop:
            self._finish()

    def _planned(self) -> range:
        """The batches to trace after the first, counted from 0. The batch after them is for memory."""
        trainer = self._lightning_module.trainer
        bounds = [WARM_UP + self.active + 1]
        done = trainer.fit_loop.epoch_loop.total_batch_idx
        if trainer.fit_loop.max_epochs not in (None, -1):
            bounds.append(trainer.fit_loop.max_epochs * trainer.num_training_batches - done)
        if trainer.max_steps not in (None, -1):
            bounds.append((trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches)
        stop = max(2, int(min(bounds)) - 1)
        return range(max(1, stop - self.active), stop)

    def _open(self, traced: bool, memory: bool) -> None:
        self._opened, self._traced, self._memory = self._batches, traced, memory
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=not memory)
        self._profile = profile(record_shapes=traced, profile_memory=memory, experimental_config=everywhere)
        self._cuda = self._lightning_module.device.type == "cuda"
        if memory and self._cuda:
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
            if self._memory:
                self._write_memory(json.loads(exported.read_text(encoding="utf-8"))["traceEvents"])
            if self._traced:
                with _whole(self.folder / OPERATORS) as path:
                    path.write_text(_tables(ended, self._cuda), encoding="utf-8")
                self._keep(exported)

    def _write_memory(self, events: list[dict[str, Any]]) -> None:
        with _whole(self.folder / MEMORY) as path:
            path.write_text(memory_picture(events, f"memory during training batch {self._opened + 1}"), encoding="utf-8")
        if self._cuda:
            with _whole(self.folder / ALLOCATIONS) as path:
                torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _keep(self, exported: Path) -> None:
        large = exported.stat().st_size >= LARGE
        with _whole(self.folder / (ZIPPED if large else TRACE)) as path:
            if large:
                with exported.open("rb") as plain, gzip.open(path, "wb", compresslevel=5) as zipped:
                    shutil.copyfileobj(plain, zipped)
            else:
                exported.replace(path)
        (self.folder / (TRACE if large else ZIPPED)).unlink(missing_ok=True)  # left by the first batch or an earlier run


@contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A temporary path, which is renamed to ``path`` at the end."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _tables(ended: profile, cuda: bool) -> str:
    """Tables of the most expensive operators, of operators by input shapes, and of the named ranges."""
    sort_by = "self_device_time_total" if cuda else "self_cpu_time_total"
    parts = []
    for title, shapes in (("operators", False), ("operators by input shapes", True)):
        averages = ended.key_averages(group_by_input_shape=shapes)
        # In place, because the list object knows its device. Ranges would count their operators twice.
        averages[:] = [row for row in averages if not row.is_user_annotation]
        table = averages.table(sort_by=sort_by, row_limit=30, max_name_column_width=50, max_shapes_column_width=60)
        parts.append(f"{title}, by self time\n{table}")
    whole = "device_time_total" if cuda else "cpu_time_total"
    rows = [(getattr(row, whole) / 1e3, row.count, row.key) for row in ended.key_averages() if row.is_user_annotation]
    parts.append(f"ranges, by total time\n{'total ms':>10}  {'average ms':>10}  {'count':>5}  name")
    parts += [f"{total:10.3f}  {total / count:10.3f}  {count:5}  {name}" for total, count, name in sorted(rows, reverse=True)]
    return "\n".join(parts) + "\n"
