"""Training within the memory there is: automatic options, and what to do after running out of memory."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby

import lightning.pytorch as pl

from holotrain.commands.console import console
from holotrain.commands.failures import OutOfMemory, as_out_of_memory
from holotrain.commands.planners import (
    NO_OPTION,
    budget_of,
    longest_context,
    planner_of,
    smallest_batch,
    variants_of,
    with_variant,
)
from holotrain.commands.run_folder import Run
from holotrain.config.build import check_optimizer
from holotrain.config.build_trainer import device_kind, device_name
from holotrain.config.command_options import Config, RunConfig
from holotrain.config.objects import PYTHON_OBJECT
from holotrain.config.option_groups import ADAMW, AUTO, LOW_BIT, OBJECT_GROUPS, takes
from holotrain.errors import UserError
from holotrain.numeric import counted, in_words
from holotrain.planning import Planner
from holotrain.planning.allocators import ALLOCATORS
from holotrain.planning.choice import Choice, TooSmall
from holotrain.planning.fake_tensors import Unplannable
from holotrain.planning.memory_plan import Limit, choose_batch, choose_variant, largest_batch, least_memory, smallest
from holotrain.planning.planner import Variant
from holotrain.targets import TARGET

Say = Callable[[str], object]
"""Called with each line of a report."""


def chosen(
    config: Config, data: pl.LightningDataModule, device: str, processes: int = 1, say: Say = console.print
) -> tuple[Config, int | None]:
    """The configuration with its ``auto`` options filled in, and the bytes that a step then needs at most; None: nothing was
    planned. Reports the choice.

    Args:
        data: set up; if the batch size is ``auto``, with the smallest one. Its batch size is changed.
        processes: number of processes on this machine, which share its memory.

    Raises:
        UserError: nothing fits, the model cannot be planned, or the device is not supported.
    """
    if not (config.batch_is_open or config.backward.open):
        if config.backward.kind == AUTO:
            say(f"backward=auto: {runs_of(config.backward.blocks)}, as before")
        elif config.memory is not None:
            say(f"memory={config.memory} has no effect without backward=auto or an automatic batch size")
        return config, None
    if device not in ALLOCATORS:
        raise UserError(f"auto: planning does not support {device}; set backward and the batch size yourself")
    budget, planned = budget_of(config, device, processes), None
    try:
        with as_out_of_memory():
            if config.batch_is_open:
                config, planned = _with_batch(config, data, device, budget, say)
            if config.backward.open:
                config, planned = _with_schedules(config, data, device, budget, say)
    except Unplannable as error:
        raise UserError(f"auto: {error}; set backward and the batch size yourself") from error
    except OutOfMemory as error:
        raise UserError("auto: not enough memory to time a single block; use a smaller batch size") from error
    return config, planned


def _with_batch(config: Config, data: pl.LightningDataModule, device: str, budget: int, say: Say) -> tuple[Config, int]:
    option, _ = config.batch_option
    say(f"{option}=auto: planning the largest batch ...")
    smallest = smallest_batch(config)
    least = smallest.batch_option[1]  # a batch must hold the longest document
    most = len(data.train_dataloader()) if option == "data.batch_size" else None
    planner = planner_of(config, data, device)
    try:
        size = choose_batch(planner, budget, least, most)
    except TooSmall as error:
        raise _too_small(smallest, budget, error) from error
    assert planner.backward is not None  # an automatic batch size does not go with open schedules
    setattr(data, option.removeprefix("data."), size)
    say(f"  {option}={size} is the largest that fits into {in_words(budget)} or that the data provide")
    return config.with_batch(size), planner.footprint(planner.backward, size).bound


def _with_schedules(config: Config, data: pl.LightningDataModule, device: str, budget: int, say: Say) -> tuple[Config, int]:
    say("backward=auto: planning what each block stores ...")
    planner = planner_of(config, data, device)
    variants = variants_of(config, data, planner, config.backward.inexact)
    try:
        variant, choice = choose_variant(planner, variants, budget)
    except TooSmall as error:
        say("  it does not fit; planning what would ...")
        raise _too_small(config, budget, error, what_helps(*proposals(config, data, planner, variants, budget))) from error
    say(f"  {described(choice, budget, '' if variant is None else variant.options)}")
    if variant is not None:
        config = with_variant(config, variant.tile, variant.bits)
    return replace(config, backward=replace(config.backward, blocks=choice.blocks)), choice.bound


def _too_small(config: RunConfig, budget: int, error: TooSmall, helps: str = "") -> UserError:
    option, size = config.batch_option
    batch = "" if size is None else f"with {option}={size} "
    need = f"{batch}this run needs {in_words(error.least, up=True)}"
    return UserError(f"memory: {in_words(budget)} is too little: {need}" + (f"; {helps}" if helps else ""))


def described(choice: Choice, budget: int, options: str = "") -> str:
    """The choice of ``backward=auto``, with further options, as text."""
    words = f"{runs_of(choice.blocks)} with {options}" if options else runs_of(choice.blocks)
    words += f"; {in_words(choice.bound, up=True)} of {in_words(budget)}"
    saved = 1 - choice.cost / choice.most_expensive
    return words + (f"; {saved:.0%} less computation in blocks than with full recomputation" if saved else "")


def runs_of(blocks: Sequence[str]) -> str:
    """The schedules of blocks as text, such as ``"4 checkpoint, 2 autograd"``."""
    return ", ".join(f"{len(list(run))} {name}" for name, run in groupby(blocks))


def explained(config: RunConfig, data: pl.LightningDataModule, run: Run, when: str, requested: str) -> str:
    """The message after running out of memory: what happened, how to resume, and which overrides need less memory.

    Args:
        data: set up.
        when: such as ``at step 12``.
        requested: the requested size, such as ``20.00 MiB``, or empty.
    """
    option, size = config.batch_option
    tried = f": tried to allocate {requested}" if requested else ""
    batch = "" if size is None else f" with {option}={size}"  # data of others may have no such option
    lines = [f"holotrain: out of memory {when}{batch} on {device_name(config.trainer.accelerator)}{tried}"]
    if run.last_checkpoint.exists():
        again = f"python -m holotrain fit resume=true hydra.run.dir={run.folder} ..."
        lines.append(f"resume from {run.last_checkpoint} with: {again}")
    else:
        lines.append("no checkpoint was saved yet; callbacks.checkpoint.every_n_train_steps=... saves during an epoch")
    advice = "smaller batches, backward=reversible or checkpoint, and trainer.precision=bf16-mixed need less memory"
    with suppress(Exception):  # such as: there is too little memory even for a plan, or none for this device
        planner = planner_of(config, data, device_kind(config.trainer.accelerator))
        assert planner.backward is not None  # open schedules have been chosen by now
        half = planner.footprint(planner.backward).bound // 2
        limits = [largest_batch(planner, planner.backward, half)]
        variants = variants_of(config, data, planner, config.backward.inexact)
        advice = f"by the plan, in half of the memory {what_helps(*proposals(config, data, planner, variants, half, limits))}"
    return "\n".join([*lines, advice])


LOWER_PRECISION = {"64-true": "32-true", "32-true": "bf16-mixed"}


def proposals(
    config: RunConfig,
    data: pl.LightningDataModule,
    planner: Planner,
    variants: Sequence[Variant],
    budget: int,
    limits: Sequence[Limit] = (),
) -> tuple[list[str], dict[str, int]]:
    """Overrides with which a training fits, by its plan; those that change least come first.

    Args:
        limits: its largest sizes, if its schedules are configured; those of ``backward=auto`` are planned here.

    Returns:
        the overrides; if there are none, overrides with which it needs less, and the bytes that it then needs.
    """
    found, needs = [], {}
    with suppress(Unplannable, OutOfMemory), as_out_of_memory():
        variant, _ = smallest(planner, variants)
        least = planner if variant is None else variant.planner
        if planner.backward is not None:
            found = list(_schedules(config, planner, variants, budget))
            found += [_words(config, limit) for limit in limits if limit.value]
            limits = [largest_batch(least, least_memory(least), budget)] if not found else []
            way = f"backward={least_memory(least)} " + (f"{variant.options} " if variant else "")
        else:
            inexact = replace(config, backward=replace(config.backward, inexact=True))
            if not config.backward.inexact and _need(inexact, data, replace(planner, inexact=True)) <= budget:
                found.append("backward.inexact=true")
            longest = longest_context(config, data, planner, variant, least_memory(least), budget)
            limits, way = [largest_batch(least, least_memory(least), budget), *([longest] if longest else [])], ""
        found += [f"{way}{_words(config, limit)}" for limit in limits if limit.value]
        if not found:
            needs = _needs(config, data, planner)
            found = [words for words, need in needs.items() if need <= budget]
    return found, {} if found else needs


def what_helps(found: list[str], needs: dict[str, int]) -> str:
    """What :func:`proposals` returns, as text."""
    if found:
        return f"it fits with {', or with '.join(found)}"
    if needs:
        return "; ".join(f"with {words} it needs {in_words(need, up=True)}" for words, need in needs.items())
    return "nothing else could be planned"


def _schedules(config: RunConfig, planner: Planner, variants: Sequence[Variant], budget: int) -> Iterator[str]:
    """Other schedules with which it fits."""
    unsupported = {"store": "0", "keep": "[]", "blocks": "[]", "inexact": "false"}  # by other schedules
    resets = "".join(f" backward.{name}={value}" for name, value in unsupported.items() if getattr(config.backward, name))
    for name in planner.schedules:
        if name != planner.backward and planner.footprint(name).bound <= budget:
            yield f"backward={name}{resets}"
    for variant in variants:
        if variant.planner.footprint(variant.row).bound <= budget:
            yield f"backward={variant.row} {variant.options}{resets}"


def _need(config: RunConfig, data: pl.LightningDataModule, planner: Planner) -> int:
    """Bytes that a training needs with its schedules; if ``backward=auto`` chooses them, at least."""
    if planner.backward is not None:
        return planner.footprint(planner.backward).bound
    return smallest(planner, variants_of(config, data, planner, config.backward.inexact))[1]


def _needs(config: RunConfig, data: pl.LightningDataModule, planner: Planner) -> dict[str, int]:
    """Overrides that make numbers, gradients or optimizer states smaller, with the bytes that the training then needs, if
    these are fewer than without."""
    others: dict[str, RunConfig] = {}
    trainer, optimizer, model = config.trainer, config.optimizer, config.model
    if optimizer is not None and not config.steps_in_backward:
        words = "optimizer.in_backward=true"
        words += " trainer.gradient_clip_val=null" if trainer.gradient_clip_val else ""
        words += " trainer.accumulate_grad_batches=1" if trainer.accumulate_grad_batches > 1 else ""
        unclipped = trainer.with_arguments(gradient_clip_val=None, accumulate_grad_batches=1)
        stepping = replace(config, trainer=unclipped, optimizer=optimizer.with_arguments(in_backward=True))
        with suppress(UserError):  # something else is refused beside it
            check_optimizer(stepping)
            others[words] = stepping
    if optimizer is not None and optimizer.target == ADAMW:
        few_bits = replace(optimizer, target=LOW_BIT, arguments={"bits": "8bit"} | optimizer.arguments)
        others["optimizer=adamw_8bit"] = replace(config, optimizer=few_bits)
    if takes(model, "reversible") and model.trained == "all" and not model.adapters:
        lora = {TARGET: "peft.LoraConfig", "r": 8, "target_modules": "all-linear"}
        words = ", ".join(f"{name}: {value}" for name, value in lora.items())
        others[f"'model.adapters={{{words}}}'"] = replace(config, model=model.with_arguments(adapters=lora))
    if lower := LOWER_PRECISION.get(trainer.precision):
        others[f"trainer.precision={lower}"] = replace(config, trainer=trainer.with_arguments(precision=lower))
    usual, needs = _need(config, data, planner), {}
    for words, changed in others.items():
        with suppress(UserError, Unplannable, ValueError):
            need = _need(changed, data, planner_of(changed, data, planner.device))
            if need < usual:
                needs[words] = need
    return needs


def _words(config: RunConfig, limit: Limit) -> str:
    if limit.option != NO_OPTION:
        return f"{limit.option}={limit.value}"
    options = [] if config.data.target == PYTHON_OBJECT else OBJECT_GROUPS["data"].options(config.data.target)
    named = ", ".join(f"data.{name}" for name in options)
    return f"batches of {counted(limit.value, 'sample')} ({f'options: {named}' if named else 'which the data module sets'})"
