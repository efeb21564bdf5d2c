"""A sequence dimension sharded over ranks, as rows ordered rank by rank.

The view ``x.view(ranks, share, ...)`` puts the shares of all ranks side by side. A group ``[:, rows]`` of it is then a
contiguous piece of every rank's share, and nothing has to be reordered after a reduce-scatter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.nn.functional import pad


@dataclass(frozen=True)
class Shares:
    """Dimension ``dim`` of length ``length``, split as ``torch.chunk`` and DTensor's ``Shard`` split it.

    If the length does not divide evenly, the last shares are shorter, and are padded with zeros for communication.
    Shape letters: A dimensions before ``dim``, S ``length``, s length of a padded share, C dimensions between ``dim`` and the
    features, K features; a share has L = A * s * C rows.
    """

    dim: int
    length: int
    ranks: int

    @property
    def padded(self) -> int:
        return math.ceil(self.length / self.ranks)

    def own(self, rank: int) -> int:
        """The length of a rank's share without padding."""
        return min(max(self.length - rank * self.padded, 0), self.padded)

    def side_by_side(self, x: Tensor) -> Tensor:
        """[..A, S, ..C, K] to [ranks, L, K]; a view if the sequence is the first dimension and divides evenly."""
        rows = self._rows(x)
        x = self._lengthened(x, self.ranks * self.padded)
        return x.unflatten(self.dim, (self.ranks, self.padded)).movedim(self.dim, 0).reshape(self.ranks, rows, x.shape[-1])

    def end_to_end(self, rows: Tensor, like: Tensor) -> Tensor:
        """[ranks, L, K] to [..A, S, ..C, K]; ``like`` gives A and C."""
        shape = (self.ranks, *like.shape[: self.dim], self.padded, *like.shape[self.dim + 1 : -1], rows.shape[-1])
        return rows.view(shape).movedim(0, self.dim).flatten(self.dim, self.dim + 1).narrow(self.dim, 0, self.length)

    def rows_of_share(self, x: Tensor) -> Tensor:
        """[..A, own, ..C, K] to [L, K]."""
        return rows_of(self._lengthened(x, self.padded))

    def share_of_rows(self, rows: Tensor, rank: int, like: Tensor) -> Tensor:
        """[L, K] to [..A, own, ..C, K]; ``like`` gives A and C."""
        shape = (*like.shape[: self.dim], self.padded, *like.shape[self.dim + 1 : -1], rows.shape[-1])
        return rows.view(shape).narrow(self.dim, 0, self.own(rank))

    def _rows(self, like: Tensor) -> int:
        return math.prod(like.shape[: self.dim]) * self.padded * math.prod(like.shape[self.dim + 1 : -1])

    def _lengthened(self, x: Tensor, length: int) -> Tensor:
        missing = length - x.shape[self.dim]
        if missing == 0:
            return x
        return pad(x, (0, 0) * (x.dim() - 1 - self.dim) + (0, missing))


def rows_of(x: Tensor) -> Tensor:
    """[..., K] to [R, K]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # not -1: this rank may have no features
