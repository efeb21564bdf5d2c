"""PowerSGD: low-rank compression of gradients, with error feedback.

Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", 2019. torch has the
algorithm; this module makes it resumable. torch (2.15) keeps its state per bucket, and DDP rebuilds its buckets after the first
step of every run. So the state is kept per parameter here.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

RANK = 4
"""Rank of the approximation, as in the paper for language models."""

WARM_UP = 100
"""Number of first steps without compression, because early gradients do not have a low rank."""

WORTH = 2
"""Minimum compression rate: other matrices are sent whole."""


class PowerSGD:
    """A communication hook: ``ddp.register_comm_hook(powersgd, PowerSGD.send)``.

    Args:
        parameters: parameters of the model, with their names.
    """

    def __init__(self, parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
        self.state = powerSGD_hook.PowerSGDState(
            None, matrix_approximation_rank=RANK, start_powerSGD_iter=WARM_UP, min_compression_rate=WORTH
        )
        self._names = {parameter: name for name, parameter in parameters}
        self._parameters = {name: parameter for parameter, name in self._names.items()}
        self._sent: torch.futures.Future[Tensor] = torch.futures.Future()
        self._buckets: dict[int, list[str]] = {}
        self._errors: dict[str, Tensor] = {}
        self._bases: dict[str, Tensor] = {}

    def send(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """The low-rank approximation of a bucket's mean gradient over processes."""
        index, names = bucket.index(), [self._names[parameter] for parameter in bucket.parameters()]
        if self._buckets.get(index, names) != names:  # DDP has rebuilt its buckets
            self._errors, self._bases = self._by_parameter()
            self._forget_buckets()
        if index not in self._buckets:
            self._buckets[index] = names
            self._put_together(index)
        if index and dist.get_backend() == "gloo":
            # The second collective of a bucket starts when its first is done. With two buckets in flight, the order could
            # differ between processes. (With NCCL, all are launched at once.)
            self._sent.wait()
        self._sent = powerSGD_hook.powerSGD_hook(self.state, bucket)
        return self._sent

    def state_dict(self) -> dict[str, Any]:
        """Plain containers and CPU tensors, in the first process. All processes must call it.

        Each process continues with the mean of all errors. This only changes rounding, since PowerSGD approximates the mean of
        gradients plus errors. A single mean can be loaded by any number of processes.
        """
        for _, error in sorted(self.state.error_dict.items()):
            dist.all_reduce(error)
            error.div_(dist.get_world_size())
        if dist.get_rank() != 0:
            return {}
        errors, bases = ({name: kept.to("cpu", copy=True) for name, kept in of.items()} for of in self._by_parameter())
        return {"step": self.state.iter, "errors": errors, "bases": bases}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state, with any number of processes."""
        self.state.iter = state["step"]
        self._forget_buckets()
        for own, kept in ((self._errors, state["errors"]), (self._bases, state["bases"])):
            own.clear()
            own |= {name: tensor.to(self._parameters[name].device, copy=True) for name, tensor in kept.items()}

    def _forget_buckets(self) -> None:
        for by_bucket in (self._buckets, self.state.error_dict, self.state.p_memory_dict, self.state.q_memory_dict):
            by_bucket.clear()

    def _by_parameter(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The state of each parameter: its error, flat, and, if compressed, the basis of its rows. Mostly views."""
        errors, bases = dict(self._errors), dict(self._bases)
        for index, names in self._buckets.items():
            if index not in self.state.error_dict:  # warming up
                continue
            sizes = [self._parameters[name].numel() for name in names]
            errors |= zip(names, self.state.error_dict[index].split(sizes), strict=True)
            thin = self._compressed(names)
            parts = self.state.q_memory_dict[index].split([size for _, _, size in thin])
            bases |= {name: base for (name, _, _), base in zip(thin, parts, strict=True)}
        return errors, bases

    def _put_together(self, index: int) -> None:
        """The reverse of ``_by_parameter`` for one bucket, if the state of its parameters is known."""
        names = self._buckets[index]
        if not self._errors.keys() >= set(names):
            return
        thin, errors = self._compressed(names), [self._errors.pop(name) for name in names]
        self.state.error_dict[index] = torch.cat(errors)
        self.state.q_memory_dict[index] = torch.cat([errors[0][:0], *(self._bases.pop(name) for name, _, _ in thin)])
        self.state.p_memory_dict[index] = errors[0].new_empty(sum(size for _, size, _ in thin))  # written before it is read

    def _compressed(self, names: list[str]) -> list[tuple[str, int, int]]:
        """The compressed matrices in the order of torch's memory, with the number of entries of both factors."""
        by_shape: dict[tuple[int, int], list[tuple[str, int, int]]] = {}
        for name in names:
            parameter = self._parameters[name]
            rows = len(parameter)
            columns = parameter.numel() // rows
            rank = min(rows, columns, RANK)
            if powerSGD_hook._should_compress(rows, columns, rank, WORTH)[0]:
                by_shape.setdefault((rows, columns), []).append((name, rows * rank, columns * rank))
        return [thin for shape in by_shape.values() for thin in shape]
