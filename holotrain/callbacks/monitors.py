"""Monitors: how often they measure, how they log, and those of gradients, reversible blocks and error diffusion."""

import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import Logger, TensorBoardLogger
from matplotlib.figure import Figure
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holotrain.error_diffusion import ErrorDiffusionNetwork
from holotrain.error_diffusion.cells import alignment, dead_cells, sign_violations
from holotrain.error_diffusion.rules import BACKPROPAGATION
from holotrain.errors import readable
from holotrain.numeric import require_at_least
from holotrain.optimizers import InBackward
from holotrain.reversible.graphs import StepGraphs
from holotrain.reversible.sequence import checks_in


class Monitor(pl.Callback):
    """Measures in one of every n optimizer steps.

    Args:
        every_n_steps: n; None: the trainer's ``log_every_n_steps``; 0: never.

    Raises:
        ValueError: n is negative.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        require_at_least(0, every_n_steps=every_n_steps)
        self.every_n_steps = every_n_steps

    def period(self, trainer: pl.Trainer) -> int:
        """n, or 0."""
        return trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps  # ty: ignore[missing-attribute]

    def ends_window(self, trainer: pl.Trainer, step: int) -> bool:
        """Whether this optimizer step, counted from 1, is one of those that are measured."""
        period = self.period(trainer)
        return period > 0 and step % period == 0

    def measures(self, trainer: pl.Trainer) -> bool:
        """Whether the optimizer step that comes next, or that is being taken, is one of those."""
        return self.ends_window(trainer, trainer.global_step + 1)


def log_scalars(trainer: pl.Trainer, scalars: Mapping[str, float], step: int) -> None:
    """To all loggers."""
    for logger in trainer.loggers:
        logger.log_metrics(dict(scalars), step=step)


def log_figure(loggers: Iterable[Logger], tag: str, figure: Figure, step: int) -> None:
    """To TensorBoard, and to loggers that have Lightning's ``log_image``, such as WandbLogger."""
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(tag, figure, step)
        elif (log := getattr(logger, "log_image", None)) is not None:
            log(key=tag, images=[figure], step=step)


def log_text(loggers: Iterable[Logger], tag: str, text: str, step: int) -> None:
    """The same, with ``log_text``. TensorBoard reads Markdown, which leaves indented lines as they are."""
    text = readable(text)
    for logger in loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(tag, "\n".join(f"    {line}" for line in text.splitlines()), step)
        elif (log := getattr(logger, "log_text", None)) is not None:
            log(key=tag, columns=["text"], data=[[text]], step=step)


def replays(pl_module: pl.LightningModule) -> bool:
    """Whether the training step is the replay of a CUDA graph, which runs no hooks of Python's."""
    graphs = next((value for value in vars(pl_module).values() if isinstance(value, StepGraphs)), None)
    return graphs is not None and graphs.reason is None and pl_module.device.type == "cuda"


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


class DriftMonitor(Monitor):
    """Logs how well activations are rebuilt, for any Lightning Trainer.

    Every backward of reversible blocks checks this, with a sample of a few thousand entries; see
    :mod:`holotrain.reversible.checks`, which warns where it must.

    Args:
        every_n_steps: logs one of every n optimizer steps; None: the trainer's ``log_every_n_steps``; 0: never.

    Logs ``reversible/drift``: the relative error of the rebuilt stream that the first blocks read, the maximum over all
    sequences; 0 if it is exact. Logs nothing if no sequence recomputes, or if the step is replayed as a CUDA graph.
    """

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.measures(trainer) or replays(pl_module):
            return
        errors = [error for checks in checks_in(pl_module) for error in checks.errors]
        if errors:
            log_scalars(trainer, {"reversible/drift": max(error.item() for error in errors)}, trainer.global_step)


class ErrorDiffusionMonitor(Monitor):
    """Monitors every ErrorDiffusionNetwork of a LightningModule, for any Lightning Trainer, in one of every n steps.

    Args:
        every_n_steps: n, in optimizer steps; None: the trainer's ``log_every_n_steps``; 0: never.

    Logs, for the last batch and averaged over networks, ``error_diffusion/sign_violations`` (fraction of weights whose sign
    does not match their cells), ``error_diffusion/dead_cells`` (fraction of hidden cells that learn from no sample) and,
    unless the rule is back-propagation, ``error_diffusion/alignment`` (cosine between update and gradient descent). A
    monitored step takes about three times as long. Logs nothing if the step is replayed as a CUDA graph.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self._seen: dict[ErrorDiffusionNetwork, tuple[Tensor, Tensor]] = {}  # input and gradient of the output
        self._hooks: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        self._stop()
        if self.measures(trainer) and not replays(pl_module):
            networks = [module for module in pl_module.modules() if isinstance(module, ErrorDiffusionNetwork)]
            self._hooks = [network.register_forward_hook(self._watch, with_kwargs=True) for network in networks]

    def _watch(
        self, network: ErrorDiffusionNetwork, given: tuple[Tensor, ...], named: dict[str, Tensor], outputs: Tensor
    ) -> None:
        if outputs.requires_grad:
            (x,) = (*given, *named.values())
            outputs.register_hook(lambda grad: self._seen.update({network: (x.detach(), grad.detach())}))

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Any) -> None:
        seen = self._seen
        self._stop()
        if not seen:
            return
        with trainer.precision_plugin.forward_context():
            found = []
            for network, (x, grad) in seen.items():
                figures = {"sign_violations": sign_violations(network), "dead_cells": dead_cells(network, x)}
                if network.rule != BACKPROPAGATION:
                    figures["alignment"] = alignment(network, x, grad)
                found.append(figures)
        scalars = {f"error_diffusion/{name}": torch.stack([each[name] for each in found]).mean().item() for name in found[0]}
        log_scalars(trainer, scalars, trainer.global_step + 1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._stop()

    def _stop(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._seen = [], {}
