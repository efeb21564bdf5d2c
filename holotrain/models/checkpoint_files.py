"""Reads checkpoints: a file, or a folder to which several processes wrote their parts.

A folder has ``checkpoint.pt``, in which the model's and the optimizer's tensors are meta tensors (shape and dtype), and
``tensors-<n>/``, the safetensors files that torch.distributed.checkpoint (DCP) writes and reads. No file can run code.

torch.save writes a CRC-32 of each record, which torch.load (2.15) does not compare; it is compared here. A safetensors file
that is cut short does not match its header.
"""

from __future__ import annotations

import re
import shutil
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import KeyPath, tree_leaves, tree_leaves_with_path, tree_map_with_path

from holotrain.files import is_inside, read_json, require_shallow
from holotrain.models.plain_tensors import named, require_plain

CHECKPOINT = "checkpoint.pt"

TENSORS = "tensors"
"""Key of the name of the tensors' folder in checkpoint.pt."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
IN_A_FOLDER = (WEIGHTS, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
CONFIG = "config.json"
WITHIN = ("state_dict", "model")
"""Keys of the weights in checkpoints that hold more: Lightning and ours; DeiT, Swin."""


def is_folder(path: str | Path) -> bool:
    """Whether this is the folder of a checkpoint, complete or not."""
    return (Path(path) / CHECKPOINT).is_file() or bool(numbered(Path(path)))


def numbered(folder: Path) -> dict[int, Path]:
    """The folders of tensors in a checkpoint's folder, by number."""
    found = {re.fullmatch(rf"{TENSORS}-(\d+)", path.name): path for path in folder.glob(f"{TENSORS}-*")}
    return {int(match[1]): path for match, path in found.items() if match}


def remove_tensors(folder: Path, but: str | None = None) -> None:
    """Removes the tensors of replaced checkpoints; the next call removes what cannot be removed now."""
    for path in numbered(folder).values():
        if path.name != but:
            shutil.rmtree(path, ignore_errors=True)


def partial(path: Path) -> Path:
    """The temporary name of a checkpoint's folder, until its first checkpoint is complete."""
    return path.with_name(f".{path.name}.partial")


def written(path: Path) -> int | None:
    """When a checkpoint was completed; None: it does not exist. (A folder changes as soon as a save begins.)"""
    file = path / CHECKPOINT if path.is_dir() else path
    return file.stat().st_mtime_ns if file.exists() else None


def load(path: str | Path) -> Any:
    """Reads a checkpoint on the CPU; a file's tensors are mapped into memory, those of a folder stay meta tensors.

    Raises:
        ValueError: the checkpoint is damaged or incomplete, or holds tensors that are not plain.
    """
    path = Path(path)
    file = path / CHECKPOINT if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        raise ValueError(f"{file} is missing: the checkpoint is incomplete")
    if not file.is_file():  # a pipe would wait for a writer, and a device may never end
        raise ValueError(f"{file} is neither a file nor a folder")
    try:
        damage = find_damage(file)
        checkpoint = None if damage else _torch_load(file, mmap=True)
        require_shallow(checkpoint)
    except Exception as error:  # zipfile and torch raise many kinds of errors for damaged files
        raise ValueError(f"{file} is not a readable checkpoint: it is damaged, truncated or another kind of file") from error
    if damage:
        raise ValueError(f"{file} is damaged ({damage})")
    require_plain(checkpoint, file, meta=True)
    if any(map(_is_meta, tree_leaves(checkpoint))):
        folder = _tensor_folder(checkpoint, path)
        claimed = sum(leaf.nbytes for leaf in tree_leaves(checkpoint) if _is_meta(leaf))
        stored = sum(part.stat().st_size for part in folder.iterdir() if is_inside(folder, part))
        if claimed > stored:
            raise ValueError(f"{folder} does not have all tensors of the checkpoint: they claim {claimed} bytes of {stored}")
    return checkpoint


def _tensor_folder(checkpoint: Any, path: Path) -> Path:
    name = checkpoint.get(TENSORS) if isinstance(checkpoint, dict) else None
    for folder in numbered(path).values():
        if folder.name == name:
            return folder
    raise ValueError(f"{path} needs the folder {str(name)!r} of its tensors, which is missing")


def _torch_load(file: Path, mmap: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of kinds of tensors that are refused
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)


def find_damage(file: Path) -> str | None:
    """How the content of a zip file differs from its checksums; None: it does not. An unchanged file is read only once."""
    stat = file.stat()
    return _find_damage(file, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache
def _find_damage(file: Path, version: tuple[int, ...]) -> str | None:
    with zipfile.ZipFile(file) as container:
        records = container.infolist()
        if sum(record.file_size for record in records) > file.stat().st_size:
            return "it claims to hold more than its size"  # torch compresses nothing; this could be without end
        without = not any(record.CRC for record in records)  # set_crc32_options(False)
        return None if without or container.testzip() is None else "its checksum differs"


def read(path: str | Path, only: Iterable[str] | None = None, like: Mapping[KeyPath, Tensor] | None = None) -> Any:
    """Reads a checkpoint with its tensors, or some of its entries.

    Args:
        only: the entries; None: all.
        like: tensors of this process by their place in the checkpoint. Those of a folder are read into them, into the local
            part of a DTensor. Tensors that are not in it are read in full.

    Raises:
        ValueError: the checkpoint is damaged or incomplete.
    """
    held, like = load(path), like or {}
    folder = held.pop(TENSORS, None) if isinstance(held, dict) else None
    if only is not None:
        held = {key: held[key] for key in only if key in held}
    wanted = {keys: leaf for keys, leaf in tree_leaves_with_path(held) if _is_meta(leaf)}
    if not wanted:
        return held
    import torch.distributed.checkpoint as dcp  # imported here, so that models only need torch and safetensors

    reader = dcp.HuggingFaceStorageReader(str(Path(path) / str(folder)))
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    try:
        places = {
            named(keys): like[keys] if keys in like else torch.zeros_like(leaf, device="cpu") for keys, leaf in wanted.items()
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each process reads its own parts, which torch warns of
            dcp.load(places, storage_reader=reader, planner=planner, no_dist=True)
        metadata: Any = planner.metadata
        for keys, leaf in wanted.items():
            written = metadata.state_dict_metadata[named(keys)].chunks
            if sum(chunk.sizes.numel() for chunk in written) != leaf.numel():
                raise ValueError(f"parts of {named(keys)} are missing")
    except (Exception, dcp.CheckpointException) as error:  # the second is not an Exception
        said = str(cause(error)).strip().partition("\n")[0]
        raise ValueError(
            f"{Path(path) / str(folder)} does not have all tensors of the checkpoint, or is damaged: {said}"
        ) from error
    return tree_map_with_path(lambda keys, leaf: places[named(keys)] if keys in wanted else leaf, held)


def warn_of_non_finite(weights: Mapping[str, Tensor], path: str | Path) -> None:
    """Warns, by its name, of the first tensor with a NaN or an infinity."""
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.itemsize > 1 and not tensor.isfinite().all():  # torch does not tell of 8 bits
            warnings.warn(f"{path}: {name} holds NaN or infinity", stacklevel=3)
            return


def _is_meta(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta


def cause(error: BaseException) -> BaseException:
    """What failed, in the first process that says so; DCP wraps it."""
    failures = getattr(error, "failures", None)
    return cause(min(failures.items())[1][0]) if failures else error


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU.

    Args:
        path: a ``.safetensors`` file; the index of a sharded one (``model.safetensors.index.json``); a torch file, which may be
            a checkpoint with the weights under ``state_dict`` or ``model``; a folder with one of these under Hugging Face's
            names; or a sharded checkpoint.

    Warns of weights that are not finite.

    Raises:
        ValueError: there is no such file, it cannot be read as weights, or its tensors are not plain.
    """
    weights = _read(Path(path))
    require_plain(weights, Path(path))
    warn_of_non_finite(weights, path)
    return weights


def _read(path: Path) -> dict[str, Tensor]:
    if is_folder(path):
        return _weights(read(path, WITHIN), path)
    if path.is_dir():
        found = [path / name for name in IN_A_FOLDER if (path / name).is_file()]
        if not found:
            raise ValueError(f"{path} holds none of {', '.join(IN_A_FOLDER)}")
        path = found[0]
        if not is_inside(path.parent, path):
            raise ValueError(f"{path} is a link that leads out of its folder")
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    return _sharded(path) if path.name.endswith(".index.json") else _whole(path)


def _whole(path: Path) -> dict[str, Tensor]:
    return _safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError  # here, so that models need torch alone
    from safetensors.torch import load_file

    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file; it is damaged, truncated or of another kind") from error


def save_tensors(
    weights: dict[str, Tensor], path: Path, to: Path | None = None, metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file.

    Args:
        to: where it is written; None: to ``path``, which messages name.

    Raises:
        ValueError: it cannot be written.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, to or path, metadata)
    except SafetensorError as error:  # which is no OSError, whatever the system said
        raise ValueError(f"cannot write {path} ({error})") from error


def _sharded(path: Path) -> dict[str, Tensor]:
    weights = {}
    for shard in _shards(path):
        weights |= _whole(path.parent / shard)
    return weights


def _shards(path: Path) -> list[str]:
    """The names of the files beside an index that hold its weights. Raises a ValueError if it names a file elsewhere."""
    try:
        shards = sorted({*read_json(path)["weight_map"].values()}, key=str)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not an index of weights: it does not map names to files") from error
    beside = {each.name for each in path.parent.iterdir() if each.is_file()}
    for shard in shards:
        if shard not in beside or not is_inside(path.parent, path.parent / shard):
            raise ValueError(f"{path} names {shard!r}, which is not in the same folder")
    return shards


def _torch_file(path: Path) -> dict[str, Tensor]:
    try:
        if zipfile.is_zipfile(path) and (damage := find_damage(path)):
            raise ValueError(damage)
        held = _torch_load(path)
    except Exception as error:  # zipfile and torch raise many kinds of exceptions for damaged files
        raise ValueError(f"{path} cannot be read as weights: it is damaged, or holds more than tensors") from error
    return _weights(held, path)


def _weights(held: Any, path: Path) -> dict[str, Tensor]:
    for key in WITHIN:
        if isinstance(held, dict) and isinstance(held.get(key), dict):
            held = held[key]
    weights = {name: x for name, x in held.items() if isinstance(x, Tensor)} if isinstance(held, dict) else {}
    if not weights:
        raise ValueError(f"{path} is not a mapping from names to weights")
    return weights
