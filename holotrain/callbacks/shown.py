"""What people look at: in TensorBoard a confusion matrix, predictions and sampled texts, in the terminal a bar or lines."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Sequence
from typing import Any, Literal, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import RichProgressBar, Timer
from lightning.pytorch.callbacks.progress.rich_progress import RichProgressBarTheme
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchmetrics.classification import MulticlassConfusionMatrix
from torchvision.utils import make_grid

from holotrain.callbacks.monitors import log_figure, log_text
from holotrain.models import generate
from holotrain.models.generation import Sampling, can_generate
from holotrain.numeric import require_at_least

FIGURES = ".4g"
"""The form of numbers on the screen: in the bar, in the lines, and at the end."""

FIRST_LINE, LONGEST_SILENCE = 10.0, 600.0
"""Seconds after which a line says how far a training is, before anything was validated, and the longest between two."""


def classified(outputs: Any) -> tuple[Tensor, Tensor] | None:
    """``probabilities`` (B, classes) and ``labels`` (B,), if an evaluation step returned a dictionary with both."""
    if not isinstance(outputs, dict) or not {"probabilities", "labels"} <= outputs.keys() or outputs["labels"].ndim != 1:
        return None
    return outputs["probabilities"].detach(), outputs["labels"]


def class_names(trainer: pl.Trainer, classes: int) -> list[str]:
    """Those of the data module, cut to 20 characters, else their numbers. A dollar sign would begin a formula."""
    names = getattr(trainer.datamodule, "class_names", None) or []  # ty: ignore[missing-attribute]
    return [str(name)[:20].replace("$", r"\$") for name in (names if len(names) == classes else range(classes))]


class ConfusionMatrix(pl.Callback):
    """Logs the confusion matrix, with counts, as ``val/confusion_matrix`` and ``test/confusion_matrix``.

    For any classifier whose ``validation_step`` and ``test_step`` return a dictionary with ``probabilities`` (B, classes) and
    ``labels`` (B,). It counts the first loader, over all processes.

    Args:
        max_classes: with more classes than this, it draws nothing. Counts are written into a matrix of up to 20 classes.

    Attributes:
        figure: the last matrix; None before the first.
    """

    def __init__(self, max_classes: int = 100) -> None:
        self.max_classes = max_classes
        self.figure: Figure | None = None
        self._metric: MulticlassConfusionMatrix | None = None

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        found = classified(outputs)
        if trainer.sanity_checking or dataloader_idx or found is None or found[0].shape[1] > self.max_classes:
            return
        if self._metric is None:
            self._metric = MulticlassConfusionMatrix(found[0].shape[1], validate_args=False).to(found[0].device)
        self._metric.update(*found)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw(trainer, "val/confusion_matrix")

    on_test_batch_end = on_validation_batch_end

    def on_test_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._draw(trainer, "test/confusion_matrix")

    def _draw(self, trainer: pl.Trainer, tag: str) -> None:
        metric, self._metric = self._metric, None
        if metric is None:
            return
        counts = metric.compute()  # over all processes
        if trainer.is_global_zero:
            classes = len(counts)
            side = min(2 + 0.7 * classes, 24)  # inches
            self.figure = Figure((side, side), layout="constrained")
            axes = self.figure.subplots()
            metric.plot(counts, axes, add_text=classes <= 20, labels=class_names(trainer, classes), cmap="Blues")
            log_figure(trainer.loggers, tag, self.figure, trainer.global_step)


class Predictions(pl.Callback):
    """Logs ``val/predictions`` at each validation: images with label, prediction and its probability.

    For classifiers as in :class:`ConfusionMatrix` with batches (images (B, 1 or 3, H, W), labels (B,)). It shows the first
    images of batches that are spread over the first loader, each scaled to its own range.

    Args:
        count: number of images.
    """

    def __init__(self, count: int = 9) -> None:
        require_at_least(1, count=count)
        self.count = count
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []

    def on_validation_batch_end(
        self,
        trainer: pl.Trainer,
        pl_module: pl.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        images, found = batch[0] if isinstance(batch, list | tuple) else None, classified(outputs)
        if found is None or not isinstance(images, Tensor) or images.ndim != 4 or images.shape[1] not in (1, 3):
            return
        batches = trainer.num_val_batches[0]  # may be infinite
        if not (trainer.sanity_checking or dataloader_idx) and (
            batches == math.inf or batch_idx % max(batches // self.count, 1) == 0
        ):
            first = slice(max(math.ceil(self.count / batches), 1))
            self._rows += zip(images[first].clone(), found[0][first], found[1][first], strict=True)

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        rows, self._rows = self._rows[: self.count], []
        if not (rows and trainer.is_global_zero and trainer.loggers):
            return
        names, height = class_names(trainer, len(rows[0][1])), math.ceil(len(rows) / 3)
        figure = Figure((6, 2.4 * height), layout="constrained")
        for place, (image, probabilities, label) in enumerate(rows):
            predicted = int(probabilities.argmax())
            axes = figure.add_subplot(height, 3, place + 1)
            axes.imshow(make_grid(image.cpu().float(), normalize=True).permute(1, 2, 0))
            said = f"label {names[label]}\npredicted {names[predicted]}, {probabilities[predicted].item():.0%}"
            axes.set_title(said, fontsize=9, color="green" if predicted == label else "red")
            axes.set_axis_off()
        log_figure(trainer.loggers, "val/predictions", figure, trainer.global_step)


class Samples(pl.Callback):
    """Logs ``val/samples`` at each validation: how a causal language model goes on with prompts, by the same random numbers.

    For a model that can generate, in ``pl_module.model`` and not sharded, and a data module with a ``tokenizer``.

    Args:
        prompts: texts to go on with; of a long one as much as fills half of the context. An empty one
            begins a document; None: two empty ones.
        tokens: number of tokens to add to each.
    """

    def __init__(self, prompts: Sequence[str] | None = None, tokens: int = 64) -> None:
        prompts = ["", ""] if prompts is None else prompts
        if isinstance(prompts, str) or not prompts:
            raise ValueError("prompts must be a list of at least one text")
        require_at_least(1, tokens=tokens)
        self.prompts, self.tokens = prompts, tokens

    # Before on_validation_end: then an average of the weights is still in place, and the time does not count as training.
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model, tokenizer = getattr(pl_module, "model", None), getattr(trainer.datamodule, "tokenizer", None)  # ty: ignore[missing-attribute]
        if not isinstance(model, nn.Module) or not can_generate(model) or tokenizer is None or not trainer.is_global_zero:
            return
        if trainer.sanity_checking or any(isinstance(each, DTensor) or each.is_meta for each in model.parameters()):
            return
        end, longest = tokenizer.end_id, cast(int, model.context) // 2
        starts = [torch.tensor([end, *tokenizer.encode(prompt).tolist()][-longest:]) for prompt in self.prompts]
        generator = torch.Generator(pl_module.device).manual_seed(0)
        # Each length of the cache would be compiled anew.
        with trainer.precision_plugin.forward_context(), torch.compiler.set_stance("force_eager"):
            try:
                rows = torch.stack([*generate(model, starts, self.tokens, Sampling(), end, generator)], dim=1).tolist()
                texts = [tokenizer.decode([token for token in row if token != end]) for row in rows]
            except ValueError as error:  # NaN: the training goes on, and its loss shows it
                texts = [f"({error})"] * len(self.prompts)
        shown = "\n\n".join(f"{prompt} | {text}" for prompt, text in zip(self.prompts, texts, strict=True))
        log_text(trainer.loggers, "val/samples", shown, trainer.global_step)


class EpochLog(pl.Callback):
    """Prints one line per epoch, and one per validation within an epoch, so that the log of a batch job stays readable. Where
    these are far apart, others stand between them: after 10, 20, 40, ... seconds of training, and every ten minutes.

    A line has epoch, step, metrics (those of the progress bar), the seconds since the start of the epoch, and about how long
    the training still takes, validations included.
    """

    _pace: Pace | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pace, self._due = Pace(trainer), FIRST_LINE
        self._started = self._pace.began  # on_train_epoch_start is not called for an epoch that is resumed

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = time.monotonic()

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert self._pace is not None
        if self._pace.seconds >= self._due and not trainer.is_last_batch:  # the line of the epoch follows
            self._print(trainer, evaluated=False)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        ended = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch or 0 <= trainer.max_steps <= trainer.global_step
        if trainer.state.fn == "fit" and not (trainer.sanity_checking or ended):  # the line of the epoch follows
            self._print(trainer)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._print(trainer)

    def _print(self, trainer: pl.Trainer, evaluated: bool = True) -> None:
        assert self._pace is not None
        seconds = self._pace.seconds
        self._due = seconds + min(max(seconds, FIRST_LINE), LONGEST_SILENCE)
        if not trainer.is_global_zero:
            return
        metrics: dict[str, Any] = {
            name: each for name, each in trainer.callback_metrics.items() if name.startswith(("train/loss", "val/"))
        }
        metrics |= trainer.progress_bar_metrics  # of a LightningModule of others, which has names of its own
        shown = sorted((name, value) for name, value in metrics.items() if evaluated or not name.startswith("val"))
        figures = "  ".join(f"{name} {value:{FIGURES}}" for name, value in shown)
        left = self._pace.left(trainer)
        times = f"{time.monotonic() - self._started:.1f} s" + (f", about {left} left" if left else "")
        line = f"epoch {epoch_of(trainer)}  step {trainer.global_step}  {figures}  {times}"
        print(line, flush=True)
        logging.getLogger("holotrain").info(line)


class Bar(RichProgressBar):
    """Lightning's bar, which is of an epoch. It counts epochs from 1, and says how long the whole training still takes."""

    _pace: Pace | None = None  # before a training, in a sanity check

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._pace = Pace(trainer)
        super().on_train_start(trainer, pl_module)

    def _get_train_description(self, current_epoch: int) -> str:
        return f"epoch {epoch_of(self.trainer)}"

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, pl_module)
        metrics.pop("v_num", None)  # the first screen names the folder
        left = None if self._pace is None else self._pace.left(trainer)
        return metrics | {"left": left or "-"}


class Pace:
    """How fast a training is since it began, or was resumed: ``began``, in seconds of the monotonic clock."""

    def __init__(self, trainer: pl.Trainer) -> None:
        self.began, self._before = time.monotonic(), share_done(trainer)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def left(self, trainer: pl.Trainer) -> str | None:
        """About how long the rest takes, validations included; None: that is not known, or there is none."""
        done = share_done(trainer)
        if not self._before < done < 1:
            return None
        left = self.seconds * (1 - done) / (done - self._before)
        return f"{left:.0f} s" if left < 100 else f"{left / 60:.0f} min" if left < 6000 else f"{left / 3600:.1f} h"


def share_done(trainer: pl.Trainer) -> float:
    """How much of a training is done, by the limit of epochs, steps or time that will end it."""
    batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
    limits = [(batches, (trainer.max_epochs or 0) * trainer.num_training_batches), (trainer.global_step, trainer.max_steps)]
    timer = next((each for each in trainer.callbacks if isinstance(each, Timer)), None)  # ty: ignore[missing-attribute]
    if timer is not None and (left := timer.time_remaining()) is not None:
        limits.append((timer.time_elapsed(), timer.time_elapsed() + left))
    return max((done / most for done, most in limits if most > 0), default=0.0)


def epoch_of(trainer: pl.Trainer) -> str:
    """The number of the epoch, from 1, and of how many."""
    return f"{trainer.current_epoch + 1}" + (f"/{trainer.max_epochs}" if (trainer.max_epochs or 0) > 0 else "")


def progress(style: Literal["auto", "bar", "lines"] = "auto") -> pl.Callback:
    """Shows how far a training is.

    Args:
        style: bar or lines (one per epoch, or more of a long one); auto: bar on a terminal, else lines
    """
    if style == "auto":
        style = "bar" if sys.stdout.isatty() else "lines"
    return Bar(theme=RichProgressBarTheme(metrics_format=FIGURES)) if style == "bar" else EpochLog()
