"""Builds data, model, task, optimizer and synthesis from a configuration."""

import copy
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from holotrain.callbacks import SynthesisCallback
from holotrain.config import option_groups as groups
from holotrain.config.command_options import FitConfig, PlanConfig, RunConfig
from holotrain.config.objects import ObjectConfig
from holotrain.config.option_groups import default_backward, is_a, schema_of, takes
from holotrain.config.signatures import REQUIRED, signature
from holotrain.data.text.module import TextDataModule
from holotrain.data.tokenizers import tokenizer_from_json
from holotrain.errors import UserError, as_user_error
from holotrain.models.adapters import PEFT, add_peft, train_head_alone
from holotrain.models.block_schedules import compile_blocks, schedule_blocks, set_backward, set_tile
from holotrain.models.checkpoint_files import read_weights
from holotrain.models.external import ExternalModel
from holotrain.models.pretrained import load_pretrained
from holotrain.models.quantised import quantise
from holotrain.models.saved import allocated
from holotrain.numeric import bits_in, require_at_least
from holotrain.optimizers.stepping import InBackward
from holotrain.reversible.sequence import checks_in
from holotrain.schedules import ON_MISMATCH
from holotrain.synthesis import HolographicSynthesis
from holotrain.targets import TARGET, instantiate, needed
from holotrain.tasks.optimizer_functions import decay_groups


def build_object(where: str, config: ObjectConfig, kind: type, *positional: Any, **context: Any) -> Any:
    """Calls what is configured, with what the program knows of those parameters that the configuration leaves open. All objects
    of a configuration are made here.

    Args:
        where: the group, or a name in it, such as ``callbacks.memory``.
        kind: the class that the object must have.
        context: values of parameters, used where the class or function has such a parameter.

    Raises:
        UserError: it cannot be imported or called, refuses a value, or makes something else.
    """
    if config.object is not None:
        return _on_default_device(config.object)
    schema = schema_of(where)
    own = {name: value for name, value in config.arguments.items() if value is not None or name not in schema.null_if_known}
    parameters = {*signature(config.target).options, *config.arguments}
    context = {name: value for name, value in context.items() if name in parameters and own.get(name) is None}
    with as_user_error(where, schema.options(config.target), schema.elsewhere):
        result = instantiate({TARGET: config.target, **own}, *positional, **context)
        if not isinstance(result, kind):
            raise ValueError(f"{config.target} is not a {kind.__name__}; calling it gives a {type(result).__name__}")
    return result


def _on_default_device(value: Any) -> Any:
    """The object; while torch's default device is ``meta``, a copy of it that has shapes but no data."""
    if torch.get_default_device().type != "meta" or not isinstance(value, torch.nn.Module):
        return value
    memo: dict[int, Any] = {id(getattr(value, "_trainer", None)): None}  # a copy belongs to no trainer
    for tensor in value.buffers():
        memo[id(tensor)] = torch.empty_like(tensor, device="meta")
    for weight in value.parameters():
        memo[id(weight)] = torch.nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
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
    return facts


def with_data_properties(group: str, chosen: ObjectConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a model or a task, with the facts under the names of its parameters, which must not contradict them."""
    other = groups.MODEL_OPTIONS if group == "model" else ()
    arguments = {name: value for name, value in chosen.arguments.items() if name not in other}
    for name, value in facts.items():
        if takes(chosen, name) and arguments.setdefault(name, value) != value:
            raise UserError(f"{group}.{name}: {arguments[name]} does not fit the data, which have {value}; leave it out")
    for name, option in schema_of(group).options(chosen.target).items():
        if option.default is REQUIRED and name not in arguments:
            raise UserError(f"{group}.{name}: the data do not tell it; give {group}.{name}=...")
    return arguments


def model_arguments(config: RunConfig, facts: dict[str, Any]) -> dict[str, Any]:
    """The arguments of the model's class; ``facts``: from :func:`data_properties`."""
    assert config.model is not None
    heads = [option for task, option in groups.TASK_OPTIONS.items() if is_a(config.task, task)]
    if heads and is_a(config.model, groups.HUGGING_FACE):
        facts = facts | {"head": heads[0]}
    arguments, backward = with_data_properties("model", config.model, facts), config.backward
    if takes(config.model, "backward"):
        kind = default_backward(config.model) if backward.kind in (None, groups.AUTO) else backward.kind
        engine = {name: value for name, value in backward.engine().items() if name != "tile" or takes(config.model, name)}
        arguments |= ({} if kind is None else {"backward": kind}) | engine
    return arguments


def build_model(config: RunConfig, facts: dict[str, Any]) -> nn.Module:
    """The model, without pretrained weights and adapters; ``facts``: from :func:`data_properties`."""
    assert config.model is not None
    backward = config.backward
    with as_user_error("model"), allocated():
        chosen = replace(config.model, arguments=model_arguments(config, facts))
        model = build_object("model", chosen, nn.Module)
    if isinstance(model, pl.LightningModule):  # whose steps and optimizer would not be used
        target = config.model.target
        raise UserError(f"model.{TARGET}: {target} is a LightningModule, which is a task; give task.{TARGET}={target}")
    try:
        if backward.blocks:
            schedule_blocks(model, backward.blocks)
        elif not takes(config.model, "backward") and backward.kind not in (None, groups.AUTO):
            if backward.exact:
                raise ValueError(f"{config.model.name} takes no option exact")
            set_backward(model, backward.kind, backward.store, backward.keep)
        if backward.tile is not None and not takes(config.model, "tile"):
            with as_user_error("backward.tile"):
                set_tile(model, backward.tile)
    except ValueError as error:
        if backward.blocks:
            raise UserError(f"backward.blocks: {error}; use backward.blocks=[] to choose them again") from error
        raise UserError(f"backward={backward.kind}: {error}") from error
    return model


def build_task(config: RunConfig, data: pl.LightningDataModule, begin: bool = False) -> pl.LightningModule:
    """The LightningModule with its model.

    Args:
        begin: load the pretrained weights of the configuration, if any; False if a checkpoint is loaded instead.
    """
    described = description(config, data)
    classes = described["facts"].get("classes", 0)
    if is_a(config.task, groups.SEQUENCE_CLASSIFIER) and is_a(config.data, groups.TEXT) and classes < 2:
        raise UserError(f"data.label: the texts have {classes} classes; at least 2 are needed")
    if config.model is None:
        return task_of(None, config, described)
    model = build_model(config, described["facts"])
    prepare_weights(model, config.model, begin)
    if config.compile:
        compile_blocks(model, mode=None if config.compile is True else config.compile)
    return task_of(model, config, described)


def task_of(model: nn.Module | None, config: RunConfig, described: dict[str, Any]) -> pl.LightningModule:
    """The LightningModule for a model, or for None if it takes none; ``described``: from :func:`description`."""
    context: dict[str, Any] = {"model": model, "cuda_graph": config.backward.cuda_graph}
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
    if config.backward.on_mismatch != ON_MISMATCH[0]:
        for checks in checks_in(task):
            checks.on_mismatch = config.backward.on_mismatch
    return task


def make_optimizer(chosen: ObjectConfig, clip_value: float | None, model: nn.Module) -> Optimizer:
    """The optimizer of a model.

    A function or class that takes ``model`` is given the model. One that takes ``params``, as torch's do, is given the two
    groups of :func:`~holotrain.tasks.optimizer_functions.decay_groups`: norms, biases and positions have no weight decay.

    Args:
        clip_value: to what an optimizer that steps in the backward clips the entries of gradients; of others the trainer does.
    """
    arguments = {name: value for name, value in chosen.arguments.items() if name != groups.IN_BACKWARD}
    with as_user_error("optimizer", ["lr", "weight_decay"]):
        if isinstance(rate := arguments.get("lr"), int | float):
            require_at_least(0, lr=rate)  # torch's message names no option
        of = model if takes(chosen, "model") else decay_groups(model, arguments.get("weight_decay", 0.0))
    optimizer = build_object("optimizer", replace(chosen, arguments=arguments), Optimizer, of)
    if not chosen.arguments.get(groups.IN_BACKWARD, False):
        return optimizer
    with as_user_error(f"optimizer.{groups.IN_BACKWARD}"):
        return InBackward(optimizer, clip_value)


def make_scheduler(chosen: ObjectConfig, epochs: int | None, optimizer: Optimizer, steps: int) -> LRScheduler | dict[str, Any]:
    """The schedule of an optimizer; with Lightning's options for it, if it does not advance after every optimizer step.

    Args:
        epochs: of the training.
        steps: optimizer steps of the training. Those, or the epochs, are passed as ``steps`` or ``total_steps``, where the
            function or class takes it.
    """
    options = {name: chosen.arguments.get(name) for name in groups.SCHEDULER_OPTIONS}
    own = {name: value for name, value in chosen.arguments.items() if name not in options}
    plateau = is_a(chosen, groups.PLATEAU)
    by_epoch = options["interval"] == "epoch" or (plateau and options["interval"] is None)
    length = epochs if by_epoch and epochs and epochs > 0 else steps
    scheduler = build_object(
        "scheduler", replace(chosen, arguments=own), LRScheduler, optimizer, steps=length, total_steps=length
    )
    if options["monitor"] is not None and not plateau:
        raise UserError(f"scheduler.monitor: {chosen.name} follows no metric; leave it out")
    if not by_epoch and not plateau:
        return scheduler
    monitor = {} if options["monitor"] is None else {"monitor": options["monitor"]}
    return {"scheduler": scheduler, "interval": "epoch" if by_epoch else "step", **monitor}


def check_optimizer(config: RunConfig) -> None:
    """Makes the optimizer and the schedule of a small model, so that a wrong value is refused before data are read."""
    if config.optimizer is None or not isinstance(config, FitConfig | PlanConfig):  # the others need no optimizer
        return
    optimizer = make_optimizer(config.optimizer, None, nn.Linear(1, 1))
    if config.steps_in_backward and not _steps_parameters_alone(config.optimizer):
        raise UserError(f"optimizer.in_backward: {config.optimizer.name} steps all parameters together; set it to false")
    if config.scheduler is not None:
        make_scheduler(config.scheduler, config.trainer.max_epochs, optimizer, 10)


def _steps_parameters_alone(chosen: ObjectConfig) -> bool:
    """Whether a small model becomes the same in the usual steps and in steps of one parameter after another."""

    def trained(in_backward: bool) -> list[Tensor]:
        with torch.device("cpu"):
            model = nn.Sequential(*(nn.utils.skip_init(nn.Linear, 2, 2) for _ in range(2)))  # draws no random numbers
            for parameter in model.parameters():
                parameter.data.copy_(torch.linspace(-1, 2, parameter.numel()).view_as(parameter))
            optimizer = make_optimizer(chosen.with_arguments(in_backward=in_backward), None, model)
            for number in range(2):
                for size, parameter in enumerate(model.parameters(), 1):
                    parameter.grad = (number + 1) * 10.0**size * parameter.detach().cos()
                optimizer.step()
        return [parameter.detach() for parameter in model.parameters()]

    try:
        return all(map(torch.equal, trained(True), trained(False)))
    except RuntimeError:  # a state of all parameters, which InBackward found
        return False


def description(config: RunConfig, data: pl.LightningDataModule) -> dict[str, Any]:
    """What is needed to use the model without its data, in plain containers.

    The class and arguments of the model (without a model, of the task), what the data tell, the tokenizer of text, the classes
    of a classification, and the mean and deviation of the channels of images.
    """
    facts = data_properties(data)
    trained = config.task if config.model is None else config.model
    arguments = with_data_properties("task", config.task, facts) if config.model is None else model_arguments(config, facts)
    found: dict[str, Any] = {"target": trained.target, "arguments": arguments, "facts": facts}
    if isinstance(data, TextDataModule):
        found["tokenizer"] = data.tokenizer.to_json()
    if statistics := getattr(data, "statistics", None):
        found["statistics"] = [list(numbers) for numbers in statistics]
    if (classes := class_names(config, data)) is not None:
        found["class_names"] = classes
    return found


def class_names(config: RunConfig, data: pl.LightningDataModule) -> list[str] | None:
    """The names of the classes; None if the task is not a classification, or the data do not tell them."""
    names = getattr(data, "class_names", None) if is_a(config.task, groups.CLASSIFIER) else None
    return None if names is None else list(names)


def synthesis_callback(chosen: ObjectConfig) -> SynthesisCallback:
    return build_object("synthesis", chosen, SynthesisCallback)


def synthesis_of(chosen: ObjectConfig, task: nn.Module) -> HolographicSynthesis:
    """The synthesis of a task, which need not be on its device yet."""
    callback = synthesis_callback(chosen)
    with as_user_error("synthesis", schema_of("synthesis").options(chosen.target)):
        return callback.applied_to(task, on_device=False)


def prepare_weights(model: nn.Module, config: ObjectConfig, read: bool) -> None:
    """Loads pretrained weights (unless ``read`` is False, since a checkpoint is loaded instead), adds adapters and freezes
    parameters, in place. Reports which weights were used."""
    if isinstance(model, ExternalModel):
        with as_user_error("model"):
            if read and (report := model.start_from(config.pretrained)):
                print(report, file=sys.stderr)
    elif read and config.pretrained:
        with as_user_error("model.pretrained"):
            print(load_pretrained(model, read_weights(config.pretrained)), file=sys.stderr)
    with as_user_error("model"), allocated():
        train_part(model, config.trained, config.adapters, config.quantised)


def train_part(
    model: nn.Module, trained: str = "all", adapters: int | dict[str, Any] = 0, quantised: str | None = None
) -> None:
    """Adds layers of peft, freezes what is not trained and quantises it, in place, as the options of the model say.

    Raises:
        ValueError: the model has no layer that peft is to stand beside, or nothing to train or to quantise.
    """
    if isinstance(adapters, dict):
        needed(*PEFT)  # before `instantiate` imports it by name, which names no extra
        add_peft(model, instantiate(adapters))
    elif trained == "head":
        train_head_alone(model)
    if quantised is not None:
        quantise(model, bits_in(quantised))
