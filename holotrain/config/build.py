"""What a run is built from, in the order in which it needs it: device, data, model, task, trainer, callbacks, loggers."""

import copy
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ProgressBar, WeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holotrain.callbacks import BestCheckpoint, ConfusionMatrix, SynthesisCallback
from holotrain.callbacks.interrupt import SaveOnSignal
from holotrain.callbacks.shown import EpochLog
from holotrain.callbacks.throughput import peak_flops, training_flops
from holotrain.callbacks.trace import TraceProfiler
from holotrain.checkpoints.distributed import CheckpointFiles
from holotrain.checkpoints.exact_resume import ExactResume
from holotrain.checkpoints.saving import last_checkpoint
from holotrain.config import option_groups as groups
from holotrain.config.command_options import CheckpointConfig, RunConfig, exclusive
from holotrain.config.option_groups import BackwardConfig, ObjectConfig, default_backward, full_name, is_a, schema_of, takes
from holotrain.config.signatures import REQUIRED, Option, signature
from holotrain.data.text.module import TextDataModule
from holotrain.data.tokenizers import tokenizer_from_json
from holotrain.errors import UserError, as_user_error, check_choice, readable
from holotrain.folders import LAST_CHECKPOINT
from holotrain.models.adapters import PEFT, add_peft, freeze, train_head_alone
from holotrain.models.block_schedules import compile_blocks, schedule_blocks, set_backward, set_tile
from holotrain.models.checkpoint_files import read_weights
from holotrain.models.external import ExternalModel, allocated
from holotrain.models.pretrained import load_pretrained
from holotrain.models.quantised import quantise
from holotrain.numeric import bits_in, counted
from holotrain.optimizers.stepping import InBackward, require_steps_alone
from holotrain.overlap.tuner import Tuner
from holotrain.parallel.rank import ProcessRank
from holotrain.parallel.stages import Pipeline, check_stages
from holotrain.parallel.strategies import DataParallel, Sharding, division, overlapped
from holotrain.reversible.chunks import train_in_chunks
from holotrain.reversible.context import has_no_data
from holotrain.reversible.sequence import checks_in
from holotrain.schedules import ON_MISMATCH
from holotrain.targets import TARGET, first_line, instantiate, needed
from holotrain.tasks.optimizer_functions import decay_groups, decay_layers
from holotrain.tasks.task import monitored_by


def device_kind(accelerator: str) -> str:
    """cuda, mps or cpu: the device that this accelerator option selects on this machine."""
    if accelerator in ("auto", "gpu") and torch.cuda.is_available():
        return "cuda"
    if accelerator in ("auto", "gpu", "mps") and torch.backends.mps.is_available():
        return "mps"
    return "cpu"


def why_no_graphs(config: RunConfig) -> str | None:
    """Why no training step is captured as a CUDA graph; None: they are, unless a step shows that it cannot be."""
    if device_kind(config.trainer.accelerator) != "cuda":
        return "needs an NVIDIA GPU"
    others = next(others for option, _, others in exclusive(config) if option == "trainer.graphs")
    return next((f"does not go together with {other}" for other, is_used in others.items() if is_used), None)


def device_name(accelerator: str) -> str:
    """The name of the GPU, or the number of CPU threads."""
    kind = device_kind(accelerator)
    if kind == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu, {counted(torch.get_num_threads(), 'thread')}" if kind == "cpu" else kind


def autocast_of(config: ObjectConfig, device: str | None = None) -> AbstractContextManager:
    """The autocast context of a run outside a Trainer; ``device`` replaces the type of the accelerator."""
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(config.precision)
    return torch.autocast(device or device_kind(config.accelerator), dtype) if dtype else nullcontext()


def check_device(config: ObjectConfig) -> None:
    """Raises a UserError if the accelerator is missing."""
    if config.accelerator in ("gpu", "mps") and device_kind(config.accelerator) == "cpu":
        raise UserError(f"trainer.accelerator={config.accelerator}: there is none here; use trainer.accelerator=cpu")


def model_parallel_size(config: ObjectConfig, process: ProcessRank) -> int:
    """The number of processes that share a model, by layers (tp) or by blocks (pipeline), and read the same data."""
    size = {"tp": config.tensor_parallel or process.size, "pipeline": config.pipeline_stages or process.size}
    return size.get(config.strategy, 1)


def build_object(where: str, config: ObjectConfig, kind: type, *positional: Any, **context: Any) -> Any:
    """Calls what is configured, and raises a UserError if it refuses a value or makes something else than a ``kind``.

    Args:
        where: the group, or a name in it, such as ``callbacks.memory``.
        context: values of parameters that the configuration leaves open, used where the class has such a parameter.
    """
    if config.object is not None:
        return _on_default_device(config.object)
    schema = schema_of(where)
    own = schema.of_class(config.arguments)
    parameters = {*signature(config.target).options, *config.arguments}
    context = {name: value for name, value in context.items() if name in parameters and own.get(name) is None}
    with as_user_error(where, schema.options(config.target), schema.elsewhere):
        try:
            result = instantiate({TARGET: config.target, **own}, *positional, **context)
        except (ArithmeticError, AssertionError, MisconfigurationException) as error:
            raise ValueError(f"{config.target}: {first_line(error)}") from error
        if not isinstance(result, kind):
            raise ValueError(f"{config.target} is not a {kind.__name__}; calling it gives a {type(result).__name__}")
    return result


def _on_default_device(value: Any) -> Any:
    """The object; while torch's default device is ``meta``, a copy of it that has shapes but no data."""
    if torch.get_default_device().type != "meta" or not isinstance(value, nn.Module):
        return value
    memo: dict[int, Any] = {id(getattr(value, "_trainer", None)): None}  # a copy belongs to no trainer
    for tensor in [*value.buffers(), *value.parameters()]:
        empty = torch.empty_like(tensor, device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(value, memo)


def build_data(config: RunConfig, tokenizer: str | None = None) -> pl.LightningDataModule:
    """The data module of a run, which reads its data in ``setup``; ``tokenizer``: that of a checkpoint, from ``to_json``."""
    context: dict[str, Any] = {"seed": config.seed}
    if is_a(config.data, groups.TEXT):
        packed = is_a(config.task, groups.CAUSAL_LM)
        context |= {"layout": "packed" if packed else "documents", "tokenizer_json": tokenizer}
        context["labels"] = is_a(config.task, groups.SEQUENCE_CLASSIFIER)
    return build_object("data", config.data, pl.LightningDataModule, **context)


def data_properties(data: pl.LightningDataModule) -> dict[str, Any]:
    """What data, which are set up, tell models and tasks, by the names of their parameters."""
    facts: dict[str, Any] = {}
    if shape := getattr(data, "image_shape", None):
        facts |= {"channels": shape[0], "image_size": shape[1]}
    for attribute, other in (("num_classes", "classes"), ("vocab_size", "vocab"), ("context", "context")):
        if value := getattr(data, attribute, None):
            facts |= {other: value, attribute: value}
    if isinstance(data, TextDataModule):
        facts["pad_id"] = data.tokenizer.pad_id
        facts |= {"chats": 1} if data.learns_chats else {}  # for generate
    return facts


def with_data_properties(group: str, chosen: ObjectConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a model or a task, with the facts under the names of its parameters, which must not contradict them."""
    schema = schema_of(group)
    arguments = schema.of_class(chosen.arguments)
    for name, value in facts.items():
        if takes(chosen, name) and arguments.setdefault(name, value) != value:
            raise UserError(f"{group}.{name}: {arguments[name]} does not fit the data, which have {value}; leave it out")
    for name, option in signature(chosen.target).options.items():
        if option.default is REQUIRED and name not in {*arguments, *schema.reserved}:
            raise UserError(f"{group}.{name}: the data do not tell it; give {group}.{name}=...")
    return arguments


def description(config: RunConfig, data: pl.LightningDataModule) -> dict[str, Any]:
    """What is needed to use the model (without one, the task) without its data, in plain containers."""
    facts = data_properties(data)
    if config.model is None:
        target, arguments = config.task.target, with_data_properties("task", config.task, facts)
    else:
        target, arguments = config.model.target, model_arguments(config, facts)
    found: dict[str, Any] = {"target": target, "arguments": arguments, "facts": facts}
    if isinstance(data, TextDataModule):
        found["tokenizer"] = data.tokenizer.to_json()
    if statistics := getattr(data, "statistics", None):  # mean and deviation of the channels of images
        found["statistics"] = [list(numbers) for numbers in statistics]
    found |= {name: getattr(data, name) for name in ("interpolation", "crop_pct") if hasattr(data, name)}
    classes = class_names(config, data)
    return found if classes is None else found | {"class_names": classes}


def class_names(config: RunConfig, data: pl.LightningDataModule) -> list[str] | None:
    """The names of the classes; None if the task is not a classification, or the data do not tell them."""
    names = getattr(data, "class_names", None) if is_a(config.task, groups.CLASSIFIER) else None
    return None if names is None else list(names)


def build_model(config: RunConfig, facts: dict[str, Any]) -> nn.Module:
    """The model, without pretrained weights and adapters; ``facts``: from :func:`data_properties`."""
    chosen, backward = config.model, config.backward
    assert chosen is not None
    with as_user_error("model"), allocated():
        model = build_object("model", replace(chosen, arguments=model_arguments(config, facts)), nn.Module)
    with as_user_error("backward.blocks ([] chooses them again)" if backward.blocks else f"backward={backward.kind}"):
        if backward.blocks:
            schedule_blocks(model, backward.blocks)
        elif not takes(chosen, "backward") and backward.kind not in (None, groups.AUTO):
            if backward.exact:
                raise ValueError(f"{chosen.name} takes no option exact")
            set_backward(model, backward.kind, backward.store, backward.keep)
    if backward.tile is not None and not takes(chosen, "tile"):
        with as_user_error("backward.tile"):
            set_tile(model, backward.tile)
    if backward.chunk is not None:
        with as_user_error("backward.chunk"):
            train_in_chunks(model, backward.chunk, backward.keys)
    return model


def model_arguments(config: RunConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the model's class; ``facts``: from :func:`data_properties`."""
    assert config.model is not None
    heads = [head for task, (_, _, head) in groups.COMPATIBLE.items() if is_a(config.task, task)]
    if heads and is_a(config.model, groups.HUGGING_FACE):
        facts = facts | {"head": heads[0]}
    arguments, backward = with_data_properties("model", config.model, facts), config.backward
    if takes(config.model, "backward"):
        kind = default_backward(config.model) if backward.kind in (None, groups.AUTO) else backward.kind
        engine = {name: value for name, value in backward.engine().items() if name != "tile" or takes(config.model, name)}
        arguments |= ({} if kind is None else {"backward": kind}) | engine
    return arguments


def prepare_weights(model: nn.Module, config: ObjectConfig, read: bool) -> None:
    """Loads pretrained weights (unless ``read`` is False, since a checkpoint is loaded instead), adds adapters and freezes
    parameters, in place. Reports which weights were used."""
    if read and isinstance(model, ExternalModel):
        with as_user_error("model.pretrained" if config.pretrained else "model"):
            report = model.start_from(config.pretrained)
    else:
        with as_user_error("model.pretrained"):
            report = load_pretrained(model, read_weights(config.pretrained)) if read and config.pretrained else None
    if report:
        print(readable(str(report)), file=sys.stderr)
    with as_user_error("model", schema_of("model").own), allocated():
        train_part(model, config.trained, config.adapters, config.quantised, config.freeze)


def train_part(
    model: nn.Module,
    trained: str = "all",
    adapters: int | dict[str, Any] = 0,
    quantised: str | None = None,
    frozen: Sequence[str] = (),
) -> None:
    """Adds layers of peft, freezes what is not trained and quantises it, in place, as the options of the model say. Raises a
    ValueError if the model has no layer that peft is to stand beside, or nothing to train or to quantise."""
    if adapters:
        needed(*PEFT)  # before `instantiate` imports it by name, which names no extra
        add_peft(model, instantiate(adapters))
    elif trained == "head":
        train_head_alone(model)
    if frozen:
        freeze(model, frozen)
    if quantised is not None:
        quantise(model, bits_in(quantised))


def build_task(config: RunConfig, data: pl.LightningDataModule, begin: bool = False) -> pl.LightningModule:
    """The LightningModule with its model; ``begin``: with the pretrained weights, if any, since no checkpoint is loaded."""
    described = description(config, data)
    if config.model is None:
        return task_of(None, config, described)
    model = build_model(config, described["facts"])
    prepare_weights(model, config.model, begin)
    if config.compile:
        with as_user_error("compile"):
            compile_blocks(model, mode=None if config.compile is True else config.compile)
    return task_of(model, config, described)


def task_of(model: nn.Module | None, config: RunConfig, described: dict[str, Any]) -> pl.LightningModule:
    """The LightningModule for a model, or for None if it takes none; ``described``: from :func:`description`."""
    context: dict[str, Any] = {"model": model, "graphs": bool(config.trainer.graphs) and why_no_graphs(config) is None}
    if config.optimizer is not None:
        context["optimizer"] = partial(make_optimizer, config.optimizer, config.trainer.gradient_clip_val or None)
        if config.scheduler is not None:
            context["scheduler"] = partial(make_scheduler, config.scheduler, config.trainer.max_epochs)
    if "tokenizer" in described:
        tokenizer = tokenizer_from_json(described["tokenizer"])
        context["token_bytes"] = torch.from_numpy(tokenizer.byte_lengths)
        if takes(config.task, "mask_id"):
            context["mask_id"] = tokenizer.mask_id
    chosen = replace(config.task, arguments=with_data_properties("task", config.task, described["facts"]))
    task = build_object("task", chosen, pl.LightningModule, **context)
    for part in () if isinstance(config, CheckpointConfig) else task.children():
        # from_pretrained gives eval(), and Lightning keeps each part's mode. What does not learn, such as a teacher, stays.
        if not part.training and any(parameter.requires_grad for parameter in part.parameters()):
            part.train()
    if config.backward.on_mismatch != ON_MISMATCH[0]:  # a model of a user's own may have it otherwise
        for checks in checks_in(task):
            checks.on_mismatch = config.backward.on_mismatch
    return task


def make_optimizer(chosen: ObjectConfig, clip_value: float | None, model: nn.Module) -> Optimizer:
    """The optimizer of a model: of a function or class that takes ``model``, or ``params``, as torch's do: those are the groups
    of :func:`~holotrain.tasks.optimizer_functions.decay_groups`.

    Args:
        clip_value: to what an optimizer that steps in the backward clips the entries of gradients; of others the trainer does.
    """
    with as_user_error("optimizer", chosen.arguments):
        of = model if takes(chosen, "model") else decay_groups(model, chosen.arguments.get("weight_decay", 0.0))
    optimizer = build_object("optimizer", chosen, Optimizer, of)
    with as_user_error("optimizer", ["layer_decay"]):
        if (layer_decay := chosen.arguments.get("layer_decay", 1.0)) != 1 or any(
            "lr_scale" in g for g in optimizer.param_groups
        ):
            decay_layers(optimizer, model, layer_decay)
    if not chosen.arguments.get("in_backward", False):
        return optimizer
    with as_user_error("optimizer.in_backward"):
        if not any(map(has_no_data, model.parameters())):  # of a plan
            require_steps_alone(partial(make_optimizer, chosen.with_arguments(in_backward=False, layer_decay=1.0), None))
        return InBackward(optimizer, clip_value)


def make_scheduler(chosen: ObjectConfig, epochs: int | None, optimizer: Optimizer, steps: int) -> LRScheduler | dict[str, Any]:
    """The schedule of an optimizer; with Lightning's options for it, if it does not advance after every optimizer step. The
    length of the training, in optimizer steps or epochs, is passed as ``steps`` or ``total_steps``."""
    interval, monitor = (chosen.arguments.get(name) for name in ("interval", "monitor"))
    plateau = is_a(chosen, groups.PLATEAU)
    by_epoch = interval == "epoch" or (plateau and interval is None)
    length = epochs if by_epoch and epochs and epochs > 0 else steps
    scheduler = build_object("scheduler", chosen, LRScheduler, optimizer, steps=length, total_steps=length)
    if not by_epoch and not plateau:
        return scheduler
    found = {"scheduler": scheduler, "interval": "epoch" if by_epoch else "step"}
    return found if monitor is None else found | {"monitor": monitor}


def build_trainer(
    config: ObjectConfig,
    folder: Path,
    callbacks: list[pl.Callback],
    logger: object,
    batches: int | None = None,
    profiler: str | None = None,
    process: ProcessRank | None = None,
) -> pl.Trainer:
    """A trainer that writes its files to ``folder``; ``batches``: in an epoch of the training, if it is one."""
    own = schema_of("trainer").of_class(config.arguments)
    plugins = own.pop("plugins") or []
    with as_user_error("trainer.plugins"):
        plugins = [*instantiate(plugins if isinstance(plugins, list) else [plugins]), CheckpointFiles()]
    own |= {"plugins": plugins, "strategy": build_strategy(config, process), "devices": 1, "num_nodes": 1}
    own |= {"default_root_dir": folder, "callbacks": callbacks, "logger": logger}
    own["enable_progress_bar"] = any(isinstance(callback, ProgressBar) for callback in callbacks)
    if process is not None:
        own |= {"devices": process.local_size, "num_nodes": process.nodes}
        plugins.append(TorchElasticEnvironment())
        if config.precision == "64-true":  # Lightning's ModelParallelStrategy only accepts it as a plugin
            own["precision"] = None
            plugins.append(DoublePrecision())
    if profiler == "trace":
        own["profiler"] = TraceProfiler(folder)
    if process is not None and not process.is_main:
        own["profiler"] = None
    if batches is not None:
        own |= validation_and_logging(config, batches)
    try:
        return instantiate({TARGET: config.target}, **own)
    except (MisconfigurationException, ValueError, OverflowError) as error:  # the last of max_time
        raise UserError(f"trainer: {first_line(error)}") from error


def check_division(config: ObjectConfig, process: ProcessRank | None, model: nn.Module) -> None:
    """Raises a UserError if tensor parallelism cannot shard any layer of the model, or it cannot be divided into stages."""
    if process is not None and (ranks := model_parallel_size(config, process)) > 1:
        with as_user_error(f"trainer={config.strategy}: the model cannot be divided among {counted(ranks, 'process')}"):
            (check_stages if config.strategy == "pipeline" else division)(model, ranks)


def build_strategy(config: ObjectConfig, process: ProcessRank | None) -> Strategy | str:
    """Lightning's strategy; "auto" for a single process."""
    if process is None:
        return "auto"
    common: dict[str, Any] = {"timeout": timedelta(seconds=config.timeout)}
    if config.strategy in ("fsdp", "tp"):
        size = model_parallel_size(config, process)
        styles = None  # the tensor parallel layers of torch, without overlap
        if config.overlap is not None:
            styles = overlapped(Tuner() if config.overlap == "auto" else config.overlap, config.signals)
        return Sharding(process.size // size, size, styles, config.sharded_checkpoints, **common)
    if config.strategy == "pipeline":
        return Pipeline(model_parallel_size(config, process), config.pipeline_schedule, config.microbatches, **common)
    return DataParallel(config.compression, **common)


def validation_and_logging(config: ObjectConfig, batches: int) -> dict[str, Any]:
    """Lightning's arguments for when to validate and log: as configured, and at the latest at the end of the training.

    If ``max_epochs`` ends the training and an epoch has fewer batches than ``val_check_interval``, every epoch is validated.

    Args:
        batches: number of batches per epoch, before limit_train_batches.
    """
    limit = config.overfit_batches or (1.0 if config.limit_train_batches is None else config.limit_train_batches)
    batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if not batches or config.fast_dev_run:
        return {}
    interval = 1.0 if config.val_check_interval is None else config.val_check_interval
    every, accumulated = config.check_val_every_n_epoch, config.accumulate_grad_batches
    last = of_epochs = config.max_epochs * batches if (config.max_epochs or 0) > 0 else math.inf
    if config.max_steps > 0:
        epochs, steps = divmod(config.max_steps, -(-batches // accumulated))  # the last batches of an epoch step as well
        last = min(last, epochs * batches + steps * accumulated)
    found = {}
    if config.log_every_n_steps and last < math.inf:
        found["log_every_n_steps"] = min(config.log_every_n_steps, max(1, last // accumulated))
    if isinstance(interval, int) and batches < interval and last == of_epochs < math.inf and every:
        interval = 1.0
    if isinstance(interval, float) and batches * (every or 1) * interval <= last:
        return found | {"val_check_interval": interval, "check_val_every_n_epoch": every}
    interval = last if isinstance(interval, float) else min(interval, last)
    return found | {"val_check_interval": interval, "check_val_every_n_epoch": None}


def build_callbacks(
    config: RunConfig, folder: Path, task: pl.LightningModule, data: pl.LightningDataModule, given: Sequence[pl.Callback] = ()
) -> list[pl.Callback]:
    """The callbacks of a training: those of the configuration, the objects that are ``given``, and those that no training goes
    without. A progress bar that is given replaces the one of the configuration.

    They act in this order. An average of the weights leaves the model when its validation ends, so it comes after all that look
    at the validation. A synthesis rewrites gradients, so it comes after all that measure them. Lightning moves those that save
    checkpoints to the end, in this order, so that last.ckpt holds the state of all others.
    """
    callbacks: list[pl.Callback] = []
    for name, chosen in config.callbacks.items():
        follows_training = (getattr(chosen, "monitor", None) or "").startswith("train/")
        if config.trainer.limit_val_batches == 0 and takes(chosen, "monitor") and not follows_training:
            continue  # there is no metric of a validation
        context = _callback_context(name, chosen, config, folder, task, data)
        callbacks.append(build_object(f"callbacks.{name}", chosen, pl.Callback, **context))
    if config.trainer.enable_progress_bar is False or any(isinstance(each, ProgressBar) for each in given):
        callbacks = [callback for callback in callbacks if not isinstance(callback, ProgressBar | EpochLog)]
    callbacks += given
    callbacks.sort(key=lambda callback: isinstance(callback, WeightAveraging))
    synthesis = [] if config.synthesis is None else [build_object("synthesis", config.synthesis, SynthesisCallback)]
    last = folder / LAST_CHECKPOINT
    periods = [callback.last_every_n_steps for callback in callbacks if isinstance(callback, BestCheckpoint)]
    lasts = [last_checkpoint(last, period) for period in (None, *filter(None, periods))]
    return [ExactResume(config.seed), *callbacks, *synthesis, *lasts, SaveOnSignal(last)]


def build_matrices(config: RunConfig) -> list[ConfusionMatrix]:
    """The confusion matrices among the configured callbacks, for an evaluation."""
    chosen = [(name, each) for name, each in config.callbacks.items() if is_a(each, full_name(ConfusionMatrix))]
    return [build_object(f"callbacks.{name}", each, ConfusionMatrix) for name, each in chosen]


def _callback_context(
    name: str, chosen: ObjectConfig, config: RunConfig, folder: Path, task: pl.LightningModule, data: pl.LightningDataModule
) -> dict[str, Any]:
    """What the program knows of a callback's parameters. What takes time is computed only for a callback that has it."""
    context: dict[str, Any] = {"dirpath": folder / LAST_CHECKPOINT.parent}
    if isinstance(data, TextDataModule):
        context["count_tokens"] = tokens_of
    if takes(chosen, "monitor"):
        monitored = monitored_by(task)
        monitor = chosen.arguments.get("monitor") or next(iter(monitored), None)
        if monitor and monitored and not monitor.startswith("train/") and monitor != "step":  # the latest are kept by step
            check_choice(f"callbacks.{name}.monitor", monitor, monitored)
        given = {"monitor": monitor, "mode": monitored.get(monitor)}
        context |= {option: value for option, value in given.items() if value is not None}
    if takes(chosen, "peak_flops"):
        found = peak_flops(device_name(config.trainer.accelerator), config.trainer.precision)
        context["peak_flops"] = chosen.arguments.get("peak_flops") or found
        if context["peak_flops"] is not None and takes(chosen, "model_flops_per_sample"):  # only MFU and HFU need them
            context |= _flops(config, data)
    return context


def _flops(config: RunConfig, data: pl.LightningDataModule) -> dict[str, int]:
    """FLOPs of a sample with and without recomputation; nothing where the shape of samples varies or is not known."""
    text, image_shape = data if isinstance(data, TextDataModule) else None, getattr(data, "image_shape", ())
    if config.model is None or (not image_shape if text is None else text.layout != "packed"):
        return {}
    with torch.device("meta"):
        sample = torch.empty(1, *image_shape) if text is None else torch.zeros(1, text.context, dtype=torch.long)
        stored = build_model(replace(config, backward=BackwardConfig("autograd")), data_properties(data))
        model = build_model(config, data_properties(data))
    stored_flops, flops = training_flops(stored, (sample,)), training_flops(model, (sample,))
    return {"model_flops_per_sample": stored_flops, "hardware_flops_per_sample": flops}


def tokens_of(batch: dict[str, Tensor]) -> Tensor:
    """Number of training tokens in a batch, without padding; on the batch's device, to avoid a synchronization."""
    return batch["lengths"].sum() if "lengths" in batch else torch.tensor(batch["tokens"][:, 1:].numel())


def build_loggers(config: RunConfig, folder: Path, sweep: str | None = None, given: Sequence[Logger] = ()) -> list[Logger]:
    """Those of the group ``logger``, and the objects that are ``given``; ``folder``: that of the run; ``sweep``: name of the
    sweep that the run is a job of."""
    run = (config.name or folder.name) if sweep is None else f"{config.name or sweep}/{folder.name}"
    loggers = []
    for name, chosen in config.logger.items():
        parameters = signature(chosen.target).options
        named = run if "project" in parameters else name  # of a run in a project, or of a subfolder
        tags = [*config.tags] or None
        if tags and "dict" in parameters.get("tags", Option("", None, "")).type.lower():
            tags = dict.fromkeys(tags, "true")
        context = {"save_dir": folder, "run_name": run, "name": named, "tags": tags, "group": sweep}
        loggers.append(build_object(f"logger.{name}", chosen, Logger, **context))
    for logger in loggers:
        _count_steps_done(logger)
    return [*loggers, *given]


def _count_steps_done(logger: Logger) -> None:
    """The logger counts as the screen does: steps that were done, and epochs from 1. Lightning (2.6) gives it what the n-th
    step has measured at n - 1, with an epoch that counts from 0."""
    log = logger.log_metrics

    def log_metrics(metrics: dict[str, float], step: int | None = None) -> None:
        if "epoch" in metrics and step is not None:
            metrics, step = metrics | {"epoch": metrics["epoch"] + 1}, step + 1
        log(metrics, step)

    logger.log_metrics = log_metrics
