"""The memory of a training: ``backward=auto`` and a batch size of ``auto`` are chosen by a plan, and so is what would fit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property

import lightning.pytorch as pl
import torch
import torch.distributed as dist

from holotrain.commands.planner import NO_OPTION, TILE, budget_of, planner_of, with_data, with_tile
from holotrain.commands.run import Run
from holotrain.commands.screen import console, runs_of
from holotrain.config.build import build_model, data_properties, device_kind
from holotrain.config.command_options import Config, FitConfig, RunConfig
from holotrain.config.option_groups import AUTO, CAUSAL_LM, COMPATIBLE, is_a
from holotrain.data.text.module import TextDataModule
from holotrain.errors import UserError
from holotrain.numeric import counted, in_words
from holotrain.planning import Planner, memory_plan
from holotrain.planning.choice import Choice, TooSmall
from holotrain.planning.devices import ALLOCATORS, OutOfMemory, as_out_of_memory
from holotrain.planning.fake_tensors import Unplannable
from holotrain.planning.memory_plan import Limit
from holotrain.planning.planner import Backward

CONTEXT_UNIT = 64
"""The step in which a context grows."""


def choose_memory(config: FitConfig, data: pl.LightningDataModule, run: Run) -> tuple[FitConfig, int | None]:
    """The configuration of a training with its ``auto`` options filled in, equal in all processes, and the bytes of a step by
    the plan; None: nothing was planned, or in another process. Prints the choice, and raises what :func:`chosen` does.

    Args:
        data: from :func:`~holotrain.commands.prepare.prepare`; their batch size is changed.
    """
    if not (config.batch_is_open or config.backward.open):
        if config.backward.kind == AUTO:
            console.print(f"backward=auto: {runs_of(config.backward.blocks)}, as before")
        elif config.memory is not None:
            console.print(f"memory={config.memory} has no effect without backward=auto or an automatic batch size")
        return config, None
    device = device_kind(config.trainer.accelerator)
    if run.process is None:
        return chosen(config, data, device)
    planned = None
    if run.is_main:
        config, planned = chosen(config, data, device, run.process.local_size)
    shared = [config]
    dist.broadcast_object_list(shared)
    _set_batch(data, shared[0])
    return shared[0], planned


def chosen(config: Config, data: pl.LightningDataModule, device: str, processes: int = 1) -> tuple[Config, int]:
    """The configuration with its ``auto`` options filled in, and the bytes that a step then needs at most.

    Args:
        data: set up; if the batch size is ``auto``, with the smallest one. Its batch size is changed.
        processes: number of processes on this machine, which share its memory.

    Raises:
        UserError: nothing fits, the model cannot be planned, or the device is not supported.
    """
    if device not in ALLOCATORS:
        raise UserError(f"auto: planning does not support {device}; set backward and the batch size yourself")
    choose = _with_batch if config.batch_is_open else _with_schedules  # both do not go together
    try:
        with as_out_of_memory():
            return choose(config, data, device, budget_of(config, device, processes))
    except Unplannable as error:
        raise UserError(f"auto: {error}; set backward and the batch size yourself") from error
    except OutOfMemory as error:
        raise UserError("auto: not enough memory to time a single block; use a smaller batch size") from error


def smallest_batch(config: Config) -> Config:
    """The configuration; if its batch size is to be chosen, with the smallest one for now: of documents, the longest."""
    if not config.batch_is_open:
        return config
    return config.with_batch(config.data.context if config.batch_option[0] == "data.max_tokens" else 1)


def _set_batch(data: pl.LightningDataModule, config: RunConfig) -> None:
    option, size = config.batch_option
    setattr(data, option.removeprefix("data."), size)


def _with_batch(config: Config, data: pl.LightningDataModule, device: str, budget: int) -> tuple[Config, int]:
    option, _ = config.batch_option
    console.print(f"{option}=auto: planning the largest batch ...")
    smallest = smallest_batch(config)
    most = len(data.train_dataloader()) if option == "data.batch_size" else None
    planner = planner_of(config, data, device)
    try:
        size = memory_plan.choose_batch(planner, budget, smallest.batch_option[1], most)
    except TooSmall as error:
        raise _too_small(PlannedTraining(smallest, data, device), budget, error) from error
    assert planner.backward is not None
    config = config.with_batch(size)
    _set_batch(data, config)
    console.print(f"  {option}={size} is the largest that fits into {in_words(budget)} or that the data provide")
    return config, planner.footprint(planner.backward, size).bound


def _with_schedules(config: Config, data: pl.LightningDataModule, device: str, budget: int) -> tuple[Config, int]:
    console.print("backward=auto: planning what each block stores ...")
    training = PlannedTraining(config, data, device)
    try:
        planner, choice = memory_plan.choose_tile(training.planner, training.tiled, budget)
    except TooSmall as error:
        raise _too_small(training, budget, error) from error
    if planner is training.tiled:
        config = with_tile(config)
    console.print(f"  {described(choice, budget, f'backward.tile={TILE}' if planner is training.tiled else '')}")
    return replace(config, backward=replace(config.backward, blocks=choice.blocks)), choice.bound


def _too_small(training: PlannedTraining, budget: int, error: TooSmall) -> UserError:
    console.print("  it does not fit; planning what would ...")
    option, size = training.config.batch_option
    batch = "" if size is None else f"with {option}={size} "
    need = f"{batch}this run needs {in_words(error.least, up=True)}"
    return UserError(f"memory: {in_words(budget)} is too little: {need}; {what_helps(proposals(training, budget))}")


def described(choice: Choice, budget: int, options: str = "") -> str:
    """The choice of ``backward=auto``, with further options, as text."""
    words = f"{runs_of(choice.blocks)} with {options}" if options else runs_of(choice.blocks)
    words += f"; {in_words(choice.bound, up=True)} of {in_words(budget)}"
    saved = 1 - choice.cost / choice.most_expensive
    return words + (f"; {saved:.0%} less computation in blocks than with full recomputation" if saved else "")


def proposals(training: PlannedTraining, budget: int, limits: Sequence[Limit] = ()) -> list[str]:
    """Overrides with which a training fits, by its plan; those that change least come first.

    Args:
        limits: its largest sizes, if its schedules are configured; those of ``backward=auto`` are planned here.
    """
    planner, tiled, backward, found = training.planner, training.tiled, training.config.backward, []
    with suppress(Unplannable, OutOfMemory), as_out_of_memory():
        if planner.backward is None and not planner.inexact:
            inexact = [memory_plan.least_bytes(replace(each, inexact=True)) for each in (planner, tiled) if each is not None]
            found += ["backward.inexact=true"] if min(inexact) <= budget else []
        elif planner.backward is not None:
            unsupported = {"store": "0", "keep": "[]", "blocks": "[]", "inexact": "false"}  # by other schedules
            resets = "".join(f" backward.{name}={value}" for name, value in unsupported.items() if getattr(backward, name))
            for name in planner.schedules:
                if name != planner.backward and planner.footprint(name).bound <= budget:
                    found.append(f"backward={name}{resets}")
            if tiled is not None:
                rows = [name for name in memory_plan.rows_in_tiles(tiled) if tiled.footprint(name).bound <= budget]
                found += [f"backward={name} backward.tile={TILE}{resets}" for name in rows]
            found += [_words(limit) for limit in limits if limit.value]
        if planner.backward is None or not found:
            found += _smaller_sizes(training, budget)
    return found


def _smaller_sizes(training: PlannedTraining, budget: int) -> list[str]:
    """Smaller sizes with which it fits under the schedules that need least."""
    planner, way = training.smallest, ""
    least = memory_plan.least_memory(planner)
    limits: list[Limit | None] = [memory_plan.largest_batch(planner, least, budget)]
    if training.planner.backward is None:  # backward=auto chooses these schedules itself
        limits.append(training.longest_context(planner, least, budget))
    else:
        way = f"backward={least} " + (f"backward.tile={TILE} " if planner is training.tiled else "")
    return [f"{way}{_words(limit)}" for limit in limits if limit is not None and limit.value]


def _words(limit: Limit) -> str:
    if limit.option == NO_OPTION:
        return f"batches of {counted(limit.value, 'sample')}, which the data module sets"
    return f"{limit.option}={limit.value}"


def what_helps(found: list[str]) -> str:
    """What :func:`proposals` returns, as text."""
    if found:
        return f"it fits with {', or with '.join(found)}"
    less = "optimizer=adamw_8bit, and optimizer.in_backward=true with trainer.gradient_clip_val=null"
    return f"no schedule and no smaller batch would fit; these need less: {less}"


class PlannedTraining:
    """A training, and the same with MLPs in tiles, without allocating anything.

    Args:
        data, device: see :func:`planner_of`.
    """

    def __init__(self, config: RunConfig, data: pl.LightningDataModule, device: str) -> None:
        self.config, self.data = config, data
        self.planner = planner_of(config, data, device)

    @cached_property
    def tiled(self) -> Planner | None:
        """The planner of the training with MLPs in tiles; None: they are already, or cannot be, or it saves nothing."""
        if self.config.backward.tile is not None or self.config.model is None:
            return None
        try:
            tiled = planner_of(with_tile(self.config), self.data, self.planner.device)
            tiled = replace(tiled, updates=self.planner.updates)
            rows = memory_plan.rows_in_tiles(tiled)
            saves = bool(rows) and tiled.footprint(rows[0]).bound < self.planner.footprint(rows[0]).bound
        except (UserError, Unplannable, ValueError):
            return None
        return tiled if saves else None

    @property
    def smallest(self) -> Planner:
        """The planner, of these two, of what needs least under some schedules."""
        return min(filter(None, (self.planner, self.tiled)), key=memory_plan.least_bytes)

    def longest_context(self, planner: Planner, backward: Backward, budget: int) -> Limit | None:
        """The longest sequence, in steps of 64 tokens, with which the training fits by one of the planners; None: no option
        sets one length for all."""
        config, data = self.config if planner is self.planner else with_tile(self.config), self.data
        if not isinstance(data, TextDataModule) or data.layout != "packed" or not is_a(config.model, *COMPATIBLE[CAUSAL_LM][0]):
            return None
        with torch.device("meta"):
            most = getattr(build_model(config, data_properties(data)), "longest", None)

        def bound(context: int) -> int:
            other = copy.copy(data)
            other.context = context
            return with_data(planner, config, other).footprint(backward).bound

        unit = min(CONTEXT_UNIT, data.context)
        most = None if most is None else most // unit * unit
        return Limit("data.context", data.context, memory_plan.largest(bound, budget, data.context // unit * unit, unit, most))
