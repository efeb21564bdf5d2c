"""What a checkpoint says of its run: the resolved configuration, the choices, and how to use the model without its data.

A checkpoint is a file that anybody may have written, so all of it is checked before it is used.
"""

import itertools
import json
import re
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch import Tensor
from yaml import YAMLError

from holotrain.config.annotations import checked
from holotrain.config.command_options import RunConfig
from holotrain.config.composition import config_folder, models
from holotrain.config.objects import PYTHON_OBJECT
from holotrain.config.option_groups import CLASSIFIER, GROUPS, IMAGES, TEXT, is_a
from holotrain.config.signatures import signature
from holotrain.config.structured import structured, to_container
from holotrain.errors import UserError, as_user_error, did_you_mean
from holotrain.models import checkpoint_files
from holotrain.models.saved import config_path, read_config
from holotrain.targets import TARGET, first_line, is_defined_in, missing_package, targets

KEY = "holotrain"
"""Where a checkpoint holds what ``run_metadata`` returns."""

NEVER_KEPT = ("output_dir", "ckpt_path", "trust", "logger")
"""Options of a run that only a command line sets."""

COMMAND_LINE_ONLY = (
    *("trust", "data.cache_dir", "data.download", "model.download"),
    *("trainer.profiler", "trainer.plugins", "trainer.model_registry"),
)
"""Options that decide what is run, what is written, and where: a file does not set them."""

REMOVED = ("trainer.max_restarts", "data.max_megapixels", "data.max_expansion")
"""Options that only checkpoints of older versions have."""

DESCRIPTION = {
    **{"target": "str", "arguments": "dict", "facts": "dict[str, int | float | str | None]"},
    **{"tokenizer": "str", "statistics": "tuple[list[float], list[float]]", "class_names": "list[str]"},
}
"""The types of what a description may hold, as annotations."""

STATE = {
    **{"state_dict": "dict", "callbacks": "dict", "loops": "dict", "optimizer_states": "list", "lr_schedulers": "list"},
    **{"epoch": "int", "global_step": "int", "pytorch-lightning_version": "str"},
}
"""Those of the parts of a checkpoint that this program and Lightning read by name."""

WEIGHTS = ("state_dict", "current_model_state")
"""The parts that hold weights: the second those that are trained, if the first holds their average."""


def run_metadata(config: RunConfig, choices: dict[str, str], description: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint keeps of a run, in plain containers: the option of each group is for display, and the description, of
    the trained model, is that of ``holotrain.config.build.description``."""
    return {"config": _kept(config), "choices": choices, "description": description}


def require_readable(metadata: dict[str, Any]) -> None:
    """Raises a UserError, before the first step, if no run could begin from a checkpoint with this ``run_metadata``."""
    try:
        _checked_description(metadata["description"], _checked_config(metadata["config"]))
    except (UserError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"no checkpoint could hold this configuration: {first_line(error)}") from error


def _kept(config: RunConfig) -> dict[str, Any]:
    values, names = to_container(config), [field.name for field in fields(RunConfig)]
    return {name: value for name, value in values.items() if name in names and name not in NEVER_KEPT}


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint of holotrain's, on the CPU, running nothing that stands in it; of an exported folder all but weights.

    Tensors in a folder of several processes are not read (:func:`weights`).

    Raises:
        UserError: it is missing, damaged, or of another program.
    """
    if is_exported(path):
        with as_user_error("ckpt_path"):
            exported = read_config(path)
        if KEY not in exported:
            raise UserError(f"ckpt_path: {path} was not exported by the command line: it holds no configuration of a run")
        found = _checked({KEY: exported[KEY]}, path)
        if any(exported[key] != found[KEY]["description"][key] for key in ("target", "arguments")):
            raise UserError(f"ckpt_path: {path} is damaged: its {config_path(path).name} describes two models")
        return found
    if not path.exists():
        raise UserError(f"ckpt_path: there is no file {path}.{did_you_mean(str(path), ('best', 'last'))}")
    with as_user_error("ckpt_path"):
        checkpoint = checkpoint_files.load(path)
    if not isinstance(checkpoint, dict) or KEY not in checkpoint:
        raise UserError(f"ckpt_path: {path} was not written by holotrain: it holds no configuration of a run")
    if "state_dict" not in checkpoint:
        raise UserError(f"ckpt_path: {path} holds no weights")
    return _checked(checkpoint, path)


def metadata(path: Path) -> dict[str, Any]:
    """What :func:`run_metadata` returned for the run of a checkpoint or an export, checked. Raises as :func:`load`."""
    return load(path)[KEY]


def weights(path: Path) -> dict[str, Any]:
    """The ``state_dict`` of a checkpoint that :func:`load` has read. Raises a UserError if a part is missing or damaged."""
    with as_user_error("ckpt_path"):
        return checkpoint_files.read(path, ["state_dict"])["state_dict"]


def is_exported(path: Path) -> bool:
    """Whether this folder was written by ``holotrain export``. A sharded checkpoint is a folder too."""
    return path.is_dir() and not checkpoint_files.is_folder(path)


def _checked(checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """The checkpoint, unless a part of what it says of itself is missing, unknown or of another type."""
    entry = checkpoint[KEY]
    if not isinstance(entry, dict) or not {"config", "choices", "description"} <= entry.keys():
        raise UserError(f"ckpt_path: {path} is of an older holotrain, or damaged: it does not say what was trained")
    try:
        config = _checked_config(entry["config"])
        for group, option in checked("its choices", "dict[str, str]", entry["choices"]).items():
            if not re.fullmatch(r"\w[\w-]*=[^=\n]+", f"{group}={option}"):
                raise ValueError(f"{group!r}: {option!r} among its choices is not a group with its option")
        description = _checked_description(entry["description"], config)
        checkpoint = _typed(checkpoint, STATE | dict.fromkeys(WEIGHTS, "dict[str, Any]"))
        for part in WEIGHTS:
            if unfit := [name for name, weight in checkpoint.get(part, {}).items() if not isinstance(weight, Tensor)]:
                raise ValueError(f"{unfit[0]!r} in {part} is not a tensor")
        if min(checkpoint.get("epoch", 0), checkpoint.get("global_step", 0)) < 0:
            raise ValueError("its epoch or its global_step is below 0")
        if not re.fullmatch(r"[2-9](\.\w+)*", checkpoint.get("pytorch-lightning_version", "2")):
            raise ValueError(f"it was written by Lightning {checkpoint['pytorch-lightning_version']!r}")
    except (UserError, ValueError, KeyError, TypeError, AttributeError) as error:  # the last of what lacks a part
        for where, target in targets(entry["config"]):  # a package that Python does not find says more
            if isinstance(target, str) and (missing := missing_package(target)):
                trusted = f"with trust={target.partition('.')[0]}, unless --config-dir names the class"
                where = f" as {where}" if where else ""
                raise UserError(f"ckpt_path: {path} names {target!r}{where}, and {missing} ({trusted})") from error
        raise UserError(f"ckpt_path: {path} is damaged, or of another version of holotrain: {first_line(error)}") from error
    return checkpoint | {KEY: entry | {"config": config, "description": description}}


def _typed(parts: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
    """A mapping, with its values as these types take them."""
    return parts | {key: checked(key, kind, parts[key]) for key, kind in kinds.items() if key in parts}


def _checked_config(plain: Any) -> dict[str, Any]:
    """The configuration of a file in plain containers, less what a file must not decide."""
    json.dumps(checked("its options", "dict", plain))  # a TypeError of what is no plain value
    values = {name: value for name, value in plain.items() if name not in NEVER_KEPT}
    for group, each in values.items():
        if isinstance(each, dict):
            values[group] = {name: value for name, value in each.items() if f"{group}.{name}" not in REMOVED}
    config = _kept(structured("fit", values))
    for group, _, name in (option.partition(".") for option in COMMAND_LINE_ONLY):
        if (config.get(group) or {}).pop(name, None) is not None and name == "download":
            config[group][name] = False  # which is not its default
    return config


def _checked_description(plain: Any, config: dict[str, Any]) -> dict[str, Any]:
    """The description of the model that the configuration names."""
    description = _typed(checked("its description", "dict", plain), DESCRIPTION)
    trained, data, task = config["model"] or config["task"], config["data"][TARGET], config["task"][TARGET]
    needed = ["target", "arguments", "facts"]
    needed += ["tokenizer"] * is_a(data, TEXT) + ["statistics"] * is_a(data, IMAGES)
    if is_a(data, TEXT, IMAGES) and is_a(task, CLASSIFIER):
        needed.append("class_names")
    for key in (*needed, *description):
        if key not in description or key not in DESCRIPTION:
            raise ValueError(f"{key!r} in its description is {'unknown' if key in description else 'missing'}")
    arguments = description["arguments"]
    json.dumps(arguments)
    if description["target"] != trained[TARGET] or TARGET in arguments:
        raise ValueError("its description is of another model than its configuration")
    trusted = list(targets(trained))
    if unlike := [target for where, target in targets(arguments) if (where, target) not in trusted]:
        raise ValueError(f"its description names {unlike[0]!r}, and its configuration does not")
    return description


COMPUTING = {
    "optimizer": ("holotrain.tasks.optimizer_functions.", "torch.optim.optimizer.Optimizer"),
    "scheduler": ("holotrain.tasks.schedules.", "torch.optim.lr_scheduler.LRScheduler"),
}
"""What needs no further trust in these groups: the public functions of a module, and classes of ``torch.optim`` with a base."""


def require_trusted(
    config: dict[str, Any], path: Path, packages: Iterable[str], words: Iterable[str], config_dir: str | None
) -> None:
    """Nothing is imported for this check.

    Args:
        config: the configuration in the checkpoint ``path``.
        packages: packages that the user trusts.
        words: the overrides of the command line, which may name a class at the same place.
        config_dir: the user's YAML folder, whose files may do so too.

    Raises:
        UserError: it names a class that nobody vouches for.
    """
    given = (word.lstrip("+").partition("=") for word in words)
    named = {(key.removesuffix(f".{TARGET}"), name) for key, _, name in given if key.endswith(f".{TARGET}")}
    named |= _named_in_files(config_dir)
    for where, target in targets(config):
        if not isinstance(target, str):
            raise UserError(f"ckpt_path: {path} is damaged: the name of the class in {where} is not a string")
        package = target.partition(".")[0]
        if package == "holotrain" and target != PYTHON_OBJECT and not is_defined_in(target, [package]):
            raise UserError(f"ckpt_path: {path} is of another version of holotrain: there is no {target!r}, its {where}")
        trusted = _only_computes(where, target) or is_defined_in(target, packages)
        if trusted or (where, target) in named:
            continue
        if target == PYTHON_OBJECT:
            raise UserError(
                f"ckpt_path: {path} was trained with an object of Python code as {where}; give it to holotrain.fit, test "
                f"or validate in Python as {where}=..., or call the model of holotrain.load(..., model=...)"
            )
        raise UserError(
            f"ckpt_path: {path} names {target!r} as {where}, but neither the command line nor a file in conf or "
            f"--config-dir does; if you trust it, add trust={package}"
        )


def _only_computes(where: str, target: str) -> bool:
    """Whether it is an optimizer or schedule of torch's or holotrain's, by the name that will be imported."""
    if (where, target) == ("model.adapters", "peft.LoraConfig"):  # which only holds values
        return True
    if where not in COMPUTING:
        return False
    module, base = COMPUTING[where]
    if target.startswith(module):
        return re.fullmatch(r"[^_.][^.]*", target.removeprefix(module)) is not None
    try:
        return target.startswith("torch.optim.") and base in signature(target).bases
    except ValueError:
        return False


OF_ANY_GROUP = ("experiment", "debug", "sweep", "task", "data")
"""Groups whose files may change others."""


def _named_in_files(config_dir: str | None) -> set[tuple[str, str]]:
    """The classes that ``conf`` and the user's folder name, each with its place in a configuration."""
    found = {("model", node[TARGET]) for node in models().values()}
    for folder, group in itertools.product(filter(None, (config_folder(), config_dir)), {*GROUPS, *OF_ANY_GROUP}):
        places = [group, ""] if group in OF_ANY_GROUP else [group]
        for path in Path(folder, group).rglob("*.yaml"):
            try:
                node = OmegaConf.to_container(OmegaConf.load(path))
            except (YAMLError, OmegaConfBaseException, OSError):
                continue  # it vouches for nothing
            for place in places:
                found |= {(where, target) for where, target in targets(node, place) if isinstance(target, str)}
    return found
