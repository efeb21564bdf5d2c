"""Options of the callbacks and the loggers."""

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from holotrain.checks import at_least, one_of, within
from holotrain.config.chosen import Filled, chosen


@dataclass
class CheckpointConfig:
    monitor: str | None = None
    """metric that selects the best checkpoint; null: depends on the task (val/accuracy, val/bits_per_byte or val/loss)"""

    mode: str | None = None
    """max or min: whether a higher or a lower metric is better; null: depends on the metric"""

    save_top_k: int = 1
    """number of best checkpoints to keep, in addition to last.ckpt"""

    every_n_train_steps: int | None = None
    """save last.ckpt every n optimizer steps too; null: only after each validation"""

    def __post_init__(self) -> None:
        if self.mode is not None:
            one_of("callbacks.checkpoint.mode", self.mode, ("max", "min"))
        at_least("callbacks.checkpoint.save_top_k", self.save_top_k, 1)
        if self.every_n_train_steps is not None:
            at_least("callbacks.checkpoint.every_n_train_steps", self.every_n_train_steps, 1)


@dataclass
class EMAConfig:
    decay: float | None = None
    """decay of an exponential moving average of the weights, which is validated, tested and saved; null: no average"""

    every_n_steps: int = 1
    """update the average every n optimizer steps"""

    def __post_init__(self) -> None:
        if self.decay is not None:
            within("callbacks.ema.decay", self.decay, 0, 1)
        at_least("callbacks.ema.every_n_steps", self.every_n_steps, 1)


@dataclass
class ThroughputConfig:
    enabled: bool = True
    """log samples/s, tokens/s, MFU and HFU"""

    peak_flops: float | None = None
    """peak FLOP/s of the device, for MFU and HFU; null: look it up for known GPUs"""


@dataclass
class DriftConfig:
    enabled: bool = True
    """log the relative error of recomputed activations"""

    threshold: float = 1e-2
    """warn if the relative error of recomputed activations exceeds this"""

    def __post_init__(self) -> None:
        at_least("callbacks.drift.threshold", self.threshold, 0)


CALLBACK = Filled()


@dataclass
class CallbacksConfig:
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    ema: EMAConfig = field(default_factory=EMAConfig)

    throughput: ThroughputConfig = field(default_factory=ThroughputConfig)

    memory: bool = True
    """log memory use"""

    optimization: bool = True
    """log the norm of the gradient and the relative size of weight updates"""

    predictions: bool = True
    """image classification: log some validation images with their predictions"""

    confusion_matrix: bool = True
    """classification: log a confusion matrix after each validation and test"""

    samples: bool = True
    """causal language models: log sampled texts after each validation"""

    histograms: bool = False
    """log histograms of weights and gradients (TensorBoard only; slow)"""

    drift: DriftConfig = field(default_factory=DriftConfig)

    patience: int | None = None
    """stop after n validations without an improvement of checkpoint.monitor; null: never"""

    progress: str = "auto"
    """bar, lines (one per epoch) or none; auto: bar on a terminal, else lines"""

    others: dict[str, Any] = field(default_factory=dict)
    """further callbacks by name, such as callbacks.swa._target_=lightning.pytorch.callbacks.StochasticWeightAveraging"""

    def __post_init__(self) -> None:
        one_of("callbacks.progress", self.progress, ("auto", "bar", "lines", "none"))
        if self.patience is not None:
            at_least("callbacks.patience", self.patience, 1)
        for name, other in self.others.items():
            self.others[name] = chosen(f"callbacks.{name}", other, CALLBACK)


@dataclass
class LoggerConfig:
    kind: str = MISSING

    project: str = "holotrain"
    """project (wandb) or experiment (mlflow) of the runs"""

    tracking_uri: str | None = None
    """URI of the MLflow server; null: mlflow/mlflow.db in the run's folder"""

    def __post_init__(self) -> None:
        one_of("logger.kind", self.kind, ("tensorboard", "csv", "none", "wandb", "mlflow"))
