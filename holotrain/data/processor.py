"""How a published model wants its images normalised, from the files beside its weights."""

from pathlib import Path
from typing import Any

import torch

from holotrain.data.augment import Statistics
from holotrain.errors import UserError
from holotrain.outside import read_json

FILES = ("preprocessor_config.json", "config.json")
"""Of Hugging Face, and of timm."""

SINGLE = torch.finfo(torch.float32)
"""The numbers with which images are normalised."""


def statistics_of(processor: str) -> Statistics:
    """Mean and standard deviation of the channels.

    Args:
        processor: a folder with preprocessor_config.json (Hugging Face) or config.json (timm), or a name of timm's.

    Raises:
        UserError: there is no such folder or name, or its file does not say it.
    """
    folder = Path(processor).expanduser()
    found = _of_folder(folder) if folder.is_dir() else _of_timm(processor)
    mean, std = (found.get(name) or found.get(f"image_{name}") for name in ("mean", "std"))
    if not (_three(mean) and _three(std) and min(std) >= SINGLE.tiny):
        raise UserError(f"data.processor: {processor} does not say a mean and a deviation above 0 for three channels")
    return tuple(map(float, mean)), tuple(map(float, std))


def _three(values: Any) -> bool:
    numbers = isinstance(values, list | tuple) and {*map(type, values)} <= {int, float} and len(values) == 3
    return numbers and all(abs(value) <= SINGLE.max for value in values)


def _of_folder(folder: Path) -> dict[str, Any]:
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        raise UserError(f"data.processor: {folder} holds neither {' nor '.join(FILES)}")
    try:
        found = read_json(path)
        return dict(found.get("pretrained_cfg", found))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"data.processor: {path} cannot be read: it is damaged") from error


def _of_timm(name: str) -> dict[str, Any]:
    try:
        import timm
    except ImportError:
        timm = None
    published = timm and timm.get_pretrained_cfg(name)
    if not published:
        raise UserError(f"data.processor: there is no folder {name}, and no model of timm's with this name")
    return published.to_dict()
