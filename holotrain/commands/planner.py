"""The planner of a configuration: how to build the training and its variants without allocating anything, and a budget."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import move_data_to_device
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from holotrain.callbacks import SynthesisCallback
from holotrain.config.build import autocast_of, build_model, build_object, build_task, data_properties
from holotrain.config.command_options import Config, RunConfig
from holotrain.config.option_groups import AUTO, MASKED_LM, BackwardConfig, ObjectConfig, is_a, takes
from holotrain.data.loader import batch_unit, example_batch, first_batch, samples_in
from holotrain.errors import UserError, as_user_error
from holotrain.models.block_schedules import listed_blocks, sequences, set_backward
from holotrain.models.layers.blocks import ResidualSequence
from holotrain.numeric import parse_bytes
from holotrain.planning import Planner, TrainingStep
from holotrain.planning.planner import Backward, Size, free_memory
from holotrain.schedules import EAGER, OF_REVERSIBLE, PLAIN, SCHEDULES, planned_as
from holotrain.tasks.task import model_of, optimizer_of, training_loss

NO_OPTION = "batch"
"""What the size of batches is called if the data module has no option for it."""

TILE = 512
"""Tokens of a tile that a plan tries."""


def planner_of(config: RunConfig, data: pl.LightningDataModule, device: str) -> Planner:
    """The planner of a configuration and of variants of it.

    Args:
        data: set up; only shapes are read.
        device: ``"cuda"`` or ``"cpu"``: where the run is to take place; this machine need not have it.
    """
    option, size = config.batch_option
    unit, first = batch_unit(data), first_batch(data)
    if size is None:
        option, size = NO_OPTION, samples_in(first)
    backward, (schedules, own, listed) = config.backward, _schedules(config, data, device)
    return Planner(
        partial(_task, config, data),
        partial(_step, config, data, device, first),
        device,
        Size(option, unit if size == AUTO else size, unit),
        None if backward.store else _depth(config),  # what is stored depends on the depth
        schedules,
        (list(backward.blocks) or None) if backward.kind == AUTO else backward.kind or own,
        keeps_results=not config.compile,  # compiled blocks cannot keep results
        selected=config.task.mask_probability if is_a(config.task, MASKED_LM) else None,
        listed=listed,
        tile=backward.tile,
        inexact=backward.inexact,
    )


def _schedules(config: RunConfig, data: pl.LightningDataModule, device: str) -> tuple[tuple[str, ...], str, int]:
    """The schedules to plan that all blocks of the model can have, the one that they have when the model is built, and the
    number of blocks that are in no sequence."""
    if config.model is None:
        return PLAIN[:1], PLAIN[0], 0
    plain = tuple(name for name in EAGER if device == "cuda" or not SCHEDULES[name].gpu)
    with torch.device("meta"):
        model = build_model(replace(config, backward=BackwardConfig()), data_properties(data))
        runs = sequences(model)
        if not runs:
            try:
                set_backward(model, PLAIN[1])
            except ValueError:
                return PLAIN[:1], PLAIN[0], 0
            return plain, PLAIN[0], len(listed_blocks(model))
    own = runs[0].backward if isinstance(runs[0].backward, str) else PLAIN[0]
    schedules = plain if any(isinstance(run, ResidualSequence) for run in runs) else OF_REVERSIBLE
    return schedules, own, 0


def _depth(config: RunConfig) -> Size | None:
    """Of the deepest stage, if the model has several; None: the model has no such option."""
    if takes(config.model, "depths"):
        depths = config.model.depths
        return Size(f"model.depths.{depths.index(max(depths))}", max(depths))
    return Size("model.depth", config.model.depth) if takes(config.model, "depth") else None


def _task(config: RunConfig, data: pl.LightningDataModule, backward: Backward, depth: int | None) -> pl.LightningModule:
    configured, model = config.backward, config.model
    if not isinstance(backward, str):
        configured = replace(configured, kind=AUTO, blocks=backward)
    elif backward != configured.kind:
        tile = None if backward == PLAIN[0] else configured.tile
        exact, chunk, keys = configured.exact, configured.chunk, configured.keys
        configured = BackwardConfig(backward, exact=exact, tile=tile, chunk=chunk, keys=keys)
    if depth is not None and takes(model, "depths"):
        stage = model.depths.index(max(model.depths))
        model = model.with_arguments(depths=[*model.depths[:stage], depth, *model.depths[stage + 1 :]])
    elif depth is not None and takes(model, "depth"):
        model = model.with_arguments(depth=depth)
    # The plan follows the operations themselves, without torch.compile and CUDA graphs.
    config = replace(config, model=model, backward=configured, compile=False)
    task = build_task(config, data)
    return task.double() if config.trainer.precision == "64-true" else task


def _step(
    config: RunConfig, data: pl.LightningDataModule, device: str, first: Any, module: nn.Module, size: int
) -> TrainingStep:
    """The step of a Trainer with this task, on the device of its parameters; it behaves as on ``device``."""
    task = cast(pl.LightningModule, module)  # made by _task
    process = next(task.parameters()).device
    batch = example_batch(data, size, first)
    if config.trainer.precision == "64-true":
        batch = tree_map_only(Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, batch)
    batch = move_data_to_device(batch, process)
    model = model_of(task)
    own = {*map(id, model.buffers())}
    held: dict[str, Iterable[Tensor]] = {
        "batch": [leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor)],
        "buffers": [buffer for buffer in task.buffers() if id(buffer) not in own],
    }
    if config.average is not None:
        held["average"] = [torch.empty_like(tensor) for tensor in model.state_dict().values()]
    rewrite = None
    if config.synthesis is not None:
        held["hologram"], rewrite = _hologram(config.synthesis, task, device == "cuda")
    return TrainingStep(
        model=model,
        loss=lambda: training_loss(task, batch),
        optimizer=optimizer_of(task),
        autocast=partial(autocast_of, config.trainer, process.type),
        batches=config.trainer.accumulate_grad_batches,
        clip=config.trainer.gradient_clip_val,
        clip_value=config.trainer.gradient_clip_algorithm == "value",
        rewrite=rewrite,
        held=held,
        sequences=sequences(model),
    )


def _hologram(
    chosen: ObjectConfig, task: pl.LightningModule, on_gpu: bool
) -> tuple[list[Tensor], Callable[[], list[Tensor]] | None]:
    """What synthesis holds on the device, and the copies that it makes of the gradients."""
    with as_user_error("synthesis", chosen.arguments):
        synthesis = build_object("synthesis", chosen, SynthesisCallback).applied_to(task, on_device=False)
    split = synthesis.options.split == "cpu"

    def copied() -> list[Tensor]:  # on a GPU, and on a CPU with a split, synthesis works on a copy of all gradients
        return [torch.empty_like(parameter.grad) for parameter in task.parameters() if parameter.grad is not None]

    # With a split a GPU holds only the updates that wait.
    held = [*map(torch.empty_like, synthesis.parameters)] if split and on_gpu else list(synthesis.state_tensors)
    return held, copied if split != on_gpu else None


def with_data(planner: Planner, config: RunConfig, data: pl.LightningDataModule) -> Planner:
    """The planner of the same training on other data, such as longer sequences."""
    step = partial(_step, config, data, planner.device, None)
    return replace(planner, make_model=partial(_task, config, data), make_step=step)


def with_tile(config: Config) -> Config:
    """The configuration with MLPs in tiles; ``backward=autograd`` would keep each tile."""
    kind = config.backward.kind and planned_as(config.backward.kind)  # what is compiled takes no tiles
    return replace(config, backward=replace(config.backward, tile=TILE, kind=PLAIN[1] if kind == PLAIN[0] else kind))


def budget_of(config: RunConfig, device: str, processes: int = 1) -> int:
    """Bytes: the option ``memory``, else the free memory of the device; of a GPU's, a part is left to what no plan counts; of a
    CPU's, each process that trains on this machine has an equal share."""
    if config.memory is not None:
        return parse_bytes(config.memory)
    free = free_memory(device)
    if free is None:
        unknown = "this machine has no GPU" if device == "cuda" else "the free memory of this system is not known"
        raise UserError(f"memory: {unknown}; give the memory, such as memory=16GiB")
    return free - max(2**30, int(0.06 * free)) if device == "cuda" else free // processes
