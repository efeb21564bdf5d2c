"""TraceProfiler: profiles a few training batches with torch.profiler and writes the results as files."""

import gzip
import json
import math
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.profilers import Profiler
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import profile, record_function

from holotrain.dashboard.curves import thinned
from holotrain.files import replacing

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

    _lightning_module: pl.LightningModule  # set by the Trainer

    def __init__(self, folder: str | Path, active: int = 3) -> None:
        super().__init__()
        self.folder = Path(folder)
        self.active = active
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

    def _begin_batch(self) -> None:
        if self._batches == 0:
            self._later = self._planned()
        traced = self._batches == 0 or self._batches in self._later
        memory = self._batches in (0, self._later.stop)
        if self._profile is None and (traced or memory):
            self._open(traced, memory)

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
        everywhere = _ExperimentalConfig(profile_all_threads=not memory)
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
                with replacing(self.folder / OPERATORS) as path:
                    path.write_text(_tables(ended, self._cuda), encoding="utf-8")
                self._keep(exported)

    def _write_memory(self, events: list[dict[str, Any]]) -> None:
        with replacing(self.folder / MEMORY) as path:
            path.write_text(memory_picture(events, f"memory during training batch {self._opened + 1}"), encoding="utf-8")
        if self._cuda:
            with replacing(self.folder / ALLOCATIONS) as path:
                torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)

    def _keep(self, exported: Path) -> None:
        large = exported.stat().st_size >= LARGE
        with replacing(self.folder / (ZIPPED if large else TRACE)) as path:
            if large:
                with exported.open("rb") as plain, gzip.open(path, "wb", compresslevel=5) as zipped:
                    shutil.copyfileobj(plain, zipped)
            else:
                exported.replace(path)
        (self.folder / (TRACE if large else ZIPPED)).unlink(missing_ok=True)  # left by the first batch or an earlier run


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


WIDTH, HEIGHT, LEFT, TOP, ROW = 1120, 320, 90, 60, 26
"""Pixels: size of the curve, margins to its left and top, and height of a row of ranges below it."""

POINTS = 4 * WIDTH
"""To about so many points the curve is thinned."""

ROWS = {
    "step": ("#8c8c8c", ("training_step", "backward")),
    "forward": ("#4477aa", ("forward ",)),
    "recompute": ("#ee8833", ("recompute ",)),
    "gradients": ("#228855", ("gradients ",)),
}
"""The rows, with their colors and the prefixes of the names of their ranges."""


@dataclass(frozen=True)
class Range:
    """Times in microseconds."""

    row: str
    name: str
    begin: float
    end: float


def memory_picture(events: Iterable[dict], title: str) -> str:
    """Draws the memory curve, and below it the ranges that ran.

    Args:
        events: ``traceEvents`` of a Chrome trace from torch.profiler with ``profile_memory=True``.

    Returns:
        SVG; only a line of text if nothing was allocated.
    """
    events = list(events)
    (points, device), ranges = curve_of(events), ranges_of(events)
    rows = [row for row in ROWS if any(r.row == row for r in ranges)]
    height = TOP + HEIGHT + ROW * len(rows) + 34
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 30}" height="{height}" font-family="sans-serif" '
        'font-size="12" fill="#222"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    if not points:
        return "\n".join([*lines, f'<text x="{LEFT}" y="60">no allocations</text></svg>\n'])
    times = [time for time, _ in points] + [t for r in ranges for t in (r.begin, r.end)]
    begin, end = min(times), max(times)
    floor, peak = min(0, *(b for _, b in points)), max(1, *(b for _, b in points))

    def x(time: float) -> float:
        return LEFT + WIDTH * (time - begin) / ((end - begin) or 1)

    def y(value: float) -> float:
        return TOP + HEIGHT * (1 - (value - floor) / (peak - floor))

    for value in _ticks(floor / 2**20, peak / 2**20):
        level = y(value * 2**20)
        lines.append(f'<path d="M{LEFT} {level:.1f}h{WIDTH}" stroke="#ddd"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{level + 4:.1f}" text-anchor="end">{value:g} MiB</text>')
    bottom = TOP + HEIGHT + ROW * len(rows)
    for value in _ticks(0, (end - begin) / 1e3):
        place = x(begin + value * 1e3)
        lines.append(f'<path d="M{place:.1f} {TOP}V{bottom + 6}" stroke="#eee"/>')
        lines.append(f'<text x="{place:.1f}" y="{bottom + 20}" text-anchor="middle">{value:g} ms</text>')
    lines += [_rectangle(r, TOP + HEIGHT + ROW * rows.index(r.row), x) for r in ranges]
    lines += [
        f'<text x="{LEFT - 8}" y="{TOP + HEIGHT + ROW * i + 18}" text-anchor="end">{row}</text>' for i, row in enumerate(rows)
    ]
    shown = thinned(np.array([value for _, value in points]), POINTS, at=np.array([time for time, _ in points]))
    path = "".join(f"H{x(points[index][0]):.1f}V{y(points[index][1]):.1f}" for index in shown)
    last, origin = points[-1][1], f"M{LEFT} {y(0):.1f}"
    lines.append(f'<path d="{origin}{path}H{x(end):.1f}V{y(0):.1f}Z" fill="#aaccee" fill-opacity="0.6" stroke="none"/>')
    lines.append(f'<path d="{origin}{path}H{x(end):.1f}" fill="none" stroke="#224466"/>')
    when, _ = max(points, key=lambda point: point[1])
    during = [r.name for r in ranges if r.begin <= when <= r.end and r.row != "step"]
    lines.append(f'<circle cx="{x(when):.1f}" cy="{y(peak):.1f}" r="4" fill="#cc3311"/>')
    above = "above the start of the step" if device == "CPU" else "in use"
    told = f"{device}: peak {peak / 2**20:.1f} MiB {above} at {(when - begin) / 1e3:.1f} ms"
    told += f", during {' and '.join(during)}" if during else ""
    lines.append(f'<text x="{LEFT}" y="44">{escape(told)}; {last / 2**20:.1f} MiB at the end</text>')
    return "\n".join([*lines, "</svg>\n"])


def curve_of(events: Iterable[dict]) -> tuple[list[tuple[float, int]], str]:
    """The bytes in use after each allocation and release, with times in microseconds, and the name of their device: the first
    accelerator with events, else the CPU, whose bytes count from the first event."""
    seen = [event for event in events if event.get("name") == "[memory]"]
    seen.sort(key=lambda event: event["ts"])
    device = max(((e["args"]["Device Type"], -e["args"]["Device Id"]) for e in seen), default=(0, 0))
    seen = [e["args"] | {"ts": e["ts"]} for e in seen if (e["args"]["Device Type"], -e["args"]["Device Id"]) == device]
    if device[0] != 0:
        return [(e["ts"], e["Total Allocated"]) for e in seen], f"device {-device[1]}"
    points, now = [], 0
    for event in seen:
        now += event["Bytes"]
        points.append((event["ts"], now))
    return points, "CPU"


def ranges_of(events: Iterable[dict]) -> list[Range]:
    """The ranges of the host, by the names from the engine and from Lightning.

    Lightning runs training_step and backward inside the optimizer step; only the part after them counts as "optimizer".
    """
    found, around = [], []
    for event in events:
        if event.get("cat") != "user_annotation":
            continue
        name = event["name"].rpartition(".")[2] if event["name"].startswith("[") else event["name"]
        if name == "optimizer_step":
            around.append((event["ts"], event["ts"] + event["dur"]))
        for row, (_, beginnings) in ROWS.items():
            if name.startswith(beginnings):
                found.append(Range(row, name, event["ts"], event["ts"] + event["dur"]))
    for begin, end in around:
        own = max((r.end for r in found if r.name == "backward" and begin <= r.begin <= end), default=begin)
        found.append(Range("step", "optimizer", own, end))
    return found


def _rectangle(r: Range, top: int, x: Callable[[float], float]) -> str:
    width = max(x(r.end) - x(r.begin), 1)
    name = r.name.partition(" ")[2] or r.name
    label = f'<text x="{x(r.begin) + 3:.1f}" y="{top + 18}" font-size="10" fill="white">{escape(name)}</text>'
    return (
        f'<rect x="{x(r.begin):.1f}" y="{top + 4}" width="{width:.1f}" height="{ROW - 6}" fill="{ROWS[r.row][0]}" '
        f'stroke="white" stroke-width="0.5"><title>{escape(r.name)}: {(r.end - r.begin) / 1e3:.2f} ms</title></rect>'
    ) + (label if width > 6 * len(name) + 4 else "")


def _ticks(low: float, high: float) -> Iterator[float]:
    """About six round numbers between two."""
    rough = (high - low) / 8 or 1
    size = 10.0 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
    for number in range(math.ceil(low / step), math.floor(high / step) + 1):
        yield round(number * step, 10)
