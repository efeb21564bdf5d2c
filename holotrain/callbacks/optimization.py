"""OptimizationMonitor: the norm of the gradient and the size of a step's update."""

import math
from collections.abc import Iterable
from typing import Any, cast

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holotrain.callbacks.monitor import Monitor, log_scalars
from holotrain.optimizers import InBackward

SAMPLED = 2**16
"""Entries of a tensor whose update is measured. So a logged step needs at most 256 KiB per fp32 tensor, not a copy of it."""


class OptimizationMonitor(Monitor):
    """Logs ``optimization/gradient_norm`` and ``optimization/update_ratio`` in one of every n optimizer steps.

    The first is the L2 norm of the gradient before clipping, the second that of the step's change of the weights over that of
    the weights. Of tensors with more than 65,536 entries that many are compared, but of sharded ones all. In error diffusion,
    the updates in place of gradients are measured.

    Args:
        every_n_steps: n; None: the trainer's ``log_every_n_steps``; 0: never.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self._before: dict[Tensor, tuple[Tensor, Tensor]] = {}  # norm of the gradient, and a sample of the weights
        self._scale = 1.0
        self._watch: RemovableHandle | None = None

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._forget()
        optimizer = InBackward.among(trainer.optimizers)
        if optimizer is not None and trainer.loggers and self.measures(trainer):
            self._watch = optimizer.observe(self._note)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        if not trainer.loggers or not self.measures(trainer):
            return
        elsewhere = getattr(trainer.strategy, "tied_to_first", ())  # in the first stage of a pipeline
        for parameter in pl_module.parameters():
            if parameter.grad is not None and parameter not in elsewhere:
                self._note(parameter)
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):  # fused: it unscales in its step
            self._scale = scaler.get_scale()

    def _note(self, parameter: Tensor) -> None:
        self._before[parameter] = norm_of([cast(Tensor, parameter.grad)]), sample(parameter)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not self._before:
            return
        gradients, weights = zip(*self._before.values(), strict=True)
        changes = [sample(parameter) - before for parameter, before in zip(self._before, weights, strict=True)]
        found = [torch.stack(gradients).norm() / self._scale, norm_of(changes), norm_of(weights)]
        norms = dict(zip(("gradient", "change", "weights"), torch.stack(found).tolist(), strict=True))
        if (over_stages := getattr(trainer.strategy, "norms_over_stages", None)) is not None:
            norms = over_stages(norms)
        scalars = {"optimization/gradient_norm": norms["gradient"]}
        if norms["weights"]:
            scalars["optimization/update_ratio"] = norms["change"] / norms["weights"]
        log_scalars(trainer, scalars, trainer.global_step)
        self._forget()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._forget()

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.remove()
        self._watch, self._before = None, {}


def norm_of(tensors: Iterable[Tensor]) -> Tensor:
    """The L2 norm over all tensors, in fp32 or better. A sharded tensor counts as a whole, so all processes call it."""
    norms = []
    for tensor in tensors:
        values = tensor.detach().coalesce().values() if tensor.is_sparse else tensor.detach()
        norm = torch.linalg.vector_norm(values, dtype=torch.promote_types(values.dtype, torch.float32))
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    return torch.stack(norms).norm()


def sample(parameter: Tensor) -> Tensor:
    """A copy of up to ``SAMPLED`` equally spaced entries, scaled so that their norm estimates that of all entries. A sharded
    tensor is copied as a whole."""
    own = parameter.detach()
    step = -(-own.numel() // SAMPLED)
    if step <= 1 or isinstance(own, DTensor):
        return own.clone()
    while math.gcd(step, own.shape[-1]) > 1:  # else all entries would lie in a few columns
        step += 1
    return own.flatten()[::step] * math.sqrt(step)
