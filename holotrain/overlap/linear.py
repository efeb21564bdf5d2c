"""Row- and column-parallel linear layers as functions of local tensors with any leading dimensions."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from holotrain.overlap.collectives import Collectives, collectives_of
from holotrain.overlap.column import ColumnAllReduce, ColumnReduceScatter
from holotrain.overlap.groups import Grouping
from holotrain.overlap.row import RowAllReduce, RowReduceScatter
from holotrain.overlap.sending import Sender
from holotrain.overlap.shares import Shares, rows_of

GROUPS = 4
"""The default number of groups."""


def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | Collectives,
    groups: Grouping = GROUPS,
    sequence_dim: int | None = None,
    signals: bool = False,
) -> Tensor:
    """``linear(x, weight, bias)`` with input features sharded over the ranks, and overlapped communication.

    Args:
        x: [..., K], this rank's share of the input features; the same rows on every rank.
        weight: [N, K], the columns of the weight for these features.
        bias: [N], whole on every rank.
        group: the ranks.
        groups: the number of groups of rows, or a callable that chooses them (:class:`~holotrain.overlap.Predictor`,
            :class:`~holotrain.overlap.Tuner`); the same on every rank.
        sequence_dim: the dimension of x by which the output is sharded (sequence parallel), with a reduce-scatter instead of an
            all-reduce. If it does not divide evenly, the shares are those of ``torch.chunk``.
        signals: compute all groups in one product that signals each finished group (CUDA, bf16 and fp16, with Triton; otherwise
            one product per group). Its numbers are checked in Triton's interpreter; it has not run on a GPU yet.

    Returns:
        [..., N], whole on every rank; with ``sequence_dim`` this rank's share of it.

    Under autocast it computes and communicates in autocast's dtype. Second derivatives are refused. torch.compile breaks its
    graph here.
    """
    sender = Sender(collectives_of(group), groups, signals)
    x, weight, bias = _as_autocast_would(x, weight, bias)
    if sequence_dim is None:
        return _apply(RowAllReduce, rows_of(x), weight, bias, sender).view(*x.shape[:-1], len(weight))
    shares = Shares(_dimension(sequence_dim, x), x.shape[sequence_dim], sender.link.ranks)
    rows = _apply(RowReduceScatter, shares.side_by_side(x), weight, bias, sender)
    return shares.share_of_rows(rows, sender.link.rank, like=x)


def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | Collectives,
    groups: Grouping = GROUPS,
    sequence_dim: int | None = None,
    length: int | None = None,
    signals: bool = False,
) -> Tensor:
    """This rank's output features of ``linear(x, weight, bias)``, with an overlapped sum of the input gradient over ranks.

    Args:
        x: [..., K], whole on every rank; with ``sequence_dim`` this rank's share of it.
        weight: [N, K], this rank's rows of the weight.
        bias: [N], this rank's part of the bias.
        group: the ranks.
        groups: as in :func:`row_parallel_linear`.
        sequence_dim: the dimension by which x is sharded over the ranks (sequence parallel). It is gathered in the forward; the
            gradient is reduce-scattered in the backward.
        length: total length of that dimension, if it does not divide evenly; by default ranks times the length of x.
        signals: as in :func:`row_parallel_linear`, for the backward.

    Returns:
        [..., N], with the whole sequence.

    Raises:
        ValueError: x is not the share that ``torch.chunk`` gives this rank of ``length``.
    """
    sender = Sender(collectives_of(group), groups, signals)
    x, weight, bias = _as_autocast_would(x, weight, bias)
    if sequence_dim is None:
        return _apply(ColumnAllReduce, rows_of(x), weight, bias, sender).view(*x.shape[:-1], len(weight))
    own = x.shape[sequence_dim]
    shares = Shares(_dimension(sequence_dim, x), sender.link.ranks * own if length is None else length, sender.link.ranks)
    if own != (due := shares.own(sender.link.rank)):
        raise ValueError(f"rank {sender.link.rank} must hold {due} of {shares.length} positions of the sequence, not {own}")
    rows = _apply(ColumnReduceScatter, shares.rows_of_share(x), weight, bias, sender)
    return shares.end_to_end(rows, like=x)


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    if torch.compiler.is_compiling():  # checked first, because torch.compiler.disable imports the compiler
        return torch.compiler.disable(function.apply)(*arguments)
    return function.apply(*arguments)


def _dimension(dim: int, x: Tensor) -> int:
    """The dimension, counted from the front.

    Raises:
        ValueError: it is the last dimension, or not a dimension of x.
    """
    if not -x.dim() <= dim < x.dim() or dim % x.dim() == x.dim() - 1:
        raise ValueError(f"sequence_dim must be a dimension of the input other than the last of its {x.dim()}, not {dim}")
    return dim % x.dim()


def _as_autocast_would(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Casts tensors as autocast casts the arguments of ``linear``; autocast does not cast for products with ``out=``."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t is None or t.dtype == torch.float64 else t.to(dtype) for t in tensors)
