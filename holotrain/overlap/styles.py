"""The overlapped linear layers as styles for ``torch.distributed.tensor.parallel.parallelize_module``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from holotrain.overlap.groups import Grouping, require_grouping
from holotrain.overlap.linear import GROUPS, column_parallel_linear, row_parallel_linear


class _ParallelLinear(nn.Linear):
    """An ``nn.Linear`` changed by a style. The mesh comes from the weight, so that a copy of the module holds no process group.

    ``input_layout`` and ``output_layout`` are those of the style; their dimensions may be counted from the end.
    """

    weight: DTensor  # ty: ignore[incompatible-mutable-override]
    bias: DTensor | None
    groups: Grouping
    signals: bool
    input_layout: Placement
    output_layout: Placement
    use_local_output: bool

    def _local(self, x: Tensor, wanted: Placement) -> Tensor:
        """This rank's part of an input in the wanted layout."""
        if not isinstance(x, DTensor):
            if _counted(self.input_layout, x.dim()) == wanted:
                return x
            x = DTensor.from_local(x, self.weight.device_mesh, [self.input_layout], run_check=False)
        return x.redistribute(placements=[wanted]).to_local()

    def _arranged(self, y: Tensor, layout: Placement, shape: Sequence[int]) -> Tensor:
        """Returns a local result of ``layout`` in the output layout, as a plain tensor or a DTensor of ``shape``."""
        wanted = _counted(self.output_layout, len(shape))
        if wanted == layout and self.use_local_output:
            return y
        stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
        mesh = self.weight.device_mesh
        whole = DTensor.from_local(y, mesh, [layout], run_check=False, shape=torch.Size(shape), stride=stride)
        if wanted != layout:
            whole = whole.redistribute(placements=[wanted], async_op=True)
        return whole.to_local() if self.use_local_output else whole

    def _multiplied(self, run: Callable[..., Tensor], x: Tensor, layout: Placement, **length: int | None) -> Tensor:
        """The layer of local tensors; a ``layout`` that is sharded is sequence parallel."""
        return run(
            x,
            self.weight.to_local(),
            None if self.bias is None else self.bias.to_local(),
            group=self.weight.device_mesh.get_group(),
            groups=self.groups,
            signals=self.signals,
            sequence_dim=layout.dim if isinstance(layout, Shard) else None,
            **length,
        )

    def extra_repr(self) -> str:
        groups = self.groups if isinstance(self.groups, int) else type(self.groups).__name__
        return f"{super().extra_repr()}, groups={groups}, {self.input_layout} to {self.output_layout}"


class RowParallelLinear(_ParallelLinear):
    """Weight ``Shard(1)``, bias ``Replicate()``; see :class:`~holotrain.overlap.styles.OverlappedRowwise`."""

    def forward(self, input: Tensor) -> Tensor:
        x = self._local(input, Shard(input.dim() - 1))
        layout = _of_the_sequence(self.output_layout, x.dim())
        y = self._multiplied(row_parallel_linear, x, layout)
        return self._arranged(y, layout, (*x.shape[:-1], self.weight.shape[0]))


class ColumnParallelLinear(_ParallelLinear):
    """Weight and bias ``Shard(0)``; see :class:`~holotrain.overlap.styles.OverlappedColwise`."""

    def forward(self, input: Tensor) -> Tensor:
        layout = _of_the_sequence(input.placements[0] if isinstance(input, DTensor) else self.input_layout, input.dim())
        length = input.shape[layout.dim] if isinstance(layout, Shard) and isinstance(input, DTensor) else None
        x = self._local(input, layout)
        y = self._multiplied(column_parallel_linear, x, layout, length=length)
        return self._arranged(y, Shard(y.dim() - 1), (*y.shape[:-1], self.weight.shape[0]))


def _counted(layout: Placement, dims: int) -> Placement:
    """The layout with its dimension counted from the front."""
    return Shard(layout.dim % dims) if isinstance(layout, Shard) else layout


def _of_the_sequence(layout: Placement, dims: int) -> Placement:
    """The layout if it shards a dimension other than the last, counted from the front; otherwise ``Replicate()``."""
    layout = _counted(layout, dims)
    return layout if isinstance(layout, Shard) and layout.dim != dims - 1 else Replicate()


class _Overlapped:
    """The common part of both styles; it must come before torch's style among their bases."""

    kind: type[RowParallelLinear] | type[ColumnParallelLinear]
    """The class of a styled ``nn.Linear``."""
    input_layouts: tuple[Placement, ...]
    output_layouts: tuple[Placement, ...]
    use_local_output: bool

    def __init__(
        self,
        *,
        groups: Grouping = GROUPS,
        signals: bool = False,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = True,
    ) -> None:
        require_grouping(groups)
        # torch's style, the next base.
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)  # ty: ignore[unknown-argument]
        self.groups, self.signals = groups, signals

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not nn.Linear:
            raise TypeError(f"{type(self).__name__} applies to nn.Linear only, not to {type(module).__name__}")
        partition = self._partition_linear_fn  # ty: ignore[missing-attribute]
        styled = cast(_ParallelLinear, distribute_module(module, device_mesh, partition))
        styled.__class__ = self.kind  # like fully_shard: copies, pickles and wrappers of the module keep its forward
        styled.groups, styled.signals, styled.use_local_output = self.groups, self.signals, self.use_local_output
        styled.input_layout, styled.output_layout = self.input_layouts[0], self.output_layouts[0]
        return styled


class OverlappedRowwise(_Overlapped, RowwiseParallel):
    """torch's ``RowwiseParallel`` for linear layers, with an overlapped sum of the output.

    Args:
        groups: the number of groups, or a callable that chooses them for each shape; see
            :func:`~holotrain.overlap.row_parallel_linear`.
        signals: use one product that signals its groups, where possible; see there.
        input_layouts: of an input that is not a DTensor; sharded on the last dimension by default.
        output_layouts: ``Replicate()`` by default (an all-reduce); ``Shard(d)`` on a dimension other than the last is the
            sequence parallel form (a reduce-scatter). Other layouts are made from the replicated output.
        use_local_output: return a plain tensor instead of a DTensor.

    Parameters become the same DTensors as with ``RowwiseParallel``. Plain tensor inputs are assumed to be evenly sharded, as in
    torch; DTensors may have any length.

    Raises:
        TypeError: applied to a module that is not an ``nn.Linear``, or to a subclass of it.
    """

    kind = RowParallelLinear


class OverlappedColwise(_Overlapped, ColwiseParallel):
    """torch's ``ColwiseParallel`` for linear layers, with an overlapped sum of the input gradient.

    Args:
        groups, signals: as in :class:`OverlappedRowwise`.
        input_layouts: of an input that is not a DTensor: ``Replicate()`` by default; ``Shard(d)`` on a dimension other than the
            last is the sequence parallel form (gathered in groups). Other layouts are replicated first.
        output_layouts: sharded on the last dimension by default; other layouts are made from it.
        use_local_output: return a plain tensor instead of a DTensor.

    Parameters become the same DTensors as with ``ColwiseParallel``. In the sequence parallel form only the share of the input
    is kept for the backward, which gathers it again.

    Raises:
        TypeError: applied to a module that is not an ``nn.Linear``, or to a subclass of it.
    """

    kind = ColumnParallelLinear
