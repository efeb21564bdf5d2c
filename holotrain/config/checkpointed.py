"""The configuration that travels inside a checkpoint, and how a command line changes it.

A checkpoint keeps the resolved configuration of its run as plain data. A command that starts from a checkpoint checks this data
against the schemas, hands it to Hydra as the primary configuration, and lays the command line over it.

A checkpoint is a file that anybody may have written. Nothing in it becomes an argument, an override, the name of a group or an
interpolation, and it does not decide where files are written.
"""

import re
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from holotrain.checks import described_by
from holotrain.config.arguments import Arguments, literal
from holotrain.config.chosen import TARGET, Chosen, defaults
from holotrain.config.folders import LAST_CHECKPOINT, run_folder
from holotrain.config.register import options
from holotrain.config.schema import COMMANDS, GROUPS, KINDS, OPEN, PLAIN, RunConfig
from holotrain.config.schema.backward import reversible
from holotrain.config.schema.data import TextDataConfig
from holotrain.config.schema.running import CALLBACK, CallbacksConfig
from holotrain.config.schema.task import LEARNED_FROM, tells_classes
from holotrain.config.schema.trainer import PROCESSES
from holotrain.config.trust import require_trusted
from holotrain.errors import UserError

KEY = "holotrain"
"""Where a checkpoint holds what ``stamp`` returns."""

BRINGS = {"task": ("data", "model")}
"""The groups whose default an option of another group brings along."""

NEVER_KEPT = ("output_dir", "ckpt_path", "trust")
"""Options of a run that only a command line sets."""

SHAPE_ARGUMENTS = ("image_size", "channels", "classes", "vocab", "context")
"""Arguments of models that come from the data."""

ENGINE_ARGUMENTS = ("backward", "store", "exact", "keep")
"""Arguments of models that come from the options of ``backward``."""

NOT_FROM_FILES = {
    "data": {"cache_dir": None, "download": False},
    "logger": {"tracking_uri": None},
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
    for name, value in vars(config).items():
        found[name] = value.plain() if isinstance(value, Chosen) else asdict(value) if is_dataclass(value) else value
    del found["callbacks"]["others"]
    found["callbacks"] |= {name: other.plain() for name, other in config.callbacks.others.items()}
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
    brought = {group for chosen in given for group in BRINGS.get(chosen, ())}
    groups = [group for group in GROUPS if group not in (*brought, "task", "trainer")]
    groups += ["task", "experiment", "debug", "sweep"]  # last, since these may change the option of another group
    kept, logger = dict(start.config), None
    if not arguments.resume:  # a file does not decide what is sent to W&B or MLflow
        logger = "tensorboard"
        del kept["logger"]
    if command != "fit" or "trainer" in given:  # the number of processes may change; the other options stay
        kept["trainer"] = {name: value for name, value in kept["trainer"].items() if name not in PROCESSES}
    for group in OPEN:
        if group in given and group != "trainer":  # the option replaces what the checkpoint has
            del kept[group]
    node = options(command)
    node.defaults = [
        "_hydra",
        {"trainer": "default"},
        "_self_",
        *({group: logger if group == "logger" else None} for group in groups),
        {"override hydra/hydra_logging": "none"},
        {"override hydra/job_logging": "none"},
    ]
    node.hydra = {"job": {"name": command}}
    node.merge_with(_literally(kept))
    name = "_checkpoint"
    ConfigStore.instance().store(name=name, node=node)
    return name


def without_leftovers(plain: dict[str, Any], start: Origin, overrides: list[str]) -> dict[str, Any]:
    """What Hydra composed over a checkpoint. In a group of another kind now, the options of the old kind go."""
    result = dict(plain)
    given = {override.lstrip("+~").partition("=")[0] for override in overrides}
    for group, classes in KINDS.items():
        kind = plain[group].get("kind")
        if kind in classes and kind != start.config[group]["kind"]:
            names = [field.name for field in fields(classes[kind])]
            result[group] = {name: value for name, value in plain[group].items() if name in names}
    for group in OPEN:
        kept = start.config[group]
        if plain[group][TARGET] != kept[TARGET]:
            result[group] = {
                name: value
                for name, value in plain[group].items()
                if name not in kept or value != kept[name] or f"{group}.{name}" in given
            }
    models = plain["model"].get("kind", ""), start.config["model"]["kind"]
    if plain["backward"] == start.config["backward"] and reversible(models[0]) != reversible(models[1]):
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
    path = arguments.value("ckpt_path")
    return None if path in (None, "null", "") else Path(path).expanduser()


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

    if not (folder / "config.json").is_file() and (folder / LAST_CHECKPOINT).exists():
        raise UserError(f"ckpt_path: {folder} is the folder of a run; give ckpt_path={folder / LAST_CHECKPOINT}")
    with described_by("ckpt_path"):
        config = read_config(folder)
    if KEY not in config:
        raise UserError(f"ckpt_path: {folder} was not exported by the command line: it holds no configuration of a run")
    return _described({KEY: config[KEY]}, folder)


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
        _check_description(kept["description"], config["task"]["kind"])
        _check_state(checkpoint)
    except (UserError, ValueError, OmegaConfBaseException) as error:
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(f"ckpt_path: {path} is damaged, or of another version of holotrain: {said}") from error
    return checkpoint | {KEY: kept | {"config": config}}


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
        if isinstance(chosen, Chosen):
            kept[group] |= {name: value for name, value in fixed.items() if name in chosen.arguments}
            continue
        known = type(chosen).__dataclass_fields__
        for name, value in fixed.items():
            if name in known:
                kept[group][name] = known[name].default if value is None else value
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
    return all(map(_is_plain, value)) if isinstance(value, list) else _is_scalar(value)


def _is_scalar(value: Any) -> bool:
    return value is None or isinstance(value, str | int | float)


def _check_choices(choices: Any) -> None:
    if not isinstance(choices, dict):
        raise ValueError("its choices are not a mapping")
    for group, option in choices.items():
        words = isinstance(group, str) and isinstance(option, str)
        if not words or not re.fullmatch(r"\w[\w-]*", group) or not re.fullmatch(r"[^=\n]+", option):
            raise ValueError(f"{group!r}: {option!r} among its choices is not a group with its option")


def _check_description(described: Any, task: str) -> None:
    def is_list(value: Any, kind: type) -> bool:
        return isinstance(value, list) and all(isinstance(entry, kind) for entry in value)

    if not isinstance(described, dict):
        raise ValueError("its description is not a mapping")
    valid = {
        "kind": lambda value: isinstance(value, str) and value in KINDS["model"],
        "arguments": lambda value: isinstance(value, dict) and all(map(_is_argument, value.values())),
        "tokenizer": lambda value: isinstance(value, str),
        "statistics": lambda value: is_list(value, list) and len(value) == 2 and all(is_list(x, int | float) for x in value),
        "class_names": lambda value: is_list(value, str),
    }
    of_text = issubclass(LEARNED_FROM[task], TextDataConfig)
    needed = ["kind", "arguments", "tokenizer" if of_text else "statistics", *(["class_names"] if tells_classes(task) else [])]
    for key in dict.fromkeys((*needed, *described)):
        if key not in valid or not valid[key](described.get(key)):
            raise ValueError(f"{key!r} in its description is missing, unknown or of another type")
    known = [*KINDS["model"][described["kind"]].__dataclass_fields__, *ENGINE_ARGUMENTS, *SHAPE_ARGUMENTS]
    for name in described["arguments"]:
        if name not in known:
            raise ValueError(f"its model takes no {name!r}")


def _is_argument(value: Any) -> bool:
    return all(map(_is_argument, value)) if isinstance(value, list | tuple) else _is_scalar(value)


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


def completed(command: str, plain: dict[str, Any]) -> DictConfig:
    """A configuration with the defaults of all options that it does not mention. Checks names and types, but no values.

    Raises:
        UserError, OmegaConfBaseException: see :func:`typed`.
    """
    root = OmegaConf.structured(COMMANDS[command])
    for group, classes in KINDS.items():
        if not isinstance(plain.get(group), dict):
            raise UserError(f"{group}: an option is needed; give {group}=...")
        kind = plain[group].get("kind")
        if kind not in classes:
            raise UserError(f"{group}.kind: {kind!r} is not one of {', '.join(classes)}")
        root[group] = OmegaConf.structured(classes[kind])
    for group, schema in PLAIN.items():
        root[group] = OmegaConf.structured(schema)
    for group, filled in OPEN.items():
        root[group] = defaults(group, plain.get(group) or {}, filled)
    plain = plain | {"callbacks": _with_others(plain.get("callbacks") or {})}
    root.backward.kind = "reversible" if reversible(plain["model"]["kind"]) else "autograd"
    return OmegaConf.merge(root, plain)


def _with_others(callbacks: dict[str, Any]) -> dict[str, Any]:
    """The options of the group ``callbacks``, with what names a class of its own apart from the others."""
    others = {name: value for name, value in callbacks.items() if isinstance(value, dict) and TARGET in value}
    for name in others:
        if name in CallbacksConfig.__dataclass_fields__:
            raise UserError(f"callbacks.{name}: is an option already; give the callback another name")
    own = {name: value for name, value in callbacks.items() if name not in others}
    return own | {"others": {name: defaults(f"callbacks.{name}", value, CALLBACK) for name, value in others.items()}}


def _literally(node: Any) -> Any:
    """What was resolved already is not to be resolved again: a prompt may well hold a dollar and a brace."""
    if isinstance(node, dict):
        return {key: _literally(value) for key, value in node.items()}
    if isinstance(node, list):
        return [_literally(value) for value in node]
    return literal(node) if isinstance(node, str) else node
