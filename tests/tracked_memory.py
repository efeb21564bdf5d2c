"""Memory of a step, counted per tensor, so that it is equal on every machine."""

import weakref
from collections.abc import Callable, Iterable

import pytest
import torch
from measured_memory import measured_peak
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from holotrain.planning.devices import ALLOCATORS
from holotrain.planning.tracker import Footprint
from holotrain.planning.training_step import TrainingStep


class TrackedMemory(TorchDispatchMode):
    """``peak``: maximum number of live bytes that operations have allocated; ``alive``: current number.

    Args:
        model: its parameters, gradients and buffers do not count. Gradients must already exist, or they would count.
        counted: tensors that exist already and do count.
        within: bytes that an operation holds within itself, given the operation, its arguments and its result.
    """

    def __init__(
        self, model: nn.Module | None = None, counted: Iterable[torch.Tensor] = (), within: Callable[..., int] = lambda *_: 0
    ) -> None:
        super().__init__()
        own = []
        if model is not None:
            own = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]
        self._within = within
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._living = {}
        self.alive = self.peak = 0
        for tensor in counted:
            self._count(tensor.untyped_storage())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(hasattr(each, "__tensor_flatten__") for each in types):
            return NotImplemented  # it comes again, as operations of the parts of these tensors
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if type(tensor) in (torch.Tensor, nn.Parameter):  # others have no memory of their own
                self._count(tensor.untyped_storage())
        self.peak = max(self.peak, self.alive + self._within(function, args, result))
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if storage.data_ptr() in self._own or key in self._living:
            return
        size = storage.nbytes()

        def freed(_):
            del self._living[key]
            self.alive -= size

        self._living[key] = weakref.ref(storage, freed)
        self.alive += size
        self.peak = max(self.peak, self.alive)


def bytes_of_a_step(model: nn.Module, *inputs: torch.Tensor) -> tuple[int, int]:
    """Bytes in addition to the model and its gradients: at the peak, and between forward and backward."""
    model(*inputs).sum().backward()
    with TrackedMemory(model) as memory:
        loss = model(*inputs).sum()
        between = memory.alive
        loss.backward()
    return memory.peak, between


def check_plan(planned: Footprint, step: TrainingStep) -> None:
    """Runs a real step on the CPU and compares it with its plan, within one per cent.

    The peak is that of the tensors, with what kernels are known to hold: the same on every machine. What the allocator reports
    includes scratch, which depends on the CPU: it lies between the peak and the bound.
    """
    held = [tensor for tensors in step.held.values() for tensor in tensors]
    there = [*step.model.parameters(), *step.model.buffers(), *held]
    with TrackedMemory(counted=there, within=ALLOCATORS["cpu"].within) as tracked:
        reported = measured_peak(step, torch.device("cpu"))
    figures = f"planned {planned.peak}, at most {planned.bound}; tensors {tracked.peak}, allocator {reported}"
    assert planned.peak == pytest.approx(tracked.peak, rel=0.01), figures
    assert 0.99 * planned.peak <= reported <= 1.01 * planned.bound, figures
