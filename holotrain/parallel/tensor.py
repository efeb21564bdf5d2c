"""Tensor parallel: shards the two large matrices of a branch, with one all-reduce per branch.

Shoeybi et al., "Megatron-LM", 2019, section 3: the first matrix is sharded by columns (attention: heads), the second by rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from holotrain.models.division import division
from holotrain.models.layers.attention import Attention
from holotrain.overlap import OverlappedColwise, OverlappedRowwise
from holotrain.overlap.groups import Grouping


@dataclass(frozen=True)
class Styles:
    """How Linears are sharded: factories of a ``ParallelStyle`` for ``parallelize_module``.

    Attributes:
        column: for the first Linear of a branch; replicated input, column-sharded output.
        row: for the last Linear of a branch; column-sharded input, replicated output.
    """

    column: Callable[[], ParallelStyle] = ColwiseParallel
    row: Callable[[], ParallelStyle] = RowwiseParallel


def overlapped(groups: Grouping, signals: bool = False) -> Styles:
    """Styles that overlap the all-reduce of row groups with computation (:mod:`holotrain.overlap`)."""
    options = {"groups": groups, "signals": signals}
    return Styles(partial(OverlappedColwise, **options), partial(OverlappedRowwise, **options))


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, styles: Styles | None = None) -> None:
    """Shards the matrices of a model's branches over ``mesh``, in place, where possible
    (:func:`~holotrain.models.division.division`). The others stay replicated.

    Args:
        mesh: one-dimensional. All its processes have the same weights and receive the same batches.
        styles: None: those of torch.

    Raises:
        Indivisible: no matrix can be sharded.
    """
    styles = styles or Styles()
    for layer in division(model, mesh.size()).layers:
        first, last = ("query_key_value", "project") if isinstance(layer, Attention) else ("widen", "narrow")
        parallelize_module(layer, mesh, {first: styles.column(), last: styles.row()})
