"""A training and its variants: other schedules, batch sizes and depths; and the free memory of a device."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from holotrain.planning.devices import ALLOCATORS, cuda_rules
from holotrain.planning.fake_tensors import assume_mask_share, fake_parameters, fake_tensors
from holotrain.planning.tracker import Footprint
from holotrain.planning.training_step import TrainingStep, Update, simulate_step, simulate_update
from holotrain.reversible.side_stream import assuming_a_side_stream
from holotrain.schedules import OF_REVERSIBLE

MEMINFO = Path("/proc/meminfo")
CONTAINER = Path("/sys/fs/cgroup")
"""Memory limit and use of a container (cgroup v2). The use includes cached files, whose memory is free when it is needed."""


def free_memory(device: str) -> int | None:
    """Bytes; None: not known.

    Args:
        device: ``"cuda"``: includes what this process has reserved; ``"cpu"``: the least of the free memory of the system, of
            the container and of this process's limit.
    """
    if device == "cuda":
        return torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() if torch.cuda.is_available() else None
    if not MEMINFO.is_file():
        return None
    import resource  # not at the top, because Windows has none

    line = next(line for line in MEMINFO.read_text().splitlines() if line.startswith("MemAvailable:"))
    left = [int(line.split()[1]) * 1024]
    most, taken, parts = (CONTAINER / f"memory.{name}" for name in ("max", "current", "stat"))
    if most.is_file() and taken.is_file() and (limit := most.read_text().strip()).isdigit():
        lines = parts.read_text().splitlines() if parts.is_file() else []
        cached = sum(int(line.split()[1]) for line in lines if line.startswith(("inactive_file ", "active_file ")))
        left.append(int(limit) - int(taken.read_text()) + cached)
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        left.append(limit - mapped)
    return max(min(left), 0)


Backward = str | list[str]
"""The schedule of all blocks, or of each block, as in :class:`~holotrain.reversible.ReversibleSequence`."""


@dataclass(frozen=True)
class Size:
    """A size of a training that a plan can change.

    Args:
        name: the option that sets it, for messages.
        value: as configured.
        unit: the smallest sensible increment.
    """

    name: str
    value: int
    unit: int = 1


@dataclass(frozen=True)
class Planner:
    """Predicts the memory of a training and of variants of it, without allocating anything.

    Args:
        make_model: makes the module to train on PyTorch's default device, given its schedules and depth (None: as configured).
        make_step: makes the training step of this module with a batch of the given size, on the device of its parameters.
        device: ``"cuda"`` or ``"cpu"``: where the training is to take place; this machine need not have it.
        batch: the batch size.
        depth: the number of blocks; None: it cannot be changed.
        schedules: names of the schedules that the blocks support.
        backward: the configured schedules; None: they are to be chosen.
        keeps_results: whether blocks that are rebuilt can keep the outputs of attention and of matrix products.
        selected: the share of its entries that a boolean mask is assumed to select; None: the step uses no such mask.
        listed: number of equal blocks in lists of a model without sequences; they can be recomputed.
        tile: tokens at a time that MLPs are taken, so that they run once more; None: all.
        inexact: schedules that change gradients a little may be chosen.
        updates: what is known of updates, by the shapes of the parameters; planners of one training may share it.
    """

    make_model: Callable[[Backward, int | None], nn.Module]
    make_step: Callable[[nn.Module, int], TrainingStep]
    device: str
    batch: Size
    depth: Size | None = None
    schedules: Sequence[str] = OF_REVERSIBLE
    backward: Backward | None = None
    keeps_results: bool = True
    selected: float | None = None
    listed: int = 0
    tile: int | None = None
    inexact: bool = False
    updates: dict[Any, Update] = field(default_factory=dict, repr=False)
    _known: dict[str, Footprint] = field(default_factory=dict, init=False, repr=False)

    def footprint(self, backward: Backward, batch: int | None = None, depth: int | None = None) -> Footprint:
        """The memory of a training step, with another batch size or depth if given.

        Raises:
            Unplannable: an operation needs the values of its inputs.
        """
        batch = batch or self.batch.value
        key = repr((backward, batch, depth))
        if key not in self._known:
            allocator = ALLOCATORS[self.device]
            with self.fake_step(self.fake_model(backward, depth), batch) as step:
                shapes = tuple((tensor.shape, tensor.dtype, tensor.requires_grad) for tensor in step.model.parameters())
                if shapes not in self.updates:
                    self.updates[shapes] = simulate_update(step, allocator)
                self._known[key] = simulate_step(step, allocator, self.updates[shapes])
        return self._known[key]

    def fake_model(self, backward: Backward, depth: int | None = None) -> nn.Module:
        """The module on the meta device."""
        with torch.device("meta"):
            return self.make_model(backward, depth)

    @contextmanager
    def fake_step(self, model: nn.Module, batch: int | None = None) -> Generator[TrainingStep]:
        """The training step of a module on the meta device, with tensors that have shapes but no data."""
        with ExitStack() as stack:
            if self.device == "cuda":
                stack.enter_context(cuda_rules())
                stack.enter_context(assuming_a_side_stream())
            stack.enter_context(fake_tensors())
            if self.selected is not None:
                stack.enter_context(assume_mask_share(self.selected))
            step = self.make_step(fake_parameters(model, torch.device("cpu")), batch or self.batch.value)
            if self.device == "cuda":  # where optimizers use foreach by default
                for group in step.optimizer.param_groups:
                    if group.get("foreach", 0) is None and not group.get("fused"):
                        group["foreach"] = True
            yield step
