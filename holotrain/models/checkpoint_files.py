"""Reads checkpoints and weights as data: a file, or a folder to which several processes wrote their parts.

A folder has ``checkpoint.pt``, in which the model's and the optimizer's tensors are meta tensors (shape and dtype), and
``tensors-<n>/``, the safetensors files that torch.distributed.checkpoint (DCP) writes and reads. No file can run code.
"""

from __future__ import annotations

import re
import warnings
import zipfile
from collections.abc import Iterable, Mapping
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import KeyPath, tree_leaves, tree_leaves_with_path, tree_map_with_path

from holotrain.files import LARGEST, is_inside, open_regular, read_json, require_inside, require_shallow
from holotrain.targets import first_line

CHECKPOINT = "checkpoint.pt"

TENSORS = "tensors"
"""Key of the name of the tensors' folder in checkpoint.pt."""

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
IN_A_FOLDER = (WEIGHTS, INDEX, "pytorch_model.bin", "pytorch_model.bin.index.json")
CONFIG = "config.json"
WITHIN = ("state_dict", "model", "model_state")
"""Keys of the weights in checkpoints that hold more: Lightning and ours; DeiT, Swin; SlowFast."""

MOST_RECORDS = 100_000
"""Of a checkpoint: a tensor is one."""

MOST_HEADER = 2**24
"""Bytes that a safetensors file has of names, which some 150,000 tensors need."""


def is_folder(path: str | Path) -> bool:
    """Whether this is the folder of a checkpoint, complete or not."""
    return (Path(path) / CHECKPOINT).is_file() or bool(numbered(Path(path)))


def numbered(folder: Path) -> dict[int, Path]:
    """The folders of tensors in a checkpoint's folder, by number."""
    found = {re.fullmatch(rf"{TENSORS}-(\d+)", path.name): path for path in folder.glob(f"{TENSORS}-*")}
    return {int(match[1]): path for match, path in found.items() if match}


def load(path: str | Path) -> Any:
    """Reads a checkpoint on the CPU; a file's tensors are mapped into memory, those of a folder stay meta tensors. Raises a
    ValueError if the checkpoint is damaged or incomplete, or holds tensors that are not dense."""
    path = Path(path)
    file = path / CHECKPOINT if path.is_dir() else path
    if not file.is_file():  # a pipe would wait for a writer, and a device may never end
        raise ValueError(f"{file} is no file" + (", so the checkpoint is incomplete" if path.is_dir() else ""))
    try:
        is_zip = zipfile.is_zipfile(file)
        if is_zip:
            _check_records(file, file.stat().st_mtime_ns)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of kinds of tensors that are refused below
            checkpoint = torch.load(file, map_location="cpu", weights_only=True, mmap=is_zip)
        require_shallow(checkpoint)
        tensors = [leaf for leaf in tree_leaves(checkpoint) if isinstance(leaf, Tensor)]
    except Exception as error:  # zipfile and torch raise many kinds of errors for damaged files
        raise ValueError(f"{file} is not a readable checkpoint: it is damaged, or holds more than tensors") from error
    if not all(map(_is_dense, tensors)):
        raise ValueError(f"{file} is damaged, or of another program: a tensor in it is not dense")
    if any(tensor.is_meta for tensor in tensors):
        name = checkpoint.get(TENSORS) if isinstance(checkpoint, dict) else None
        if name not in [folder.name for folder in numbered(path).values()]:
            raise ValueError(f"{path} needs the folder {str(name)!r} of its tensors, which is missing")
        for part in (path / name).iterdir():  # DCP would wait for a pipe
            require_inside(path / name, part)
            _require_header(part)
    return checkpoint


@lru_cache
def _check_records(file: Path, changed: int) -> None:
    """Compares the checksums of a zip, which torch.load (2.15) does not. A file is read once for each time it was changed."""
    with zipfile.ZipFile(file) as container:
        records = container.infolist()
        if len(records) > MOST_RECORDS or any(each.file_size > LARGEST for each in records if each.filename.endswith(".pkl")):
            raise ValueError(f"it has more than {MOST_RECORDS} tensors, or more than {LARGEST} bytes of other things")
        if container.testzip() is not None:
            raise ValueError("the checksum of a record differs")


def _is_dense(tensor: Tensor) -> bool:
    """Whether each number of a tensor stands in the file: in a few bytes a stride of 0 makes 10^13 of them."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_quantized:
        return False
    claimed = prod(tensor.shape) * tensor.itemsize  # nbytes overflows
    return claimed <= tensor.untyped_storage().nbytes() or type(tensor).__module__.startswith("torchao.")


def named(keys: KeyPath) -> str:
    """The name of a tensor: the keys on the way to it."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in keys)


def read(path: str | Path, only: Iterable[str] | None = None, like: Mapping[KeyPath, Tensor] | None = None) -> Any:
    """Reads a checkpoint with its tensors, or some of its entries.

    Args:
        only: the entries; None: all.
        like: tensors of this process by their place in the checkpoint. Those of a folder are read into them, into the local
            part of a DTensor. Tensors that are not in it are read in full.

    Raises:
        ValueError: the checkpoint is damaged or incomplete.
    """
    checkpoint, like = load(path), like or {}
    folder = checkpoint.pop(TENSORS, None) if isinstance(checkpoint, dict) else None
    if only is not None:
        checkpoint = {key: checkpoint[key] for key in only if key in checkpoint}
    wanted = {keys: leaf for keys, leaf in tree_leaves_with_path(checkpoint) if isinstance(leaf, Tensor) and leaf.is_meta}
    if not wanted:
        return checkpoint
    import torch.distributed.checkpoint as dcp  # imported here, so that models only need torch and safetensors

    folder = Path(path) / str(folder)
    planner = dcp.DefaultLoadPlanner(flatten_state_dict=False)
    try:
        tensors = {}
        for keys, leaf in wanted.items():
            tensors[named(keys)] = like[keys] if keys in like else torch.zeros_like(leaf, device="cpu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each process reads its own parts, which torch warns of
            dcp.load(tensors, storage_reader=dcp.HuggingFaceStorageReader(str(folder)), planner=planner, no_dist=True)
        metadata: Any = planner.metadata
        for keys, leaf in wanted.items():  # torch does not notice that a part is missing
            chunks = metadata.state_dict_metadata[named(keys)].chunks
            if sum(chunk.sizes.numel() for chunk in chunks) != leaf.numel():
                raise ValueError(f"parts of {named(keys)} are missing")
    except (Exception, dcp.CheckpointException) as error:  # the second is not an Exception
        reason = first_line(cause(error))
        raise ValueError(f"{folder} does not have all tensors of the checkpoint, or is damaged: {reason}") from error
    return tree_map_with_path(lambda keys, leaf: tensors[named(keys)] if keys in wanted else leaf, checkpoint)


def cause(error: BaseException) -> BaseException:
    """What failed, in the first process that says so; DCP wraps it."""
    failures = getattr(error, "failures", None)
    return cause(min(failures.items())[1][0]) if failures else error


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU.

    Args:
        path: a ``.safetensors`` file; the index of a sharded one (``model.safetensors.index.json``); a torch file, which may be
            a checkpoint with the weights under one of :data:`WITHIN`; a folder with one of these under Hugging Face's
            names; or a sharded checkpoint.

    Warns of weights that are not finite.

    Raises:
        ValueError: there is no such file, it cannot be read as weights, or its tensors are not dense.
    """
    path = Path(path)
    weights: dict[str, Tensor] = {}
    if is_folder(path):
        weights = _weights(read(path, WITHIN), path)
    else:
        for file in _files(path):
            weights |= _safetensors(file) if file.suffix == ".safetensors" else _weights(load(file), file)
    warn_of_non_finite(weights, path)
    return weights


def _files(path: Path) -> list[Path]:
    """The files of weights at a path: itself, that of a folder, or those that an index names beside itself."""
    if path.is_dir():
        folder = path
        path = next((folder / name for name in IN_A_FOLDER if (folder / name).is_file()), folder)
        if path == folder:
            raise ValueError(f"{folder} holds none of {', '.join(IN_A_FOLDER)}")
        if not is_inside(folder, path):
            raise ValueError(f"{path} is a link that leads out of its folder")
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if not path.name.endswith(".index.json"):
        return [path]
    try:
        names = sorted({*read_json(path)["weight_map"].values()}, key=str)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not an index of weights: it does not map names to files") from error
    beside = {each.name for each in path.parent.iterdir() if each.is_file()}
    for name in names:
        if name not in beside or not is_inside(path.parent, path.parent / name):
            raise ValueError(f"{path} names {name!r}, which is not in the same folder")
    return [path.parent / name for name in names]


def _weights(checkpoint: Any, path: Path) -> dict[str, Tensor]:
    for key in WITHIN:
        if isinstance(checkpoint, dict) and isinstance(checkpoint.get(key), dict):
            checkpoint = checkpoint[key]
    entries = checkpoint.items() if isinstance(checkpoint, dict) else ()
    weights = {name: value for name, value in entries if isinstance(value, Tensor)}
    if not weights:
        raise ValueError(f"{path} is not a mapping from names to weights")
    return weights


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError  # here, so that models need torch alone
    from safetensors.torch import load_file

    try:
        _require_header(path)
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file; it is damaged, truncated or of another kind") from error


def _require_header(path: Path) -> None:
    """Raises a ValueError if a safetensors file names more tensors than any model has, which would take minutes."""
    with open_regular(path) as file:
        if int.from_bytes(file.read(8), "little") > MOST_HEADER and path.suffix == ".safetensors":
            raise ValueError(f"{path} is no readable safetensors file: it has more than {MOST_HEADER} bytes of names")


def save_tensors(weights: dict[str, Tensor], path: Path, to: Path | None = None, metadata: dict | None = None) -> None:
    """Writes a safetensors file, to ``to`` if that is not None. Raises a ValueError, which names ``path``, if it cannot."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}, to or path, metadata)
    except SafetensorError as error:  # which is no OSError, whatever the system said
        raise ValueError(f"cannot write {path} ({error})") from error


def require_same(expected: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raises a ValueError if weights differ from a model's ``state_dict``, into which they are to be loaded, in a name, a shape
    or the dtype; floating-point dtypes may have another width."""
    for name in [*expected, *weights]:
        here, there = (_kind(tensors.get(name)) for tensors in (expected, weights))
        if here != there:
            raise ValueError(f"{name} is {there}, not {here}")


def _kind(tensor: object) -> str:
    if not isinstance(tensor, Tensor):
        return "missing"
    return f"{tuple(tensor.shape)}" if tensor.is_floating_point() else f"{tuple(tensor.shape)} {tensor.dtype}"


def load_weights(module: nn.Module, weights: Mapping[str, Tensor], path: str | Path) -> None:
    """Loads weights that were read from a file. Warns as :func:`read_weights`. Raises what :func:`require_same` does."""
    require_same(module.state_dict(), weights)
    try:
        module.load_state_dict(weights)
    except RuntimeError as error:  # numbers that torch cannot convert
        raise ValueError(str(error).strip().splitlines()[-1].strip()) from error
    warn_of_non_finite(weights, path)


def warn_of_non_finite(weights: Mapping[str, Tensor], path: str | Path) -> None:
    """Warns, by its name, of the first tensor with a NaN or an infinity."""
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.itemsize > 1 and not tensor.isfinite().all():  # torch does not tell of 8 bits
            warnings.warn(f"{path}: {name} holds NaN or infinity", stacklevel=3)
            return
