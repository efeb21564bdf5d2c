"""The charts of TensorBoard's Custom Scalars tab."""

import lightning.pytorch as pl
from lightning.pytorch.loggers import TensorBoardLogger

from holotrain.callbacks import (
    DriftMonitor,
    ErrorDiffusionMonitor,
    MemoryMonitor,
    OptimizationMonitor,
    PaddingMonitor,
    SynthesisCallback,
    ThroughputMonitor,
)
from holotrain.callbacks.period import replays
from holotrain.config.schema.backward import PLAIN
from holotrain.config.schema.run import RunConfig
from holotrain.dashboard.charts import tensorboard_layout
from holotrain.error_diffusion import BACKPROPAGATION, ErrorDiffusionNetwork
from holotrain.tasks import Task
from holotrain.tasks.task import monitored_by


def log_layout(trainer: pl.Trainer, task: Task, config: RunConfig) -> None:
    """Logs the layout to TensorBoard, if it is a logger of this training."""
    for logger in trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_custom_scalars(tensorboard_layout(tags(trainer, task, config)))


def tags(trainer: pl.Trainer, task: Task, config: RunConfig) -> set[str]:
    """The scalars that this training can log and that a chart shows. The callbacks' docstrings describe them."""
    found = {"train/loss", "train/lr"}
    if config.trainer.limit_val_batches != 0:
        found |= monitored_by(task).keys()
    for callback in trainer.callbacks:
        if isinstance(callback, MemoryMonitor):
            found |= {"memory/peak_bytes", "memory/forward_backward_peak_bytes"}
        elif isinstance(callback, ThroughputMonitor):
            found |= {"throughput/samples_per_second", "throughput/step_seconds"}
            if callback.count_tokens:
                found.add("throughput/tokens_per_second")
            if callback.peak_flops and callback.model_flops_per_sample:
                found.add("throughput/mfu")
        elif isinstance(callback, DriftMonitor):
            if config.backward.kind not in PLAIN and not replays(task):
                found.add("reversible/drift")
        elif isinstance(callback, OptimizationMonitor):
            found |= {"optimization/gradient_norm", "optimization/update_ratio"}
        elif isinstance(callback, SynthesisCallback):
            found |= {f"synthesis/{name}" for name in ("milliseconds", "gradient_cosine", "update_norm", "skipped")}
        elif isinstance(callback, ErrorDiffusionMonitor):
            rules = {module.rule for module in task.modules() if isinstance(module, ErrorDiffusionNetwork)}
            if rules and not replays(task):
                found |= {"error_diffusion/dead_cells", "error_diffusion/sign_violations"}
                found |= {"error_diffusion/alignment"} if rules - {BACKPROPAGATION} else set()
        elif isinstance(callback, PaddingMonitor) and callback.unbucketed is not None:
            found.add("padding/fraction")
    return found
