"""Pipeline parallel: each process has some of a model's blocks, and microbatches pass through all processes.

torch.distributed.pipelining runs the schedules: GPipe (Huang et al., 2019, arXiv 1811.06965) and 1F1B (Narayanan et al., 2019,
arXiv 1806.03377).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.optimizer import _optimizers_to_device
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.optim import Optimizer
from torch.utils._pytree import KeyPath, MappingKey, tree_leaves_with_path

from holotrain.models.layers.blocks import Divisible
from holotrain.numeric import counted, mixed_seed
from holotrain.optimizers.stepping import CombinedOptimizer
from holotrain.parallel.strategies import TaskWithModel, average, clip, gradients_of, parameters_of, set_timeouts

SCHEDULES = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}


def check_stages(model: nn.Module, stages: int) -> None:
    """
    Raises:
        ValueError: the model cannot be divided into this many stages.
    """
    if not isinstance(model, Divisible):
        raise ValueError(
            f"{type(model).__name__} cannot be divided into stages; GPT, RoBERTa, Swin and ViT can, plain or reversible"
        )
    model.require_divisible()
    if model.depth < stages:
        raise ValueError(f"a model of {counted(model.depth, 'block')} cannot be divided into {stages} stages")


def equal_parts(rows: int, most: int) -> int:
    """The largest number of equal parts, at most ``most``."""
    return max(number for number in range(1, min(most, rows) + 1) if rows % number == 0)


class ModelStage(nn.Module):
    """One process's part of a task's model. The other parameters become meta tensors, so all keep their names and numbers.

    A schedule calls it with microbatches. The model itself then takes a whole batch through all processes, and all get its
    output.

    Args:
        task: its model is divided, in place.
        group: of the processes that have the parts, in order.
        context: makes the context in which the forward runs, for autocast.

    Attributes:
        tied: parameters that the first and the last stage share.

    Raises:
        ValueError: the model cannot be divided, or a part has nothing to train.
    """

    def __init__(self, task: TaskWithModel, group: dist.ProcessGroup, context: Callable[[], AbstractContextManager]) -> None:
        super().__init__()
        self.group, self.index, self.count, self.context = group, group.rank(), group.size(), context
        self.task_loss, self.task_terms = task.loss, task.terms
        check_stages(task.model, self.count)
        self.model: Any = task.model
        model = cast(Divisible, self.model)
        self.first, self.last = self.index == 0, self.index == self.count - 1
        self.start, self.stop = (model.depth * stage // self.count for stage in (self.index, self.index + 1))
        self.blocks = model.part(self.start, self.stop)
        before, after = ({parameter for module in modules for parameter in module.parameters()} for modules in model.outside())
        own = {*self.blocks.parameters()} | (before if self.first else set()) | (after if self.last else set())
        if not any(parameter.requires_grad for parameter in own):
            raise ValueError(f"stage {self.index} of the pipeline has nothing to train")
        shared = own & before & after
        self.tied = [parameter for parameter in self.model.parameters() if parameter in shared and parameter.requires_grad]
        others: dict[Tensor, nn.Parameter] = {}  # one for each, since modules may share a parameter
        for module in self.model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter not in own:
                    meta = nn.Parameter(parameter.to("meta"), parameter.requires_grad)
                    module._parameters[name] = others.setdefault(parameter, meta)
        self._received: tuple[Tensor, ...] | None = None
        self._terms = 0
        self.model.forward = self.run_whole_batch

    @property
    def dtype(self) -> torch.dtype:
        """Of the streams. Autocast keeps it."""
        return next(each.dtype for each in self.blocks.parameters() if each.is_floating_point())

    @property
    def loss_dtype(self) -> torch.dtype:
        """Of the loss between processes, whatever the model computes it in."""
        return torch.promote_types(self.dtype, torch.float32)

    def make_schedule(self, most: int, schedule: str, *inputs: Tensor) -> Any:
        """A schedule for batches of this shape, cut into equal microbatches.

        Args:
            most: number of microbatches; fewer if the batch does not divide. Then it may be GPipe, for 1F1B needs one a stage.
        """
        rows = len(inputs[0])
        count = equal_parts(rows, most)
        schedule = schedule if count >= self.count else "gpipe"
        batch = inputs[0][: rows // count]
        taken = (batch,) if self.first else self._streams_for(batch, self.start)
        loss = torch.zeros(1, dtype=self.loss_dtype, device=batch.device)
        made = (loss,) if self.last else self._streams_for(batch, self.stop)
        for tensor in (*taken[self.first :], *made):
            tensor.requires_grad_()
        stage = PipelineStage(self, self.index, self.count, batch.device, input_args=taken, output_args=made, group=self.group)
        return SCHEDULES[schedule](stage, count, loss_fn=lambda loss, _: loss.squeeze(), scale_grads=False)

    def step(self, schedule: Any, *inputs: Tensor) -> Tensor:
        """Forward and backward of a batch. Returns its loss, in all processes."""
        self._terms = int(self.task_terms(*inputs))
        losses: list[Tensor] = []
        # All stages draw alike for the data, and each for itself in its blocks.
        drawn, devices = int(torch.randint(2**62, ())), [inputs[0].device] if inputs[0].is_cuda else []
        # The backward runs in here too.
        with torch.random.fork_rng(devices), torch.autocast(inputs[0].device.type, enabled=False):
            torch.manual_seed(mixed_seed(drawn, self.index))
            named = {f"input_{number}": value for number, value in enumerate(inputs)}
            if self.first:
                schedule.step(inputs[0], **named)
            else:
                schedule.step(target=inputs[0], losses=losses, **named)
        loss = (
            torch.stack(losses).sum().detach() if self.last else torch.empty((), dtype=self.loss_dtype, device=inputs[0].device)
        )
        return self._from_last(loss)

    def forward(self, *streams: Tensor, **inputs: Tensor) -> Any:
        """Of one microbatch: the streams for the next stage, or on the last one its share of the batch's loss.

        Args:
            streams: from the stage before.
            inputs: the arguments of the task's loss. Every stage has them, for masks and positions.
        """
        with self.context():
            batch, *others = inputs.values()
            streams = self._run(self.model.enter(batch) if self.first else streams, batch, *others)
            if not self.last:
                return streams
            terms = int(self.task_terms(*inputs.values()))
            if terms == 0:  # the mean of nothing is NaN, and so are its gradients
                return torch.stack([stream.sum() for stream in streams]).sum()[None].to(self.loss_dtype) * 0
            self._received = streams
            try:
                return self.task_loss(*inputs.values())[None].to(self.loss_dtype) * (terms / self._terms)
            finally:
                self._received = None

    def run_whole_batch(self, batch: Tensor, *others: Tensor | None) -> Tensor:
        """The model's forward: through all processes, or from the streams of a microbatch on."""
        if self._received is not None:
            return self.model.leave(self._received, *others)
        here = dist.get_rank()
        if self.first:
            streams = self.model.enter(batch)
        else:
            streams = self._streams_for(batch, self.start)
            for stream in streams:
                dist.recv(stream, here - 1, self.group)
        streams = self._run(streams, batch, *others)
        if not self.last:
            for stream in streams:
                dist.send(stream, here + 1, self.group)
        output = self.model.leave(streams, *others) if self.last else None
        about: list[Any] = [None if output is None else (output.shape, output.dtype)]
        dist.broadcast_object_list(about, group=self.group, group_src=self.count - 1)
        shape, dtype = about[0]
        return self._from_last(torch.empty(shape, dtype=dtype, device=batch.device) if output is None else output.contiguous())

    def _run(self, streams: tuple[Tensor, ...], *inputs: Tensor | None) -> tuple[Tensor, ...]:
        return tuple(stream.contiguous() for stream in self.model.run(self.blocks, streams, *inputs))

    def _streams_for(self, batch: Tensor, block: int) -> tuple[Tensor, ...]:
        """Tensors like the streams of this batch that a block reads."""
        shape = self.model.stream_shape(batch, block)
        return tuple(torch.empty(shape, dtype=self.dtype, device=batch.device) for _ in range(self.model.streams))

    def _from_last(self, tensor: Tensor) -> Tensor:
        dist.broadcast(tensor, group=self.group, group_src=self.count - 1)
        return tensor


class Pipeline(DDPStrategy):
    """Divides a task's model into stages when its ``configure_model`` asks for it.

    Args:
        stages: processes that share a model; all of them read the same data. Gradients are averaged over groups of them.
        schedule: ``"gpipe"`` runs the forwards of all microbatches, then their backwards; ``"1f1b"`` begins each backward as
            soon as it can, so that a stage holds the activations of fewer of them.
        microbatches: into how many a batch is cut.
        options: options of DDPStrategy.
    """

    def __init__(self, stages: int, schedule: str = "1f1b", microbatches: int | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.stages, self.schedule, self.microbatches = stages, schedule, microbatches or 2 * stages
        self._stage: ModelStage | None = None
        self._schedule: tuple[Any, Any] = None, None  # and before it the shapes of the batches that it is for
        self._tied: dist.ProcessGroup | None = None

    def setup_environment(self) -> None:
        super().setup_environment()
        size = (self.world_size // self.stages, self.stages)
        self._mesh: DeviceMesh = init_device_mesh(self.root_device.type, size, mesh_dim_names=("data", "stages"))
        set_timeouts(self._mesh, self._timeout)
        for ranks in self._mesh.mesh.tolist():
            group = cast(dist.ProcessGroup, dist.new_group([ranks[0], ranks[-1]], timeout=self._timeout))
            if self.global_rank in (ranks[0], ranks[-1]):
                self._tied = group

    def setup(self, trainer: pl.Trainer) -> None:
        self.accelerator.setup(trainer)  # ty: ignore[missing-union-attribute]
        self.precision_plugin.convert_module(cast(nn.Module, self.model))
        self.model_to_device()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            _optimizers_to_device(self.optimizers, self.root_device)
        self.setup_precision_plugin()

    def divide(self, task: TaskWithModel) -> None:
        """Divides the model, once."""
        if self._stage is None or self._stage.model is not task.model:
            self._stage = ModelStage(task, self._mesh["stages"].get_group(), self.precision_plugin.train_step_context)

    def model_to_device(self) -> None:
        cast(nn.Module, self.model)._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(self.root_device))

    def run_step(self, *inputs: Tensor) -> Tensor:
        """Forward and backward of a training batch. Returns its loss."""
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        stage = cast(ModelStage, self._stage)
        shapes = [value.shape for value in inputs]
        if self._schedule[0] != shapes:
            self._schedule = shapes, stage.make_schedule(self.microbatches, self.schedule, *inputs)
        loss = stage.step(self._schedule[1], *inputs)
        for parameter in stage.tied:
            if parameter.grad is None:  # nothing is learned from this batch, or on this stage
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, group=self._tied)
        if self._mesh["data"].size() > 1:
            average(gradients_of(cast(nn.Module, self.model).parameters()), self._mesh["data"])
        return loss

    @property
    def tied_to_first(self) -> set[Tensor]:
        """Parameters of this stage that the first one has too, with the same gradient."""
        return set(self._stage.tied) if self._stage is not None and self._stage.last else set()

    def norms_over_stages(self, norms: dict[str, float]) -> dict[str, float]:
        """L2 norms over the parameters of all stages, from those over each stage's. All processes call it.

        Args:
            norms: without the parameters in :attr:`tied_to_first`.
        """
        gathered: list[dict[str, float]] = [{} for _ in range(self.stages)]
        dist.all_gather_object(gathered, norms, group=self._mesh["stages"].get_group())
        names = dict.fromkeys(name for each in gathered for name in each)
        return {name: math.hypot(*(each.get(name, 0.0) for each in gathered)) for name in names}

    def reduce_and_clip_gradients(self, optimizer: Optimizer, largest: float | None, algorithm: str | None) -> None:
        """Clips gradients, see :func:`~holotrain.parallel.strategies.clip`."""
        trained = [parameter for parameter in parameters_of(optimizer) if parameter.grad is not None]
        clip(trained, largest, algorithm, self.tied_to_first, self._mesh["stages"].get_group())

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._collected(super().lightning_module_state_dict())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._collected(super().optimizer_state(optimizer))

    def _collected(self, own: dict[str, Any]) -> dict[str, Any]:
        if self._mesh["data"].get_local_rank():  # another group does it
            return {}
        return collected(own, self._mesh["stages"].get_group(), self.root_device)

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which shard of the data this process reads, and the number of shards."""
        data = self._mesh["data"]
        return {"num_replicas": data.size(), "rank": data.get_local_rank()}

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")  # those of other stages
            super().load_model_state_dict(checkpoint, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(_without_others(optimizer, state))

    def teardown(self) -> None:
        module, self._lightning_module = self._lightning_module, None  # what is on meta cannot be moved to the CPU
        try:
            super().teardown()
        finally:
            self._lightning_module = module
            if self._stage is not None:
                del self._stage.model.forward
            # They hold process groups, whose threads must end before Python does.
            self._stage, self._schedule, self._tied = None, (None, None), None


def collected(own: dict[str, Any], group: dist.ProcessGroup, device: torch.device) -> dict[str, Any]:
    """A nested state with the leaves of all processes of a group, in its first process; {} in the others.

    Args:
        own: in which what another process has may be missing, or be a meta tensor.
        device: from which tensors are sent.
    """
    leaves = {keys: leaf for keys, leaf in tree_leaves_with_path(own) if not (isinstance(leaf, Tensor) and leaf.is_meta)}
    described = {keys: leaf.to("meta") if isinstance(leaf, Tensor) else leaf for keys, leaf in leaves.items()}
    gathered: list[dict[KeyPath, Any]] = [{} for _ in range(group.size())]
    dist.all_gather_object(gathered, described, group=group)
    first, here, seen = dist.get_global_rank(group, 0), group.rank(), set(gathered[0])
    for rank, kinds in enumerate(gathered):
        for keys, like in kinds.items():
            if keys in seen:
                continue
            seen.add(keys)
            if here == 0:
                value = like
                if isinstance(like, Tensor):
                    value = torch.empty_like(like, device=device)
                    dist.recv(value, dist.get_global_rank(group, rank), group)
                    value = value.cpu()
                _put(own, keys, value)
            elif here == rank and isinstance(like, Tensor):
                dist.send(leaves[keys].detach().to(device).contiguous(), first, group)
    return own if here == 0 else {}


def _put(tree: Any, keys: KeyPath, value: Any) -> None:
    *outer, last = keys
    for key in outer:
        tree = tree.setdefault(key.key, {}) if isinstance(key, MappingKey) else key.get(tree)
    tree[cast(MappingKey, last).key] = value


def _without_others(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state without that of other stages' parameters."""
    if isinstance(optimizer, CombinedOptimizer):
        return {"parts": [_without_others(*each) for each in zip(optimizer.parts, state["parts"], strict=True)]}
    parameters = parameters_of(optimizer)
    return state | {"state": {number: kept for number, kept in state["state"].items() if not parameters[number].is_meta}}
