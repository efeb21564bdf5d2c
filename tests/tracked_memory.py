"""Memory of a step without its model, counted per tensor, so that it is equal on every machine."""

import weakref

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class TrackedMemory(TorchDispatchMode):
    """``peak``: maximum number of live bytes that operations have allocated; ``alive``: current number.

    Args:
        model: its parameters, gradients and buffers do not count. Gradients must already exist, or they would count.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        own = [*model.parameters(), *(p.grad for p in model.parameters() if p.grad is not None), *model.buffers()]
        self._own = {tensor.untyped_storage().data_ptr() for tensor in own}
        self._living = {}
        self.alive = self.peak = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
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
