"""The files of a model of transformers, read as data: nothing in them is run."""

import os
import re
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from holotrain.files import read_json, read_text
from holotrain.models.checkpoint_files import CONFIG, IN_A_FOLDER
from holotrain.models.external import LOADING_ARGUMENTS
from holotrain.targets import blaming, first_line, needed, targets

TRANSFORMERS = ("transformers", "this model needs transformers", "huggingface")

FILES = ("*.json", "*.txt", "*.model", "*.safetensors")
"""What is downloaded of a repository: no code, and no pickled weights."""

OF_A_FILE = (
    *("_name_or_path", "architectures", "auto_map", "dtype", "pretrained_cfg", "torch_dtype"),
    *("transformers_version", "transformers_weights"),
)
"""What a config.json says of its own weights, or of code beside it."""

ELSEWHERE = ("backbone", "use_pretrained_backbone", *LOADING_ARGUMENTS)
"""Entries that name another model or file, which transformers or timm would download or open."""

LABELS = ("id2label", "label2id")
"""Entries whose names are those of classes."""

ATTENTION = ("eager", "sdpa", "flex_attention", "flash_attention_2", "flash_attention_3")
"""Implementations of attention that are installed with their libraries; other names stand for code on the Hub."""


@contextmanager
def quiet_and_offline(transformers: ModuleType) -> Generator[None]:
    """Without the network, and without the library's warnings and progress bars: what matters is reported in one line."""
    from huggingface_hub import constants

    logging = transformers.logging
    level, bars, offline = logging.get_verbosity(), logging.is_progress_bar_enabled(), constants.HF_HUB_OFFLINE
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = offline
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


@cache
def _questions() -> list[tuple[Any, str, Any]]:
    masks, base = import_module("transformers.masking_utils"), import_module("transformers.modeling_utils").PreTrainedModel
    asked = ((masks, "find_packed_sequence_indices"), (base, "warn_if_padding_and_no_attention_mask"))
    return [(owner, name, getattr(owner, name)) for owner, name in asked if hasattr(owner, name)]


@contextmanager
def without_questions() -> Generator[None]:
    """Without what transformers (5.24) asks of tokens without a mask: whether a row holds several documents, or padding. For
    each answer it waits for the device. Where it cannot ask, in the capture of a CUDA graph, attention would get a mask."""
    for owner, name, _ in _questions():
        setattr(owner, name, lambda *asked: None)
    try:
        yield
    finally:
        for owner, name, own in _questions():
            setattr(owner, name, own)


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
    import huggingface_hub as hub

    try:
        wanted: dict[str, Any] = {"allow_patterns": FILES, "ignore_patterns": ["*/*"]}
        return Path(hub.snapshot_download(name, local_files_only=not download, **wanted))
    except Exception as error:  # whatever the network says
        if not download:
            raise ValueError(
                f"there is no folder {name}, and no model of this name in the cache of Hugging Face; "
                "model.download=true downloads one from the Hub"
            ) from error
        raise ValueError(f"cannot download {name} ({first_line(error)})") from error


def has_weights(name: str, download: bool = False) -> bool:
    """Whether a model of this name has weights. A config.json alone has none. Arguments and errors of :func:`folder_of`."""
    if Path(name).name == CONFIG:
        return False
    folder = folder_of(name, download)
    return any((folder / file).is_file() for file in IN_A_FOLDER)


def network_of(name: str, entries: dict[str, Any] | None = None, download: bool = False) -> dict[str, Any]:
    """The configuration of a network in plain containers, as its config.json has it.

    Args:
        name, download: see :func:`folder_of`. Nothing is read if ``entries`` is a whole configuration.
        entries: replace those of the file.

    Raises:
        ValueError: there is no such file, it is not the configuration of a model, or an entry would run code.
    """
    entries = dict(entries or {})
    if "model_type" not in entries:
        entries = _read(folder_of(name, download) / CONFIG) | entries
    if any(True for _ in targets(entries)):
        raise ValueError(f"the configuration of {name} names a class by _target_")
    try:
        _check_entries(entries)
    except ValueError as error:
        raise ValueError(f"the configuration of {name}: {error}") from error
    if "quantization_config" in entries:
        raise ValueError(f"{name} is quantised and cannot be trained; use the model that it was made from")
    return {key: value for key, value in entries.items() if key not in OF_A_FILE}


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


def _check_entries(node: Any) -> None:
    """Refuses models, files and implementations elsewhere, which the libraries would download, open or run."""
    if isinstance(node, list):
        for each in node:
            _check_entries(each)
    if not isinstance(node, dict):
        return
    for key, value in node.items():
        if key.strip("_").startswith(("attn_implementation", "experts_implementation")):
            if value is not None and value not in ATTENTION:
                raise ValueError(f"{key}: {value!r} is not one of {', '.join(ATTENTION)}")
            if value and value.startswith("flash") and find_spec("flash_attn") is None:
                raise ValueError(f"{key}: {value} needs the package flash-attn")
        elif key in LABELS:
            continue
        elif (key in ELSEWHERE and value) or (key == "architecture" and re.search(r"[:/\\]", str(value))):
            raise ValueError(f"{key}: {value!r} names a model or a file elsewhere, which is not opened")
        else:
            _check_entries(value)


def _require_own_tokenizer(folder: Path) -> None:
    """Refuses a tokenizer whose description names a file: the library would open it in place of its own.

    Raises:
        ValueError: a text in it is the path of a file.
    """
    for path in (folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")):
        for text in _texts(read_json(path)) if path.is_file() else ():
            elsewhere = os.path.isfile(text) and Path(text).resolve().parent != folder.resolve()
            if elsewhere or (os.sep in text and os.path.isfile(folder / text)):
                raise ValueError(f"{path} names the file {text!r}, which is not opened")


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, list | dict):
        for each in node.values() if isinstance(node, dict) else node:
            yield from _texts(each)


def tokenizer_of(name: str, download: bool = False) -> str | None:
    """The content of the tokenizer.json of a model; None: it has none.

    Args:
        name, download: see :func:`~holotrain.models.huggingface.folder_of`.
    """
    folder, transformers = folder_of(name, download), needed(*TRANSFORMERS)
    if (path := folder / "tokenizer.json").is_file():
        try:
            return read_text(path)
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {path} ({first_line(error)})") from error
    if not any((folder / name).is_file() for name in ("vocab.txt", "vocab.json", "tokenizer.model", "tokenizer_config.json")):
        return None
    _require_own_tokenizer(folder)
    with blaming(f"{folder} has a tokenizer that cannot be read"), quiet_and_offline(transformers):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        return tokenizer.backend_tokenizer.to_str()
