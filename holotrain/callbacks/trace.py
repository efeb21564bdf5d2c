"""TraceProfiler: profiles a few training batches with torch.profiler and writes the trace."""

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.profilers import Profiler
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList
from torch.profiler import profile, record_function

from holotrain.numeric import counted

TRACE, OPERATORS = "trace.json.gz", "trace-operators.txt"

WARM_UP, ACTIVE = 3, 3
"""Batches before the traced ones, in which libraries choose kernels and allocate, and traced batches."""

BATCH, EPOCH, VALIDATION = "run_training_batch", "run_training_epoch", "on_validation_start"
"""Lightning's names of these actions, or what they end with."""


class TraceProfiler(Profiler):
    """Traces the fourth to the sixth training batch with torch.profiler, for any Lightning Trainer.

        Trainer(profiler=TraceProfiler("my_run"))

    A trace holds whole batches: forward, backward and optimizer step. (Lightning's PyTorchProfiler traces three of every five
    batches of the whole training, from the end of one forward to that of another.) The end of an epoch and a validation end
    it. The first three batches are recorded too, in case that the training ends there; all later ones run without a profiler.

    Args:
        folder: where ``trace.json.gz`` (for ui.perfetto.dev) and ``trace-operators.txt``, the operators by the time that they
            took, are written; of several processes only the first of each machine writes.

    Attributes:
        most_expensive: a line for each of the five operators that took the most time in themselves.
    """

    _lightning_module: pl.LightningModule  # set by the Trainer

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.most_expensive: list[str] = []
        self._batches = 0
        self._profile: profile | None = None
        self._ranges: list[tuple[str, record_function]] = []

    def start(self, action_name: str) -> None:
        if action_name == BATCH and not self._local_rank and self._batches in (0, WARM_UP):
            self._end()
            self._profile = profile(record_shapes=True)
            self._profile.start()
        elif action_name.endswith(VALIDATION):
            self._write()
        # Of callbacks there are dozens of actions per batch, and most do nothing.
        if self._profile is not None and not action_name.startswith("[Callback]"):
            span = record_function(f"batch {self._batches + 1}" if action_name == BATCH else action_name)
            span.__enter__()
            self._ranges.append((action_name, span))

    def stop(self, action_name: str) -> None:
        if self._ranges and self._ranges[-1][0] == action_name:
            self._ranges.pop()[1].__exit__(None, None, None)
        self._batches += action_name == BATCH
        if action_name == EPOCH or self._batches == WARM_UP + ACTIVE:
            self._write()

    def teardown(self, stage: str | None) -> None:
        self._write()
        super().teardown(stage)

    def summary(self) -> str:
        """What the Trainer logs at the end; nothing in a process that does not write."""
        title = f"most expensive operators of the traced batches, see {self.folder / OPERATORS} and {self.folder / TRACE}"
        return "\n  ".join([title, *self.most_expensive]) if self.most_expensive else ""

    def _end(self) -> profile | None:
        """Ends the recording, if there is one."""
        while self._ranges:
            self._ranges.pop()[1].__exit__(None, None, None)
        ended, self._profile = self._profile, None
        if ended is not None:
            ended.stop()  # waits for the kernels that were launched
        return ended

    def _write(self) -> None:
        ended = self._end()
        if ended is None:
            return
        own = "self_device_time_total" if self._lightning_module.device.type == "cuda" else "self_cpu_time_total"
        operators = ended.key_averages()
        self.folder.mkdir(parents=True, exist_ok=True)
        ended.export_chrome_trace(str(self.folder / TRACE))
        table = operators.table(sort_by=own, row_limit=50, max_name_column_width=50)
        (self.folder / OPERATORS).write_text(table, encoding="utf-8")
        self.most_expensive = most_expensive(operators, own)


def most_expensive(operators: EventList, own: str, number: int = 5) -> list[str]:
    """The operators that took the most time in themselves: name, share of the time of all, and time in so many calls.

    Args:
        operators: ``key_averages()`` of a profile. Rows of kernels are left out, because an operator's row has the time of its
            kernels, and ranges, because they would count their operators twice.
        own: the attribute of a row that has this time, in microseconds.
        number: how many are returned.
    """
    rows = [row for row in operators if row.device_type == DeviceType.CPU and not row.is_user_annotation]
    rows.sort(key=lambda row: getattr(row, own), reverse=True)
    total = sum(getattr(row, own) for row in rows) or 1
    times = [(row, getattr(row, own)) for row in rows[:number]]
    return [f"{row.key}: {time / total:.1%}, {time / 1e3:.3f} ms in {counted(row.count, 'call')}" for row, time in times]
