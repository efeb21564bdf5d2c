"""Buffers that a forward changes (running statistics, power iterations). A recomputation reads the old ones, changes none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase


@dataclass
class _Buffer:
    owner: nn.Module
    name: str
    tensor: Tensor
    version: int
    before: Tensor

    def written(self) -> bool:
        return self.owner._buffers.get(self.name) is not self.tensor or self.tensor._version != self.version


class Buffers:
    """The buffers of modules in training mode, copied before a forward.

    A batch norm updates its statistics in place, and a recomputation must not update them again. A module whose output depends
    on a buffer that it also writes (spectral norm) must read the same value in both runs.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._buffers = [
            _Buffer(owner, name, tensor, tensor._version, tensor.clone())
            for owner in modules
            if owner.training
            for name, tensor in owner._buffers.items()
            if tensor is not None
        ]

    def written(self) -> Buffers | None:
        """Keeps only the copies of buffers that the forward wrote; None if there are none."""
        # torch's normalisations write their statistics without counting it as a version.
        writers = {id(b.owner) for b in self._buffers if b.written() or isinstance(b.owner, _NormBase)}
        self._buffers = [buffer for buffer in self._buffers if id(buffer.owner) in writers]
        return self if self._buffers else None

    @property
    def owners(self) -> set[int]:
        """The ids of the modules with these buffers."""
        return {id(buffer.owner) for buffer in self._buffers}

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside the context the modules have copies of the buffers from before the forward; then their own buffers again."""
        present = [(buffer, buffer.owner._buffers[buffer.name]) for buffer in self._buffers]
        for buffer in self._buffers:
            buffer.owner._buffers[buffer.name] = buffer.before.clone()
        try:
            yield
        finally:
            for buffer, tensor in present:
                buffer.owner._buffers[buffer.name] = tensor
