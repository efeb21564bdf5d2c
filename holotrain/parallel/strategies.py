"""Lightning's strategies with what holotrain adds: DDP, and FSDP2 with tensor parallel.

Tensor parallel shards the two large matrices of a branch, with one all-reduce per branch (Shoeybi et al., "Megatron-LM", 2019,
section 3): the first matrix is sharded by columns (attention: heads), the second by rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Protocol, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook, fp16_compress_hook
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from holotrain.checkpoints.distributed import ShardedCheckpoints
from holotrain.models.block_schedules import sequences
from holotrain.models.layers.attention import Attention
from holotrain.models.layers.blocks import MLPBranch, ResidualBlock
from holotrain.models.mvit import Transition
from holotrain.models.quantised import Quantised
from holotrain.numeric import counted
from holotrain.overlap.groups import Grouping
from holotrain.overlap.styles import OverlappedColwise, OverlappedRowwise
from holotrain.reversible import ReversibleBlock

HOOKS = {"none": None, "bf16": bf16_compress_hook, "fp16": fp16_compress_hook}


class TaskWithModel(Protocol):
    """What strategies divide, and what they ask of it: see :class:`~holotrain.tasks.Task`."""

    model: nn.Module

    def loss(self, *inputs: Tensor) -> Tensor: ...

    def terms(self, *inputs: Tensor) -> Tensor | int: ...


class DataParallel(DDPStrategy):
    """Lightning's DDPStrategy. Gradients are views of the communication buckets, which saves a copy.

    Args:
        compression: the data type in which gradients are sent: ``"none"`` (their own), ``"bf16"`` or ``"fp16"``.
        options: options of DDPStrategy.
    """

    def __init__(self, compression: str = "none", **options: Any) -> None:
        super().__init__(ddp_comm_hook=HOOKS[compression], gradient_as_bucket_view=True, **options)

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        constants = []
        for path, part in model.named_modules():
            # Equal in all processes: they need not be broadcast before each forward.
            names = part.PARTS if isinstance(part, Quantised) else part._non_persistent_buffers_set
            constants += [f"{path}.{name}".lstrip(".") for name in names]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, constants)
        return super()._setup_model(model)

    def _register_ddp_hooks(self) -> None:
        if self._ddp_comm_hook is not None:  # Lightning registers it on GPUs only
            cast(DistributedDataParallel, self.model).register_comm_hook(None, self._ddp_comm_hook)


Styles = tuple[ParallelStyle, ParallelStyle]
"""Of the first Linear of a branch, sharded by columns, and of the last one, sharded by rows."""


def overlapped(groups: Grouping, signals: bool = False) -> Styles:
    """Styles that overlap the all-reduce of row groups with computation (:mod:`holotrain.overlap`)."""
    return OverlappedColwise(groups=groups, signals=signals), OverlappedRowwise(groups=groups, signals=signals)


class TensorParallelError(ValueError):
    """No layer of the model can be split among that number of processes."""


@dataclass(frozen=True)
class Division:
    """
    Args:
        layers: that are split: attention by its heads, an MLP by its hidden width.
        whole: a phrase for each kind of layer that every process computes whole, saying why.
    """

    layers: list[Attention | MLPBranch]
    whole: list[str]


def division(model: nn.Module, ranks: int) -> Division:
    """The layers of a model that tensor parallelism splits. Nothing is changed.

    Args:
        ranks: number of tensor parallel processes.

    Raises:
        TensorParallelError: no layer can be split; says why.
    """
    layers: list[Attention | MLPBranch] = []
    whole: dict[str, None] = {}  # a set, in order
    for block in (block for sequence in sequences(model) for block in sequence.blocks):
        if not any(isinstance(part, Attention) for part in block.modules()):
            whole["attention in windows, or pooled"] = None
    for part in model.modules():
        if not isinstance(part, Attention | MLPBranch):
            continue
        count = part.heads if isinstance(part, Attention) else part.widen.out_features
        if count % ranks == 0:
            layers.append(part)
        else:
            named = counted(count, "head") if isinstance(part, Attention) else f"MLPs of width {count}"
            whole[f"{named} (not divisible by {ranks})"] = None
    if not layers:
        raise TensorParallelError("; ".join(whole) or "it has no such layers")
    return Division(layers, list(whole))


def tensor_parallel(model: nn.Module, mesh: DeviceMesh, styles: Styles | None = None) -> None:
    """Shards the matrices of a model's branches over ``mesh``, in place, where possible (:func:`division`). The others stay
    replicated.

    Args:
        mesh: one-dimensional. All its processes have the same weights and receive the same batches.
        styles: None: those of torch.

    Raises:
        TensorParallelError: no matrix can be sharded.
    """
    column, row = styles or (ColwiseParallel(), RowwiseParallel())
    for layer in division(model, mesh.size()).layers:
        first, last = ("query_key_value", "project") if isinstance(layer, Attention) else ("widen", "narrow")
        parallelize_module(layer, mesh, {first: column, last: row})


set_timeout: Callable[[timedelta, dist.ProcessGroup], None] = (
    getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout  # ty: ignore[deprecated]  # before torch 2.15
)

BLOCKS = (ReversibleBlock, ResidualBlock, Transition)
"""Modules that FSDP2 gathers and frees as a unit."""

KEPT: dict[str, Any] = {"param_dtype_override_fn": lambda parameter: parameter.dtype if parameter.ndim < 2 else None}
"""Norms and biases stay as they are, as in autocast. (torch before 2.15 has no such option.)"""

OPTIONS = KEPT if KEPT.keys() <= MixedPrecisionPolicy.__dataclass_fields__.keys() else {}

HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False, **OPTIONS)
"""Of blocks under bf16-mixed: matrices are gathered in bf16, as autocast uses them, and gradients are summed in fp32."""


class Sharding(ShardedCheckpoints):
    """Shards a task's model when its ``configure_model`` asks for it.

    Args:
        groups: number of data parallel groups; FSDP2 shards parameters over them if there are several.
        size: number of tensor parallel processes per group.
        styles: tensor parallel styles; None: those of torch.
        sharded_checkpoints: each process writes its own part into a folder; False: the first process writes one file.
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
        set_timeouts(self.device_mesh, self._timeout)

    def divide(self, task: TaskWithModel) -> None:
        """Shards the parameters of a task's model, once."""
        model = task.model
        if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
            return
        self.precision_plugin.convert_module(model)
        layers, data = self.device_mesh["tensor_parallel"], self.device_mesh["data_parallel"]
        if layers.size() > 1:
            tensor_parallel(model, layers, self.styles)
        if data.size() > 1 or layers.size() == 1:
            half = self.precision_plugin.precision == "bf16-mixed" and (OPTIONS or self.root_device.type == "cuda")
            shard(model, data, HALF if half else None)  # LayerNorm on the CPU does not accept bf16 parameters with fp32 inputs

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
            mixed = len(by_mesh(parameters_of(optimizer)).keys() - {None}) > 1
            for group in optimizer.param_groups:
                if "foreach" in group:
                    group["foreach"] = False if mixed else None

    def reduce_and_clip_gradients(self, optimizer: Optimizer, largest: float | None, algorithm: str | None) -> None:
        """Averages the gradients of parameters that are replicated in a tensor parallel group, and clips.

        These gradients only differ by rounding, but without averaging the weights would diverge.

        Args:
            largest: maximum norm or value, if any.
            algorithm: ``"norm"`` or ``"value"``.
        """
        layers = self.device_mesh["tensor_parallel"]
        trained = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
        if layers.size() > 1:
            for parameters in by_mesh(trained).values():
                average(gradients_of(filter(_whole_in_its_group, parameters)), layers)
        clip(trained, largest, algorithm)

    @property
    def lightning_restore_optimizer(self) -> bool:
        return True

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        super().load_optimizer_state_dict(checkpoint)
        self._step_one_by_one()


def set_timeouts(mesh: DeviceMesh, timeout: timedelta | None) -> None:
    """Sets the timeout of a mesh's groups, which it creates with torch's default."""
    if timeout is not None:
        for dimension in range(mesh.ndim):
            set_timeout(timeout, mesh.get_group(dimension))


def parameters_of(optimizer: Optimizer) -> list[Tensor]:
    """All its parameters, in the order of their numbers in its state."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Of those that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _whole_in_its_group(parameter: Tensor) -> bool:
    """Whether a parameter is replicated in the tensor parallel group."""
    if not isinstance(parameter, DTensor):
        return True
    names = parameter.device_mesh.mesh_dim_names or ()
    return "tensor_parallel" not in names or parameter.placements[names.index("tensor_parallel")].is_replicate()


def clip(
    trained: list[Tensor],
    largest: float | None,
    algorithm: str | None,
    elsewhere: Set[Tensor] = frozenset(),
    group: dist.ProcessGroup | None = None,
) -> None:
    """Clips gradients. The norm of sharded ones is that of the whole.

    Args:
        trained: parameters with a gradient. They are clipped by their mesh: torch takes no parameters of several at once.
        largest, algorithm: see :meth:`Sharding.reduce_and_clip_gradients`.
        elsewhere: parameters that another process of the group counts.
        group: processes that have other parameters.
    """
    if largest is None or largest <= 0:
        return
    kinds = by_mesh(trained).values()
    if algorithm == "value":
        for parameters in kinds:
            nn.utils.clip_grad_value_(parameters, largest)
        return
    counted = ([each for each in parameters if each not in elsewhere] for parameters in kinds)
    norms = [nn.utils.get_total_norm(gradients_of(parameters)) for parameters in counted] or [torch.zeros(())]
    norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
    if group is not None:
        dist.all_reduce(norm.square_(), group=group)
        norm.sqrt_()
    for parameters in kinds:
        nn.utils.clip_grads_with_norm_(parameters, largest, norm)


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
