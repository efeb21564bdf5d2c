"""Collectives on a link that is emulated in one process, for tests and for scripts/bench_overlap.py."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from holotrain.overlap.groups import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER
from holotrain.overlap.predictor import Carrier

SPIN = 2e-4
"""Seconds before the end of a transfer at which waiting changes from sleeping, which ends late, to polling the clock."""


class EmulatedCollectives:
    """Replaces a process group in a single process, which acts as rank 0 of ``ranks``; the other ranks contribute nothing.

    A transfer takes ``link.seconds`` from its launch or from the end of the previous transfer: a link carries one message at a
    time. It uses no core, so computation really overlaps it. CPU only.

    Args:
        link: the time of a collective.
        ranks: the emulated number of ranks.
    """

    def __init__(self, link: Carrier, ranks: int) -> None:
        self.link, self.ranks, self.rank = link, ranks, 0
        self.name = f"emulated_{link}"
        self._free_at = 0.0

    def all_reduce(self, tensor: Tensor) -> Transfer:
        return self._transfer(ALL_REDUCE, tensor.nbytes)

    def reduce_scatter(self, share: Tensor, parts: Tensor) -> Transfer:
        share.copy_(parts[0])
        return self._transfer(REDUCE_SCATTER, parts.nbytes)

    def all_gather(self, parts: Tensor, share: Tensor) -> Transfer:
        parts.copy_(share)  # every part, so that nothing is computed from uninitialised memory
        return self._transfer(ALL_GATHER, parts.nbytes)

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Transfer:
        received[0].copy_(sent[0])
        for part in received[1:]:
            part.zero_()
        return self._transfer(ALL_TO_ALL, sum(part.nbytes for part in sent))

    def agreed(self, value: object) -> object:
        return value

    def largest(self, values: Sequence[float], device: torch.device) -> list[float]:
        return list(values)

    def _transfer(self, collective: str, size: int) -> Transfer:
        begins = max(time.perf_counter(), self._free_at)
        self._free_at = begins + self.link.seconds(collective, size, self.ranks)
        return Transfer(self._free_at)


class Transfer:
    """A message that arrives at time ``ends`` of ``time.perf_counter``."""

    def __init__(self, ends: float) -> None:
        self.ends = ends

    def wait(self) -> None:
        if (left := self.ends - time.perf_counter()) > SPIN:
            time.sleep(left - SPIN)
        while time.perf_counter() < self.ends:
            pass
