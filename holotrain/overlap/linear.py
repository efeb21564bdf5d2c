"""Linear layers with overlapped communication as functions of local tensors with any leading dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from holotrain.numeric import counted
from holotrain.overlap.functions import AllReduce, AllToAll, ReduceScatter, SendInput, SendResult
from holotrain.overlap.groups import Collectives, Grouping, collectives_of
from holotrain.overlap.signals import Overlap


@dataclass(frozen=True)
class SequenceShards:
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
        x = self._lengthened(x, self.ranks * self.padded)
        return x.unflatten(self.dim, (self.ranks, self.padded)).movedim(self.dim, 0).flatten(1, -2)

    def end_to_end(self, rows: Tensor, like: Tensor) -> Tensor:
        """[ranks, L, K] to [..A, S, ..C, K]; ``like`` gives A and C."""
        x = rows.unflatten(1, self._leading(like))
        return x.movedim(0, self.dim).flatten(self.dim, self.dim + 1).narrow(self.dim, 0, self.length)

    def rows_of_share(self, x: Tensor) -> Tensor:
        """[..A, own, ..C, K] to [L, K]."""
        return rows_of(self._lengthened(x, self.padded))

    def share_of_rows(self, rows: Tensor, rank: int, like: Tensor) -> Tensor:
        """[L, K] to [..A, own, ..C, K]; ``like`` gives A and C."""
        return rows.unflatten(0, self._leading(like)).narrow(self.dim, 0, self.own(rank))

    def _leading(self, like: Tensor) -> tuple[int, ...]:
        """The shape of a padded share without its features."""
        return (*like.shape[: self.dim], self.padded, *like.shape[self.dim + 1 : -1])

    def _lengthened(self, x: Tensor, length: int) -> Tensor:
        missing = length - x.shape[self.dim]
        return pad(x, (0, 0) * (x.dim() - 1 - self.dim) + (0, missing)) if missing else x


def rows_of(x: Tensor) -> Tensor:
    """[..., K] to [R, K]."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])  # not -1: this rank may have no features


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
        groups: the number of groups of rows, :class:`~holotrain.overlap.groups.Columns`, or a callable that chooses them
            (:class:`~holotrain.overlap.predictor.Predictor`, :class:`~holotrain.overlap.tuner.Tuner`); the same on every rank.
        sequence_dim: the dimension of x by which the output is sharded (sequence parallel), with a reduce-scatter instead of an
            all-reduce. If it does not divide evenly, the shares are those of ``torch.chunk``.
        signals: compute all groups in one product that signals each finished group (CUDA, bf16 and fp16, with Triton; otherwise
            one product per group).

    Returns:
        [..., N], whole on every rank; with ``sequence_dim`` this rank's share of it.

    Under autocast it computes and communicates in autocast's dtype. Second derivatives are refused. torch.compile breaks its
    graph here.
    """
    overlap = Overlap(collectives_of(group), groups, signals)
    x, weight, bias = _as_autocast_would(x, weight, bias)
    if sequence_dim is None:
        return _apply(SendResult, rows_of(x), weight, bias, AllReduce(overlap)).view(*x.shape[:-1], len(weight))
    shares = SequenceShards(_dimension(sequence_dim, x), x.shape[sequence_dim], overlap.collectives.ranks)
    rows = _apply(SendResult, shares.side_by_side(x), weight, bias, ReduceScatter(overlap))
    return shares.share_of_rows(rows, overlap.collectives.rank, like=x)


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
    overlap = Overlap(collectives_of(group), groups, signals)
    x, weight, bias = _as_autocast_would(x, weight, bias)
    if sequence_dim is None:
        return _apply(SendInput, rows_of(x), weight, bias, AllReduce(overlap)).view(*x.shape[:-1], len(weight))
    shares = _shares_of(x, sequence_dim, length, overlap.collectives)
    rows = _apply(SendInput, shares.rows_of_share(x), weight, bias, ReduceScatter(overlap))
    return shares.end_to_end(rows, like=x)


def linear_all_to_all(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | Collectives,
    groups: Grouping = GROUPS,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    sequence_dim: int | None = None,
    length: int | None = None,
    signals: bool = False,
) -> Tensor:
    """``linear(x, weight, bias)``, then an all-to-all of its result, in groups: a group travels while the next is computed.

    Without ``sequence_dim`` rows change ranks, as with ``torch.distributed.all_to_all_single``: the tokens of an expert go back
    to where they came from. With ``sequence_dim`` this rank has a share of the sequence and gets a share of the features of
    the whole sequence, for example of the heads of an attention (Ulysses).

    Args:
        x: [R, ..., K]; with ``sequence_dim`` [..., K], this rank's share of the sequence.
        weight, bias: [N, K] and [N], this rank's own. Their gradients are those of this rank's product.
        group: the ranks.
        groups: as in :func:`row_parallel_linear`; always groups of rows.
        output_split_sizes, input_split_sizes: how many of the first dimension come from and go to each rank; by default the
            same number for all ranks.
        sequence_dim: the dimension by which x is sharded. N must be divisible by the number of ranks.
        length: as in :func:`column_parallel_linear`.
        signals: as in :func:`row_parallel_linear`.

    Returns:
        [rows from all ranks, ..., N]; with ``sequence_dim`` [..., N / ranks] with the whole sequence.

    Raises:
        ValueError: rows or features that cannot be divided so, or splits beside ``sequence_dim``.
    """
    overlap = Overlap(collectives_of(group), groups, signals)
    x, weight, bias = _as_autocast_would(x, weight, bias)
    ranks = overlap.collectives.ranks
    if sequence_dim is None:
        return _rows_exchanged(SendResult, x, weight, bias, overlap, output_split_sizes, input_split_sizes)
    _require_features(len(weight), ranks, output_split_sizes, input_split_sizes)
    shares = _shares_of(x, sequence_dim, length, overlap.collectives)
    share = shares.rows_of_share(x)
    y = _apply(SendResult, share, weight, bias, AllToAll(overlap, None, [len(share)] * ranks, len(share)))
    return shares.end_to_end(y.unflatten(0, (ranks, len(share))), like=x)


def all_to_all_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    group: dist.ProcessGroup | Collectives,
    groups: Grouping = GROUPS,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    sequence_dim: int | None = None,
    signals: bool = False,
) -> Tensor:
    """An all-to-all of x, then ``linear(_, weight, bias)``, in groups: a group is computed while the next ones travel.

    The counterpart of :func:`linear_all_to_all`: tokens go to the ranks of their experts, or a share of the features of the
    whole sequence becomes a share of the sequence.

    Args:
        x: [R, ..., K]; with ``sequence_dim`` [..., K / ranks] with the whole sequence.
        weight, bias: [N, K] and [N], this rank's own.
        group, groups, output_split_sizes, input_split_sizes: as in :func:`linear_all_to_all`.
        sequence_dim: the dimension by which the output is sharded, as ``torch.chunk`` does it.
        signals: as in :func:`row_parallel_linear`, for the backward.

    Returns:
        [rows from all ranks, ..., N]; with ``sequence_dim`` [..., N], this rank's share of the sequence.

    Raises:
        ValueError: as :func:`linear_all_to_all`.
    """
    overlap = Overlap(collectives_of(group), groups, signals)
    x, weight, bias = _as_autocast_would(x, weight, bias)
    ranks = overlap.collectives.ranks
    if sequence_dim is None:
        return _rows_exchanged(SendInput, x, weight, bias, overlap, output_split_sizes, input_split_sizes)
    _require_features(weight.shape[1], ranks, output_split_sizes, input_split_sizes)
    shares = SequenceShards(_dimension(sequence_dim, x), x.shape[sequence_dim], ranks)
    parts = shares.side_by_side(x)
    rows = parts.shape[1]
    y = _apply(SendInput, parts.flatten(0, 1), weight, bias, AllToAll(overlap, None, [rows] * ranks, rows))
    return shares.share_of_rows(y, overlap.collectives.rank, like=x)


def _rows_exchanged(
    function: type[SendResult] | type[SendInput],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    overlap: Overlap,
    output_sizes: Sequence[int] | None,
    input_sizes: Sequence[int] | None,
) -> Tensor:
    ranks, inner = overlap.collectives.ranks, math.prod(x.shape[1:-1])
    if (input_sizes is None) != (output_sizes is None):
        raise ValueError("output_split_sizes and input_split_sizes must be given together")
    rows = None if input_sizes is not None else inner * len(x)
    if input_sizes is None or output_sizes is None:
        output_sizes = input_sizes = [len(x) // ranks] * ranks
    if not len(input_sizes) == len(output_sizes) == ranks or sum(input_sizes) != len(x):
        raise ValueError(f"{counted(len(x), 'row')} cannot be split into {list(input_sizes)} for {counted(ranks, 'rank')}")
    inputs, outputs = ([inner * size for size in sizes] for sizes in (input_sizes, output_sizes))
    near, far = (inputs, outputs) if function is SendResult else (outputs, inputs)
    y = _apply(function, rows_of(x), weight, bias, AllToAll(overlap, near, far, rows))
    return y.view(sum(output_sizes), *x.shape[1:-1], len(weight))


def _require_features(features: int, ranks: int, *sizes: Sequence[int] | None) -> None:
    if sizes != (None, None):
        raise ValueError("split sizes are for rows; with sequence_dim the shares of the sequence follow from its length")
    if features % ranks:
        raise ValueError(f"{features} features cannot be shared by {ranks} ranks")


def _apply(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    if torch.compiler.is_compiling():  # checked first, because torch.compiler.disable imports the compiler
        return torch.compiler.disable(function.apply)(*arguments)
    return function.apply(*arguments)


def _shares_of(x: Tensor, dim: int, length: int | None, link: Collectives) -> SequenceShards:
    """The shares of a sequence of ``length`` of which x is one, by default one of equal shares."""
    own = x.shape[dim]
    shares = SequenceShards(_dimension(dim, x), link.ranks * own if length is None else length, link.ranks)
    if own != (due := shares.own(link.rank)):
        raise ValueError(f"rank {link.rank} must hold {due} of {shares.length} positions of the sequence, not {own}")
    return shares


def _dimension(dim: int, x: Tensor) -> int:
    """The dimension, counted from the front."""
    if not -x.dim() <= dim < x.dim() or dim % x.dim() == x.dim() - 1:
        raise ValueError(f"sequence_dim must be a dimension of the input other than the last of its {x.dim()}, not {dim}")
    return dim % x.dim()


def _as_autocast_would(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Casts tensors as autocast casts the arguments of ``linear``; autocast does not cast for products with ``out=``."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else tensor.to(torch.get_autocast_dtype(x.device.type))

    if not torch.is_autocast_enabled(x.device.type):
        return x, weight, bias
    return cast(x), cast(weight), None if bias is None else cast(bias)
