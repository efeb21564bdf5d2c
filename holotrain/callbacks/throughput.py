"""ThroughputMonitor: the speed of training and the utilization of the device; FLOPs of a step, and peaks of GPUs."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from holotrain.callbacks.monitors import Monitor, log_scalars
from holotrain.checkpoints.exact_resume import shard_of
from holotrain.clock import Clock


@dataclass
class Window:
    """A period of training without interruption: its start, its end and the work done in it."""

    start: Any
    end: Any
    step: int
    steps: int
    samples: int
    tokens: int | Tensor


class ThroughputMonitor(Monitor):
    """Logs samples, tokens and FLOPs per second over windows of optimizer steps, for any Lightning Trainer.

    The time includes waiting for data, but not validation, the sanity check and the work between epochs. On a GPU it is
    measured with CUDA events, which are read after the GPU has passed them, so nothing waits.

    Args:
        every_n_steps: optimizer steps per window; None: the trainer's ``log_every_n_steps``; 0: measures
            over epochs and logs nothing.
        count_samples: returns the samples in a batch; None: the length of its first tensor.
        count_tokens: returns the tokens in a batch, as a number or as a tensor, which is read at the end of the window; None:
            tokens are not logged.
        model_flops_per_sample: FLOPs per sample of a training step (forward and backward) that stores everything. Used for
            MFU, which never includes recomputation (Chowdhery et al., PaLM, 2022, appendix B).
        hardware_flops_per_sample: FLOPs per sample that are computed, with recomputation. Used for HFU.
        peak_flops: peak FLOP/s of the device in the precision of the training, for MFU and HFU; in a configuration null is that
            of a known GPU. Without it, they are not logged. See :func:`~holotrain.callbacks.throughput.peak_flops`.

    Logs ``throughput/samples_per_second`` and ``throughput/tokens_per_second`` over all ranks,
    ``throughput/step_seconds`` per optimizer step, ``throughput/mfu`` and ``throughput/hfu`` as fractions.

    Attributes:
        samples_per_second, tokens_per_second, step_seconds: over all windows except the first, which is a warm-up (it counts if
            it is the only one); None if nothing was measured.
    """

    def __init__(
        self,
        every_n_steps: int | None = None,
        count_samples: Callable[[Any], int] | None = None,
        count_tokens: Callable[[Any], int | Tensor] | None = None,
        model_flops_per_sample: float | None = None,
        hardware_flops_per_sample: float | None = None,
        peak_flops: float | None = None,
    ) -> None:
        super().__init__(every_n_steps)
        self.count_samples = count_samples or first_length
        self.count_tokens = count_tokens
        self.model_flops_per_sample = model_flops_per_sample
        self.hardware_flops_per_sample = hardware_flops_per_sample
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops {peak_flops} must be above 0")
        self.peak_flops = peak_flops
        self.clock: Any = None
        self._open: Window | None = None
        self._pending: list[Window] = []
        self._measured: list[tuple[Window, float]] = []
        self._ranks = 1

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.clock = self.clock or Clock(pl_module.device)
        _, self._ranks = shard_of(trainer)
        self._begin(trainer.global_step)  # an epoch resumed in the middle has no on_train_epoch_start

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._begin(trainer.global_step)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (window := self._open) is None:
            return  # added after the training began
        window.samples += self.count_samples(batch)
        window.tokens += self.count_tokens(batch) if self.count_tokens else 0
        window.steps = trainer.global_step - window.step
        if 0 < self.period(trainer) <= window.steps:
            self._end(trainer)
            self._begin(trainer.global_step)

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._begin(trainer.global_step)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._end(trainer)
        self._read(trainer, wait=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._read(trainer, wait=False)

    @property
    def samples_per_second(self) -> float | None:
        return self._rate(lambda window: window.samples * self._ranks)

    @property
    def tokens_per_second(self) -> float | None:
        return self._rate(lambda window: int(window.tokens) * self._ranks) if self.count_tokens else None

    @property
    def step_seconds(self) -> float | None:
        rate = self._rate(lambda window: window.steps)
        return 1 / rate if rate else None

    def _rate(self, amount: Callable[[Window], int]) -> float | None:
        counted = self._measured[1:] or self._measured
        seconds = sum(seconds for _, seconds in counted)
        return sum(amount(window) for window, _ in counted) / seconds if seconds else None

    def _begin(self, step: int) -> None:
        if self.clock is not None:
            self._open = Window(self.clock.mark(), None, step, 0, 0, 0)

    def _end(self, trainer: pl.Trainer) -> None:
        """Closes the open window, if it has a step, and logs the windows whose time is known by now."""
        window, self._open = self._open, None
        if window is not None and window.steps:
            window.end = self.clock.mark()
            window.step += window.steps
            self._pending.append(window)
        self._read(trainer, wait=False)

    def _read(self, trainer: pl.Trainer, wait: bool) -> None:
        while self._pending:
            window = self._pending[0]
            seconds = self.clock.seconds(window.start, window.end, wait)
            if not seconds:
                return
            self._pending.pop(0)
            window.tokens = int(window.tokens)
            self._measured.append((window, seconds))
            if self.period(trainer):
                log_scalars(trainer, self._scalars(window, seconds), window.step)

    def _scalars(self, window: Window, seconds: float) -> dict[str, float]:
        rate = window.samples / seconds
        scalars = {
            "throughput/samples_per_second": rate * self._ranks,
            "throughput/step_seconds": seconds / window.steps,
        }
        if self.count_tokens:
            scalars["throughput/tokens_per_second"] = int(window.tokens) / seconds * self._ranks
        for name, flops in (("mfu", self.model_flops_per_sample), ("hfu", self.hardware_flops_per_sample)):
            if flops and self.peak_flops:
                scalars[f"throughput/{name}"] = rate * flops / self.peak_flops
        return scalars


def first_length(batch: Any) -> int:
    """The length of the first tensor in a batch.

    Raises:
        ValueError: the batch has no tensor.
    """
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return len(leaf)
    raise ValueError("the batch has no tensor; set ThroughputMonitor(count_samples=...)")


# Dense peaks in TFLOP/s, without sparsity. Sources: NVIDIA's data sheet of each card; for
# GeForce, the rows with FP32 accumulation (as PyTorch uses it) in the Ada and Blackwell whitepapers. The first match counts;
# "float32" is for matrix products without TF32.
PEAKS: list[tuple[str, dict[str, float]]] = [
    (r"H100 PCIe", {"half": 756, "tf32": 378, "float32": 51}),
    (r"H100 NVL", {"half": 835, "tf32": 417.5, "float32": 60}),
    (r"H100|H200", {"half": 989.5, "tf32": 494.7, "float32": 67}),
    (r"B200", {"half": 2250, "tf32": 1125, "float32": 75}),
    (r"A100", {"half": 312, "tf32": 156, "float32": 19.5}),
    (r"L40S", {"half": 362, "tf32": 183, "float32": 91.6}),
    (r"RTX 4090(?! (?:D|Laptop))", {"half": 165.2, "tf32": 82.6, "float32": 82.6}),
    (r"RTX 5090(?! (?:D|Laptop))", {"half": 209.5, "tf32": 104.8, "float32": 104.8}),
]


def peak_flops(device_name: str, precision: str) -> float | None:
    """The dense peak of a device in FLOP/s, or None if it is not known.

    Args:
        device_name: from ``torch.cuda.get_device_name()``.
        precision: Lightning's name: ``"bf16-mixed"``, ``"16-mixed"``, ``"32-true"``, ... 32-bit products count as TF32 if
            PyTorch is set to it; 64-bit peaks are not known.
    """
    if precision.startswith(("16", "bf16")):
        kind = "half"
    elif precision.startswith("32"):
        kind = "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "float32"
    else:
        return None
    peaks = _peaks_of(device_name)
    return peaks[kind] * 1e12 if peaks else None


def _peaks_of(device_name: str) -> dict[str, float] | None:
    found = (peaks for pattern, peaks in PEAKS if re.search(rf"\b(?:{pattern})(?![A-Za-z0-9])", device_name))
    return next(found, None)


def training_flops(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """FLOPs of one forward and backward, including recomputation. A multiply-add counts as two.

    Nothing is computed: a copy of the model runs on the meta device. Counts matrix products, convolutions and attention, as
    ``torch.utils.flop_counter`` does.

    Args:
        model: returns one tensor.
        inputs: of the size to count; values do not matter. If they do not require grad, their gradient is not counted, as in
            training.
    """
    model = copy.deepcopy(model).to("meta")
    inputs = tuple(tensor.to("meta") for tensor in inputs)
    with FlopCounterMode(display=False) as counter:
        model(*inputs).sum().backward()
    return counter.get_total_flops()
