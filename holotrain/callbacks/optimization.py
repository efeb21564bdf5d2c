"""OptimizationMonitor and Histograms: norms of gradients and of weight updates, distributions of weights and gradients."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.utils import get_total_norm
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from holotrain.callbacks.monitor import Monitor, log_scalars
from holotrain.optimizers import InBackward

SAMPLED = 2**16
"""Entries of a tensor whose update is measured. So a logged step needs at most 256 KiB per fp32 tensor, not a copy of it."""


class Seen(NamedTuple):
    """A parameter before its step in the backward: norms of its gradient and of itself, and a sample of its entries."""

    gradient: Tensor
    weight: Tensor
    sample: Tensor


class GradientMonitor(Monitor):
    """Looks at gradients before the optimizer step, or before each parameter's if the optimizer steps in the backward."""

    _watch: RemovableHandle | None = None

    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._forget()
        optimizer = InBackward.among(trainer.optimizers)
        if optimizer is not None and self._due(trainer):
            self._watch = optimizer.observe(partial(self._see, trainer, pl_module))

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._forget()

    def _due(self, trainer: pl.Trainer) -> bool:
        return bool(trainer.loggers) and self.measures(trainer)

    @abstractmethod
    def _see(self, trainer: pl.Trainer, pl_module: pl.LightningModule, parameter: Tensor) -> None:
        """A parameter with its gradient, before its step in the backward."""

    def _forget(self) -> None:
        if self._watch is not None:
            self._watch.remove()
            self._watch = None


class OptimizationMonitor(GradientMonitor):
    """Logs the gradient's norm and the size of the weight update in one of every n optimizer steps, for any Lightning Trainer.

    The other steps have no overhead. The norms stay on the device until the step ends, and are then read at once.

    Args:
        every_n_steps: n; None: the trainer's ``log_every_n_steps``; 0: never.
        per_block: also log the norm of the gradient of every block, and of every other part of the model.

    Logs ``optimization/gradient_norm``: the L2 norm of the gradient that the optimizer step would use without clipping (with
    16-mixed: without scaling; with accumulation: of the accumulated gradient); ``optimization/gradient_norm/<name>`` for each
    part; and ``optimization/update_ratio``: the norm of the step's change of the weights over the norm of the weights before
    it. With an optimizer that steps in the backward all of them are taken there. The change of tensors with more than 65,536
    entries is estimated from that many, equally spaced. Error diffusion has updates in place of gradients; then these
    are measured. Logs nothing for a step without gradients.
    """

    def __init__(self, every_n_steps: int | None = None, per_block: bool = False) -> None:
        super().__init__(every_n_steps)
        self.per_block = per_block
        self._norms: dict[str, Tensor] = {}
        self._before: tuple[Sequence[Tensor], list[Tensor]] | None = None
        self._seen: dict[Tensor, Seen] = {}

    def _see(self, trainer: pl.Trainer, pl_module: pl.LightningModule, parameter: Tensor) -> None:
        self._seen[parameter] = Seen(norm_of([cast(Tensor, parameter.grad)]), norm_of([parameter]), sample(parameter).clone())

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        seen = self._seen
        self._forget()
        if not self._due(trainer):
            return
        counted = getattr(trainer.strategy, "tied_to_first", ())  # in the first stage of a pipeline
        named = [(name, each) for name, each in pl_module.named_parameters() if each not in counted]
        trained = {name: each for name, each in named if each.grad is not None or each in seen}
        if not trained:
            return
        parameters = [*trained.values()]
        names = parts_of(trained) if self.per_block else {"": trained}
        parts = {part: [trained[name] for name in own] for part, own in names.items()}
        if seen:
            norms = {part: torch.stack([seen[each].gradient for each in own]).norm() for part, own in parts.items()}
            weights = torch.stack([seen[each].weight for each in parameters]).norm()
            samples = [seen[each].sample for each in parameters]
        else:
            norms = {part: norm_of([cast(Tensor, each.grad) for each in own]) for part, own in parts.items()}
            weights, samples = norm_of(parameters), [sample(each).clone() for each in parameters]
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):  # fused: it unscales in its step
            norms = {part: norm / scaler.get_scale() for part, norm in norms.items()}
        self._norms = {"optimization/gradient_norm": torch.stack([*norms.values()]).norm(), "weights": weights}
        self._before = parameters, samples
        if self.per_block:
            self._norms |= {f"optimization/gradient_norm/{part}": norm for part, norm in norms.items()}

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._before is None:
            return
        parameters, before = self._before
        changes = torch._foreach_sub([sample(parameter) for parameter in parameters], before)
        torch._foreach_mul_(changes, [weight(parameter) for parameter in parameters])
        self._norms["change"] = norm_of(parameters, changes)
        values = torch.stack([*self._norms.values()]).tolist()
        scalars = dict(zip(self._norms, values, strict=True))
        self._norms, self._before = {}, None
        if (over_stages := getattr(trainer.strategy, "norms_over_stages", None)) is not None:
            scalars = over_stages(scalars)
        change, weights = scalars.pop("change"), scalars.pop("weights")
        if weights:
            scalars["optimization/update_ratio"] = change / weights
        log_scalars(trainer, scalars, trainer.global_step)

    def _forget(self) -> None:
        super()._forget()
        self._norms, self._before, self._seen = {}, None, {}


def parts_of(names: Iterable[str]) -> dict[str, list[str]]:
    """Names of parameters by block, and by top-level part for those outside of blocks.

    A name is cut after its first number, such as in ``blocks.3``, else after its first word. Words that all names begin with
    are left out.
    """
    split = {name: name.split(".") for name in names}
    heads = [words[:-1] for words in split.values()]  # what the first and the last in order share, all share
    same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(min(heads), max(heads), strict=False)))
    parts: dict[str, list[str]] = {}
    for name, words in split.items():
        own = words[same:]
        number = next((place for place, word in enumerate(own) if word.isdigit()), 0)
        parts.setdefault(".".join(own[: number + 1]), []).append(name)
    return parts


@torch.no_grad()
def norm_of(tensors: Sequence[Tensor], parts: Sequence[Tensor] | None = None) -> Tensor:
    """The L2 norm over all tensors, in fp32 or better. Sharded tensors count as a whole; then all processes must call it.

    Args:
        parts: what to measure of each tensor in this process; None: its local part.
    """
    layouts: dict[Any, list[Tensor]] = {}
    for tensor, part in zip(tensors, parts or [local(tensor) for tensor in tensors], strict=True):
        layout = (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None
        layouts.setdefault(layout, []).append(part)
    norms = []
    for layout, members in layouts.items():
        norm = get_total_norm(members)
        norm = norm.to(torch.promote_types(norm.dtype, torch.float32))
        if layout is not None:
            mesh, placements = layout
            summed = [Replicate() if placement.is_replicate() else Partial() for placement in placements]
            norm = DTensor.from_local(norm.square(), mesh, summed, run_check=False).full_tensor().sqrt()
        norms.append(norm)
    return torch.stack(norms).norm()


def local(tensor: Tensor) -> Tensor:
    """This process's part; of a sparse tensor its values."""
    own = tensor.detach()
    own = own.to_local() if isinstance(own, DTensor) else own
    return own.coalesce().values() if own.is_sparse else own


def sample(parameter: Tensor) -> Tensor:
    """Up to ``SAMPLED`` equally spaced entries of this process's part, as a view if that is contiguous."""
    own = local(parameter)
    step = max(-(-own.numel() // SAMPLED), 1)
    while step > 1 and math.gcd(step, own.shape[-1]) > 1:  # else all entries would lie in a few columns
        step += 1
    return own.flatten()[::step]


def weight(parameter: Tensor) -> float:
    """What makes the norm of a sample an estimate of the norm of all entries."""
    return math.sqrt(local(parameter).numel() / max(sample(parameter).numel(), 1))


class Histograms(GradientMonitor):
    """Logs histograms of every weight and gradient to TensorBoard in one of every n optimizer steps, for any Lightning Trainer.

    A logged step copies all weights and gradients to the CPU, one after another. Other loggers get nothing.

    Args:
        every_n_steps: n; None: the trainer's ``log_every_n_steps``; 0: never.

    Logs ``weights/<name>`` and ``gradients/<name>``, before clipping and the optimizer step. NaN and infinity are left out.
    With 16-mixed and a fused optimizer, gradients are scaled. Error diffusion has updates in place of gradients.
    """

    def __init__(self, every_n_steps: int | None = None) -> None:
        super().__init__(every_n_steps)
        self._written: set[Tensor] = set()

    def _due(self, trainer: pl.Trainer) -> bool:
        return super()._due(trainer) and any(isinstance(logger, TensorBoardLogger) for logger in trainer.loggers)

    def _see(self, trainer: pl.Trainer, pl_module: pl.LightningModule, parameter: Tensor) -> None:
        for name, each in pl_module.named_parameters():
            if each is parameter:
                self._write(trainer, name, parameter)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        if self._due(trainer):
            for name, parameter in pl_module.named_parameters():
                if parameter not in self._written:
                    self._write(trainer, name, parameter)
        self._forget()

    def _write(self, trainer: pl.Trainer, name: str, parameter: Tensor) -> None:
        self._written.add(parameter)
        for kind, tensor in (("weights", parameter), ("gradients", parameter.grad)):
            values = finite(tensor)
            for logger in trainer.loggers if values is not None and trainer.is_global_zero else ():
                if isinstance(logger, TensorBoardLogger):
                    logger.experiment.add_histogram(f"{kind}/{name}", values, trainer.global_step + 1)

    def _forget(self) -> None:
        super()._forget()
        self._written = set()


def finite(tensor: Tensor | None) -> Any:
    """The finite values, on the CPU; None if there are none. All processes must call it if the tensor is sharded."""
    if tensor is None or tensor.is_meta:  # of another pipeline stage
        return None
    tensor = tensor.detach()
    values = (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).to_dense().cpu().float().flatten()
    values = values[values.isfinite()]
    return values if len(values) else None
