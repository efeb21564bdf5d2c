"""What callbacks share: how often they measure, what they ask of a trainer, and how they log."""

from collections.abc import Iterable, Mapping

import lightning.pytorch as pl
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from matplotlib.figure import Figure

from holotrain.numeric import require_at_least
from holotrain.reversible.graphs import GraphedStep


class Monitor(pl.Callback):
    """Measures in one of every n optimizer steps.

    Args:
        every_n_steps: n; None: the trainer's ``log_every_n_steps``; 0: never.

    Raises:
        ValueError: n is negative.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        require_at_least(0, every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps

    def period(self, trainer: pl.Trainer) -> int:
        """n, or 0."""
        return trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps  # ty: ignore[missing-attribute]

    def ends_window(self, trainer: pl.Trainer, step: int) -> bool:
        """Whether this optimizer step, counted from 1, is one of those that are measured."""
        period = self.period(trainer)
        return period > 0 and step % period == 0

    def measures(self, trainer: pl.Trainer) -> bool:
        """Whether the optimizer step that comes next, or that is being taken, is one of those."""
        return self.ends_window(trainer, trainer.global_step + 1)


def log_scalars(trainer: pl.Trainer, scalars: Mapping[str, float], step: int) -> None:
    """To all loggers."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), step=step)


def log_figure(loggers: Iterable[Logger], tag: str, figure: Figure, step: int) -> None:
    """To TensorBoard, and to loggers that have Lightning's ``log_image``, such as WandbLogger."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(tag, figure, step)
        elif (log := getattr(logger, "log_image", None)) is not None:
            log(key=tag, images=[figure], step=step)


def log_text(loggers: Iterable[Logger], tag: str, text: str, step: int) -> None:
    """The same, with ``log_text``. TensorBoard reads Markdown, which leaves indented lines as they are."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), step)
        elif (log := getattr(logger, "log_text", None)) is not None:
            log(key=tag, columns=["text"], data=[[text]], step=step)


def replays(pl_module: pl.LightningModule) -> bool:
    """Whether the training step is the replay of a CUDA graph, which runs no hooks of Python's."""
    return any(isinstance(value, GraphedStep) for value in vars(pl_module).values())
