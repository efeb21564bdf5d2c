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
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from holotrain.checks import described_by
from holotrain.config.arguments import Arguments, literal
from holotrain.config.chosen import Chosen, defaults, named_defaults
from holotrain.config.folders import LAST_CHECKPOINT, checkpoint_path, run_folder
from holotrain.config.given import GIVEN
from holotrain.config.register import options
from holotrain.config.schema import COMMANDS, GROUPS, NAMED, OPEN, RunConfig
from holotrain.config.schema.classes import CLASSIFIER, IMAGES, TEXT, default_backward, is_a, takes
from holotrain.config.schema.run import OF_THE_TASK
from holotrain.config.schema.trainer import PROCESSES
from holotrain.config.trust import require_trusted
from holotrain.errors import UserError
from holotrain.targets import TARGET, missing_package, targets

KEY = "holotrain"
"""Where a checkpoint holds what ``stamp`` returns."""

NEVER_KEPT = ("output_dir", "ckpt_path", "trust", "logger")
"""Options of a run that only a command line sets."""

LOCAL_LOGGERS = ("tensorboard", "csv", "none")
"""Options of the group ``logger`` that a resumed run takes over. Others send data out, so the command line must name them."""

NOT_FROM_FILES = {
    "data": {"cache_dir": None, "download": False},
    "model": {"download": False},
    "trainer": {"profiler": None, "plugins": None, "model_registry": None},
}
"""Options that decide what is written, and where, with the value that they have unless the command line sets them. None: the
default of the schema."""

COMMAND_LINE_ONLY = ("trust", *(f"{group}.{name}" for group, fixed in NOT_FROM_FILES.items() for name in fixed))


def stamp(config: RunConfig, choices: dict[str, str], description: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint keeps of a run, in plain containers.

    Args:
        choices: the option of each group; for display.
        description: the trained model, as ``holotrain.config.build.description`` returns it.
    """
    kept = {key: value for key, value in container(config).items() if key in _kept_keys()}
    return {"config": kept, "choices": choices, "description": description}


def container(config: RunConfig) -> dict[str, Any]:
    """The configuration in plain containers. ``typed`` reverses it."""
    found = {}
    for name in (option.name for option in fields(config)):
        value = getattr(config, name)
        found[name] = value.plain() if isinstance(value, Chosen) else asdict(value) if is_dataclass(value) else value
    for group in NAMED:
        found[group] = {name: each.plain() for name, each in found[group].items()}
    return found


@dataclass
class Origin:
    """The checkpoint that a command starts from.

    Args:
        path: the file or folder.
        config: its configuration in plain containers, checked.
        choices: the option of each group when it was trained; for display.
    """

    path: Path
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
    return Origin(path, kept["config"], kept["choices"])


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
    if "model.name" in given and kept["model"]:  # the configuration of another network
        kept["model"] = {name: value for name, value in kept["model"].items() if name != "config"}
    for group in (*OPEN, "callbacks"):
        if group in given and group != "trainer":  # the option replaces what the checkpoint has
            del kept[group]
    parts = [
        "_hydra",
        {"trainer": "default"},
        "_self_",
        *({group: logger if group == "logger" else None} for group in groups),
        {"override hydra/hydra_logging": "none"},
        {"override hydra/job_logging": "none"},
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


def _kept_keys() -> list[str]:
    return [field.name for field in fields(RunConfig) if field.name not in NEVER_KEPT]


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
    """The checkpoint, with what it says of itself checked against the schemas.

    Raises:
        UserError: a part is missing, unknown or of another type.
    """
    kept = checkpoint[KEY]
    if not isinstance(kept, dict) or not {"config", "choices", "description"} <= kept.keys():
        raise UserError(f"ckpt_path: {path} is of an older holotrain, or damaged: it does not say what was trained")
    try:
        config = _checked_config(kept["config"])
        _check_choices(kept["choices"])
        _check_description(kept["description"], config)
        _check_state(checkpoint)
    except (UserError, ValueError, OmegaConfBaseException) as error:
        _require_packages(kept["config"], path)
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"ckpt_path: {path} is damaged, or of another version of holotrain: {said}") from error
    return checkpoint | {KEY: kept | {"config": config}}


def _require_packages(config: Any, path: Path) -> None:
    """
    Raises:
        UserError: a group, or a member of one, names a class of a package that Python does not find.
    """
    groups = {group: node for group, node in config.items() if isinstance(node, dict)} if isinstance(config, dict) else {}
    members = {f"{group}.{name}": each for group, node in groups.items() for name, each in node.items()}
    for where, node in (groups | members).items():
        target = node.get(TARGET) if isinstance(node, dict) else None
        if isinstance(target, str) and (missing := missing_package(target)):
            trusted = f"with trust={target.partition('.')[0]}, unless --config-dir names the class"
            raise UserError(f"ckpt_path: {path} names {target!r} as {where}, and {missing} ({trusted})")


def _checked_config(plain: Any) -> dict[str, Any]:
    """The configuration of a file in plain containers, less what a file must not decide."""
    if not isinstance(plain, dict):
        raise ValueError("its configuration is not a mapping")
    unknown = [key for key in plain if key not in (*_kept_keys(), *NEVER_KEPT)]
    if unknown:
        raise ValueError(f"there is no option {unknown[0]!r}")
    config = typed("fit", {key: value for key, value in plain.items() if key in _kept_keys()})
    _check_values(config, "config")
    kept = {key: value for key, value in container(config).items() if key in _kept_keys()}
    for group, fixed in NOT_FROM_FILES.items():
        chosen = getattr(config, group)
        if chosen is None:
            continue
        options = OPEN[group].options(chosen.target)
        known = {name: options[name].default for name in chosen.arguments.keys() & fixed if name in options}
        kept[group] |= {name: default if fixed[name] is None else fixed[name] for name, default in known.items()}
    return kept


def _check_values(node: Any, where: str) -> None:
    """Options whose type is open hold scalars or lists of scalars; arguments of any class may be nested."""
    if isinstance(node, Chosen):
        if not _is_plain(node.arguments):
            raise ValueError(f"{where} holds more than values, lists and mappings")
    elif isinstance(node, dict) and all(isinstance(value, Chosen) for value in node.values()):
        for name, value in node.items():
            _check_values(value, f"{where}.{name}")
    elif is_dataclass(node):
        for name, value in vars(node).items():
            _check_values(value, f"{where}.{name}")
    elif not _is_scalar(node) and not (isinstance(node, list) and all(map(_is_scalar, node))):
        raise ValueError(f"{where} is {type(node).__name__}, not a value or a list of values")


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(each) for key, each in value.items())
    return all(map(_is_plain, value)) if isinstance(value, list | tuple) else _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _check_choices(choices: Any) -> None:
    if not isinstance(choices, dict):
        raise ValueError("its choices are not a mapping")
    for group, option in choices.items():
        words = isinstance(group, str) and isinstance(option, str)
        if not words or not re.fullmatch(r"\w[\w-]*", group) or not re.fullmatch(r"[^=\n]+", option):
            raise ValueError(f"{group!r}: {option!r} among its choices is not a group with its option")


def _check_description(described: Any, config: dict[str, Any]) -> None:
    def is_list(value: Any, kind: type) -> bool:
        return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)

    if not isinstance(described, dict):
        raise ValueError("its description is not a mapping")
    trained = config["model"] or config["task"]
    valid = {
        "target": lambda value: value == trained[TARGET],  # which is trusted
        "arguments": lambda value: isinstance(value, dict) and TARGET not in value and _is_plain(value),
        "facts": lambda value: isinstance(value, dict) and all(map(_is_scalar, value.values())),
        "tokenizer": lambda value: isinstance(value, str),
        "statistics": lambda value: is_list(value, list) and len(value) == 2 and all(is_list(x, int | float) for x in value),
        "class_names": lambda value: is_list(value, str),
    }
    data, task = config["data"][TARGET], config["task"][TARGET]
    of_ours = {"tokenizer": is_a(data, TEXT), "statistics": is_a(data, IMAGES)}
    of_ours["class_names"] = is_a(data, TEXT, IMAGES) and is_a(task, CLASSIFIER)
    needed = [key for key, is_needed in of_ours.items() if is_needed]
    for key in dict.fromkeys(("target", "arguments", "facts", *needed, *described)):
        if key not in valid or not valid[key](described.get(key)):
            raise ValueError(f"{key!r} in its description is missing, unknown or of another type")
    trusted = list(targets(trained))
    if unlike := [target for where, target in targets(described["arguments"]) if (where, target) not in trusted]:
        raise ValueError(f"its description names {unlike[0]!r}, and its configuration does not")


def _check_state(checkpoint: dict[str, Any]) -> None:
    """The parts that this program and Lightning read by name."""
    kinds = {
        **dict.fromkeys(("state_dict", "callbacks", "loops"), dict),
        **dict.fromkeys(("optimizer_states", "lr_schedulers"), list),
        **dict.fromkeys(("epoch", "global_step"), int),
        "pytorch-lightning_version": str,
    }
    for key, kind in kinds.items():
        if key in checkpoint and not isinstance(checkpoint[key], kind):
            raise ValueError(f"{key} is {type(checkpoint[key]).__name__}, not {kind.__name__}")
    for name, weight in checkpoint.get("state_dict", {}).items():
        if not isinstance(name, str) or not hasattr(weight, "shape"):
            raise ValueError(f"{name!r} in state_dict is not a tensor")
    if not re.fullmatch(r"[2-9](\.\w+)*", checkpoint.get("pytorch-lightning_version", "2")):
        raise ValueError(f"it was written by Lightning {checkpoint['pytorch-lightning_version']!r}")


def typed(command: str, plain: dict[str, Any]) -> RunConfig:
    """Checks a configuration against the schemas and returns it as dataclasses.

    Raises:
        UserError: a value out of range, or a combination that cannot be.
        OmegaConfBaseException: an unknown key, a value of another type, a value that is missing.
    """
    return OmegaConf.to_object(completed(command, _literally(plain)))


def completed(command: str, plain: dict[str, Any], overrides: Iterable[str] = ()) -> DictConfig:
    """A configuration with the defaults of all options that it does not mention. Checks names and types, but no values.

    Args:
        overrides: what a command line gives, which must not be in vain.

    Raises:
        UserError, OmegaConfBaseException: see :func:`typed`.
    """
    root = OmegaConf.structured(COMMANDS[command])
    plain = dict(plain)
    for group, filled in OPEN.items():
        given = plain.get(group) or None
        if group in OF_THE_TASK and not takes(root.task[TARGET], group):
            if in_vain := [word for word in overrides if re.match(rf"[+~]?{group}[.=]", word)]:
                named = root.task[TARGET]
                raise UserError(f"{in_vain[0]}: {'the given task' if named == GIVEN else named} takes no {group}")
            given = None
        elif given or group != "synthesis":
            given = defaults(group, given or {}, filled)
        root[group] = given
        plain[group] = given
    plain |= {group: named_defaults(group, plain.get(group) or {}, filled) for group, filled in NAMED.items()}
    root.backward.kind = default_backward((plain["model"] or {}).get(TARGET))
    return OmegaConf.merge(root, plain)


def _literally(node: Any) -> Any:
    """What was resolved already is not to be resolved again: a prompt may well hold a dollar and a brace."""
    if isinstance(node, dict):
        return {key: _literally(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_literally(value) for value in node]
    return literal(node) if isinstance(node, str) else node
