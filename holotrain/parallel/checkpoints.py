"""Saves and loads sharded checkpoints (:mod:`holotrain.ranks.shards`).

Each process plans its own pieces, and torch.distributed.checkpoint writes them. The default plan of torch (2.15) does not work
for stacked rows of tensor parallel (queries, keys and values): it treats them as contiguous and reports an overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from lightning.pytorch.plugins import TorchCheckpointIO
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_with_path

from holotrain.errors import UserError
from holotrain.ranks.shards import (
    CHECKPOINT,
    SHARDS,
    begun,
    is_folder,
    load,
    numbered,
    placeholder,
    read_all,
    remove_shards,
    stack_name,
)
from holotrain.ranks.tensors import numbers, stacks


class CheckpointFiles(TorchCheckpointIO):
    """Lightning's checkpoint I/O for all strategies, which also reads sharded checkpoints.

    A checkpoint file that replaces a sharded one is written into its folder, because a file cannot replace a folder atomically.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        path = Path(path)
        with write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            write(checkpoint, path / CHECKPOINT if path.is_dir() else path)
        if path.is_dir():
            remove_shards(path)

    def load_checkpoint(self, path: Any, *args: Any, **options: Any) -> dict[str, Any]:
        return read_all(load(path)) if is_folder(path) else super().load_checkpoint(path, *args, **options)


def write(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a file atomically. (Lightning 2.6 copies it from another folder, which may be on another file system.)"""
    temporary = path.with_name(f".{path.name}.file")  # differs from the temporary name of a folder
    try:
        with temporary.open("wb") as file:  # its errors say why it cannot be written, unlike torch's
            torch.save(checkpoint, file)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def write_errors(path: Path) -> Iterator[None]:
    """
    Raises:
        UserError: the checkpoint cannot be written.
    """
    try:
        yield
    except dcp.CheckpointException as error:  # is not an Exception, and prints a traceback for each process
        _, (failure, _) = min(error.failures.items(), key=lambda found: found[0])
        raise UserError(f"{path} cannot be written: {failure}") from error
    except (OSError, RuntimeError) as error:  # torch's writer raises a RuntimeError from an OSError
        failure = error.__context__ if isinstance(error.__context__, OSError) else error
        raise UserError(f"{path} cannot be written: {failure}") from error


@dataclass(frozen=True)
class Own:
    """This process's part of a sharded tensor.

    Args:
        begins: index of its first element in the full tensor.
        shape: shape of the full tensor.
    """

    tensor: Tensor
    begins: tuple[int, ...]
    shape: tuple[int, ...]


class Plan(dcp.DefaultSavePlanner):
    """Every process writes its pieces; one process writes a replicated piece."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def create_local_plan(self) -> SavePlan:
        self.plan = SavePlan([_item(name, own) for name, own in self.state_dict.items()])
        return self.plan

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        # A copy, because safetensors rejects tensors that share memory.
        return self.state_dict[index.fqn].tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)


def _item(name: str, own: Own) -> WriteItem:
    begins = torch.Size(own.begins)
    data = TensorWriteData(
        ChunkStorageMetadata(begins, own.tensor.shape), TensorProperties(own.tensor.dtype), torch.Size(own.shape)
    )
    return WriteItem(MetadataIndex(name, begins), WriteItemType.SHARD, tensor_data=data)


def save_in_shards(checkpoint: dict[str, Any], path: Path) -> None:
    """Writes a checkpoint into a folder, from all processes: each writes its parts of sharded tensors, the first one the rest.

    An existing checkpoint stays valid until the new one is complete. (Except for a moment when the folder replaces a file:
    :func:`~holotrain.ranks.shards.recover` repairs that.)

    Args:
        path: the path of the first process is used.
    """
    folder, name = _agreed(path)
    pieces: dict[str, Own] = {}
    rest = tree_map_with_path(lambda keys, leaf: _taken_out(_named(keys), leaf, pieces), checkpoint)
    with write_errors(path):
        dcp.save(pieces, storage_writer=dcp.HuggingFaceStorageWriter(str(folder / name), save_distributed=True), planner=Plan())
        if dist.get_rank() != 0:
            return
        write(rest | {SHARDS: name}, folder / CHECKPOINT)
    remove_shards(folder, but=name)
    if folder != path:
        path.unlink(missing_ok=True)
        folder.rename(path)


def _agreed(path: Path) -> tuple[Path, str]:
    """The folder to write into, and the name of a new folder for the shards in it."""
    folder = path if path.is_dir() else begun(path)
    said = [(folder, f"{SHARDS}-{max(numbered(folder), default=0) + 1}")]
    dist.broadcast_object_list(said, src=0)
    return said[0]


def _named(keys: tuple[Any, ...]) -> str:
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)


def _taken_out(name: str, leaf: Any, pieces: dict[str, Own]) -> Any:
    """The value of a leaf in checkpoint.pt. Adds this process's pieces of a sharded tensor to ``pieces``."""
    if not isinstance(leaf, DTensor):
        return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
    count = stacks(leaf)
    assert leaf.ndim and not pieces.keys() & {stack_name(name, stack, count) for stack in range(count)}
    pieces |= {stack_name(name, stack, count): own for stack, own in owned(leaf)}
    return placeholder(name, leaf.shape, leaf.dtype, count)


def owned(part: DTensor) -> Iterator[tuple[int, Own]]:
    """This process's contiguous rows of each stack of a tensor, with the number of the stack."""
    local, rows, count = part.detach().to_local(), numbers(part, 0), stacks(part)
    if not local.numel():
        return
    columns = [int(numbers(part, dim)[0]) for dim in range(1, part.ndim)]
    shape = (len(part) // count, *part.shape[1:])
    for stack in range(count):
        mine = (rows // shape[0] == stack).nonzero().flatten()
        if len(mine):
            first, last = int(mine[0]), int(mine[-1])
            yield stack, Own(local[first : last + 1], (int(rows[first]) % shape[0], *columns), shape)
