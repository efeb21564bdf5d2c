"""The configuration that travels inside a checkpoint, and how a command line changes it.

A checkpoint keeps the resolved configuration of its run as plain data. A command that starts from a checkpoint checks this data
against the schemas, hands it to Hydra as the primary configuration, and lays the command line over it.

A checkpoint is a file that anybody may have written. Nothing in it becomes an argument, an override, the name of a group or an
interpolation, and it does not decide where files are written.
"""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore

from holotrain.checks import described_by
from holotrain.config.arguments import Arguments, literal
from holotrain.config.chosen import Chosen, checked_values, chosen, defaults, named_defaults
from holotrain.config.composition import options
from holotrain.config.folders import LAST_CHECKPOINT, checkpoint_path, run_folder
from holotrain.config.given import GIVEN
from holotrain.config.schema.backward import BackwardConfig
from holotrain.config.schema.beside import PROCESSES
from holotrain.config.schema.classes import CLASSIFIER, IMAGES, TEXT, default_backward, is_a, takes
from holotrain.config.schema.commands import COMMANDS, options_of
from holotrain.config.schema.run import GROUPS, NAMED, OF_THE_TASK, OPEN, RunConfig
from holotrain.config.signatures import checked, defaults_of
from holotrain.config.trust import require_trusted
from holotrain.errors import UserError
from holotrain.targets import TARGET, targets

KEY = "holotrain"
"""Where a checkpoint holds what ``stamp`` returns."""

NEVER_KEPT = ("output_dir", "ckpt_path", "trust", "logger")
"""Options of a run that only a command line sets."""

LOCAL_LOGGERS = ("tensorboard", "csv", "none")
"""Options of the group ``logger`` that a resumed run takes over. Others send data out, so the command line must name them."""

COMMAND_LINE_ONLY = (
    *("trust", "data.cache_dir", "data.download"),
    *("trainer.profiler", "trainer.plugins", "trainer.model_registry"),
)
"""Options that decide what is run, what is written, and where: a file does not set them."""

KEPT = [field.name for field in fields(RunConfig) if field.name not in NEVER_KEPT]

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


def stamp(config: RunConfig, choices: dict[str, str], description: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint keeps of a run, in plain containers.

    Args:
        choices: the option of each group; for display.
        description: the trained model, as ``holotrain.config.build.description`` returns it.
    """
    return {"config": _kept(config), "choices": choices, "description": description}


def container(config: RunConfig) -> dict[str, Any]:
    """The configuration in plain containers. ``typed`` reverses it."""
    found = {}
    for name in (option.name for option in fields(config)):
        value = getattr(config, name)
        found[name] = value.plain() if isinstance(value, Chosen) else asdict(value) if is_dataclass(value) else value
    for group in NAMED:
        found[group] = {name: each.plain() for name, each in found[group].items()}
    return found


def _kept(config: RunConfig) -> dict[str, Any]:
    return {key: value for key, value in container(config).items() if key in KEPT}


@dataclass
class Origin:
    """The checkpoint that a command starts from.

    Args:
        config: its configuration in plain containers, checked.
        choices: the option of each group when it was trained; for display.
    """

    config: dict[str, Any]
    choices: dict[str, str]


def origin(arguments: Arguments) -> Origin | None:
    """The checkpoint that ``ckpt_path=`` or ``resume=true`` name on the command line, if any.

    A sweep of trainings has none: each job composes its own configuration and continues in its own folder. Other sweeps may
    vary everything but the checkpoint.

    Raises:
        UserError: there is no such file, it is not a checkpoint of holotrain, or it names a class that is not trusted.
    """
    if arguments.multirun and arguments.command == "fit":
        return None
    if arguments.resume and arguments.value("ckpt_path"):
        raise UserError("resume=true continues from the last checkpoint of its run; leave out ckpt_path=")
    if arguments.multirun and "," in (arguments.value("ckpt_path") or ""):
        raise UserError(f"ckpt_path: a sweep of {arguments.command} starts from one checkpoint; run the command once for each")
    path = _checkpoint_path(arguments)
    if path is None:
        return None
    kept = load(path)[KEY]
    trusted = (arguments.value("trust") or "").strip("[]").split(",")
    require_trusted(kept["config"], path, [*filter(None, map(str.strip, trusted))], arguments.words, arguments.config_dir)
    return Origin(kept["config"], kept["choices"])


def primary(arguments: Arguments, start: Origin) -> str:
    """Registers the primary configuration of a command that starts from a checkpoint, and returns its name.

    The values of the checkpoint stand in it as plain data, after the defaults of the command. Every group is an empty entry of
    its defaults list, so that the command line can choose an option from it.
    """
    command = arguments.command
    given = {word.partition("=")[0].lstrip("+~") for word in arguments.overrides}
    if "data.download" in given and not {"data.root", "data"} & given:
        raise UserError("data.root: data.download=true writes into it, so a checkpoint cannot name it; give data.root=...")
    groups = [group for group in GROUPS if group not in ("task", "trainer")]
    groups += ["task", "experiment", "debug", "sweep"]  # last, since these may change the option of another group
    kept, logger = dict(start.config), "tensorboard"
    # A file does not decide what is sent where.
    if arguments.resume and start.choices.get("logger") in LOCAL_LOGGERS:
        logger = start.choices["logger"]
    if command != "fit" or "trainer" in given:  # the number of processes may change; the other options stay
        kept["trainer"] = {name: value for name, value in kept["trainer"].items() if name not in PROCESSES}
    for group in (*OPEN, "callbacks"):
        if group in given and group != "trainer":  # the option replaces what the checkpoint has
            del kept[group]
    parts = [
        {"trainer": "default"},
        "_self_",
        *({group: logger if group == "logger" else None} for group in groups),
    ]
    node = options(command, parts)
    node.merge_with(_literally(kept))
    name = "_checkpoint"
    ConfigStore.instance().store(name=name, node=node)
    return name


def without_leftovers(plain: dict[str, Any], start: Origin, overrides: list[str]) -> dict[str, Any]:
    """What Hydra composed over a checkpoint. In a group of another kind now, the options of the old kind go."""
    result = dict(plain)
    given = {override.lstrip("+~").partition("=")[0] for override in overrides}
    for group in OPEN:
        kept = start.config[group]
        if kept and plain.get(group) and plain[group].get(TARGET) != kept[TARGET]:
            result[group] = {
                name: value
                for name, value in plain[group].items()
                if name not in kept or value != kept[name] or f"{group}.{name}" in given
            }
    usual = [default_backward((config["model"] or {}).get(TARGET)) for config in (plain, start.config)]
    if plain["backward"] == start.config["backward"] and usual[0] != usual[1]:
        result["backward"] = {}  # that of the other model
    return result


def _checkpoint_path(arguments: Arguments) -> Path | None:
    if arguments.resume:
        from holotrain.ranks import shards

        folder = arguments.value("hydra.run.dir")
        folder = folder or run_folder(arguments.command, arguments.value("output_dir") or "runs", True)
        path = Path(folder).expanduser() / LAST_CHECKPOINT
        shards.recover(path)
        return path
    given = arguments.value("ckpt_path")
    if given in (None, "null", ""):
        return None
    return checkpoint_path(given, arguments.command, arguments.value("output_dir") or "runs")


def load(path: Path) -> dict[str, Any]:
    """Reads a checkpoint of holotrain's, on the CPU, running nothing that stands in it; of an exported folder all but weights.

    What lies in shards is not read yet (:func:`holotrain.ranks.shards.read_all`).

    Raises:
        UserError: it is missing, damaged, or of another program.
    """
    from holotrain.ranks import shards

    if is_exported(path):
        return _exported(path)
    if not path.exists():
        raise UserError(f"ckpt_path: there is no file {path}")
    with described_by("ckpt_path"):
        checkpoint = shards.load(path)
    if not isinstance(checkpoint, dict) or KEY not in checkpoint:
        raise UserError(f"ckpt_path: {path} was not written by holotrain: it holds no configuration of a run")
    return _described(checkpoint, path)


def is_exported(path: Path) -> bool:
    """Whether this is a folder of ``holotrain export``'s, if it is anything: a checkpoint in shards is one too."""
    from holotrain.ranks.shards import is_folder

    return path.is_dir() and not is_folder(path)


def _exported(folder: Path) -> dict[str, Any]:
    from holotrain.models.saved import read_config

    with described_by("ckpt_path"):
        config = read_config(folder)
    if KEY not in config:
        raise UserError(f"ckpt_path: {folder} was not exported by the command line: it holds no configuration of a run")
    found = _described({KEY: config[KEY]}, folder)
    described = found[KEY]["description"]
    if any(config[key] != described[key] for key in ("target", "arguments")):
        raise UserError(f"ckpt_path: {folder} is damaged: its config.json describes two models")
    return found


def _described(checkpoint: dict[str, Any], path: Path) -> dict[str, Any]:
    """The checkpoint, with what it says of itself checked.

    Raises:
        UserError: a part is missing, unknown or of another type.
    """
    kept = checkpoint[KEY]
    if not isinstance(kept, dict) or not {"config", "choices", "description"} <= kept.keys():
        raise UserError(f"ckpt_path: {path} is of an older holotrain, or damaged: it does not say what was trained")
    try:
        config = _checked_config(kept["config"])
        for group, option in _typed_parts("its choices", kept["choices"], {}).items():
            if not re.fullmatch(r"\w[\w-]*=[^=\n]+", f"{group}={option}"):
                raise ValueError(f"{group!r}: {option!r} among its choices is not a group with its option")
        description = _typed_parts("its parts", kept["description"], DESCRIPTION)
        _check_description(description, config)
        checkpoint = _typed_parts("its parts", checkpoint, STATE)
        for name, weight in checkpoint.get("state_dict", {}).items():
            if not isinstance(name, str) or not hasattr(weight, "shape"):
                raise ValueError(f"{name!r} in state_dict is not a tensor")
        if not re.fullmatch(r"[2-9](\.\w+)*", checkpoint.get("pytorch-lightning_version", "2")):
            raise ValueError(f"it was written by Lightning {checkpoint['pytorch-lightning_version']!r}")
    except (UserError, ValueError) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"ckpt_path: {path} is damaged, or of another version of holotrain: {said}") from error
    return checkpoint | {KEY: kept | {"config": config, "description": description}}


def _typed_parts(what: str, parts: Any, kinds: dict[str, str]) -> dict[str, Any]:
    """A mapping, with its values as these types take them."""
    if not isinstance(parts, dict):
        raise ValueError(f"{what} are not a mapping")
    return parts | {key: checked(key, kind, parts[key]) for key, kind in kinds.items() if key in parts}


def _checked_config(plain: Any) -> dict[str, Any]:
    """The configuration of a file in plain containers, less what a file must not decide."""
    for key in _typed_parts("its options", plain, {}):
        if key not in (*KEPT, *NEVER_KEPT):
            raise ValueError(f"there is no option {key!r}")
    kept = _kept(typed("fit", {key: value for key, value in plain.items() if key in KEPT}))
    if not _is_plain(kept):
        raise ValueError("its configuration holds more than values, lists and mappings")
    for group, _, name in (option.partition(".") for option in COMMAND_LINE_ONLY):
        if kept.get(group, {}).pop(name, None) is not None and name == "download":
            kept[group][name] = False  # which is not its default
    return kept


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | int | float)


def _check_description(described: dict[str, Any], config: dict[str, Any]) -> None:
    trained, data, task = config["model"] or config["task"], config["data"][TARGET], config["task"][TARGET]
    needed = {"tokenizer": is_a(data, TEXT), "statistics": is_a(data, IMAGES)}
    needed["class_names"] = is_a(data, TEXT, IMAGES) and is_a(task, CLASSIFIER)
    for key in ("target", "arguments", "facts", *(key for key, is_needed in needed.items() if is_needed)):
        if key not in described:
            raise ValueError(f"its description lacks {key!r}")
    if unknown := [key for key in described if key not in DESCRIPTION]:
        raise ValueError(f"{unknown[0]!r} in its description is unknown")
    if described["target"] != trained[TARGET] or TARGET in described["arguments"] or not _is_plain(described["arguments"]):
        raise ValueError("its description is of another model than its configuration")
    trusted = list(targets(trained))
    if unlike := [target for where, target in targets(described["arguments"]) if (where, target) not in trusted]:
        raise ValueError(f"its description names {unlike[0]!r}, and its configuration does not")


def typed(command: str, plain: dict[str, Any]) -> RunConfig:
    """Checks a configuration and returns it as dataclasses.

    Args:
        plain: resolved, in plain containers.

    Raises:
        UserError: an unknown option, a value of another type or out of range, or a combination that cannot be.
    """
    values = completed(command, plain)
    for group, filled in OPEN.items():
        values[group] = values[group] and chosen(group, values[group], filled)
    for group, filled in NAMED.items():
        values[group] = {name: chosen(f"{group}.{name}", each, filled) for name, each in values[group].items()}
    with described_by("backward"):
        values["backward"] = BackwardConfig(**checked_values("backward", options_of(BackwardConfig), values["backward"]))
    try:
        return COMMANDS[command](**checked_values("", options_of(COMMANDS[command]), values))
    except ValueError as error:
        raise UserError(str(error)) from error


def completed(command: str, plain: dict[str, Any], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """A configuration with the defaults of all options that it does not mention. Checks no values.

    Args:
        overrides: what a command line gives, which must not be in vain.

    Raises:
        UserError: a class that there is not, or a group that the task does not take.
    """
    options = options_of(COMMANDS[command])
    found = defaults_of(options) | plain
    for group, filled in OPEN.items():
        given, task = plain.get(group) or None, found["task"]
        if group in OF_THE_TASK and not takes(task[TARGET], group):
            if in_vain := [word for word in overrides if re.match(rf"[+~]?{group}[.=]", word)]:
                named = "the given task" if task[TARGET] == GIVEN else task[TARGET]
                raise UserError(f"{in_vain[0]}: {named} takes no {group}")
            given = None
        elif given or group != "synthesis":
            given = defaults(group, given or {}, filled)
        found[group] = given
    found |= {group: named_defaults(group, plain.get(group) or {}, filled) for group, filled in NAMED.items()}
    if not isinstance(given := plain.get("backward") or {}, dict):
        raise UserError(f"backward: {given!r} is not a mapping")
    usual = {"kind": default_backward((found["model"] or {}).get(TARGET))}
    found["backward"] = defaults_of(options_of(BackwardConfig)) | usual | given
    return {name: found[name] for name in options} | found


def _literally(node: Any) -> Any:
    """What was resolved already is not to be resolved again: a prompt may well hold a dollar and a brace."""
    if isinstance(node, dict):
        return {key: _literally(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_literally(value) for value in node]
    return literal(node) if isinstance(node, str) else node
