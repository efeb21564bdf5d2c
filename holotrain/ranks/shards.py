"""Sharded checkpoints: a folder to which every process has written its part of the sharded tensors.

``checkpoint.pt`` contains everything else, and a placeholder for each of those tensors, in plain containers. The tensors
are in ``shards-<n>/``, one safetensors file per process, as torch.distributed.checkpoint (DCP) writes them. The header of
each file has the offsets of its pieces. No file contains code.

A tensor with stacked rows, such as queries, keys and values, is saved as one tensor per stack, because DCP supports one
piece per process and tensor.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations, starmap
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map, tree_map_only

CHECKPOINT = "checkpoint.pt"

SHARDS = "shards"
"""Key of the name of the shards' folder in checkpoint.pt."""

OFFSETS = "DCP_SHARDING_INFO"
"""Key of the offsets of pieces in DCP's header."""


def is_folder(path: str | Path) -> bool:
    """Whether this is the folder of a sharded checkpoint, complete or not."""
    return (Path(path) / CHECKPOINT).is_file() or bool(numbered(Path(path)))


def numbered(folder: Path) -> dict[int, Path]:
    """The folders of shards in a checkpoint's folder, by number."""
    found = {re.fullmatch(rf"{SHARDS}-(\d+)", path.name): path for path in folder.glob(f"{SHARDS}-*")}
    return {int(match[1]): path for match, path in found.items() if match}


def recover(path: Path) -> None:
    """Renames a complete checkpoint whose process was killed just before it renamed it."""
    if not path.exists() and (begun(path) / CHECKPOINT).is_file():
        begun(path).rename(path)


def begun(path: Path) -> Path:
    """The temporary name of a checkpoint's folder, until its first checkpoint is complete."""
    return path.with_name(f".{path.name}.partial")


def remove_shards(folder: Path, but: str | None = None) -> None:
    """Removes the shards of replaced checkpoints."""
    for path in numbered(folder).values():
        if path.name != but:
            shutil.rmtree(path)


def placeholder(name: str, shape: Sequence[int], dtype: torch.dtype, stacks: int) -> dict[str, Any]:
    """The placeholder of a sharded tensor in checkpoint.pt."""
    return {"sharded": name, "shape": list(shape), "dtype": dtype, "stacks": stacks}


def stack_name(name: str, stack: int, stacks: int) -> str:
    """The name of a stack of a tensor in the shards."""
    return name if stacks == 1 else f"{name}/{stack}"


@dataclass(frozen=True)
class Piece:
    """Part of a tensor, in an open file.

    Args:
        begins: index of its first element in the full tensor.
    """

    file: Any
    begins: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def region(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.begins, self.shape, strict=True))

    def fits(self, whole: Sequence[int]) -> bool:
        """Whether it lies inside a tensor of this shape."""
        if not len(self.begins) == len(self.shape) == len(whole):
            return False
        return all(edge.start >= 0 and edge.stop <= size for edge, size in zip(self.region, whole, strict=True))


def overlap(one: Piece, other: Piece) -> bool:
    """Whether two pieces of a tensor have elements in common."""
    edges = zip(one.region, other.region, strict=True)
    return all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in edges)


class Shards:
    """The open files of a folder. They stay readable even if they are removed.

    Raises:
        ValueError: a file is damaged or not a shard.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open  # imported here, so that models only need torch

        self.folder = folder
        self.pieces: dict[str, list[Piece]] = defaultdict(list)
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
                offsets = json.loads(file.metadata()[OFFSETS])
                for name in file.keys():  # noqa: SIM118 (it is not a dictionary)
                    begins = tuple(int(begin) for begin in offsets[name]["saved_offsets"])
                    slices = file.get_slice(name)
                    self.pieces[name].append(Piece(file, begins, tuple(slices.get_shape()), slices[:0].dtype))
            except (SafetensorError, OSError, OverflowError, ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is not a readable shard: it is damaged, truncated or another kind of file") from error


@dataclass(frozen=True)
class Sharded:
    """A sharded tensor that is not read yet.

    Args:
        stacks: number of stacks, see the module's docstring.
    """

    shards: Shards
    name: str
    shape: torch.Size
    dtype: torch.dtype
    stacks: int

    def check(self) -> None:
        """
        Raises:
            ValueError: the shards do not contain the full tensor.
        """
        shape = (self.shape[0] // self.stacks, *self.shape[1:])
        for stack in range(self.stacks):
            pieces = self._pieces(stack)
            fit = all(piece.fits(shape) and piece.dtype == self.dtype for piece in pieces)
            whole = sum(math.prod(piece.shape) for piece in pieces) == math.prod(shape)
            if not (fit and whole) or any(starmap(overlap, combinations(pieces, 2))):
                folder = self.shards.folder
                raise ValueError(f"{folder} does not contain all of {self.name}: a shard is missing or belongs to another run")

    def read(self) -> Tensor:
        """The full tensor, on the CPU."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        for stack, rows in enumerate(whole.chunk(self.stacks)):
            for piece in self._pieces(stack):
                rows[piece.region] = piece.file.get_tensor(stack_name(self.name, stack, self.stacks))
        return whole

    def _pieces(self, stack: int) -> list[Piece]:
        return self.shards.pieces.get(stack_name(self.name, stack, self.stacks), [])


def load(path: str | Path) -> Any:
    """Reads a checkpoint file or folder on the CPU, without running code from it. Sharded tensors become :class:`Sharded`.

    Raises:
        ValueError: the checkpoint is damaged, or a shard is missing.
    """
    path = Path(path)
    file = path / CHECKPOINT if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ValueError(f"{file} is missing: the checkpoint is incomplete")
    try:
        # Memory-mapped, so that reading only the configuration is fast.
        held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds of errors for damaged files
        raise ValueError(f"{file} is not a readable checkpoint: it is damaged, truncated or another kind of file") from error
    if not path.is_dir() or not isinstance(held, dict) or SHARDS not in held:
        return held
    name = held.pop(SHARDS)
    if name not in [found.name for found in numbered(path).values()]:
        raise ValueError(f"{file} needs the shards {name!r}, which are missing in its folder")
    return tree_map(partial(_in_shards, Shards(path / name)), held, is_leaf=_is_placeholder)


def read(value: Any) -> Any:
    """Reads a sharded tensor; other values are returned unchanged."""
    return value.read() if isinstance(value, Sharded) else value


def read_all(tree: Any) -> Any:
    """Reads all sharded tensors in nested containers."""
    return tree_map_only(Sharded, Sharded.read, tree)


def _is_placeholder(node: Any) -> bool:
    return isinstance(node, dict) and node.keys() == placeholder("", (), torch.float32, 1).keys()


def _in_shards(shards: Shards, node: Any) -> Any:
    if not _is_placeholder(node):
        return node
    name, shape, dtype, stacks = (node[key] for key in ("sharded", "shape", "dtype", "stacks"))
    sizes = isinstance(shape, list) and all(isinstance(size, int) and size >= 0 for size in shape)
    known = isinstance(name, str) and isinstance(dtype, torch.dtype) and isinstance(stacks, int) and stacks > 0
    if not sizes or not known or not shape or shape[0] % stacks:
        raise ValueError(f"{shards.folder.parent / CHECKPOINT} is damaged: the placeholder of a sharded tensor is not valid")
    tensor = Sharded(shards, name, torch.Size(shape), dtype, stacks)
    tensor.check()
    return tensor
