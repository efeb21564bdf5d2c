"""One training step in the order of Lightning's automatic optimization or of Trainer, and its simulation on fake tensors."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from holotrain.optimizers import InBackward
from holotrain.optimizers.low_bit import parts_of
from holotrain.optimizers.stepping import refuse_in_backward
from holotrain.planning.devices import CPU, Allocator
from holotrain.planning.fake_tensors import assume_ones
from holotrain.planning.tracker import AllocationTracker, Footprint
from holotrain.reversible.lists_of_blocks import is_list_of_blocks, outermost


@dataclass
class TrainingStep:
    """What a training step consists of.

    Args:
        model: the model.
        loss: computes the loss of one batch.
        optimizer: of the model's parameters. An :class:`~holotrain.optimizers.InBackward` updates them in the backward.
        autocast: returns the context of the forward.
        batches: number of batches whose gradients are accumulated in one step. With several, those of earlier batches stay.
        clip: the largest norm of the gradient, or its largest value if ``clip_value`` is true; None: no clipping. An optimizer
            in the backward clips by its own ``clip_value``.
        zero_first: old gradients are freed before the loss is computed, as in transformers' Trainer, not after it, as in
            Lightning.
        rewrite: changes the gradients before they are clipped.
        held: other tensors that stay allocated, by kind, such as the batch.
        sequences: the model's sequences of blocks, first to last, whose schedules can be chosen. Each has ``blocks``, ``ends``
            (the modules with whose calls it begins and ends), and ``again(depth, backward)``, which makes one like it.

    Raises:
        ValueError: the optimizer steps in the backward, and gradients are to be accumulated, rewritten or clipped by norm.
    """

    model: nn.Module
    loss: Callable[[], Tensor]
    optimizer: Optimizer
    autocast: Callable[[], AbstractContextManager] = nullcontext
    batches: int = 1
    clip: float | None = None
    clip_value: bool = False
    zero_first: bool = False
    rewrite: Callable[[], object] | None = None
    held: dict[str, Iterable[Tensor]] = field(default_factory=dict)
    sequences: Sequence[Any] = ()

    def __post_init__(self) -> None:
        if self.in_backward:
            by_norm = bool(self.clip) and not self.clip_value
            uses = {"accumulation": self.batches > 1, "a rewrite": self.rewrite is not None, "clipping by norm": by_norm}
            refuse_in_backward(uses)

    @property
    def in_backward(self) -> bool:
        """Whether parameters are updated in the backward."""
        return isinstance(self.optimizer, InBackward)

    def begin(self) -> None:
        """Allocates gradients, as the previous step would have left them, or, if it leaves none, the optimizer's state."""
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
                if self.in_backward:
                    self.optimizer.step()

    def differentiate(self, enter: Callable[[str], object] = lambda phase: None) -> None:
        """Computes the loss, frees old gradients unless they accumulate, and computes new ones.

        ``enter`` is called with the name of each phase when it begins.
        """
        if self.batches == 1 and self.zero_first:
            self.optimizer.zero_grad()
        enter("forward")
        with self.autocast():
            loss = self.loss()
        if self.batches == 1:
            self.optimizer.zero_grad()
        enter("backward")
        loss.backward()

    def update(self) -> None:
        """Rewrites and clips the gradients and runs the optimizer step."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        if self.rewrite is not None:
            self.rewrite()
        if self.clip is not None and not self.in_backward:
            (clip_grad_value_ if self.clip_value else clip_grad_norm_)(parameters, self.clip)
        self.optimizer.step()

    @property
    def optimizer_state(self) -> list[Tensor]:
        return state_of(self.optimizer)


def state_of(optimizer: Optimizer) -> list[Tensor]:
    """The tensors of an optimizer's state; of one that consists of several, its parts."""
    kept = [x for state in optimizer.state.values() for x in state.values() if isinstance(x, Tensor)]
    return [part for tensor in kept for part in parts_of(tensor)]


@dataclass(frozen=True)
class Update:
    """The memory of an update, in bytes. It depends only on the parameters.

    Args:
        state: of the optimizer's state.
        beyond: the most that an update allocates in addition to what is alive when it begins.
    """

    state: int
    beyond: int


def simulate_update(step: TrainingStep, allocator: Allocator = CPU) -> Update:
    """Simulates an update in the middle of a training, when the optimizer state exists; one in the backward has no update."""
    tracker = AllocationTracker(allocator)
    with assume_ones():
        step.begin()
        if not step.in_backward:
            step.update()
    tracker.label("optimizer", step.optimizer_state)
    state = tracker.alive
    if step.in_backward:
        return Update(state, 0)
    _label(tracker, step)
    before = tracker.alive
    with assume_ones(), tracker.tracking():
        step.update()
    return Update(state, max(tracker.peak() - before, 0))


def simulate_step(step: TrainingStep, allocator: Allocator = CPU, update: Update | None = None) -> Footprint:
    """Returns the memory of a step in the middle of a training, when old gradients still exist, if the optimizer leaves any.

    Args:
        update: its memory, if it is already known.
    """
    update = update or simulate_update(step, allocator)
    tracker = AllocationTracker(allocator)
    numbers = assume_ones() if step.in_backward else nullcontext()  # of the optimizer, not of the model
    with numbers:
        step.begin()
    _label(tracker, step)
    if isinstance(step.optimizer, InBackward):
        tracker.label("optimizer", step.optimizer_state)  # the updates of the backward change it
        step.optimizer.observe(lambda parameter: tracker.label("gradients", _gradients([parameter])))
    else:
        tracker.add("optimizer", update.state)
    with numbers, tracker.tracking(), _at_the_end_of_blocks(step, tracker.enter_head):
        step.differentiate(tracker.enter)
    tracker.label("gradients", _gradients(step.model.parameters()))
    tracker.enter("update")
    tracker.add("temporary", update.beyond)
    return Footprint.of(tracker)


@contextmanager
def _at_the_end_of_blocks(step: TrainingStep, call: Callable[[], object]) -> Generator[None]:
    """Inside, ``call`` is called after the last block of the model, if it has a list of blocks."""
    ends = list(step.sequences) or [
        block for _, blocks in outermost(step.model, is_list_of_blocks) for block in [*blocks.children()][-1:]
    ]

    # For all modules, since branches with hooks of their own are not recomputed as others are.
    def after(module: nn.Module, *_: Any) -> None:
        if module in ends[-1:]:
            call()

    hook = register_module_forward_hook(after)
    try:
        yield
    finally:
        hook.remove()


def _label(tracker: AllocationTracker, step: TrainingStep) -> None:
    tracker.label("parameters", step.model.parameters())
    tracker.label("buffers", step.model.buffers())
    tracker.label("gradients", _gradients(step.model.parameters()))
    for kind, tensors in step.held.items():
        tracker.label(kind, tensors)


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
