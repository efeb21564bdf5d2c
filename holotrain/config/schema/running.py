"""Options of Lightning's Trainer, the callbacks and the loggers."""

import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from holotrain.checks import amount, at_least, at_least_or_auto, one_of, within
from holotrain.errors import UserError

STRATEGIES = ("single", "ddp", "fsdp", "tp")
PROCESSES = ("strategy", "devices", "num_nodes", "tensor_parallel", "overlap", "signals", "compression", "sharded_checkpoints")
"""Options about several processes. A training continues with the same ones; the other commands default to one process."""

COMPRESSIONS = ("none", "bf16", "powersgd")
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed")


@dataclass
class TrainerConfig:
    accelerator: str = "auto"
    """device to use: auto, cpu, gpu or mps"""

    strategy: str = "single"
    """single (one process), ddp (data parallel), fsdp (FSDP2, sharded parameters) or tp (tensor parallel)"""

    devices: Any = 1
    """processes on this machine, one per GPU; auto: one for each GPU, or as many as torchrun or srun started"""

    num_nodes: int | None = None
    """number of machines; start the command on each with torchrun or srun; null: as many as were started"""

    tensor_parallel: int | None = None
    """tp: processes per tensor parallel group; FSDP2 runs across the groups; null: all"""

    overlap: Any = "auto"
    """tp: row groups per all-reduce, overlapped with computation; auto: measure the best; null: no overlap (torch's layers)"""

    signals: bool = False
    """tp with overlap: one kernel signals each finished group, instead of one kernel per group (NVIDIA GPUs, bf16-mixed)"""

    backend: str = "auto"
    """communication backend: nccl, gloo or auto (nccl on GPUs, gloo on CPUs)"""

    compression: str = "none"
    """ddp: compression of gradients: none, bf16 or powersgd (low rank; Vogels et al., 2019)"""

    sharded_checkpoints: bool = False
    """fsdp, tp: save a checkpoint as a folder with one part per process, instead of one file"""

    timeout: float = 600.0
    """seconds after which a process that does not answer is considered dead"""

    precision: str = "32-true"
    """32-true, 64-true, bf16-mixed or 16-mixed (GPU only; with gradient scaling)"""

    max_epochs: int = 16
    """maximum number of epochs; -1: no limit, set max_steps or max_time"""

    max_steps: int = -1
    """maximum number of optimizer steps; -1: no limit"""

    max_time: str | None = None
    """maximum training time, as DD:HH:MM:SS; null: no limit"""

    accumulate_grad_batches: int = 1
    """number of batches whose gradients are accumulated per optimizer step; validations and signals wait for the step"""

    gradient_clip_val: float | None = 1.0
    """maximum norm (or absolute value) of the gradient; null: no clipping"""

    gradient_clip_algorithm: str = "norm"
    """what to clip: norm or value"""

    val_check_interval: Any = 1.0
    """validate every n training batches (integer, counted across epochs) or every fraction of an epoch (float)"""

    check_val_every_n_epoch: int = 1
    """validate every n epochs; ignored if val_check_interval is an integer"""

    num_sanity_val_steps: int = 0
    """validation batches to run before training; -1: all"""

    log_every_n_steps: int = 20
    """log scalars every n optimizer steps; 0: only those of validation and test"""

    limit_train_batches: Any = 1.0
    """training batches per epoch: a number (integer) or a fraction (float)"""

    limit_val_batches: Any = 1.0
    """the same for the validation set"""

    limit_test_batches: Any = 1.0
    """the same for the test set"""

    limit_predict_batches: Any = 1.0
    """the same for predictions"""

    overfit_batches: Any = 0.0
    """train and validate on the same batches: a number (integer) or a fraction (float); 0: off"""

    fast_dev_run: bool = False
    """run one batch of training, validation and test, and save no checkpoint"""

    deterministic: bool = False
    """raise an error for nondeterministic operations"""

    benchmark: bool = False
    """let cuDNN benchmark its algorithms and use the fastest"""

    detect_anomaly: bool = False
    """find the operation that produced a NaN in the backward pass (slow)"""

    def __post_init__(self) -> None:
        one_of("trainer.accelerator", self.accelerator, ("auto", "cpu", "gpu", "mps"))
        one_of("trainer.precision", self.precision, PRECISIONS)
        self._check_processes()
        one_of("trainer.gradient_clip_algorithm", self.gradient_clip_algorithm, ("norm", "value"))
        if self.max_epochs != -1:
            at_least("trainer.max_epochs", self.max_epochs, 1)
        elif self.max_steps < 1 and self.max_time is None:
            raise UserError("trainer.max_epochs=-1: needs a limit; set trainer.max_steps or trainer.max_time")
        if self.max_time is not None and not re.fullmatch(r"\d+:\d+:\d+:\d+", self.max_time):
            raise UserError(f"trainer.max_time: {self.max_time!r} is not a time; write DD:HH:MM:SS, such as 00:12:00:00")
        at_least("trainer.max_steps", self.max_steps, -1)
        at_least("trainer.num_sanity_val_steps", self.num_sanity_val_steps, -1)
        for name in ("accumulate_grad_batches", "check_val_every_n_epoch"):
            at_least(f"trainer.{name}", getattr(self, name), 1)
        at_least("trainer.log_every_n_steps", self.log_every_n_steps, 0)
        if self.gradient_clip_val is not None:
            at_least("trainer.gradient_clip_val", self.gradient_clip_val, 0)
        for name in ("val_check_interval", "overfit_batches", *(f"limit_{s}_batches" for s in SPLITS)):
            amount(f"trainer.{name}", getattr(self, name))
        if not self.val_check_interval:
            raise UserError("trainer.val_check_interval: must be above 0; to skip validation, set trainer.limit_val_batches=0")

    def _check_processes(self) -> None:
        one_of("trainer.strategy", self.strategy, STRATEGIES)
        one_of("trainer.backend", self.backend, ("auto", "nccl", "gloo"))
        one_of("trainer.compression", self.compression, COMPRESSIONS)
        at_least_or_auto("trainer.devices", self.devices, 1)
        at_least("trainer.timeout", self.timeout, 1)
        if self.overlap is not None:
            at_least_or_auto("trainer.overlap", self.overlap, 1, "auto or null")
        for name in ("num_nodes", "tensor_parallel"):
            if getattr(self, name) is not None:
                at_least(f"trainer.{name}", getattr(self, name), 1)
        if self.strategy == "single" and (self.devices not in (1, "auto") or (self.num_nodes or 1) > 1):
            raise UserError("trainer.devices: trainer=default uses one process; for several, use trainer=ddp, fsdp or tp")
        if self.compression != "none" and self.strategy != "ddp":
            raise UserError(f"trainer.compression={self.compression}: needs trainer=ddp")
        for name, default in (("tensor_parallel", None), ("overlap", "auto")):
            if getattr(self, name) != default and self.strategy != "tp":
                raise UserError(f"trainer.{name}: needs trainer=tp")
        if self.compression == "powersgd" and self.precision == "16-mixed":
            raise UserError("trainer.compression=powersgd: no support for the gradient scaling of 16-mixed; use bf16-mixed")
        if self.signals and (self.strategy != "tp" or self.overlap is None):
            raise UserError("trainer.signals: needs trainer=tp and trainer.overlap")
        if self.sharded_checkpoints and self.strategy not in ("fsdp", "tp"):
            raise UserError("trainer.sharded_checkpoints=true: needs trainer=fsdp or trainer=tp")
        if self.strategy in ("fsdp", "tp") and self.precision == "16-mixed":
            raise UserError(f"trainer.precision=16-mixed: trainer={self.strategy} has no gradient scaling; use bf16-mixed")


SPLITS = ("train", "val", "test", "predict")


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


@dataclass
class CallbacksConfig:
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    ema: EMAConfig = field(default_factory=EMAConfig)

    throughput: ThroughputConfig = field(default_factory=ThroughputConfig)

    memory: bool = True
    """log memory use"""

    drift: DriftConfig = field(default_factory=DriftConfig)

    patience: int | None = None
    """stop after n validations without an improvement of checkpoint.monitor; null: never"""

    progress: str = "auto"
    """bar, lines (one per epoch) or none; auto: bar on a terminal, else lines"""

    def __post_init__(self) -> None:
        one_of("callbacks.progress", self.progress, ("auto", "bar", "lines", "none"))
        if self.patience is not None:
            at_least("callbacks.patience", self.patience, 1)


@dataclass
class LoggerConfig:
    kind: str = MISSING

    project: str = "holotrain"
    """project (wandb) or experiment (mlflow) of the runs"""

    tracking_uri: str | None = None
    """URI of the MLflow server; null: mlflow/mlflow.db in the run's folder"""

    def __post_init__(self) -> None:
        one_of("logger.kind", self.kind, ("tensorboard", "csv", "none", "wandb", "mlflow"))
