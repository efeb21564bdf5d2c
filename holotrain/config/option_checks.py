"""Which options of a configuration go together."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from holotrain.config import option_groups as groups
from holotrain.config.objects import ObjectConfig
from holotrain.config.option_groups import is_a, reversible, takes, trainer_options
from holotrain.errors import UserError, as_user_error
from holotrain.numeric import require_at_least
from holotrain.schedules import PLAIN

if TYPE_CHECKING:
    from holotrain.config.command_options import RunConfig


def check_groups(config: RunConfig) -> None:
    """Raises a UserError if options of several groups exclude each other."""
    _check_task(config)
    _check_error_diffusion(config)
    _check_backward(config)
    _check_batch(config)
    _check_strategy(config)
    _check_in_backward(config)
    _check_callbacks(config)


SEARCHES = {
    "lightning.pytorch.callbacks.batch_size_finder.BatchSizeFinder": "data.batch_size=auto plans the largest batch",
    "lightning.pytorch.callbacks.lr_finder.LearningRateFinder": "-m sweep=learning_rate tries several rates",
}
"""Callbacks of Lightning that run trainings of their own before a training, and what does the same here."""


def _check_callbacks(config: RunConfig) -> None:
    for name, each in config.callbacks.items():
        for target, instead in SEARCHES.items():
            if is_a(each, target):
                raise UserError(f"callbacks.{name}: {each.name} does not work here; {instead}")


def _check_task(config: RunConfig) -> None:
    task, model, data = config.task, config.model, config.data
    if is_a(task, groups.SEQUENCE_CLASSIFIER) and getattr(data, "label", "given") is None:
        raise UserError("data.label: give the field or column of the class as data.label=..., or data.label=folder")
    if getattr(model, "trained", "all") == "head" and is_a(task, groups.CAUSAL_LM, groups.MASKED_LM):
        raise UserError(f"model.trained=head: {task.name} shares its head with the embedding; use trained=all, or LoRA")
    ours = next((each for each in groups.COMPATIBLE if is_a(task, each)), None)
    if ours is None:
        return
    models, of = groups.COMPATIBLE[ours]
    if is_a(data, groups.IMAGES, groups.TEXT) and not is_a(data, of):
        kind = "images" if of == groups.IMAGES else "text"
        others = _options(each for each in groups.COMPATIBLE if is_a(data, groups.COMPATIBLE[each][1]))
        raise UserError(f"data: {task.name} learns from {kind}, which {data.name} does not have; use other data, or {others}")
    trainers = [each for each, (classes, _) in groups.COMPATIBLE.items() if is_a(model, *classes)]
    if model is not None and trainers and not is_a(model, *models):
        names = " or ".join(target.rpartition(".")[2] for target in models)
        raise UserError(f"model: {task.name} trains {names}, not {model.name}; use another model, or {_options(trainers)}")


def _options(tasks: Iterable[str]) -> str:
    return " or ".join(f"task={groups.TASK_OPTIONS[each]}" for each in tasks)


def _check_error_diffusion(config: RunConfig) -> None:
    if not is_a(config.task, groups.ERROR_DIFFUSION) or config.model is None:
        return
    layers = "an error diffusion network has no"
    if config.backward.kind not in (None, PLAIN[0]):
        raise UserError(f"backward={config.backward.kind}: {layers} blocks to recompute; use backward={PLAIN[0]}")
    if config.synthesis is not None:
        raise UserError(f"synthesis: {layers} Linear layers, which it needs; use synthesis=none")
    if config.compile:
        raise UserError(f"compile: {layers} blocks; on a GPU use backward.cuda_graph=true")
    if getattr(config.optimizer, "target", None) == groups.MUON:
        raise UserError(f"optimizer=muon: {layers} blocks, which it needs; use error_diffusion, sgd or adamw")
    if config.task.clamp_signs and config.model.rule == "kaneko":
        raise UserError("task.clamp_signs: model.rule=kaneko never changes a sign; use rule article or backpropagation")


def _check_batch(config: RunConfig) -> None:
    option, size = config.batch_option
    for other in ("batch_size", "max_tokens"):
        if f"data.{other}" != option and getattr(config.data, other, None) == groups.AUTO:
            raise UserError(f"data.{other}=auto: {option} sets the batch size here; give {option}=auto")
    if size == groups.AUTO and config.backward.open:
        raise UserError(f"{option}=auto: cannot be combined with backward=auto; set one of the two")
    if config.trainer.overfit_batches and getattr(config.data, "streaming", False):
        raise UserError("trainer.overfit_batches: a stream has no batch twice; set data.streaming=false")


def _check_strategy(config: RunConfig) -> None:
    strategy = config.trainer.strategy
    if strategy == "single":
        return
    if config.backward.cuda_graph or getattr(config.synthesis, "cuda_graph", False):
        option = "backward" if config.backward.cuda_graph else "synthesis"
        raise UserError(f"{option}.cuda_graph: CUDA graphs do not work with trainer={strategy}; set it to false")
    if strategy == "ddp":
        return
    if is_a(config.task, groups.ERROR_DIFFUSION):
        raise UserError(f"trainer={strategy}: error diffusion networks have no blocks to shard; use trainer=ddp")
    parts = f"trainer={strategy} {'divides' if strategy == 'pipeline' else 'shards'} them"
    # What works under FSDP2, but not where layers are divided, too.
    whole = getattr(config.synthesis, "mode", None) == "bind" or getattr(config.synthesis, "block_length", None) == 0
    if config.synthesis is not None and (strategy != "fsdp" or whole):
        also = ", or synthesis=shared or associative with a block length under trainer=fsdp"
        raise UserError(f"synthesis: needs whole gradients, and {parts}; use trainer=ddp{also}")
    if getattr(config.synthesis, "split", "none") != "none":
        raise UserError(f"synthesis.split: needs whole gradients, and {parts}; use split=none")
    if getattr(config.optimizer, "target", None) == groups.LOW_BIT:
        name = f"adamw_{getattr(config.optimizer, 'bits', 8)}"
        raise UserError(f"optimizer={name}: needs whole parameters, and {parts}; use trainer=ddp, or optimizer=adafactor")
    if strategy in ("tp", "pipeline") and getattr(config.model, "adapters", 0):
        raise UserError(f"model.adapters: trainer={strategy} does not support adapters; use trainer=fsdp or ddp")
    if strategy in ("tp", "pipeline") and getattr(config.model, "quantised", None):
        raise UserError(f"model.quantised: trainer={strategy} does not support it; use trainer=fsdp or ddp")
    trained = getattr(config.model, "trained", "all")
    if strategy == "pipeline" and trained != "all":
        raise UserError(f"model.trained={trained}: a stage of trainer=pipeline would train nothing; use trainer=fsdp or ddp")
    batch, count = getattr(config.data, "batch_size", None), config.trainer.microbatches
    if count and isinstance(batch, int) and batch % count:
        raise UserError(f"trainer.microbatches={count}: data.batch_size={batch} is not a multiple of it")
    if config.average is not None:
        raise UserError(f"callbacks.{config.average}: needs whole weights, and {parts}; use trainer=ddp")
    if config.backward.open or config.batch_is_open:
        raise UserError(f"auto: planning needs whole parameters, and {parts}; set backward and the batch size yourself")


def _check_backward(config: RunConfig) -> None:
    backward, model, rebuilds = config.backward, config.model, reversible(config.model)
    if takes(model, "backward"):
        ours = model.target.startswith("holotrain.")  # of models of others it is known when they are built
        if ours and not rebuilds and backward.kind not in (None, *PLAIN, groups.AUTO):
            raise UserError(
                f"backward={backward.kind}: {model.name} is not reversible; use backward={PLAIN[0]} or model=rev_..."
            )
        for name in [name for name in backward.engine() if not takes(model, name)]:
            why = "is not reversible" if ours else f"has no argument {name}"
            raise UserError(f"backward.{name}: {model.name} {why}; remove the option")
    if config.compile and any("+" in schedule for schedule in backward.blocks):
        raise UserError("backward.blocks: compiled blocks cannot keep results; remove what follows + or use compile=false")
    if config.compile and backward.keep:
        raise UserError("backward.keep: compiled blocks cannot keep results; use compile=false")
    checkpointed, trainer = backward.kind in (*PLAIN[1:], groups.AUTO) and not rebuilds, config.trainer
    refused = {
        "cannot capture the checkpointing of a plain model; use backward=autograd": checkpointed,
        "no support for accumulation; use trainer.accumulate_grad_batches=1": trainer.accumulate_grad_batches > 1,
        "no gradient scaling of 16-mixed; use trainer.precision=bf16-mixed": trainer.precision == "16-mixed",
        f"batches of {config.task.name} vary in shape": is_a(config.task, groups.MASKED_LM, groups.SEQUENCE_CLASSIFIER),
    }
    for reason in [reason for reason, found in refused.items() if found and backward.cuda_graph]:
        raise UserError(f"backward.cuda_graph: {reason}")


def _check_in_backward(config: RunConfig) -> None:
    if not config.steps_in_backward:
        return
    from holotrain.optimizers.stepping import refuse_in_backward  # imports torch

    trainer = config.trainer
    by_norm = "trainer.gradient_clip_val by norm (use null, or trainer.gradient_clip_algorithm=value)"
    with as_user_error(f"optimizer.{groups.IN_BACKWARD}"):
        refuse_in_backward(
            {
                f"trainer={trainer.strategy}": trainer.strategy != "single",
                "trainer.accumulate_grad_batches above 1": trainer.accumulate_grad_batches > 1,
                by_norm: bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value",
                "trainer.precision=16-mixed": trainer.precision == "16-mixed",
                "a synthesis": config.synthesis is not None,
                "backward.cuda_graph=true": config.backward.cuda_graph,
                config.task.name: is_a(config.task, groups.ERROR_DIFFUSION),
            }
        )


def check_trainer(trainer: ObjectConfig) -> None:
    """Raises a ValueError if a value is out of range, or options exclude each other."""
    if not is_a(trainer, groups.TRAINER):
        raise ValueError(f"{trainer.target} is not Lightning's Trainer")
    trainer_options(**{name: trainer.arguments[name] for name in groups.TRAINER_OPTIONS})
    if trainer.strategy in ("fsdp", "tp", "pipeline") and trainer.precision == "16-mixed":
        raise ValueError(f"precision=16-mixed: trainer={trainer.strategy} has no gradient scaling; use bf16-mixed")
    if trainer.strategy == "pipeline" and trainer.accumulate_grad_batches > 1:
        raise ValueError("accumulate_grad_batches: a pipeline accumulates over parts of a batch; set trainer.microbatches")
    if trainer.max_epochs not in (None, -1):
        require_at_least(1, max_epochs=trainer.max_epochs)
    elif trainer.max_steps < 1 and trainer.max_time is None:
        raise ValueError("max_epochs=-1: needs a limit; set trainer.max_steps or trainer.max_time")
    if trainer.max_time is not None and _seconds(trainer.max_time) <= 0:
        raise ValueError(f"max_time: {trainer.max_time!r} is not a time; write DD:HH:MM:SS, such as 00:12:00:00")
    if trainer.max_steps == 0:
        raise ValueError("max_steps: must be above 0; for no limit, use trainer.max_steps=-1")
    least = {"max_steps": -1, "num_sanity_val_steps": -1, "accumulate_grad_batches": 1, "check_val_every_n_epoch": 1}
    for name, smallest in (least | {"log_every_n_steps": 0, "gradient_clip_val": 0}).items():
        require_at_least(smallest, **{name: getattr(trainer, name)})
    limits = (f"limit_{split}_batches" for split in ("train", "val", "test", "predict"))
    for name in ("val_check_interval", "overfit_batches", *limits):
        value = getattr(trainer, name)
        is_valid = type(value) in (int, float) and value >= 0 and not (isinstance(value, float) and value > 1)
        if value is not None and not is_valid:
            raise ValueError(f"{name}: {value!r} is not valid; give a whole number of batches or a fraction in [0, 1]")
    if trainer.limit_train_batches == 0:
        raise ValueError("limit_train_batches: must be above 0; to evaluate without training, use validate or test")
    if trainer.val_check_interval == 0:
        raise ValueError("val_check_interval: must be above 0; to skip validation, set trainer.limit_val_batches=0")


def _seconds(time: Any) -> float:
    """A duration as Lightning takes it, DD:HH:MM:SS or keywords of ``timedelta``; 0 if it is none."""
    try:
        if isinstance(time, str):
            found = re.fullmatch(r"(\d+):(\d\d):(\d\d):(\d\d)", time.strip())
            time = dict(zip(("days", "hours", "minutes", "seconds"), map(int, found.groups()), strict=True)) if found else {}
        return (time if isinstance(time, timedelta) else timedelta(**time)).total_seconds()
    except (OverflowError, TypeError, ValueError):
        return 0.0
