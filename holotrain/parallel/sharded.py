"""FSDP2 and tensor parallel, with Lightning's ModelParallelStrategy.

Lightning (2.6) numbers an optimizer's state by the order of the module's parameters, torch by the order of the optimizer's
groups. They differ when only some parameters have weight decay. So states are gathered and sharded here. A checkpoint is the
same as from a single process, so any strategy can continue from it, with any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from holotrain.models.layers.residual import ResidualBlock
from holotrain.models.mvit import Transition
from holotrain.parallel.checkpoints import save_in_shards
from holotrain.parallel.tensor import Styles, tensor_parallel
from holotrain.ranks import shards
from holotrain.ranks.tensors import part_like, whole
from holotrain.reversible import ReversibleBlock

set_timeout = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # torch 2.15; older versions

BLOCKS = (ReversibleBlock, ResidualBlock, Transition)
"""Modules that FSDP2 gathers and frees as a unit."""

KEPT = {"param_dtype_override_fn": lambda parameter: parameter.dtype if parameter.ndim < 2 else None}
"""Norms and biases stay as they are, as in autocast. (torch before 2.15 has no such option.)"""

OPTIONS = KEPT if KEPT.keys() <= MixedPrecisionPolicy.__dataclass_fields__.keys() else {}

HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False, **OPTIONS)
"""Of blocks under bf16-mixed: matrices are gathered in bf16, as autocast uses them, and gradients are summed in fp32."""


class Sharding(ModelParallelStrategy):
    """Shards a task's model when its ``configure_model`` asks for it.

    Args:
        groups: number of data parallel groups; FSDP2 shards parameters over them if there are several.
        size: number of tensor parallel processes per group.
        styles: tensor parallel styles; None: those of torch.
        sharded_checkpoints: each process writes its own part (:mod:`holotrain.ranks.shards`); False: the first process writes
            one file.
        options: options of ModelParallelStrategy.
    """

    def __init__(
        self, groups: int, size: int = 1, styles: Styles | None = None, sharded_checkpoints: bool = False, **options: Any
    ) -> None:
        super().__init__(groups, size, save_distributed_checkpoint=False, **options)
        self.styles = styles
        self.sharded_checkpoints = sharded_checkpoints

    def setup_environment(self) -> None:
        super().setup_environment()
        for dimension in range(self.device_mesh.ndim):  # a mesh creates its groups with torch's default timeout
            set_timeout(self._timeout, self.device_mesh.get_group(dimension))

    def share_out(self, model: nn.Module) -> None:
        """Shards the parameters, once."""
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return
        self.precision_plugin.convert_module(model)
        layers, data = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        if layers.size() > 1:
            tensor_parallel(model, layers, self.styles)
        if data.size() > 1 or layers.size() == 1:
            half = self.precision_plugin.precision == "bf16-mixed" and (OPTIONS or self.root_device.type == "cuda")
            shard(model, data, HALF if half else None)  # layers of norms on the CPU take no bf16 parameters with fp32 inputs

    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        self._step_one_by_one()

    def optimizer_step(self, *args: Any, **options: Any) -> Any:
        with implicit_replication():  # an optimizer's foreach kernel then takes DTensors and plain tensors
            return super().optimizer_step(*args, **options)

    def _step_one_by_one(self) -> None:
        """Turns off foreach if parameters have different meshes (FSDP2 across tensor parallel groups), which torch does not
        support."""
        for optimizer in self.optimizers:
            mixed = len(by_mesh(_parameters(optimizer)).keys() - {None}) > 1
            for group in optimizer.param_groups:
                if "foreach" in group:
                    group["foreach"] = False if mixed else None

    def settle_gradients(self, optimizer: Optimizer, largest: float | None, algorithm: str | None) -> None:
        """Averages the gradients of parameters that are replicated in a tensor parallel group, and clips.

        These gradients only differ by rounding, but without averaging the weights would diverge.

        Args:
            largest: maximum norm or value, if any.
            algorithm: ``"norm"`` or ``"value"``.
        """
        layers = self.device_mesh["tensor_parallel"]
        kinds = by_mesh(parameter for parameter in _parameters(optimizer) if parameter.grad is not None)
        if layers.size() > 1:
            for parameters in kinds.values():
                average([parameter.grad for parameter in parameters if _whole_in_its_group(parameter)], layers)
        if largest is None or largest <= 0:
            return
        if algorithm == "value":
            for parameters in kinds.values():
                nn.utils.clip_grad_value_(parameters, largest)
            return
        norms = [nn.utils.get_total_norm([p.grad for p in parameters]) for parameters in kinds.values()]
        norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
        for parameters in kinds.values():
            nn.utils.clip_grads_with_norm_(parameters, largest, norm)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._to_save(self.lightning_module.state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        optimizer = optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        state = self._to_save(optimizer.state_dict())
        for part in state.get("parts", [state]) if state else []:
            for group in part["param_groups"]:
                group |= {"foreach": None} if "foreach" in group else {}  # set by this strategy, not by the training
        return state

    def _to_save(self, state: dict[str, Any]) -> dict[str, Any]:
        return state if self.sharded_checkpoints else put_together(state, self.is_global_zero)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        if self.sharded_checkpoints:
            save_in_shards(checkpoint, Path(filepath))
        else:
            ParallelStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if shards.is_folder(checkpoint_path):  # reads one full tensor at a time
            return shards.load(checkpoint_path)
        return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        here, there = self.lightning_module.state_dict(), checkpoint["state_dict"]
        parted = {name: part_of(value, here[name]) if name in here else value for name, value in there.items()}
        self.lightning_module.load_state_dict(parted, strict=strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(parted_state(optimizer, state))
        self._step_one_by_one()


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _whole_in_its_group(parameter: Tensor) -> bool:
    """Whether a parameter is replicated in the tensor parallel group."""
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
    return "tensor_parallel" not in names or parameter.placements[names.index("tensor_parallel")].is_replicate()


def by_mesh(parameters: Iterable[Tensor]) -> dict[DeviceMesh | None, list[Tensor]]:
    """Parameters by the mesh on which they are sharded; None: not sharded."""
    found: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        found.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return found


def average(tensors: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """Averages tensors, or local parts of DTensors, over the processes of a mesh, in place."""
    own = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    if own:
        mesh.get_group().allreduce_coalesced(own).wait()
        torch._foreach_div_(own, mesh.size())


def shard(model: nn.Module, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> None:
    """Applies fully_shard to every block, and to the rest of the model.

    Args:
        policy: of the blocks. The rest keeps its own precision: embeddings in bf16 would make the streams between blocks bf16,
            and rebuilding those is exact to the precision of the streams.
    """
    for module in model.modules():
        if isinstance(module, BLOCKS):
            fully_shard(module, mesh=mesh, mp_policy=policy or MixedPrecisionPolicy())
    fully_shard(model, mesh=mesh)


def put_together(state: Any, keep: bool) -> Any:
    """The state with full tensors on the CPU. All processes must call it; the result is empty if ``keep`` is False."""

    def gathered(part: Tensor) -> Tensor | None:
        full = whole(part)
        return full.detach().cpu() if keep else None

    found = tree_map_only(Tensor, gathered, state)
    return found if keep else {}


def part_of(value: Any, like: Any) -> Any:
    """This process's part of a full tensor (which may be in a sharded checkpoint), sharded like another one."""
    value = shards.read(value)
    return part_like(value, like) if isinstance(value, Tensor) and value.shape == like.shape else value


def parted_state(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The state of an optimizer, with full tensors replaced by this process's parts."""
    if "parts" in state:
        pairs = zip(optimizer.parts, state["parts"], strict=True)
        return {"parts": [parted_state(part, kept) for part, kept in pairs]}
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    of_number = dict(zip(numbers, _parameters(optimizer), strict=True))
    parted = {
        number: {name: part_of(value, of_number[number]) for name, value in kept.items()}
        for number, kept in state["state"].items()
    }
    return state | {"state": parted}
