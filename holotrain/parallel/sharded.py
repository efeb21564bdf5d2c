"""Parameters shared out among processes: FSDP2, by Lightning's ModelParallelStrategy.

Lightning (2.6) numbers an optimizer's state by the order of the module's parameters, torch by that of the optimizer's groups,
which is another wherever some parameters decay and others do not. So the states are put together and shared out here, and a
checkpoint is what one process would have written: any strategy, on any number of processes, continues from it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from holotrain.models.layers.residual import ResidualBlock
from holotrain.models.mvit import Transition
from holotrain.reversible import ReversibleBlock

BLOCKS = (ReversibleBlock, ResidualBlock, Transition)
"""What is gathered as a whole, used and let go."""


class Sharding(ModelParallelStrategy):
    """Shares out a task's model when its ``configure_model`` asks for it.

    Args:
        size: processes.
        options: ModelParallelStrategy's.
    """

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(size, 1, save_distributed_checkpoint=False, **options)

    def share_out(self, model: nn.Module) -> None:
        """Leaves each process its part of the parameters; once."""
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return
        self.precision_plugin.convert_module(model)
        shard(model, self.device_mesh["data_parallel"])

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return whole(self.lightning_module.state_dict(), self.is_global_zero)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        return whole(optimizer.state_dict(), self.is_global_zero)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        here, there = self.lightning_module.state_dict(), checkpoint["state_dict"]
        parted = {name: part_of(value, here[name]) if name in here else value for name, value in there.items()}
        self.lightning_module.load_state_dict(parted, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(parted_state(optimizer, state))


def shard(model: nn.Module, mesh: Any) -> None:
    """Applies fully_shard to every block, and to what is left as one."""
    for module in model.modules():
        if isinstance(module, BLOCKS):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)


def whole(state: Any, keep: bool) -> Any:
    """A state in whole tensors, on the CPU. All processes must take part; the result is empty where ``keep`` is False."""

    def gathered(part: Tensor) -> Tensor | None:
        full = part.full_tensor() if isinstance(part, DTensor) else part
        return full.detach().cpu() if keep else None

    found = tree_map_only(Tensor, gathered, state)
    return found if keep else {}


def part_of(value: Any, like: Any) -> Any:
    """This process's part of a whole tensor, shared out as another one is."""
    if not isinstance(like, DTensor) or not isinstance(value, Tensor) or value.shape != like.shape:
        return value
    return distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def parted_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer, of whole tensors, with the part of each that belongs to this process."""
    if "parts" in state:
        pairs = zip(optimizer.parts, state["parts"], strict=True)
        return {"parts": [parted_state(part, kept) for part, kept in pairs]}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    of_number = dict(zip(numbers, parameters, strict=True))
    parted = {
        number: {name: part_of(value, of_number[number]) for name, value in kept.items()}
        for number, kept in state["state"].items()
    }
    return state | {"state": parted}
