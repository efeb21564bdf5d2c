"""Reads weights from local files, without running any code in them."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from holotrain.models.checkpoint_files import check_records, checksum, damaged, is_folder, read, warn_of_non_finite
from holotrain.outside import read_json

INDEX = "model.safetensors.index.json"
IN_A_FOLDER = ("model.safetensors", INDEX, "pytorch_model.bin")
CONFIG, CHECKSUM = "config.json", "crc32"
"""Where a file beside model.safetensors may hold its checksum, eight hexadecimal digits. Other programs write none."""
WITHIN = ("state_dict", "model")
"""Keys of the weights in checkpoints that hold more: Lightning and ours; DeiT, Swin."""


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """The tensors of a file by name, on the CPU.

    Args:
        path: a ``.safetensors`` file; the index of a sharded one (``model.safetensors.index.json``); a torch file, which may be
            a checkpoint with the weights under ``state_dict`` or ``model``; a folder with one of these under Hugging Face's
            names; or a sharded checkpoint.

    Warns of weights that are not finite.

    Raises:
        ValueError: there is no such file, or it cannot be read as weights.
    """
    weights = _read(Path(path))
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
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if path.name.endswith(".index.json"):
        return _sharded(path)
    return _safetensors(path) if path.suffix == ".safetensors" else _torch_file(path)


def _safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors import SafetensorError  # here, so that models need torch alone
    from safetensors.torch import load_file

    try:
        recorded = _recorded_checksum(path)
        sound = recorded is None or recorded == f"{checksum(path):08x}"
        weights = load_file(path) if sound else {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a readable safetensors file; it is damaged, truncated or of another kind") from error
    if not sound:
        raise damaged(path)
    return weights


def _recorded_checksum(path: Path) -> Any:
    """The checksum of the weights in a folder; None: there is none."""
    try:
        config = read_json(path.parent / CONFIG) if path.name == IN_A_FOLDER[0] else None
    except (OSError, ValueError):  # not there, or no configuration
        return None
    return config.get(CHECKSUM) if isinstance(config, dict) else None


def _sharded(path: Path) -> dict[str, Tensor]:
    try:
        shards = set(read_json(path)["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not an index of weights: it does not map names to files") from error
    weights = {}
    beside = {each.name for each in path.parent.iterdir() if each.is_file()}
    for shard in sorted(shards, key=str):
        if shard not in beside:
            raise ValueError(f"{path} names {shard!r}, which is not in the same folder")
        weights |= _safetensors(path.parent / shard)
    return weights


def _torch_file(path: Path) -> dict[str, Tensor]:
    try:
        check_records(path)
        held = torch.load(path, map_location="cpu", weights_only=True)
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
