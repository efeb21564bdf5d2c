"""Options beside those of the class that a group names: of every model, and of the trainer."""

import re
from datetime import timedelta
from typing import Literal

from holotrain.checks import amount, naming_group
from holotrain.config.chosen import Chosen
from holotrain.config.schema.classes import HUGGING_FACE, is_a
from holotrain.errors import UserError
from holotrain.ranges import require_at_least
from holotrain.targets import TARGET

BEGINNING = ("pretrained", "trained", "adapters")
"""Options that are not passed on to the model's class."""


class Beginning:
    """How the training of a model begins.

    Args:
        pretrained: initial weights: a local file or folder from timm, Hugging Face or holotrain; null: random
        trained: what to train: all, head (only the classifier) or adapters (with norms and head); the rest is frozen
        adapters: width of the adapter after each branch of each block; 0: no adapters; or a configuration of peft, such as
            {_target_: peft.LoraConfig, r: 8, target_modules: [query_key_value]}, which trains its layers and the head
    """

    def __init__(
        self, pretrained: str | None = None, trained: Literal["all", "head", "adapters"] = "all", adapters: int | dict = 0
    ) -> None:
        if isinstance(adapters, dict):
            if TARGET not in adapters:
                raise UserError(f"model.adapters: give a width, or model.adapters.{TARGET}=peft.LoraConfig")
            if trained == "head":
                raise UserError("model.trained=head: the layers of model.adapters would not be trained; use trained=adapters")
        else:
            require_at_least(0, adapters=adapters)
        if trained == "adapters" and not adapters:
            raise UserError("model.trained=adapters: the model has no adapters; give their width, such as model.adapters=64")


def with_network(model: Chosen) -> Chosen:
    """A Hugging Face model with the content of its config.json, so that a checkpoint holds it and needs no other file.

    Raises:
        UserError: there is no such file, or it is not the configuration of a model.
    """
    if not is_a(model, HUGGING_FACE):
        return model
    from holotrain.models.huggingface import network_of  # imports torch

    with naming_group("model.name"):
        return model.with_arguments(config=network_of(model.arguments["name"], model.config, model.download))


PROCESSES = (
    "strategy",
    "devices",
    "num_nodes",
    "tensor_parallel",
    "overlap",
    "signals",
    "pipeline_stages",
    "pipeline_schedule",
    "microbatches",
    "nccl_max_ctas",
    "nccl_high_priority",
    "compression",
    "sharded_checkpoints",
    "max_restarts",
)
"""Options about several processes. A training continues with the same ones; the other commands default to one process."""

BESIDE = (*PROCESSES, "float32_matmul_precision", "backend", "timeout")
"""Options that are not passed on to Lightning."""

SPLITS = ("train", "val", "test", "predict")


class TrainerOptions:
    """Options of the trainer beside those of Lightning; they replace those with the same name.

    Args:
        accelerator: cpu, gpu (NVIDIA or Apple), mps (Apple) or auto (the GPU, if there is one)
        precision: of the computation: 32-true, 64-true, bf16-mixed or 16-mixed
        float32_matmul_precision: of products and convolutions of float32 on a GPU: highest, high (TF32) or medium (TF32, or
            less), as torch.set_float32_matmul_precision names them
        gradient_clip_algorithm: what gradient_clip_val bounds: the norm of all gradients or each value; null: norm
        strategy: single (one process), ddp (data parallel), fsdp (FSDP2, sharded parameters), tp (tensor parallel) or
            pipeline (each process has some of the blocks)
        devices: processes on this machine, one per GPU; auto: one for each GPU, or as many as torchrun or srun started
        num_nodes: number of machines; start the command on each with torchrun or srun; null: as many as were started
        tensor_parallel: tp: processes per tensor parallel group; FSDP2 runs across the groups; null: all
        overlap: tp: row groups per all-reduce, overlapped with computation; auto: measure the best; null: no overlap (torch's
            layers)
        signals: tp with overlap: one kernel signals each finished group, instead of one kernel per group (NVIDIA GPUs,
            bf16-mixed)
        pipeline_stages: pipeline: processes that share a model; null: all
        pipeline_schedule: pipeline: 1f1b (each backward begins as soon as it can) or gpipe (all forwards, then all backwards)
        microbatches: pipeline: parts of a batch that pass through the stages one after another; null: two for each stage
        backend: communication backend: nccl, gloo or auto (nccl on GPUs, gloo on CPUs)
        nccl_max_ctas: SMs of a GPU that a collective of NCCL may take, at most; null: NCCL decides
        nccl_high_priority: collectives of NCCL come first where an SM is free, before the waiting parts of a product
        compression: ddp: the data type in which gradients are sent: none (their own), bf16 or fp16
        sharded_checkpoints: fsdp, tp: save a checkpoint as a folder with one part per process, instead of one file
        timeout: seconds after which a collective fails that another process does not join
        max_restarts: how often all processes start again from the run's last checkpoint after one of them died
    """

    def __init__(
        self,
        accelerator: Literal["auto", "cpu", "gpu", "mps"] = "auto",
        precision: Literal["32-true", "64-true", "bf16-mixed", "16-mixed"] = "32-true",
        float32_matmul_precision: Literal["highest", "high", "medium"] = "highest",
        gradient_clip_algorithm: Literal["norm", "value"] | None = "norm",
        strategy: Literal["single", "ddp", "fsdp", "tp", "pipeline"] = "single",
        devices: int | Literal["auto"] = 1,
        num_nodes: int | None = None,
        tensor_parallel: int | None = None,
        overlap: int | Literal["auto"] | None = "auto",
        signals: bool = False,
        pipeline_stages: int | None = None,
        pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b",
        microbatches: int | None = None,
        backend: Literal["auto", "nccl", "gloo"] = "auto",
        nccl_max_ctas: int | None = None,
        nccl_high_priority: bool = False,
        compression: Literal["none", "bf16", "fp16"] = "none",
        sharded_checkpoints: bool = False,
        timeout: float = 600.0,
        max_restarts: int = 0,
    ) -> None:
        counts = {"devices": devices, "num_nodes": num_nodes, "tensor_parallel": tensor_parallel, "overlap": overlap}
        require_at_least(1, timeout=timeout, microbatches=microbatches, nccl_max_ctas=nccl_max_ctas, **counts)
        require_at_least(2, pipeline_stages=pipeline_stages)
        require_at_least(0, max_restarts=max_restarts)
        if strategy == "single" and (devices not in (1, "auto") or (num_nodes or 1) > 1):
            raise UserError(
                "trainer.devices: trainer=default uses one process; for several, use trainer=ddp, fsdp, tp or pipeline"
            )
        if strategy == "single" and (nccl_max_ctas or nccl_high_priority):
            name = "nccl_max_ctas" if nccl_max_ctas else "nccl_high_priority"
            raise UserError(f"trainer.{name}: needs several processes; use trainer=ddp, fsdp, tp or pipeline")
        if compression != "none" and strategy != "ddp":
            raise UserError(f"trainer.compression={compression}: needs trainer=ddp")
        changed = {
            "tp": {"tensor_parallel": tensor_parallel is not None, "overlap": overlap != "auto"},
            "pipeline": {
                "pipeline_stages": pipeline_stages is not None,
                "pipeline_schedule": pipeline_schedule != "1f1b",
                "microbatches": microbatches is not None,
            },
        }
        for needed, options in changed.items():
            for name in [name for name, given in options.items() if given and strategy != needed]:
                raise UserError(f"trainer.{name}: needs trainer={needed}")
        if signals and (strategy != "tp" or overlap is None):
            raise UserError("trainer.signals: needs trainer=tp and trainer.overlap")
        if max_restarts and strategy == "single":
            raise UserError("trainer.max_restarts: needs several processes; use trainer=ddp, fsdp, tp or pipeline")
        if sharded_checkpoints and strategy not in ("fsdp", "tp"):
            raise UserError("trainer.sharded_checkpoints=true: needs trainer=fsdp or trainer=tp")


def check_trainer(trainer: Chosen) -> None:
    """
    Raises:
        UserError: options that exclude each other.
        ValueError: a value out of range.
    """
    if not is_a(trainer, "lightning.pytorch.trainer.trainer.Trainer"):
        raise UserError(f"trainer: {trainer.target} is not Lightning's Trainer")
    TrainerOptions(**{name: trainer.arguments[name] for name in BESIDE})
    if trainer.strategy in ("fsdp", "tp", "pipeline") and trainer.precision == "16-mixed":
        raise UserError(f"trainer.precision=16-mixed: trainer={trainer.strategy} has no gradient scaling; use bf16-mixed")
    if trainer.strategy == "pipeline" and trainer.accumulate_grad_batches > 1:
        raise UserError(
            "trainer.accumulate_grad_batches: trainer=pipeline accumulates over parts of a batch; set trainer.microbatches"
        )
    if trainer.max_epochs not in (None, -1):
        require_at_least(1, max_epochs=trainer.max_epochs)
    elif trainer.max_steps < 1 and trainer.max_time is None:
        raise UserError("trainer.max_epochs=-1: needs a limit; set trainer.max_steps or trainer.max_time")
    if trainer.max_time is not None and _seconds(trainer.max_time) <= 0:
        raise UserError(f"trainer.max_time: {trainer.max_time!r} is not a time; write DD:HH:MM:SS, such as 00:12:00:00")
    if trainer.max_steps == 0:
        raise UserError("trainer.max_steps: must be above 0; for no limit, use trainer.max_steps=-1")
    least = {"max_steps": -1, "num_sanity_val_steps": -1, "accumulate_grad_batches": 1, "check_val_every_n_epoch": 1}
    for name, smallest in (least | {"log_every_n_steps": 0, "gradient_clip_val": 0}).items():
        require_at_least(smallest, **{name: getattr(trainer, name)})
    for name in ("val_check_interval", "overfit_batches", *(f"limit_{split}_batches" for split in SPLITS)):
        if (value := getattr(trainer, name)) is not None:
            amount(f"trainer.{name}", value)
    if trainer.limit_train_batches == 0:
        raise UserError("trainer.limit_train_batches: must be above 0; to evaluate without training, use validate or test")
    if trainer.val_check_interval == 0:
        raise UserError("trainer.val_check_interval: must be above 0; to skip validation, set trainer.limit_val_batches=0")


def _seconds(time: object) -> float:
    """A duration as Lightning takes it, DD:HH:MM:SS or keywords of ``timedelta``; 0 if it is none."""
    try:
        if isinstance(time, str):
            found = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", time.strip())
            time = dict(zip(("days", "hours", "minutes", "seconds"), map(int, found.groups()), strict=True)) if found else {}
        return (time if isinstance(time, timedelta) else timedelta(**time)).total_seconds()
    except (OverflowError, TypeError, ValueError):
        return 0.0
