"""Training within the memory there is: automatic options, and what to do after running out of memory."""

import re
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby

import lightning.pytorch as pl
import torch

from holotrain.commands.console import console
from holotrain.commands.planners import NO_OPTION, PlannedTraining, budget_of, planner_of, smallest_batch, with_tile
from holotrain.commands.run_folder import Run
from holotrain.config.build import check_optimizer
from holotrain.config.build_trainer import device_kind, device_name
from holotrain.config.command_options import Config, RunConfig
from holotrain.config.option_groups import ADAMW, AUTO, HUGGING_FACE, LOW_BIT, TIMM, is_a, trains_all
from holotrain.data.loader import batch_unit
from holotrain.errors import UserError
from holotrain.numeric import counted, in_words
from holotrain.planning.choice import Choice, TooSmall
from holotrain.planning.devices import ALLOCATORS
from holotrain.planning.fake_tensors import Unplannable
from holotrain.planning.memory_plan import Limit, choose_batch, choose_tile, largest_batch, least_memory, rows_in_tiles
from holotrain.targets import TARGET


def chosen(config: Config, data: pl.LightningDataModule, device: str, processes: int = 1) -> tuple[Config, int | None]:
    """The configuration with its ``auto`` options filled in, and the bytes that a step then needs at most; None: nothing was
    planned. Prints the choice.

    Args:
        data: set up; if the batch size is ``auto``, with the smallest one. Its batch size is changed.
        processes: number of processes on this machine, which share its memory.

    Raises:
        UserError: nothing fits, the model cannot be planned, or the device is not supported.
    """
    if not (config.batch_is_open or config.backward.open):
        if config.backward.kind == AUTO:
            console.print(f"backward=auto: {runs_of(config.backward.blocks)}, as before")
        elif config.memory is not None:
            console.print(f"memory={config.memory} has no effect without backward=auto or an automatic batch size")
        return config, None
    if device not in ALLOCATORS:
        raise UserError(f"auto: planning does not support {device}; set backward and the batch size yourself")
    budget, planned = budget_of(config, device, processes), None
    try:
        with as_out_of_memory():
            if config.batch_is_open:
                config, planned = _with_batch(config, data, device, budget)
            if config.backward.open:
                config, planned = _with_schedules(config, data, device, budget)
    except Unplannable as error:
        raise UserError(f"auto: {error}; set backward and the batch size yourself") from error
    except OutOfMemory as error:
        raise UserError("auto: not enough memory to time a single block; use a smaller batch size") from error
    return config, planned


def _with_batch(config: Config, data: pl.LightningDataModule, device: str, budget: int) -> tuple[Config, int]:
    option, _ = config.batch_option
    console.print(f"{option}=auto: planning the largest batch ...")
    smallest = smallest_batch(config)
    least = smallest.batch_option[1]  # a batch must hold the longest document
    most = len(data.train_dataloader()) if option == "data.batch_size" else None
    planner = planner_of(config, data, device)
    try:
        size = choose_batch(planner, budget, least, most)
    except TooSmall as error:
        console.print("  not even the smallest fits; planning what would ...")
        helps = what_helps(*proposals(PlannedTraining(smallest, data, device), budget))
        raise _too_small(smallest, budget, error, helps) from error
    assert planner.backward is not None  # an automatic batch size does not go with open schedules
    setattr(data, option.removeprefix("data."), size)
    console.print(f"  {option}={size} is the largest that fits into {in_words(budget)} or that the data provide")
    return config.with_batch(size), planner.footprint(planner.backward, size).bound


def with_smaller_batch(config: Config, data: pl.LightningDataModule, device: str) -> tuple[Config, int] | None:
    """After an automatic batch did not fit: the configuration with three quarters of it, and the bytes of a step by the
    plan; None: it was the smallest. The batch size of the data is changed."""
    option, size = config.batch_option
    unit, least = batch_unit(data), smallest_batch(config).batch_option[1]
    smaller = max(3 * size // 4 // unit * unit, least)
    if smaller >= size:
        return None
    setattr(data, option.removeprefix("data."), smaller)
    planner = planner_of(config.with_batch(smaller), data, device)
    assert planner.backward is not None
    return config.with_batch(smaller), planner.footprint(planner.backward).bound


def _with_schedules(config: Config, data: pl.LightningDataModule, device: str, budget: int) -> tuple[Config, int]:
    console.print("backward=auto: planning what each block stores ...")
    training = PlannedTraining(config, data, device)
    try:
        found, choice = choose_tile(training.planner, training.tiled, budget)
    except TooSmall as error:
        console.print("  it does not fit; planning what would ...")
        raise _too_small(config, budget, error, what_helps(*proposals(training, budget))) from error
    if found is not training.planner:
        config = with_tile(config, found.tile)
    console.print(f"  {described(choice, budget, '' if found is training.planner else f'backward.tile={found.tile}')}")
    return replace(config, backward=replace(config.backward, blocks=choice.blocks)), choice.bound


def _too_small(config: RunConfig, budget: int, error: TooSmall, helps: str) -> UserError:
    option, size = config.batch_option
    batch = "" if size is None else f"with {option}={size} "
    need = f"{batch}this run needs {in_words(error.least, up=True)}"
    return UserError(f"memory: {in_words(budget)} is too little: {need}; {helps}")


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
        lines.append(f"add what needs less memory, and {run.how_to_resume}")
    else:
        lines.append("no checkpoint was saved yet; callbacks.checkpoint.every_n_train_steps=... saves during an epoch")
    advice = "smaller batches, backward=reversible or checkpoint, and trainer.precision=bf16-mixed need less memory"
    with suppress(Exception):  # such as: there is too little memory even for a plan, or none for this device
        training = PlannedTraining(config, data, device_kind(config.trainer.accelerator))
        assert training.planner.backward is not None  # open schedules have been chosen by now
        half = training.need // 2
        limits = [largest_batch(training.planner, training.planner.backward, half)]
        advice = f"by the plan, in half of the memory {what_helps(*proposals(training, half, limits))}"
    return "\n".join([*lines, advice])


def proposals(training: PlannedTraining, budget: int, limits: Sequence[Limit] = ()) -> tuple[list[str], dict[str, int]]:
    """Overrides with which a training fits, by its plan; those that change least come first.

    Args:
        limits: its largest sizes, if its schedules are configured; those of ``backward=auto`` are planned here.

    Returns:
        the overrides; if there are none, overrides with which it needs less, and the bytes that it then needs.
    """
    config, found, needs = training.config, [], {}
    is_open = training.planner.backward is None
    with suppress(Unplannable, OutOfMemory), as_out_of_memory():
        if not is_open:
            found += _other_schedules(training, budget)
            found += [_words(limit) for limit in limits if limit.value]
        elif not config.backward.inexact:
            inexact = replace(config, backward=replace(config.backward, inexact=True))
            found += ["backward.inexact=true"] if training.changed(inexact).need <= budget else []
        if is_open or not found:
            found += _smaller(training, budget)
        if not found:
            needs = _needs(training)
            found = [words for words, need in needs.items() if need <= budget]
    return found, {} if found else needs


def what_helps(found: list[str], needs: dict[str, int]) -> str:
    """What :func:`proposals` returns, as text."""
    if found:
        return f"it fits with {', or with '.join(found)}"
    if needs:
        return "; ".join(f"with {words} it needs {in_words(need, up=True)}" for words, need in needs.items())
    return "nothing else could be planned"


def _other_schedules(training: PlannedTraining, budget: int) -> list[str]:
    """Schedules with which it fits, other than the configured ones."""
    planner, backward = training.planner, training.config.backward
    unsupported = {"store": "0", "keep": "[]", "blocks": "[]", "inexact": "false"}  # by other schedules
    resets = "".join(f" backward.{name}={value}" for name, value in unsupported.items() if getattr(backward, name))
    rows = [(name, "", planner) for name in planner.schedules if name != planner.backward]
    if (tiled := training.tiled) is not None:
        rows += [(name, f" backward.tile={tiled.tile}", tiled) for name in rows_in_tiles(tiled)]
    return [f"backward={name}{options}{resets}" for name, options, by in rows if by.footprint(name).bound <= budget]


def _smaller(training: PlannedTraining, budget: int) -> list[str]:
    """Smaller sizes with which it fits under the schedules that need least."""
    planner = training.smallest
    least = least_memory(planner)
    limits: list[Limit | None] = [largest_batch(planner, least, budget)]
    if training.planner.backward is None:  # backward=auto chooses these schedules itself
        way = ""
        limits.append(training.longest_context(planner, least, budget))
    else:
        way = f"backward={least} " + (f"backward.tile={planner.tile} " if planner is training.tiled else "")
    return [f"{way}{_words(limit)}" for limit in limits if limit is not None and limit.value]


def _needs(training: PlannedTraining) -> dict[str, int]:
    """Overrides that make numbers, gradients or optimizer states smaller, with the bytes that the training then needs, if
    these are fewer than without."""
    usual, needs = training.need, {}
    for words, changed in _lighter(training.config).items():
        with suppress(UserError, Unplannable, ValueError):  # such as: something else is refused beside it
            check_optimizer(changed)
            need = training.changed(changed).need
            if need < usual:
                needs[words] = need
    return needs


def _lighter(config: RunConfig) -> dict[str, RunConfig]:
    """Configurations with smaller numbers, gradients or optimizer states, by the overrides that make them."""
    others: dict[str, RunConfig] = {}
    trainer, optimizer, model = config.trainer, config.optimizer, config.model
    if optimizer is not None and not config.steps_in_backward:
        words = "optimizer.in_backward=true"
        words += " trainer.gradient_clip_val=null" if trainer.gradient_clip_val else ""
        words += " trainer.accumulate_grad_batches=1" if trainer.accumulate_grad_batches > 1 else ""
        unclipped = trainer.with_arguments(gradient_clip_val=None, accumulate_grad_batches=1)
        others[words] = replace(config, trainer=unclipped, optimizer=optimizer.with_arguments(in_backward=True))
    if optimizer is not None and optimizer.target == ADAMW:
        few_bits = replace(optimizer, target=LOW_BIT, arguments={"bits": "8bit"} | optimizer.arguments)
        others["optimizer=adamw_8bit"] = replace(config, optimizer=few_bits)
    if is_a(model, HUGGING_FACE, TIMM) and model.trained == "all" and not model.adapters:
        lora = {TARGET: "peft.LoraConfig", "r": 8, "target_modules": "all-linear"}
        words = f"'model.adapters={{{', '.join(f'{name}: {value}' for name, value in lora.items())}}}'"
        others[words] = replace(config, model=model.with_arguments(adapters=lora))
        others[f"{words} model.quantised=4bit"] = replace(config, model=model.with_arguments(adapters=lora, quantised="4bit"))
    elif model is not None and model.quantised is None and not trains_all(model.plain()):
        others["model.quantised=4bit"] = replace(config, model=model.with_arguments(quantised="4bit"))
    if lower := {"64-true": "32-true", "32-true": "bf16-mixed"}.get(trainer.precision):
        others[f"trainer.precision={lower}"] = replace(config, trainer=trainer.with_arguments(precision=lower))
    return others


def _words(limit: Limit) -> str:
    if limit.option == NO_OPTION:
        return f"batches of {counted(limit.value, 'sample')}, which the data module sets"
    return f"{limit.option}={limit.value}"


SIGNS = ("out of memory", "can't allocate memory", "not enough memory", "ALLOC_FAILED")
"""Parts of the RuntimeErrors of torch's allocators (CUDA, MPS, CPU, Windows) and NVIDIA's libraries."""


class OutOfMemory(Exception):
    """An allocation failed. The message is the requested size, or empty if it is not known."""


@contextmanager
def as_out_of_memory() -> Generator[None]:
    """Raises an OutOfMemory instead of the error that an allocator of torch, NumPy or Python raises inside."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not any(sign in str(error) for sign in SIGNS):
            raise
        if found := re.search(r"tried to allocate (\d+) bytes", str(error)):
            raise OutOfMemory(f"{int(found[1]) / 2**20:.1f} MiB") from error
        found = re.search(r"(?:tried|unable) to allocate ([\d.]+ \w+)", str(error), re.IGNORECASE)
        raise OutOfMemory(found[1] if found else "") from error
