"""One training step without its arithmetic: the order of Lightning's automatic optimization, on fake or real tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import Optimizer

from holotrain.planning.footprint import Footprint
from holotrain.planning.ledger import Ledger


@dataclass
class TrainingStep:
    """What a training step consists of.

    Args:
        model: what is trained.
        loss: of one batch.
        optimizer: of the model's parameters.
        autocast: gives the context of the forward.
        clip: the largest norm of the gradient, or its largest value where ``clip_value`` is true; None: any.
        rewrite: done to the gradients before they are clipped.
        held: what else stays all along, by kind: the batch above all.
    """

    model: nn.Module
    loss: Callable[[], Tensor]
    optimizer: Optimizer
    autocast: Callable[[], AbstractContextManager] = nullcontext
    clip: float | None = None
    clip_value: bool = False
    rewrite: Callable[[], object] | None = None
    held: dict[str, Iterable[Tensor]] = field(default_factory=dict)


def rehearse(step: TrainingStep, rounded: Callable[[int], int] = int) -> Footprint:
    """The memory of a step in the middle of a training, when the optimizer has its state and old gradients are still there.

    Args:
        rounded: what the allocator takes for so many bytes (:mod:`holotrain.planning.allocators`).
    """
    ledger = Ledger(rounded)
    prepare(step)
    _label(ledger, step)
    with ledger.watching():
        run(step, ledger)
    return Footprint.of(ledger)


def _label(ledger: Ledger, step: TrainingStep) -> None:
    parameters = list(step.model.parameters())
    ledger.label("parameters", parameters)
    ledger.label("buffers", step.model.buffers())
    for kind, tensors in step.held.items():
        ledger.label(kind, tensors)
    ledger.label("gradients", (p.grad for p in parameters if p.grad is not None))
    kept = (tensor for state in step.optimizer.state.values() for tensor in state.values() if isinstance(tensor, Tensor))
    ledger.label("optimizer", kept)


def prepare(step: TrainingStep) -> None:
    """Gives the parameters gradients and the optimizer its state, as a first step would."""
    for parameter in step.model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.zeros_like(parameter)
    step.optimizer.step()


def run(step: TrainingStep, ledger: Ledger | None = None) -> None:
    """Lightning's order: the loss first, then old gradients go, then come new ones."""
    ledger = ledger or Ledger()
    ledger.phase = "forward"
    with step.autocast():
        loss = step.loss()
    step.optimizer.zero_grad()
    ledger.phase = "backward"
    loss.backward()
    del loss
    parameters = [parameter for parameter in step.model.parameters() if parameter.grad is not None]
    ledger.label("gradients", (parameter.grad for parameter in parameters))
    ledger.phase = "update"
    if step.rewrite is not None:
        step.rewrite()
    if step.clip is not None:
        (clip_grad_value_ if step.clip_value else clip_grad_norm_)(parameters, step.clip)
    step.optimizer.step()
