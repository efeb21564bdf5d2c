"""The overlapped linear layers as styles for ``torch.distributed.tensor.parallel.parallelize_module``."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from holotrain.overlap.groups import Grouping, require_grouping
from holotrain.overlap.linear import GROUPS
from holotrain.overlap.modules import ColumnParallelLinear, RowParallelLinear


class _Overlapped:
    """The common part of both styles; it must come before torch's style among their bases."""

    kind: type[RowParallelLinear] | type[ColumnParallelLinear]
    """The class of a styled ``nn.Linear``."""

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
        super().__init__(input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output)
        self.groups, self.signals = groups, signals

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if type(module) is not nn.Linear:
            raise TypeError(f"{type(self).__name__} applies to nn.Linear only, not to {type(module).__name__}")
        module = distribute_module(module, device_mesh, self._partition_linear_fn)
        module.__class__ = self.kind  # like fully_shard: copies, pickles and wrappers of the module keep its forward
        module.groups, module.signals, module.use_local_output = self.groups, self.signals, self.use_local_output
        module.input_layout, module.output_layout = self.input_layouts[0], self.output_layouts[0]
        return module


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
