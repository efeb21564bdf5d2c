"""Tensor parallel: shards the two large matrices of a branch, with one all-reduce per branch.

Shoeybi et al., "Megatron-LM", 2019, section 3: the first matrix is sharded by columns (attention: heads), the second by rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from holotrain.models.division import division
from holotrain.models.layers.attention import Attention
from holotrain.overlap import OverlappedColwise, OverlappedRowwise
from holotrain.overlap.groups import Grouping
from holotrain.ranks.tensors import shared_out


class StackedColwise(ParallelStyle):
    """Column parallel for a Linear with several concatenated outputs of equal width, such as queries, keys and values: each
    process has its columns of every output. The input is replicated; the output is the local part.

    Args:
        stacked: number of outputs.
    """

    def __init__(self, stacked: int) -> None:
        super().__init__()
        self.stacked = stacked

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def enter(linear: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
            return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

        def leave(linear: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, partial(part_of_each, self.stacked), enter, leave)


class OverlappedStacked(OverlappedColwise):
    """The same, with an overlapped all-reduce of the input's gradient.

    Args:
        stacked: number of outputs.
        groups, signals: see :class:`~holotrain.overlap.OverlappedColwise`.
    """

    def __init__(self, stacked: int, groups: Grouping, signals: bool = False) -> None:
        super().__init__(groups=groups, signals=signals)
        self._partition_linear_fn = partial(part_of_each, stacked)


def part_of_each(stacked: int, name: str, linear: nn.Module, mesh: DeviceMesh) -> None:
    """Shards a Linear by the columns of each of its ``stacked`` concatenated outputs."""
    placements = [_StridedShard(0, split_factor=stacked)]
    for key, value in list(linear.named_parameters()):
        shared = shared_out(value.detach(), mesh, placements)
        linear.register_parameter(key, nn.Parameter(shared, requires_grad=value.requires_grad))


@dataclass(frozen=True)
class Styles:
    """How Linears are sharded: factories of a ``ParallelStyle`` for ``parallelize_module``.

    Attributes:
        column: for the first Linear of an MLP; replicated input, column-sharded output.
        stacked: for queries, keys and values; called with the number of outputs, 3.
        row: for the last Linear of a branch; column-sharded input, replicated output.
    """

    column: Callable[[], ParallelStyle] = ColwiseParallel
    stacked: Callable[[int], ParallelStyle] = StackedColwise
    row: Callable[[], ParallelStyle] = RowwiseParallel


def overlapped(groups: Grouping, signals: bool = False) -> Styles:
    """Styles that overlap the all-reduce of row groups with computation (:mod:`holotrain.overlap`)."""
    options = {"groups": groups, "signals": signals}
    return Styles(
        partial(OverlappedColwise, **options), partial(OverlappedStacked, **options), partial(OverlappedRowwise, **options)
    )


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, styles: Styles | None = None) -> None:
    """Shards the matrices of a model's branches over ``mesh``, in place, where possible
    (:func:`~holotrain.models.division.division`). The others stay replicated.

    Args:
        mesh: one-dimensional. All its processes have the same weights and receive the same batches.
        styles: None: those of torch.

    Raises:
        Indivisible: no matrix can be sharded.
    """
    styles, size = styles or Styles(), mesh.size()
    for layer in division(model, size).layers:
        if isinstance(layer, Attention):
            parallelize_module(layer, mesh, {"qkv": styles.stacked(3), "project": styles.row()})
            layer.heads //= size
        else:
            parallelize_module(layer, mesh, {"widen": styles.column(), "narrow": styles.row()})
