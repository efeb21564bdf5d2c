"""The configuration and the files of a Hugging Face model, read as data: nothing in them is run."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from holotrain.outside import read_json
from holotrain.targets import targets

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
FILES = ("*.json", "*.txt", "*.model", "*.safetensors")
"""What is downloaded of a repository: no code, and no pickled weights."""

OF_A_FILE = ("_name_or_path", "architectures", "auto_map", "dtype", "torch_dtype", "transformers_version")
"""What a config.json says of its own weights, or of code beside it."""

ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
"""Implementations of attention that are installed with their libraries; other names stand for code on the Hub."""


def folder_of(name: str, download: bool = False) -> Path:
    """The local folder of a model.

    Args:
        name: a folder, its config.json, or the name of a repository on the Hugging Face Hub.
        download: download the repository, if it is not in the cache.

    Raises:
        ValueError: there is no such folder, and the repository is not in the cache or cannot be downloaded.
    """
    path = Path(name).expanduser()
    if path.name == CONFIG and path.is_file():
        return path.parent
    if path.is_dir():
        return path
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name):
        raise ValueError(f"there is no folder {name}")
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ValueError("this model needs transformers: pip install 'holotrain[huggingface]'") from error
    try:
        return Path(snapshot_download(name, allow_patterns=FILES, ignore_patterns=["*/*"], local_files_only=not download))
    except Exception as error:  # whatever the network says
        if not download:
            raise ValueError(
                f"there is no folder {name}, and no model of this name in the cache of Hugging Face; "
                "download=true downloads one from the Hub"
            ) from error
        raise ValueError(f"cannot download {name} ({str(error).strip().splitlines()[0]})") from error


def has_weights(folder: Path) -> bool:
    return any((folder / name).is_file() for name in WEIGHTS)


def network_of(name: str, given: dict[str, Any] | None = None, download: bool = False) -> dict[str, Any]:
    """The configuration of a network in plain containers, as its config.json has it.

    Args:
        name, download: see :func:`folder_of`. Nothing is read if ``given`` is a whole configuration.
        given: replaces entries of the file.

    Raises:
        ValueError: there is no such file, it is not the configuration of a model, or an entry would run code.
    """
    given = dict(given or {})
    if "model_type" not in given:
        given = _read(folder_of(name, download) / CONFIG) | given
    if any(True for _ in targets(given)):
        raise ValueError(f"the configuration of {name} names a class by _target_")
    try:
        _check_attention(given)
    except ValueError as error:
        raise ValueError(f"the configuration of {name}: {error}") from error
    if "quantization_config" in given:
        raise ValueError(f"{name} is quantised and cannot be trained; use the model that it was made from")
    return {key: value for key, value in given.items() if key not in OF_A_FILE}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except OSError as error:
        raise ValueError(f"cannot read {path} ({error.strerror or error})") from error
    except ValueError as error:
        raise ValueError(f"{path} is damaged: it is not JSON") from error
    if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
        raise ValueError(f"{path} is not the configuration of a model of transformers: it has no model_type")
    return found


def _check_attention(node: Any) -> None:
    """Refuses implementations that transformers would download and run."""
    if isinstance(node, list):
        for each in node:
            _check_attention(each)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key.strip("_").startswith(("attn_implementation", "experts_implementation")):
            if value is not None and value not in ATTENTION:
                raise ValueError(f"{key}: {value!r} is not one of {', '.join(ATTENTION)}")
            if value and value.startswith("flash") and find_spec("flash_attn") is None:
                raise ValueError(f"{key}: {value} needs the package flash-attn")
        else:
            _check_attention(value)
