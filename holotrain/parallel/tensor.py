"""Tensor parallel: the two large matrices of a branch are shared out, so that one all-reduce a branch puts results together.

Shoeybi et al., "Megatron-LM", 2019, section 3: the first by its columns (of attention: by heads), the second by its rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

from holotrain.models.layers.attention import Attention
from holotrain.models.layers.branches import MLPBranch


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
        placements = [_StridedShard(0, split_factor=self.stacked)]

        def part(name: str, linear: nn.Module, mesh: DeviceMesh) -> None:
            for key, value in list(linear.named_parameters()):
                shared = distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
                linear.register_parameter(key, nn.Parameter(shared, requires_grad=value.requires_grad))

        def enter(linear: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> DTensor:
            return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=False)

        def leave(linear: nn.Module, output: DTensor, mesh: DeviceMesh) -> Tensor:
            return output.to_local()

        return distribute_module(module, device_mesh, part, enter, leave)


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


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, styles: Styles | None = None) -> None:
    """Shares the matrices of a model's branches out among the processes of ``mesh``, in place.

    MLPs are shared out wherever their width divides, attention where the number of its heads does; what does not, and the
    windowed and pooling attentions of Swin and MViT, every process computes whole.

    Args:
        mesh: of one dimension. All its processes have the same weights, and are given the same batches.
        styles: None: torch's own.
    """
    styles, size = styles or Styles(), mesh.size()
    for module in model.modules():
        if isinstance(module, MLPBranch) and module.widen.out_features % size == 0:
            parallelize_module(module, mesh, {"widen": styles.column(), "narrow": styles.row()})
        elif isinstance(module, Attention) and module.heads % size == 0:
            parallelize_module(module, mesh, {"qkv": styles.stacked(3), "project": styles.row()})
            module.heads //= size
