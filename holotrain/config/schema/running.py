"""How a run goes: Lightning's Trainer, callbacks, loggers."""

import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from holotrain.checks import amount, at_least, at_least_or_auto, one_of, within
from holotrain.errors import UserError

STRATEGIES = ("single", "ddp", "fsdp", "tp")
PROCESSES = ("strategy", "devices", "num_nodes", "tensor_parallel", "overlap", "signals", "compression", "sharded_checkpoints")
"""Options that say in how many processes a run is done: a training continues in as many, other commands take one."""

COMPRESSIONS = ("none", "bf16", "powersgd")
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "16-mixed")


@dataclass
class TrainerConfig:
    accelerator: str = "auto"
    """auto, cpu, gpu or mps"""

    strategy: str = "single"
    """single; or of several processes: ddp, each with the whole model; fsdp, parameters shared out (FSDP2); tp, layers shared
    out (tensor parallel)"""

    devices: Any = 1
    """processes on this machine, one a GPU; auto: as many as there are GPUs, or as torchrun or srun started"""

    num_nodes: int | None = None
    """machines, started by torchrun or srun on each; null: as many as they are"""

    tensor_parallel: int | None = None
    """of tp: processes that share a layer; fsdp works between such groups; null: all"""

    overlap: Any = "auto"
    """of tp: groups of rows in which layers' sums travel behind what is computed; auto: as many as measuring finds best (kept
    in ~/.cache/holotrain/overlap); null: torch's own layers"""

    signals: bool = False
    """of tp's overlap: one product signals its groups to the communication, in the place of a product a group (NVIDIA GPUs,
    bf16-mixed)"""

    backend: str = "auto"
    """what processes talk through: nccl, gloo or auto, nccl between GPUs"""

    compression: str = "none"
    """of ddp: gradients are sent as none (they are), bf16 or powersgd (low rank; Vogels et al., 2019)"""

    sharded_checkpoints: bool = False
    """of fsdp and tp: a checkpoint is a folder to which each process adds its own part, and nothing is put together"""

    timeout: float = 600.0
    """seconds after which a process that does not answer counts as dead"""

    precision: str = "32-true"
    """32-true, 64-true, bf16-mixed or 16-mixed (GPU only; scaled gradients)"""

    max_epochs: int = 16
    """passes over the training data; -1: as many as max_steps or max_time allow"""

    max_steps: int = -1
    """optimizer steps after which training ends all the same; -1: no such bound"""

    max_time: str | None = None
    """time after which it ends all the same, as DD:HH:MM:SS"""

    accumulate_grad_batches: int = 1
    """batches whose gradients add up to one optimizer step; validations and signals wait for it"""

    gradient_clip_val: float | None = 1.0
    """largest norm (or value) of the gradient, after unscaling; null: none"""

    gradient_clip_algorithm: str = "norm"
    """norm or value"""

    val_check_interval: Any = 1.0
    """validate after so many training batches (an integer, counted through epochs) or this part of an epoch (a fraction)"""

    check_val_every_n_epoch: int = 1
    """validate after so many epochs; where val_check_interval is an integer, that alone counts"""

    num_sanity_val_steps: int = 0
    """validation batches tried before training"""

    log_every_n_steps: int = 20
    """optimizer steps between two points of a curve; 0: points for validations and the test alone"""

    limit_train_batches: Any = 1.0
    """use so many training batches (an integer) or this part of them (a fraction)"""

    limit_val_batches: Any = 1.0
    """the same for validation"""

    limit_test_batches: Any = 1.0
    """the same for the test"""

    limit_predict_batches: Any = 1.0
    """the same for predictions"""

    overfit_batches: Any = 0.0
    """train and validate on the same few batches"""

    fast_dev_run: bool = False
    """one batch of everything, no files"""

    deterministic: bool = False
    """refuse operations whose result varies from run to run"""

    benchmark: bool = False
    """let cuDNN choose its fastest algorithms"""

    detect_anomaly: bool = False
    """find the operation that made a NaN (slow)"""

    def __post_init__(self) -> None:
        one_of("trainer.accelerator", self.accelerator, ("auto", "cpu", "gpu", "mps"))
        one_of("trainer.precision", self.precision, PRECISIONS)
        self._check_processes()
        one_of("trainer.gradient_clip_algorithm", self.gradient_clip_algorithm, ("norm", "value"))
        if self.max_epochs != -1:
            at_least("trainer.max_epochs", self.max_epochs, 1)
        elif self.max_steps < 1 and self.max_time is None:
            raise UserError("trainer.max_epochs=-1: then trainer.max_steps or trainer.max_time must end the training")
        if self.max_time is not None and not re.fullmatch(r"\d+:\d+:\d+:\d+", self.max_time):
            raise UserError(f"trainer.max_time: {self.max_time!r} is no time; write DD:HH:MM:SS, as in 00:12:00:00")
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
            raise UserError("trainer.val_check_interval: 0 are none; leave validation out by trainer.limit_val_batches=0")

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
            raise UserError("trainer.devices: trainer=default trains in one process; take trainer=ddp, fsdp or tp")
        if self.compression != "none" and self.strategy != "ddp":
            raise UserError(f"trainer.compression={self.compression}: it is an option of trainer=ddp alone")
        for name, default in (("tensor_parallel", None), ("overlap", "auto")):
            if getattr(self, name) != default and self.strategy != "tp":
                raise UserError(f"trainer.{name}: it is an option of trainer=tp alone")
        if self.compression == "powersgd" and self.precision == "16-mixed":
            raise UserError("trainer.compression=powersgd: what it adds up cannot be scaled as 16-mixed does; take bf16-mixed")
        if self.signals and (self.strategy != "tp" or self.overlap is None):
            raise UserError("trainer.signals: it is an option of trainer=tp with trainer.overlap alone")
        if self.sharded_checkpoints and self.strategy not in ("fsdp", "tp"):
            raise UserError("trainer.sharded_checkpoints=true: it is an option of trainer=fsdp and trainer=tp alone")
        if self.strategy in ("fsdp", "tp") and self.precision == "16-mixed":
            raise UserError(f"trainer.precision=16-mixed: trainer={self.strategy} cannot scale gradients; take bf16-mixed")


SPLITS = ("train", "val", "test", "predict")


@dataclass
class CheckpointConfig:
    monitor: str | None = None
    """metric that tells the best checkpoint; null: the task's own, val/accuracy or val/bits_per_byte or val/loss"""

    mode: str | None = None
    """max or min: which end of it is best; null: as suits the metric"""

    save_top_k: int = 1
    """how many of the best are kept; last.ckpt is kept besides"""

    every_n_train_steps: int | None = None
    """save last.ckpt after so many optimizer steps too, not only after each validation"""

    def __post_init__(self) -> None:
        if self.mode is not None:
            one_of("callbacks.checkpoint.mode", self.mode, ("max", "min"))
        at_least("callbacks.checkpoint.save_top_k", self.save_top_k, 1)
        if self.every_n_train_steps is not None:
            at_least("callbacks.checkpoint.every_n_train_steps", self.every_n_train_steps, 1)


@dataclass
class EMAConfig:
    decay: float | None = None
    """keep an exponential moving average of the weights with this decay, validate, test and save with it; null: none"""

    every_n_steps: int = 1
    """optimizer steps between two updates of the average"""

    def __post_init__(self) -> None:
        if self.decay is not None:
            within("callbacks.ema.decay", self.decay, 0, 1)
        at_least("callbacks.ema.every_n_steps", self.every_n_steps, 1)


@dataclass
class ThroughputConfig:
    enabled: bool = True

    peak_flops: float | None = None
    """the device's peak FLOP/s for MFU and HFU; null: from the table of known devices"""


@dataclass
class DriftConfig:
    enabled: bool = True

    threshold: float = 1e-2
    """relative error of rebuilt activations above which a warning names the remedy"""

    def __post_init__(self) -> None:
        at_least("callbacks.drift.threshold", self.threshold, 0)


@dataclass
class CallbacksConfig:
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    ema: EMAConfig = field(default_factory=EMAConfig)

    throughput: ThroughputConfig = field(default_factory=ThroughputConfig)

    memory: bool = True
    """watch memory"""

    drift: DriftConfig = field(default_factory=DriftConfig)

    patience: int | None = None
    """validations without a better checkpoint.monitor after which training ends; null: never"""

    progress: str = "auto"
    """bar, lines (one an epoch), none, or auto: a bar on a terminal, lines elsewhere"""

    def __post_init__(self) -> None:
        one_of("callbacks.progress", self.progress, ("auto", "bar", "lines", "none"))
        if self.patience is not None:
            at_least("callbacks.patience", self.patience, 1)


@dataclass
class LoggerConfig:
    kind: str = MISSING

    project: str = "holotrain"
    """project (wandb) or experiment (mlflow) that runs belong to"""

    tracking_uri: str | None = None
    """address of the MLflow server; null: a folder beside the run"""

    def __post_init__(self) -> None:
        one_of("logger.kind", self.kind, ("tensorboard", "csv", "none", "wandb", "mlflow"))
