"""A model in a folder, to be used without the run that made it: ``holotrain.load(folder)``.

``model.safetensors`` holds the tensors, ``config.json`` the class and its arguments, ``tokenizer.json`` the tokenizer of a
model of text. A model of another library is in that library's files, and ``holotrain.json`` stands for holotrain's
``config.json``. Nothing in them is a program.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from holotrain.files import read_json, replacing, write_json
from holotrain.models.adapters import has_peft
from holotrain.models.checkpoint_files import CONFIG, WEIGHTS, read_weights, require_same, save_tensors
from holotrain.models.external import ExternalModel, allocated
from holotrain.models.quantised import bits_of, quantise
from holotrain.targets import TARGET, blaming, instantiate, is_defined_in, missing_package, targets

FORMAT = 3
PARTS = {"target": str, "arguments": dict, "quantised": int | None}
"""What ``config.json`` holds of every model, with the types."""

BESIDE = "holotrain.json"
"""What says this of a model of another library, whose own ``config.json`` is beside it."""

TOKENIZER = "tokenizer.json"

GONE = ("reversible", "blocks", "norm")
"""Arguments of models in files of older versions. Where they mattered, the weights have other names."""


def build(
    target: str,
    arguments: dict[str, Any],
    trust: Collection[str] = (),
    vouched: Collection[tuple[str, str]] = (),
    weights: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """A newly initialised model.

    Args:
        target: full name of the class, such as ``holotrain.models.RevViT``.
        arguments: those of the class; a mapping with ``_target_`` among them stands for what it names.
        trust: packages whose own classes and functions may be called, in addition to holotrain's models.
        vouched: pairs of a place, as :func:`~holotrain.targets.targets` gives it, and a name that may be called there.
        weights: that it is to take over; None: none.

    Raises:
        ValueError: a class that is not trusted or does not exist, invalid arguments, or a model that is too large.
    """
    kind = _our_class(target)
    if kind is not None:
        arguments = {name: value for name, value in arguments.items() if name not in GONE}
        if weights is not None and not issubclass(kind, ExternalModel):
            _require_possible(arguments, weights)
    description = {TARGET: target, **arguments}
    for where, name in targets(description):
        if not isinstance(name, str):
            raise ValueError("the name of a class in it is not a string")
        if missing := missing_package(name):
            raise ValueError(f"{name} is needed, and {missing}")
        if (where, name) not in vouched and _our_class(name) is None and not is_defined_in(name, trust):
            raise ValueError(f"{name} is not a model of holotrain; to trust its package, pass trust={name.partition('.')[0]!r}")
    with allocated():
        model = instantiate(description)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{target} is not a torch.nn.Module; calling it gives {type(model).__name__}")
    return model


def _our_class(target: Any) -> type[nn.Module] | None:
    """The model of holotrain, or its wrapper of one of another library, of this public name; None: it is no such name."""
    from holotrain import models  # here, because it names all models

    package, _, name = str(target).rpartition(".")
    listed = package == models.__name__ and name in models.__all__
    kind = getattr(models, name) if listed else None
    return kind if isinstance(kind, type) and issubclass(kind, nn.Module) else None


def _require_possible(arguments: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
    """Raises a ValueError for a damaged size: no model is deeper or wider than all its weights."""
    most = sum(tensor.numel() for tensor in weights.values())
    for size in tree_leaves(arguments):
        if isinstance(size, int) and size > most:
            raise ValueError(f"one of its sizes is {size}, and it has {most} weights")


def save(
    folder: str | Path,
    target: str,
    arguments: dict[str, Any],
    model: nn.Module,
    extra: dict[str, Any] | None = None,
    tokenizer: str | None = None,
) -> None:
    """Writes a model, whole or not at all as far as a file is concerned.

    Args:
        folder: made if it does not exist; what it holds of another saved model is replaced.
        target, arguments: as :func:`build` takes them; what JSON can hold.
        model: built so, and perhaps quantised.
        extra: what else ``config.json`` says, such as names of classes and how images were normalised.
        tokenizer: the content of ``tokenizer.json``.

    Raises:
        ValueError: the model has layers of peft.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    content = json.dumps(_config(target, arguments, model, extra), indent=2) + "\n"  # before anything is written
    with ExitStack() as files:  # which puts all in their places at the end
        at = {name: files.enter_context(replacing(folder / name, alone=True)) for name in (CONFIG, WEIGHTS)}
        save_tensors(model.state_dict(), folder / WEIGHTS, at[WEIGHTS])
        at[CONFIG].write_text(content, encoding="utf-8")
        at[WEIGHTS].chmod(at[CONFIG].stat().st_mode)  # safetensors would keep it from other users
        (folder / BESIDE).unlink(missing_ok=True)
        if tokenizer is None:
            (folder / TOKENIZER).unlink(missing_ok=True)
        else:
            files.enter_context(replacing(folder / TOKENIZER, alone=True)).write_text(tokenizer, encoding="utf-8")


def save_external(
    folder: str | Path,
    target: str,
    arguments: dict[str, Any],
    model: ExternalModel,
    extra: dict[str, Any] | None = None,
    tokenizer: str | None = None,
    chat: dict[str, Any] | None = None,
) -> list[str]:
    """Writes a model of another library as that library reads it, and what :func:`load` must know beside it.

    Args:
        folder, target, arguments, extra, tokenizer: as :func:`save` takes them.
        chat: the chat template of the tokenizer, as its ``chat`` is.

    Returns:
        The names of the files.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / BESIDE).unlink(missing_ok=True)  # if this is interrupted, it describes no other weights
    names = model.save(folder, (extra or {}) | {"tokenizer": tokenizer, "chat": chat})
    write_json(folder / BESIDE, _config(target, arguments, model, extra))
    return [*names, BESIDE]


def _config(target: str, arguments: dict[str, Any], model: nn.Module, extra: dict[str, Any] | None) -> dict[str, Any]:
    if has_peft(model):
        raise ValueError(
            "the model has layers of peft; merge_peft(model) of holotrain.models.adapters adds them to its weights"
        )
    config = (extra or {}) | {"format": FORMAT, "target": target, "arguments": arguments}
    return config | {"quantised": bits_of(model)}


def load(folder: str | Path, trust: Collection[str] = (), vouched: Collection[tuple[str, str]] = ()) -> nn.Module:
    """The model that :func:`save` or :func:`save_external` wrote, on the CPU, in eval mode; its ``backward`` is the one it was
    saved with.

    Args:
        trust, vouched: as :func:`build` takes them.

    Raises:
        ValueError: a file is missing or damaged, or was written by another version; quantised weights and no torchao.
    """
    folder = Path(folder)
    config, path = read_config(folder), config_path(folder)
    weights = read_weights(folder if path.name == BESIDE else folder / WEIGHTS)
    with blaming(f"{path} describes no model that can be built"):
        model = build(config["target"], config["arguments"], trust, vouched, weights)
    try:
        if path.name == BESIDE:
            _require_external(model).load_saved(weights)
            return model.eval()
        if config["quantised"] is not None:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(name in weights)  # what is there whole was not quantised
            quantise(model, config["quantised"])
        require_same(model.state_dict(), weights)
    except ValueError as error:
        raise ValueError(f"{folder / WEIGHTS} and {path.name} are of different models: {error}") from error
    model.load_state_dict(weights)
    return model.eval()


def _require_external(model: nn.Module) -> ExternalModel:
    if not isinstance(model, ExternalModel):
        raise ValueError(f"a {type(model).__name__} is of no other library")
    return model


def config_path(folder: str | Path) -> Path:
    """The file in a folder that describes its model."""
    beside = Path(folder) / BESIDE
    return beside if beside.is_file() else Path(folder) / CONFIG


def read_config(folder: str | Path) -> dict[str, Any]:
    """What :func:`config_path` says: ``format``, ``target``, ``arguments``, ``quantised`` (bits or None), and the extra.
    Raises a ValueError if it is missing or damaged, or was written by another version or program."""
    path = config_path(folder)
    if not path.is_file():
        raise ValueError(f"{folder} holds no saved model: there is no {CONFIG} in it")
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or of another program") from error
    if isinstance(config, dict) and "model_type" in config:
        raise ValueError(f"{folder} is of transformers, and not an export; use it as model=huggingface model.name={folder}")
    if not isinstance(config, dict) or "format" not in config:
        raise ValueError(f"{path} is damaged, or of another program")
    if config["format"] != FORMAT:
        known = f"this version of holotrain reads format {FORMAT}"
        raise ValueError(f"{path} is of format {config['format']!r}; {known}: export it again")
    for key, kinds in PARTS.items():
        if key not in config or not isinstance(config[key], kinds):
            raise ValueError(f"{path} is damaged, or of another program: {key} is missing or of another type")
    return config
