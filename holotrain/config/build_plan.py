"""Builds the training step that a plan analyzes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from holotrain.config.build import build_task
from holotrain.config.build_synthesis import built_synthesis
from holotrain.config.devices import autocast_of
from holotrain.config.schema import RunConfig
from holotrain.config.schema.backward import BackwardConfig
from holotrain.data.example import example_batch
from holotrain.planning import (
    ALLOCATORS,
    Footprint,
    TrainingStep,
    Update,
    fused_dropout,
    imagine,
    imagined,
    rehearse,
    rehearse_update,
    selecting,
)
from holotrain.reversible.recomputation import imagining_a_side_stream
from holotrain.tasks import Task


@dataclass(frozen=True)
class Planner:
    """Predicts the memory of a configuration and of variants of it, without allocating anything.

    Args:
        config: configuration of the run.
        data: its data, set up, for their shapes.
        device: ``"cuda"`` or ``"cpu"``: where the run is to take place; this machine need not have it.
        change: applied to the model after it is built.
    """

    config: RunConfig
    data: pl.LightningDataModule
    device: str
    change: Callable[[nn.Module], object] = lambda model: None
    _updates: dict[str, Update] = field(default_factory=dict, init=False, repr=False)
    _known: dict[str, Footprint] = field(default_factory=dict, init=False, repr=False)

    def footprint(self, batch: int, backward: BackwardConfig | None = None, **sizes: Any) -> Footprint:
        """The memory of a training step.

        Args:
            batch: batch size, as in :func:`~holotrain.data.example.example_batch`.
            backward: replaces that of the configuration.
            sizes: replace sizes of the model: ``depth=24``.

        Raises:
            Unplannable: an operation needs the values of its inputs.
        """
        backward = backward or self.config.backward
        asked = repr((batch, backward, sizes))
        if asked not in self._known:
            self._known[asked] = self._rehearsed(batch, backward, sizes)
        return self._known[asked]

    def _rehearsed(self, batch: int, backward: BackwardConfig, sizes: dict[str, Any]) -> Footprint:
        allocator = ALLOCATORS[self.device]
        with self.step(batch, backward, **sizes) as step:
            if repr(sizes) not in self._updates:
                self._updates[repr(sizes)] = rehearse_update(step, allocator)
            return rehearse(step, allocator, self._updates[repr(sizes)])

    @contextmanager
    def step(self, batch: int, backward: BackwardConfig | None = None, **sizes: Any) -> Iterator[TrainingStep]:
        """The training step, with tensors that have shapes but no data."""
        config = replace_sizes(self.config, backward or self.config.backward, sizes)
        # The plan follows the operations themselves, without torch.compile and CUDA graphs.
        config = replace(config, compile=False)
        config.backward.cuda_graph = False
        with torch.device("meta"):
            task = build_task(config, self.data)
            self.change(task.model)
        if config.trainer.precision == "64-true":
            task = task.double()
        masked = getattr(config.task, "mask_probability", None)
        with ExitStack() as stack:
            if self.device == "cuda":
                stack.enter_context(fused_dropout())
                stack.enter_context(imagining_a_side_stream())
            stack.enter_context(imagined())
            if masked is not None:
                stack.enter_context(selecting(masked))
            yield training_step(config, imagine(task, torch.device("cpu")), example_batch(self.data, batch), self.device)


def training_step(config: RunConfig, task: Task, batch: Any, device: str) -> TrainingStep:
    """The step of a Trainer with this task and batch, which are on the CPU or have no data.

    Args:
        device: ``"cuda"`` or ``"cpu"``: the device whose behavior to follow.
    """
    if config.trainer.precision == "64-true":
        batch = doubled(batch)
    optimizer = task.make_optimizer(task.model)
    if device == "cuda":  # on CUDA, optimizers use foreach by default
        for group in optimizer.param_groups:
            if group.get("foreach", 0) is None and not group.get("fused"):
                group["foreach"] = True
    held: dict[str, list[Tensor]] = {"batch": _tensors(batch)}
    if config.callbacks.ema.decay is not None:
        held["average"] = [torch.empty_like(tensor) for tensor in task.model.state_dict().values()]
    rewrite = None
    if config.synthesis.kind != "none":
        offloaded = device == "cuda" and getattr(config.synthesis, "offload", False)
        held["hologram"] = [] if offloaded else built_synthesis(config.synthesis, task).state_tensors
        rewrite = partial(_gathered, task.model) if device == "cuda" else None
    return TrainingStep(
        model=task.model,
        loss=lambda: task.loss(*task.inputs(batch)),
        optimizer=optimizer,
        autocast=partial(autocast_of, config.trainer, "cpu"),
        accumulates=config.trainer.accumulate_grad_batches > 1,
        clip=config.trainer.gradient_clip_val,
        clip_value=config.trainer.gradient_clip_algorithm == "value",
        rewrite=rewrite,
        held=held,
    )


def replace_sizes(config: RunConfig, backward: BackwardConfig, sizes: dict[str, Any]) -> RunConfig:
    """The configuration with another backward and other model sizes."""
    return replace(config, model=replace(config.model, **sizes), backward=copy.copy(backward))


def _gathered(model: nn.Module) -> list[Tensor]:
    """On a GPU, synthesis works on a copy of all gradients."""
    return [torch.empty_like(parameter.grad) for parameter in model.parameters() if parameter.grad is not None]


def _tensors(batch: Any) -> list[Tensor]:
    return list(batch.values() if isinstance(batch, dict) else batch)


def doubled(batch: Any) -> Any:
    """The batch with floating point tensors in float64, as in ``64-true``."""
    if isinstance(batch, dict):
        return batch
    return tuple(tensor.double() if tensor.is_floating_point() else tensor for tensor in batch)
