"""What a checkpoint says of its run: the resolved configuration, the choices, and how to use the model without its data.

A checkpoint is a file that anybody may have written, so all of it is checked before it is used.
"""

import json
import pkgutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor
from torch.utils._pytree import tree_leaves
from yaml import YAMLError

from holotrain.config.command_options import RunConfig
from holotrain.config.composition import config_folder, stored
from holotrain.config.option_groups import GROUPS, PYTHON_OBJECT
from holotrain.config.signatures import signature, typed_fields
from holotrain.config.structured import structured, to_container
from holotrain.errors import UserError, as_user_error, did_you_mean
from holotrain.models import checkpoint_files
from holotrain.models.saved import read_config
from holotrain.targets import TARGET, first_line, is_defined_in, targets

KEY = "holotrain"
"""Where a checkpoint holds what ``run_metadata`` returns."""

NEVER_KEPT = ("output_dir", "ckpt_path", "trust", "logger")
"""Options of a run that only a command line sets."""

COMMAND_LINE_ONLY = (
    *("trust", "data.cache_dir", "data.download", "model.download"),
    *("trainer.profiler", "trainer.plugins", "trainer.model_registry"),
)
"""Options that decide what is run, what is written, and where: a file does not set them."""

MOST_VALUES = 50_000
"""Of options in a checkpoint. The names of the classes of an ImageNet, there and back, are 43,000 in the largest."""

ADAPTERS = "peft.LoraConfig"
"""The one class of adapters that a file may name."""

DESCRIPTION = {
    **{"target": "str", "arguments": "dict", "facts": "dict[str, int | float | str | None]"},
    **{"tokenizer": "str", "statistics": "tuple[list[float], list[float]]", "class_names": "list[str]"},
    **{"interpolation": "str", "crop_pct": "float"},
}
"""The types of what a description may hold, as annotations."""


_VERSION = pkgutil.resolve_name("holotrain:__version__")  # by name: the package imports what stands above this module


def run_metadata(
    config: RunConfig, choices: dict[str, str], description: dict[str, Any], data: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What a checkpoint keeps of a run, in plain containers: the option of each group is for display, the description, of the
    trained model, is that of ``holotrain.config.build.description``, and data are the fingerprint of the data module."""
    return {
        "config": _kept(config),
        "choices": choices,
        "description": description,
        "data": data or {},
        "version": _VERSION,
    }


def _kept(config: RunConfig) -> dict[str, Any]:
    values, names = to_container(config), [field.name for field in fields(RunConfig)]
    return {name: value for name, value in values.items() if name in names and name not in NEVER_KEPT}


def load(path: Path, to_build: bool = False) -> dict[str, Any]:
    """Reads a checkpoint of holotrain's, on the CPU, running nothing that stands in it; of an exported folder all but weights.

    Tensors in a folder of several processes are not read (:func:`weights`).

    Args:
        to_build: only the model is needed. So options may be those of an earlier version, and stay as they are in the file.

    Raises:
        UserError: it is missing, damaged, or of another program.
    """
    if not path.exists():
        raise UserError(f"ckpt_path: there is no file {path}.{did_you_mean(str(path), ('best', 'last'))}")
    with as_user_error("ckpt_path"):
        checkpoint = read_config(path) if is_exported(path) else checkpoint_files.load(path)
    if not isinstance(checkpoint, dict) or KEY not in checkpoint:
        raise UserError(f"ckpt_path: {path} was not written by the command line: it holds no configuration of a run")
    held: Any = checkpoint[KEY]
    try:
        checked = _checked(held["config"], held["choices"], held["description"], to_build)
        data = typed_fields({"data": held.get("data", {})}, {"data": "dict[str, int | str]"})  # {}: of a version before
        return checkpoint | {KEY: checked | data}
    except (UserError, ValueError, LookupError, TypeError, AttributeError) as error:  # the last three of what lacks a part
        version = held.get("version", "an earlier one") if isinstance(held, dict) else "unknown"
        why = f"damaged, or of another version of holotrain ({version}): {first_line(error)}"
        also = f"; resume it with that version, or load its weights with model.pretrained={path}"
        raise UserError(f"ckpt_path: {path} is {why}{'' if to_build else also}") from error


def metadata(path: Path, to_build: bool = False) -> dict[str, Any]:
    """What :func:`run_metadata` returned for the run of a checkpoint or an export. Arguments and errors as of :func:`load`."""
    return load(path, to_build)[KEY]


def changes(config: RunConfig, path: Path) -> list[str]:
    """The options that are not those of the checkpoint, in words, such as ``"optimizer.lr 0.001 -> 0.0001"``."""
    before, now = _flat(metadata(path)["config"]), _flat(_kept(config))
    names = [name for name in {**before, **now} if before.get(name) != now.get(name) and name.partition(".")[0] not in UNTOLD]
    return [f"{name} {_word(before.get(name))} -> {_word(now.get(name))}" for name in names if name not in COMMAND_LINE_ONLY]


UNTOLD = ("name", "tags")
"""Options that change nothing in a training."""


def _flat(values: Any, name: str = "") -> dict[str, Any]:
    if not isinstance(values, dict):
        return {name: values}
    found = {}
    for key, value in values.items():
        found |= _flat(value, f"{name}.{key}" if name else str(key))
    return found


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def weights(path: Path) -> dict[str, Tensor]:
    """The ``state_dict`` of a checkpoint that :func:`load` has read. Raises a UserError if a part is missing or damaged."""
    with as_user_error("ckpt_path"):
        found = checkpoint_files.read(path, ["state_dict"]).get("state_dict")
    if not isinstance(found, dict):
        raise UserError(f"ckpt_path: {path} holds no weights")
    return found


def is_exported(path: Path) -> bool:
    """Whether this folder was written by ``holotrain export``. A sharded checkpoint is a folder too."""
    return path.is_dir() and not checkpoint_files.is_folder(path)


def _checked(config: dict[str, Any], choices: dict[str, str], description: dict[str, Any], to_build: bool) -> dict[str, Any]:
    """What :func:`run_metadata` returned, less what a file must not decide. Raises an error of any kind if it is not that."""
    json.dumps([config, description["arguments"]])  # a TypeError of what is no plain value
    if len(tree_leaves(config)) > MOST_VALUES:  # OmegaConf takes milliseconds for each
        raise ValueError(f"it has more than {MOST_VALUES} options")
    if to_build:
        options, model = signature("holotrain.config.option_groups.model_options").options, config["model"] or {}
        given = {name: value for name, value in model.items() if name in options}
        typed_fields(given, {name: options[name].type for name in given})
    else:
        config = _kept(structured("fit", {name: value for name, value in config.items() if name not in NEVER_KEPT}))
    for group, _, name in (option.partition(".") for option in COMMAND_LINE_ONLY):
        if (config.get(group) or {}).pop(name, None) is not None and name == "download":
            config[group][name] = False  # which is not its default
    described = typed_fields(description, {name: kind for name, kind in DESCRIPTION.items() if name in description})
    # Classes in a configuration are trusted or not, see below; the description names no others.
    trained = [*targets(config["model"] or config["task"])]
    for where, target in targets({TARGET: described["target"], **described["arguments"]}):
        if (where, target) not in trained:
            raise ValueError(f"its description names {target!r}, and its configuration does not")
    return {
        "config": config,
        "choices": typed_fields({"choices": choices}, {"choices": "dict[str, str]"})["choices"],
        "description": described,
    }


COMPUTING = ("torch.optim", "holotrain.tasks.optimizer_functions", "holotrain.tasks.schedules")
"""Modules whose classes and functions a file may name as its optimizer and its scheduler."""


def require_trusted(
    config: dict[str, Any], path: Path, packages: Iterable[str], words: Iterable[str], config_dir: str | None
) -> None:
    """Raises a UserError if the configuration in the checkpoint ``path`` names a class that nobody vouches for: neither the
    overrides (``words``), nor a YAML file, at the same place, nor a package that the user trusts. Of packages, only the modules
    of these and those that compute are imported for this check."""
    named = _named(words, config_dir)
    for where, target in targets(config):
        computing = COMPUTING if where in ("optimizer", "scheduler") else ()
        if (where, str(target)) in named or is_defined_in(str(target), [*packages, *computing]):
            continue
        remedy = f"if you trust it, add trust={str(target).partition('.')[0]}"
        if target == PYTHON_OBJECT:
            remedy = f"give it to holotrain.fit, test or validate in Python as {where}=..., or to holotrain.load as model=..."
        said = f"names {target!r} as {where}, but neither the command line nor a file in conf or --config-dir does"
        raise UserError(f"ckpt_path: {path} {said}; {remedy}")


def _named(words: Iterable[str], config_dir: str | None) -> set[tuple[str, str]]:
    """The classes that a file may name, each with its place in a configuration: those of the command line, of ``conf`` and of
    the user's folder."""
    nodes = [(group, node) for group, options in stored().items() for node in options.values()]
    named = {("model.adapters", ADAPTERS), *((group, node[TARGET]) for group, node in nodes if TARGET in node)}
    for key, _, value in (word.lstrip("+").partition("=") for word in words):
        if key.endswith(f".{TARGET}"):
            named.add((key.removesuffix(f".{TARGET}"), value))
    folders = [folder for folder in (config_folder(), config_dir) if folder]
    for folder, group in product(folders, (*GROUPS, "experiment", "sweep")):
        for path in Path(folder, group).rglob("*.yaml"):
            with suppress(YAMLError, OmegaConfBaseException, OSError):  # it vouches for nothing
                node = OmegaConf.to_container(OmegaConf.load(path))
                of_group, of_all = targets(node, group), targets(node)  # the files of some groups change others
                named |= {(where, str(target)) for where, target in [*of_group, *of_all]}
    return named
