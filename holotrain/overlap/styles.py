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
    """What both styles are beside torch's own; comes before it among their bases."""

    kind: type[RowParallelLinear] | type[ColumnParallelLinear]
    """What a styled ``nn.Linear`` becomes."""

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
            raise TypeError(f"{type(self).__name__} takes an nn.Linear as it is, not {type(module).__name__}")
        module = distribute_module(module, device_mesh, self._partition_linear_fn)
        module.__class__ = self.kind  # as fully_shard does: copies, pickles and wrappers of the module keep its forward
        module.groups, module.signals, module.use_local_output = self.groups, self.signals, self.use_local_output
        module.input_layout, module.output_layout = self.input_layouts[0], self.output_layouts[0]
        return module


class OverlappedRowwise(_Overlapped, RowwiseParallel):
    """torch's ``RowwiseParallel`` for linear layers, with the output's sum overlapped in groups of rows.

    Args:
        groups: how many groups, or what chooses them for each shape; see
            :func:`~holotrain.overlap.row_parallel_linear`.
        signals: one product that signals its groups, where it can; see there.
        input_layouts: of an input that is no DTensor; sharded on the last dimension by default.
        output_layouts: ``Replicate()`` by default (an all-reduce); ``Shard(d)`` of another dimension than the last is the
            sequence parallel form (a reduce-scatter). Other layouts are reached from the replicated output.
        use_local_output: a plain tensor rather than a DTensor.

    Parameters become the very DTensors that ``RowwiseParallel`` makes of them. Inputs that are plain tensors are taken to be
    shared out evenly, as torch takes them; DTensors may be of any length.

    Raises:
        TypeError: applied to something else than an ``nn.Linear``, or to a subclass of it.
    """

    kind = RowParallelLinear


class OverlappedColwise(_Overlapped, ColwiseParallel):
    """torch's ``ColwiseParallel`` for linear layers, with the sum of the input's gradient overlapped.

    Args:
        groups, signals: as in :class:`OverlappedRowwise`.
        input_layouts: of an input that is no DTensor: ``Replicate()`` by default; ``Shard(d)`` of another dimension than the
            last is the sequence parallel form (gathered in groups). Other layouts are replicated first.
        output_layouts: sharded on the last dimension by default; others are reached from there.
        use_local_output: a plain tensor rather than a DTensor.

    Parameters become the very DTensors that ``ColwiseParallel`` makes of them. In the sequence parallel form only the share of
    the input is kept for the backward, which gathers it once more.

    Raises:
        TypeError: applied to something else than an ``nn.Linear``, or to a subclass of it.
    """

    kind = ColumnParallelLinear
