"""Tensor parallel: the two large matrices of a branch are shared out, so that one all-reduce a branch puts results together.

Shoeybi et al., "Megatron-LM", 2019, section 3: the first by its columns (of attention: by heads), the second by its rows.
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
    """Column parallel for a Linear whose output is several of equal width end to end, as queries, keys and values are: each
    process has its columns of every one of them. Its input is whole on every process; its output is the process's own part.

    Args:
        stacked: how many there are.
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
    """The same, with the sum of its input's gradient overlapped.

    Args:
        stacked: how many there are.
        groups, signals: as :class:`~holotrain.overlap.OverlappedColwise` takes them.
    """

    def __init__(self, stacked: int, groups: Grouping, signals: bool = False) -> None:
        super().__init__(groups=groups, signals=signals)
        self._partition_linear_fn = partial(part_of_each, stacked)


def part_of_each(stacked: int, name: str, linear: nn.Module, mesh: DeviceMesh) -> None:
    """Leaves a Linear the process's columns of each of the ``stacked`` outputs that it has end to end."""
    placements = [_StridedShard(0, split_factor=stacked)]
    for key, value in list(linear.named_parameters()):
        shared = shared_out(value.detach(), mesh, placements)
        linear.register_parameter(key, nn.Parameter(shared, requires_grad=value.requires_grad))


@dataclass(frozen=True)
class Styles:
    """How Linears are shared out: each gives a ``ParallelStyle`` for ``parallelize_module``.

    Attributes:
        column: of an MLP's first Linear; takes what is whole, gives a part of the columns.
        stacked: of attention's queries, keys and values, given that they are three.
        row: of what ends a branch; takes a part of the columns, gives what is whole.
    """

    column: Callable[[], ParallelStyle] = ColwiseParallel
    stacked: Callable[[int], ParallelStyle] = StackedColwise
    row: Callable[[], ParallelStyle] = RowwiseParallel


def overlapped(groups: Grouping, signals: bool = False) -> Styles:
    """Styles whose sums over processes travel in groups of rows behind what is computed (:mod:`holotrain.overlap`)."""
    options = {"groups": groups, "signals": signals}
    return Styles(
        partial(OverlappedColwise, **options), partial(OverlappedStacked, **options), partial(OverlappedRowwise, **options)
    )


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, styles: Styles | None = None) -> None:
    """Shares the matrices of a model's branches out among the processes of ``mesh``, in place, where they can be
    (:func:`~holotrain.models.division.division`); every process computes the others whole.

    Args:
        mesh: of one dimension. All its processes have the same weights, and are given the same batches.
        styles: None: torch's own.

    Raises:
        Indivisible: nothing can be shared out.
    """
    styles, size = styles or Styles(), mesh.size()
    for layer in division(model, size).layers:
        if isinstance(layer, Attention):
            parallelize_module(layer, mesh, {"qkv": styles.stacked(3), "project": styles.row()})
            layer.heads //= size
        else:
            parallelize_module(layer, mesh, {"widen": styles.column(), "narrow": styles.row()})
