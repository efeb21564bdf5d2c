"""A checkpoint in shards: a folder into which every process wrote what it had of the tensors that were shared out.

``checkpoint.pt`` holds all else, and a placeholder for each of those tensors, in plain containers. The tensors lie in
``shards-<n>/``, a safetensors file a process, as torch.distributed.checkpoint (DCP) writes them: the header of each says where
in the whole a piece begins. Nothing in the folder is a program.

A tensor whose rows are dealt out in stacks, as those of queries, keys and values are, is a tensor a stack there: in each of
them a process has one piece, which is what DCP can name.
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
"""Under this key checkpoint.pt names the folder of its shards."""

OFFSETS = "DCP_SHARDING_INFO"
"""Under this key DCP keeps in a header where pieces begin."""


def is_folder(path: str | Path) -> bool:
    """Whether this is the folder of a checkpoint, or what is left of one."""
    return (Path(path) / CHECKPOINT).is_file() or bool(numbered(Path(path)))


def numbered(folder: Path) -> dict[int, Path]:
    """The folders of shards in a checkpoint's."""
    found = {re.fullmatch(rf"{SHARDS}-(\d+)", path.name): path for path in folder.glob(f"{SHARDS}-*")}
    return {int(match[1]): path for match, path in found.items() if match}


def recover(path: Path) -> None:
    """Gives a checkpoint its name that is complete, and whose process was killed as it was about to give it."""
    if not path.exists() and (begun(path) / CHECKPOINT).is_file():
        begun(path).rename(path)


def begun(path: Path) -> Path:
    """What a checkpoint's folder is called until it is complete for the first time."""
    return path.with_name(f".{path.name}.partial")


def remove_shards(folder: Path, but: str | None = None) -> None:
    """Removes the shards of checkpoints that another one has taken the place of."""
    for path in numbered(folder).values():
        if path.name != but:
            shutil.rmtree(path)


def placeholder(name: str, shape: Sequence[int], dtype: torch.dtype, stacks: int) -> dict[str, Any]:
    """What stands in checkpoint.pt for a tensor in shards."""
    return {"sharded": name, "shape": list(shape), "dtype": dtype, "stacks": stacks}


def stack_name(name: str, stack: int, stacks: int) -> str:
    """What a stack of a tensor is called in the shards."""
    return name if stacks == 1 else f"{name}/{stack}"


@dataclass(frozen=True)
class Piece:
    """Part of a tensor, in an opened file.

    Args:
        begins: index of its first element in the whole.
    """

    file: Any
    begins: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def region(self) -> tuple[slice, ...]:
        return tuple(slice(begin, begin + size) for begin, size in zip(self.begins, self.shape, strict=True))

    def fits(self, whole: Sequence[int]) -> bool:
        """Whether it lies within a tensor of that shape."""
        if not len(self.begins) == len(self.shape) == len(whole):
            return False
        return all(edge.start >= 0 and edge.stop <= size for edge, size in zip(self.region, whole, strict=True))


def overlap(one: Piece, other: Piece) -> bool:
    """Whether two pieces of a tensor have elements in common."""
    edges = zip(one.region, other.region, strict=True)
    return all(max(a.start, b.start) < min(a.stop, b.stop) for a, b in edges)


class Shards:
    """The files of a folder, opened; they can be read even when they have been removed meanwhile.

    Raises:
        ValueError: one of them is damaged, or no shard.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open  # here, so that models need torch alone

        self.folder = folder
        self.pieces: dict[str, list[Piece]] = defaultdict(list)
        for path in sorted(folder.glob("*.safetensors")):
            try:
                file = safe_open(path, framework="pt")
                offsets = json.loads(file.metadata()[OFFSETS])
                for name in file.keys():  # noqa: SIM118 (it is no dictionary)
                    begins = tuple(int(begin) for begin in offsets[name]["saved_offsets"])
                    slices = file.get_slice(name)
                    self.pieces[name].append(Piece(file, begins, tuple(slices.get_shape()), slices[:0].dtype))
            except (SafetensorError, OSError, OverflowError, ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path} is no readable shard; it is damaged, truncated or not one at all") from error


@dataclass(frozen=True)
class Sharded:
    """A tensor in shards, not read yet.

    Args:
        stacks: see above.
    """

    shards: Shards
    name: str
    shape: torch.Size
    dtype: torch.dtype
    stacks: int

    def check(self) -> None:
        """
        Raises:
            ValueError: the shards do not hold all of it.
        """
        shape = (self.shape[0] // self.stacks, *self.shape[1:])
        for stack in range(self.stacks):
            pieces = self._pieces(stack)
            fit = all(piece.fits(shape) and piece.dtype == self.dtype for piece in pieces)
            whole = sum(math.prod(piece.shape) for piece in pieces) == math.prod(shape)
            if not (fit and whole) or any(starmap(overlap, combinations(pieces, 2))):
                folder = self.shards.folder
                raise ValueError(f"{folder} does not hold all of {self.name}: a shard is missing, or of another run")

    def read(self) -> Tensor:
        """The whole tensor, on the CPU."""
        whole = torch.empty(self.shape, dtype=self.dtype)
        for stack, rows in enumerate(whole.chunk(self.stacks)):
            for piece in self._pieces(stack):
                rows[piece.region] = piece.file.get_tensor(stack_name(self.name, stack, self.stacks))
        return whole

    def _pieces(self, stack: int) -> list[Piece]:
        return self.shards.pieces.get(stack_name(self.name, stack, self.stacks), [])


def load(path: str | Path) -> Any:
    """Reads a checkpoint, a file or a folder, on the CPU, running nothing that stands in it; :class:`Sharded` for each tensor
    that lies in shards.

    Raises:
        ValueError: it is damaged, or a shard is missing.
    """
    path = Path(path)
    file = path / CHECKPOINT if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ValueError(f"{file} is not there: the checkpoint has lost it")
    try:
        # Mapped, not read: whoever asks for the configuration does not wait for the state of an optimizer.
        held = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises a different kind for every way in which a file can be damaged
        raise ValueError(f"{file} is no readable checkpoint; it is damaged, truncated or not one at all") from error
    if not path.is_dir() or not isinstance(held, dict) or SHARDS not in held:
        return held
    name = held.pop(SHARDS)
    if name not in [found.name for found in numbered(path).values()]:
        raise ValueError(f"{file} is of shards that are not beside it: {name!r}")
    return tree_map(partial(_in_shards, Shards(path / name)), held, is_leaf=_is_placeholder)


def read(value: Any) -> Any:
    """The tensor, if it lies in shards; what does not is returned as it is."""
    return value.read() if isinstance(value, Sharded) else value


def read_all(tree: Any) -> Any:
    """The same for all in nested containers."""
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
        raise ValueError(f"{shards.folder.parent / CHECKPOINT} is damaged: it says of a tensor in shards what cannot be")
    tensor = Sharded(shards, name, torch.Size(shape), dtype, stacks)
    tensor.check()
    return tensor
