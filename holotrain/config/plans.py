"""What planning asks of a configuration: how to build its training, its sizes, its memory budget."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import lightning.pytorch as pl
import torch
from torch import Tensor

from holotrain.config.build import build_task
from holotrain.config.build_synthesis import built_synthesis
from holotrain.config.devices import autocast_of
from holotrain.config.schema import RunConfig
from holotrain.config.schema.backward import AUTO, BackwardConfig, schedules_of
from holotrain.data.example import batch_unit, example_batch
from holotrain.errors import UserError
from holotrain.models.schedules import sequences
from holotrain.planning import Backward, Planner, Size, TrainingStep, free_memory
from holotrain.sizes import parse_bytes
from holotrain.tasks import Task


def planner_of(config: RunConfig, data: pl.LightningDataModule, device: str) -> Planner:
    """The planner of a configuration and of variants of it.

    Args:
        data: set up; only shapes are read.
        device: ``"cuda"`` or ``"cpu"``: where the run is to take place; this machine need not have it.
    """
    option, size = config.batch_option
    unit = batch_unit(data)
    backward = config.backward
    return Planner(
        partial(_task, config, data),
        partial(_step, config, data, device),
        device,
        Size(option, unit if size == AUTO else size, unit),
        None if backward.store else _depth(config),  # what is stored depends on the depth
        schedules_of(config.model.kind),
        (backward.blocks or None) if backward.kind == AUTO else backward.kind,
        keeps_attention=not config.compile,  # compiled blocks cannot keep results
        selected=getattr(config.task, "mask_probability", None),
    )


def _depth(config: RunConfig) -> Size:
    """Of the deepest stage, if the model has several."""
    depths = getattr(config.model, "depths", None)
    if depths is None:
        return Size("model.depth", config.model.depth)
    return Size(f"model.depths.{depths.index(max(depths))}", max(depths))


def _task(config: RunConfig, data: pl.LightningDataModule, backward: Backward, depth: int | None) -> Task:
    configured, model = config.backward, config.model
    if not isinstance(backward, str):
        configured = replace(configured, kind=AUTO, blocks=backward)
    elif backward != configured.kind:
        configured = BackwardConfig(backward, exact=configured.exact)
    if depth is not None and hasattr(model, "depths"):
        stage = model.depths.index(max(model.depths))
        model = replace(model, depths=[*model.depths[:stage], depth, *model.depths[stage + 1 :]])
    elif depth is not None:
        model = replace(model, depth=depth)
    # The plan follows the operations themselves, without torch.compile and CUDA graphs.
    config = replace(config, model=model, backward=replace(configured, cuda_graph=False), compile=False)
    task = build_task(config, data)
    return task.double() if config.trainer.precision == "64-true" else task


def _step(config: RunConfig, data: pl.LightningDataModule, device: str, task: Task, size: int) -> TrainingStep:
    """The step of a Trainer with this task, on the device of its parameters; it behaves as on ``device``."""
    place = next(task.parameters()).device
    batch = example_batch(data, size)
    if config.trainer.precision == "64-true" and not isinstance(batch, dict):
        batch = tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in batch)
    batch = pl.utilities.move_data_to_device(batch, place)
    held: dict[str, list[Tensor]] = {"batch": list(batch.values() if isinstance(batch, dict) else batch)}
    if config.callbacks.ema.decay is not None:
        held["average"] = [torch.empty_like(tensor) for tensor in task.model.state_dict().values()]
    if config.synthesis.kind != "none":
        offloaded = device == "cuda" and getattr(config.synthesis, "offload", False)
        held["hologram"] = [] if offloaded else built_synthesis(config.synthesis, task).state_tensors

    def copied() -> list[Tensor]:
        """On a GPU, synthesis works on a copy of all gradients."""
        return [torch.empty_like(parameter.grad) for parameter in task.parameters() if parameter.grad is not None]

    return TrainingStep(
        model=task.model,
        loss=lambda: task.loss(*task.inputs(batch)),
        optimizer=task.make_optimizer(task.model),
        autocast=partial(autocast_of, config.trainer, place.type),
        batches=config.trainer.accumulate_grad_batches,
        clip=config.trainer.gradient_clip_val,
        clip_value=config.trainer.gradient_clip_algorithm == "value",
        rewrite=copied if config.synthesis.kind != "none" and device == "cuda" else None,
        held=held,
        sequences=sequences(task.model),
    )


def smallest_batch(config: RunConfig) -> RunConfig:
    """The configuration with the smallest batch, for use until the batch size is chosen."""
    return config.with_batch(config.data.context if config.batch_option[0] == "data.max_tokens" else 1)


def budget_of(config: RunConfig, device: str, processes: int = 1) -> int:
    """Bytes: the option ``memory``, else the free memory of the device.

    Args:
        processes: number of processes that train on this machine; on a CPU each gets an equal share.

    Raises:
        UserError: ``memory`` is not set, and the free memory is not known.
    """
    if config.memory is not None:
        return parse_bytes(config.memory)
    free = free_memory(device)
    if free is None and device == "cuda":
        raise UserError("memory: this machine has no GPU; give the memory of the GPU, such as memory=16GiB")
    if free is None:
        raise UserError("memory: the free memory of this system is not known; give it, such as memory=16GiB")
    return free if device == "cuda" else free // processes
