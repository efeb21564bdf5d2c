"""Saves and loads checkpoints of several processes, with torch.distributed.checkpoint (DCP).

:mod:`holotrain.models.checkpoint_files` describes and reads the format. A checkpoint is the same for any strategy and number of
processes: an optimizer's state has the numbers of parameters, as in one process, where DCP has their names.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins import TorchCheckpointIO
from lightning.pytorch.strategies import ModelParallelStrategy, ParallelStrategy
from torch import Tensor, nn
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import KeyPath, tree_leaves_with_path, tree_map_only, tree_map_with_path

from holotrain.errors import as_user_error
from holotrain.files import replacing
from holotrain.models.checkpoint_files import CHECKPOINT, TENSORS, is_folder, load, named, numbered, read
from holotrain.optimizers.stepping import CombinedOptimizer
from holotrain.synthesis.hook import EACH

IN_PARTS = ("state_dict", "optimizer_states")
"""Entries of a checkpoint whose tensors all processes write together."""


class CheckpointFiles(TorchCheckpointIO):
    """Lightning's checkpoint I/O for all strategies, which also reads folders."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write(checkpoint, Path(path))

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        with as_user_error("ckpt_path"):
            return read(path)


class ShardedCheckpoints(ModelParallelStrategy):
    """Lightning's strategy, with checkpoints from which every strategy continues on any number of processes.

    Lightning (2.6) numbers an optimizer's state by the order of the module's parameters, torch by the order of the optimizer's
    groups. They differ when only some parameters have weight decay.

    Attributes:
        sharded_checkpoints: each process writes its part into a folder; False: the first process writes one file.
    """

    sharded_checkpoints: bool

    @property
    def _module(self) -> nn.Module:
        return cast(nn.Module, self.lightning_module)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        return get_model_state_dict(self._module, options=self._saved())

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if not optimizer.state:  # torch would initialise it, with a step that counts
            return optimizer.state_dict()
        return state_of(optimizer, self._module, self._saved())

    def _saved(self) -> StateDictOptions:
        whole = not self.sharded_checkpoints
        return StateDictOptions(full_state_dict=whole, cpu_offload=whole)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        checkpoint = checkpoint | {"callbacks": _of_all(checkpoint.get("callbacks", {}))}
        if self.sharded_checkpoints:
            save_in_parts(checkpoint, Path(filepath))
        else:
            ParallelStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if not is_folder(checkpoint_path):
            return ParallelStrategy.load_checkpoint(self, checkpoint_path, weights_only)
        here: dict[str, Any] = {"state_dict": get_model_state_dict(self._module)}
        if self.optimizers:
            here["optimizer_states"] = [state_of(optimizer, self._module) for optimizer in self.optimizers]
        with as_user_error("ckpt_path"):
            return load(checkpoint_path) | read(checkpoint_path, here, dict(tree_leaves_with_path(here)))

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        state = sharded_like(get_model_state_dict(self._module), checkpoint["state_dict"])
        set_model_state_dict(self._module, state, options=StateDictOptions(strict=strict))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            # torch's set_optimizer_state_dict (2.15) refuses several groups without parameters.
            optimizer.load_state_dict(sharded_like(state_of(optimizer, self._module), state))


def _of_all(callbacks: Mapping[str, Any]) -> dict[str, Any]:
    """States of callbacks with what differs between processes as a list of all of them, in the first process."""
    states = dict(callbacks)
    for name, state in callbacks.items():
        if isinstance(state, Mapping) and EACH in state:
            gathered = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
            dist.gather_object(tree_map_only(Tensor, Tensor.cpu, state[EACH]), gathered)
            states[name] = {**state, EACH: gathered}
    return states


def state_of(optimizer: Optimizer, model: nn.Module, options: StateDictOptions | None = None) -> dict[str, Any]:
    """An optimizer's state as its ``state_dict`` has it, with the tensors that DCP saves and loads. Initialises it. If the
    options say that tensors are gathered, it is {} in all processes but the first."""
    if isinstance(optimizer, CombinedOptimizer):
        return {"parts": [state_of(part, model, options) for part in optimizer.parts]}
    state = cast(dict[str, Any], get_optimizer_state_dict(model, optimizer, options=options))
    if not state:
        return {}
    names = chain.from_iterable(group["params"] for group in state["param_groups"])
    numbers = {name: number for number, name in enumerate(names)}
    groups = [group | {"params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]]
    for group in groups:
        group |= {"foreach": None} if "foreach" in group else {}  # set by the strategy, not by the training
    return {"state": {numbers[name]: kept for name, kept in state["state"].items()}, "param_groups": groups}


def sharded_like(here: Any, state: Any) -> Any:
    """A state whose full tensors become this process's parts, where ``here`` has DTensors in the same places."""
    like = dict(tree_leaves_with_path(here))

    def shard(keys: KeyPath, value: Any) -> Any:
        of = like.get(keys)
        if isinstance(of, DTensor) and isinstance(value, Tensor) and value.shape == of.shape and not isinstance(value, DTensor):
            return distribute_tensor(value, of.device_mesh, of.placements, src_data_rank=None)
        return value

    return tree_map_with_path(shard, state)


def write(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a file atomically. (Lightning 2.6 copies it from another folder, which may be on another file system.)"""
    with replacing(path, alone=True) as temporary, temporary.open("wb") as file:  # its errors give reasons, unlike torch's
        torch.save(checkpoint, file)
        if path.is_dir():  # of a run that continues with one process
            shutil.rmtree(path)


class Copies(dcp.DefaultSavePlanner):
    """Writes a copy of each tensor, because safetensors rejects tensors that share memory."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        return super().transform_object(write_item, object).clone()


def save_in_parts(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint into a folder, from all processes: each writes its parts of the tensors, the first one, whose path is
    used, the rest.

    An existing folder stays valid until the new checkpoint is complete. A file is removed just before the folder gets its name.
    """
    folder = path if path.is_dir() else path.with_name(f".{path.name}.partial")
    agreed = [(folder, f"{TENSORS}-{max(numbered(folder), default=0) + 1}")]
    dist.broadcast_object_list(agreed, src=0)
    folder, name = agreed[0]
    tensors: dict[str, Tensor] = {}

    def take(keys: KeyPath, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        tensors[named(keys)] = leaf.detach()
        return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")

    rest = checkpoint | tree_map_with_path(take, {key: checkpoint[key] for key in IN_PARTS if key in checkpoint})
    writer = dcp.HuggingFaceStorageWriter(str(folder / name), save_distributed=True)
    dcp.save(tensors, storage_writer=writer, planner=Copies(flatten_state_dict=False, flatten_sharded_tensors=False))
    if dist.get_rank() != 0:
        return
    write(rest | {TENSORS: name}, folder / CHECKPOINT)
    for replaced in numbered(folder).values():
        if replaced.name != name:
            shutil.rmtree(replaced, ignore_errors=True)  # or the next save removes it
    if folder != path:
        path.unlink(missing_ok=True)
        folder.rename(path)
