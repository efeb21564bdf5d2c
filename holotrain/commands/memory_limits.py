"""Training within the memory there is: automatic options, what to do after running out of memory, and what needs less."""

import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from itertools import groupby

import lightning.pytorch as pl
import torch

from holotrain.commands.console import console
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
from holotrain.config.option_groups import ADAMW, AUTO, LOW_BIT, OBJECT_GROUPS, PLAIN, reversible, takes
from holotrain.errors import UserError
from holotrain.numeric import counted, in_words
from holotrain.planning import (
    ALLOCATORS,
    Choice,
    Limit,
    Plan,
    Planner,
    TooSmall,
    Unplannable,
    Variant,
    choose_batch,
    choose_variant,
    make_plan,
)
from holotrain.planning.memory_plan import largest_batch, least_memory, smallest
from holotrain.targets import TARGET

LOWER_PRECISION = {"64-true": "32-true", "32-true": "bf16-mixed"}


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
    if config.backward.kind == AUTO and not config.backward.open:
        say(f"backward=auto: {runs_of(config.backward.blocks)}, as before")
    elif config.memory is not None and not (config.batch_is_open or config.backward.open):
        say(f"memory={config.memory} has no effect without backward=auto or an automatic batch size")
    planned, less = None, ""
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
                variants = variants_of(config, data, planner, config.backward.inexact)
                try:
                    variant, choice = choose_variant(planner, variants, budget)
                except TooSmall:
                    say("  it does not fit; planning what would ...")
                    less = f"; {_what_fits(config, data, planner, variants, budget)}"
                    raise
            say(f"  {described(choice, budget, '' if variant is None else variant.options)}")
            if variant is not None:
                config = with_variant(config, variant.tile, variant.bits)
            config = replace(config, backward=replace(config.backward, blocks=choice.blocks))
            planned = choice.bound
    except TooSmall as error:
        option, size = (smallest_batch(config) if config.batch_is_open else config).batch_option
        raise UserError(
            f"memory: {in_words(budget)} is too little: {'' if size is None else f'with {option}={size} '}this run needs "
            f"{in_words(error.least, up=True)}{less}"
        ) from error
    except Unplannable as error:
        raise UserError(f"auto: {error}; set backward and the batch size yourself") from error
    except OutOfMemory as error:
        raise UserError("auto: not enough memory to time a single block; use a smaller batch size") from error
    return config, planned


def proposals(
    config: Config,
    data: pl.LightningDataModule,
    planner: Planner,
    variants: Sequence[Variant],
    budget: int,
    plan: Plan | None = None,
) -> tuple[list[str], dict[str, int]]:
    """What helps a training that does not fit, all of it planned.

    Args:
        planner, variants: of the training.
        plan: of the training, where its schedules are configured; None: ``backward=auto`` chooses them.

    Returns:
        overrides with which it fits; if there are none, overrides with which it needs less, and the bytes that it then needs.
    """
    found, needs = [], {}
    with suppress(Unplannable, OutOfMemory), as_out_of_memory():
        found = list(_fitting(config, data, planner, variants, budget)) if plan is None else remedies(config, plan)
        if not found:
            needs = _needs(config, data, planner, variants)
            found = [words for words, need in needs.items() if need <= budget]
    return found, {} if found else needs


def _what_fits(config: Config, data: pl.LightningDataModule, planner: Planner, variants: Sequence[Variant], budget: int) -> str:
    found, needs = proposals(config, data, planner, variants, budget)
    if found:
        return f"it fits with {', or with '.join(found)}"
    if needs:
        return "; ".join(f"with {words} it needs {in_words(need, up=True)}" for words, need in needs.items())
    return "nothing else could be planned"


def _fitting(
    config: Config, data: pl.LightningDataModule, planner: Planner, variants: Sequence[Variant], budget: int
) -> Iterator[str]:
    """Inexact schedules, smaller batches and shorter sequences with which it fits."""
    if not config.backward.inexact:
        inexact = replace(config, backward=replace(config.backward, inexact=True))
        if _least(inexact, data, replace(planner, inexact=True)) <= budget:
            yield "backward.inexact=true"
    planners = [planner, *(each.planner for each in variants if each.may_be_chosen)]
    best = max((largest_batch(each, least_memory(each), budget) for each in planners), key=lambda limit: limit.value)
    if best.value:
        yield _in_words(config, best)
    variant, _ = smallest(planner, variants)
    backward = least_memory(planner if variant is None else variant.planner)
    longest = longest_context(config, data, planner, variant, backward, budget)
    if longest is not None and longest.value:
        yield _in_words(config, longest)


def _least(config: Config, data: pl.LightningDataModule, planner: Planner) -> int:
    """Bytes that a training needs with its schedules; if these are to be chosen, at least, also as a variant."""
    if planner.backward is not None:
        return planner.footprint(planner.backward).bound
    return smallest(planner, variants_of(config, data, planner, config.backward.inexact))[1]


def _needs(config: Config, data: pl.LightningDataModule, planner: Planner, variants: Sequence[Variant]) -> dict[str, int]:
    """Overrides that make numbers, gradients or optimizer states smaller, with the bytes that the training then needs, if
    these are fewer than without."""
    others: dict[str, Config] = {}
    trainer, optimizer, model = config.trainer, config.optimizer, config.model
    if optimizer is not None and not config.steps_in_backward:
        words = ["optimizer.in_backward=true"]
        words += ["trainer.gradient_clip_val=null"] if trainer.gradient_clip_val else []
        words += ["trainer.accumulate_grad_batches=1"] if trainer.accumulate_grad_batches > 1 else []
        with suppress(UserError):  # something else is refused beside it
            unclipped = trainer.with_arguments(gradient_clip_val=None, accumulate_grad_batches=1)
            stepping = replace(config, trainer=unclipped, optimizer=optimizer.with_arguments(in_backward=True))
            check_optimizer(stepping)
            others[" ".join(words)] = stepping
    if optimizer is not None and optimizer.target == ADAMW:
        few_bits = replace(optimizer, target=LOW_BIT, arguments={"bits": "8bit"} | optimizer.arguments)
        others["optimizer=adamw_8bit"] = replace(config, optimizer=few_bits)
    if takes(model, "reversible") and model.trained == "all" and not model.adapters:
        lora = {TARGET: "peft.LoraConfig", "r": 8, "target_modules": "all-linear"}
        words = ", ".join(f"{name}: {value}" for name, value in lora.items())
        others[f"'model.adapters={{{words}}}'"] = replace(config, model=model.with_arguments(adapters=lora))
    if lower := LOWER_PRECISION.get(trainer.precision):
        others[f"trainer.precision={lower}"] = replace(config, trainer=trainer.with_arguments(precision=lower))
    usual = smallest(planner, variants)[1] if planner.backward is None else planner.footprint(planner.backward).bound
    needs: dict[str, int] = {}
    for words, changed in others.items():
        with suppress(UserError, Unplannable, ValueError):
            need = _least(changed, data, planner_of(changed, data, planner.device))
            if need < usual:
                needs[words] = need
    return needs


def described(choice: Choice, budget: int, options: str = "") -> str:
    """The choice of ``backward=auto``, with further options, as text."""
    runs = runs_of(choice.blocks)
    runs = f"{runs} with {options}" if options else runs
    saved = 1 - choice.cost / choice.most_expensive
    memory = f"{in_words(choice.bound, up=True)} of {in_words(budget)}"
    return f"{runs}; {memory}" + (f"; {saved:.0%} less computation in blocks than with full recomputation" if saved else "")


def runs_of(blocks: Sequence[str]) -> str:
    """The schedules of blocks as text, such as ``"4 checkpoint, 2 autograd"``."""
    return ", ".join(f"{len(list(run))} {name}" for name, run in groupby(blocks))


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
    undone = {"store": "0", "keep": "[]", "blocks": "[]", "inexact": "false"}  # options that other backwards do not support
    resets = "".join(f" backward.{name}={value}" for name, value in undone.items() if getattr(config.backward, name))
    fitting = [name for name, found in plan.footprints.items() if found.bound <= plan.budget and name != plan.backward]
    limits = [*plan.limits, *([] if fitting else plan.limits_of_least)]
    return [f"backward={name}{resets}" for name in fitting] + [_in_words(config, limit) for limit in limits if limit.value]


def _in_words(config: RunConfig, limit: Limit) -> str:
    way, _, option = limit.option.rpartition(" ")  # beside the options of what needs least
    size = f"batches of {counted(limit.value, 'sample')}{_options_of_data(config)}"
    return f"{way} {size if option == NO_OPTION else f'{option}={limit.value}'}".strip()


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
    if lower := LOWER_PRECISION.get(config.trainer.precision):
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
