"""Training within the memory there is: automatic options, what to do after running out of memory, and what needs less."""

import re
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby

import lightning.pytorch as pl
import torch

from holotrain.commands.console import console
from holotrain.commands.run_folder import Run
from holotrain.config.build_trainer import device_kind, device_name
from holotrain.config.command_options import Config, RunConfig
from holotrain.config.given import PYTHON_OBJECT
from holotrain.config.option_groups import ADAMW, AUTO, OBJECT_GROUPS, PLAIN, reversible, takes
from holotrain.config.plans import NO_OPTION, budget_of, planner_of, smallest_batch, variants_of, with_variant
from holotrain.errors import UserError
from holotrain.numeric import counted, in_words
from holotrain.planning import ALLOCATORS, Choice, Plan, TooSmall, Unplannable, choose_batch, choose_variant, make_plan
from holotrain.planning.memory_plan import largest_batch, least_memory


def chosen(
    config: Config,
    data: pl.LightningDataModule,
    device: str,
    processes: int = 1,
    say: Callable[[str], object] = console.print,
) -> tuple[Config, int | None]:
    """The configuration with its ``auto`` options filled in, and the bytes that a step then needs at most; None: nothing was
    planned. Reports the choice.

    Args:
        data: set up; if the batch size is ``auto``, with the smallest one. Its batch size is changed.
        device: type of the run's device.
        processes: number of processes on this machine, which share its memory.
        say: called with each line of the report.

    Raises:
        UserError: nothing fits, the model cannot be planned, or the device is not supported.
    """
    if device not in ALLOCATORS and (config.batch_is_open or config.backward.open):
        raise UserError(f"auto: planning does not support {device}; set backward and the batch size yourself")
    if config.memory is not None and not (config.batch_is_open or config.backward.open):
        say(f"memory={config.memory} has no effect without backward=auto or an automatic batch size")
    planned = None
    try:
        if config.batch_is_open:
            option, _ = config.batch_option
            say(f"{option}=auto: planning the largest batch ...")
            budget = budget_of(config, device, processes)
            least = smallest_batch(config).batch_option[1]  # a batch must hold the longest document
            most = len(data.train_dataloader()) if option == "data.batch_size" else None
            planner = planner_of(config, data, device)
            size = choose_batch(planner, budget, least, most)
            assert planner.backward is not None  # an automatic batch size does not go with open schedules
            planned = planner.footprint(planner.backward, size).bound
            setattr(data, option.removeprefix("data."), size)
            config = config.with_batch(size)
            say(f"  {option}={size} is the largest that fits into {in_words(budget)} or that the data provide")
        if config.backward.open:
            say("backward=auto: planning what each block stores ...")
            with as_out_of_memory():
                budget = budget_of(config, device, processes)
                planner = planner_of(config, data, device)
                variant, choice = choose_variant(planner, variants_of(config, data, planner), budget)
            say(f"  {described(choice, budget, '' if variant is None else variant.options)}")
            if variant is not None:
                config = with_variant(config, variant.tile, variant.bits)
            config = replace(config, backward=replace(config.backward, blocks=choice.blocks))
            planned = choice.bound
    except TooSmall as error:
        option, size = (smallest_batch(config) if config.batch_is_open else config).batch_option
        with as_out_of_memory():
            less = f"; {what_fits(config, data, device, budget)}" if config.backward.open else ""
        raise UserError(
            f"memory: {in_words(budget)} is too little: {'' if size is None else f'with {option}={size} '}this run needs "
            f"{in_words(error.least, up=True)}{less}"
        ) from error
    except Unplannable as error:
        raise UserError(f"auto: {error}; set backward and the batch size yourself") from error
    except OutOfMemory as error:
        raise UserError("auto: not enough memory to time a single block; use a smaller batch size") from error
    return config, planned


def what_fits(config: Config, data: pl.LightningDataModule, device: str, budget: int) -> str:
    """Overrides with which a training fits that does not fit under ``backward=auto``, as text; if there are none, others that
    need less memory."""
    inexact = replace(config, backward=replace(config.backward, inexact=True))
    planner, fitting = planner_of(inexact, data, device), []
    planners = [planner, *(variant.planner for variant in variants_of(inexact, data, planner))]
    if any(each.footprint(least_memory(each)).bound <= budget for each in planners):
        fitting.append("backward.inexact=true")
    planner = planner_of(config, data, device)
    planners = [planner, *(each.planner for each in variants_of(config, data, planner) if each.may_be_chosen)]
    if size := max(largest_batch(each, least_memory(each), budget).value for each in planners):
        fitting.append(f"{planner.batch.name}={size}")
    if fitting:
        return f"it fits with {', or with '.join(fitting)}"
    return f"these need less memory: {'; '.join([*rules_of_states(config), *rules(config)])}"


def rules_of_states(config: RunConfig) -> list[str]:
    """As :func:`rules`, for the memory of weights, gradients and optimizer states."""
    found, trainer = [], config.trainer
    if config.optimizer is not None and config.optimizer.target == ADAMW:
        found.append("optimizer=adamw_8bit (8 bits for each number of its state)")
    if not (config.steps_in_backward or config.synthesis) and trainer.strategy == "single":
        clipped = bool(trainer.gradient_clip_val) and trainer.gradient_clip_algorithm != "value"
        words = ["optimizer.in_backward=true"]
        words += ["trainer.gradient_clip_val=null"] if clipped else []
        words += ["trainer.accumulate_grad_batches=1"] if trainer.accumulate_grad_batches > 1 else []
        found.append(f"{' '.join(words)} (each gradient is freed after its step)")
    if takes(config.model, "reversible") and config.model.trained == "all" and not config.model.adapters:
        lora = "model.adapters={_target_: peft.LoraConfig, r: 8, target_modules: all-linear}"
        found.append(f"'{lora}' (LoRA: other weights have no gradients and no states)")
    return found


def described(choice: Choice, budget: int, options: str = "") -> str:
    """The choice of ``backward=auto``, with further options, as text."""
    runs = ", ".join(f"{len(list(run))} {name}" for name, run in groupby(choice.blocks))
    runs = f"{runs} with {options}" if options else runs
    saved = 1 - choice.cost / choice.most_expensive
    memory = f"{in_words(choice.bound, up=True)} of {in_words(budget)}"
    return f"{runs}; {memory}; {saved:.0%} less computation in blocks than with full recomputation"


def advice(config: RunConfig, data: pl.LightningDataModule, device: str) -> list[str]:
    """Overrides under which the training fits, by its plan, then other overrides that need less memory.

    Args:
        data: set up.
        device: type of the run's device.
    """
    planned = []
    if device in ALLOCATORS:
        with suppress(Exception):  # there may be too little memory even for a plan
            plan = make_plan(planner_of(config, data, device), budget_of(config, device))
            if not plan.fits:  # else something else uses the memory
                kinds = ("backward=", config.batch_option[0], NO_OPTION)
                planned = [f"{word} (fits, by the plan)" for word in remedies(config, plan) if word.startswith(kinds)]
    settled = {override.partition("=")[0] for override in planned}
    return planned + [override for override in rules(config) if override.partition("=")[0] not in settled]


def remedies(config: RunConfig, plan: Plan) -> list[str]:
    """Overrides, each of which makes the run fit by its plan; those that store most come first."""
    if plan.budget is None:
        return []
    undone = {"store": "0", "keep": "[]", "blocks": "[]"}  # options that other backwards do not support
    resets = "".join(f" backward.{name}={value}" for name, value in undone.items() if getattr(config.backward, name))
    fitting = [name for name, found in plan.footprints.items() if found.bound <= plan.budget and name != plan.backward]
    sizes = [
        f"batches of {counted(limit.value, 'sample')}{_options_of_data(config)}"
        if limit.option == NO_OPTION
        else f"{limit.option}={limit.value}"
        for limit in plan.limits
        if limit.value
    ]
    return [f"backward={name}{resets}" for name in fitting] + sizes


def _options_of_data(config: RunConfig) -> str:
    """Where the size of batches is set, if no option of a known name does."""
    options = [] if config.data.target == PYTHON_OBJECT else OBJECT_GROUPS["data"].options(config.data.target)
    named = ", ".join(f"data.{name}" for name in options)
    return f" (options: {named})" if named else " (which the data module sets)"


def rules(config: RunConfig) -> list[str]:
    """Overrides that reduce the memory of a step, each with its reason, the cheapest first.

    None of them is a prediction: each reduces memory, but it may not be enough.
    """
    backward, found = config.backward, []
    if takes(config.model, "backward") and not reversible(config.model):
        if backward.kind in ("autograd", AUTO):
            found.append("backward=checkpoint (stores only the inputs of blocks)")
        found.append("model=rev_... (a reversible model stores no activations between blocks)")
    elif takes(config.model, "backward"):
        if backward.kind in (*PLAIN, AUTO):
            found.append("backward=reversible (stores no activations between blocks)")
        elif backward.store:
            found.append("backward.store=0 (no block stores its activations)")
        elif backward.keep:
            found.append("backward.keep=[] (no results are stored for the backward pass)")
    if lower := {"64-true": "32-true", "32-true": "bf16-mixed"}.get(config.trainer.precision):
        found.append(f"trainer.precision={lower} (halves the activations)")
    option, size = config.batch_option
    if size is None:
        return [*found, f"smaller batches{_options_of_data(config)}"]
    if size // 2 >= (config.data.context if option == "data.max_tokens" else 1):
        halved, twice = f"{option}={size // 2}", 2 * config.trainer.accumulate_grad_batches
        if backward.cuda_graph or config.steps_in_backward:  # which do not support accumulation
            found.append(f"{halved} (half the batch size)")
        else:
            found.append(f"{halved} trainer.accumulate_grad_batches={twice} (the same effective batch size)")
    return found


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


def explained(config: RunConfig, data: pl.LightningDataModule, run: Run, when: str, asked_for: str) -> str:
    """The message: what happened, how to resume, and which overrides need less memory.

    Args:
        data: set up.
        when: such as ``at step 12``.
        asked_for: the requested size, such as ``20.00 MiB``, or empty.
    """
    option, size = config.batch_option
    asked = f": tried to allocate {asked_for}" if asked_for else ""
    batch = "" if size is None else f" with {option}={size}"  # data of others may have no such option
    lines = [f"holotrain: out of memory {when}{batch} on {device_name(config.trainer.accelerator)}{asked}"]
    if run.last_checkpoint.exists():
        lines.append(
            f"resume from {run.last_checkpoint} with: python -m holotrain fit resume=true hydra.run.dir={run.folder} ..."
        )
    else:
        lines.append("no checkpoint was saved yet; callbacks.checkpoint.every_n_train_steps=... saves during an epoch")
    if overrides := advice(config, data, device_kind(config.trainer.accelerator)):
        lines.append(f"these need less memory: {'; '.join(overrides)}")
    return "\n".join(lines)
