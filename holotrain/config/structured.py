"""A whole configuration: as Hydra composes it from files and overrides, with the defaults of every option, checked, as
dataclasses, and back in plain containers."""

import json
import re
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.version import VersionBase
from omegaconf import DictConfig, ListConfig, OmegaConf

from holotrain.config import option_groups as groups
from holotrain.config.command_options import COMMANDS, RunConfig, options_of
from holotrain.config.objects import PYTHON_OBJECT, ObjectConfig
from holotrain.config.option_groups import GROUPS, BackwardConfig, default_backward, optimizer_for, schema_of, takes
from holotrain.config.signatures import (
    CONFIGURATION_ERRORS,
    UNKNOWN,
    Option,
    defaults_of,
    explained,
    literally,
    signature,
    structured_config,
    to_plain,
)
from holotrain.errors import UserError, as_user_error, did_you_mean
from holotrain.folders import run_folder
from holotrain.schedules import OPTIONS
from holotrain.targets import TARGET, targets


def structured(command: str, plain: dict[str, Any]) -> RunConfig:
    """A configuration, resolved and in plain containers, as dataclasses.

    Raises:
        UserError: an unknown option, a value of another type or out of range, or a combination that cannot be.
    """
    return checked(command, with_defaults(command, OmegaConf.create(literally(plain))))


def with_defaults(command: str, config: DictConfig, overrides: Iterable[str] = ()) -> DictConfig:
    """A configuration that Hydra composed as a structured config, whose names and types are checked: those of all options.

    Args:
        overrides: those of the command line, none of which may be about a group that the task does not take.
    """
    plain = to_plain(config)
    schema, values = structured_config(options_of(COMMANDS[command])), {}
    for group in groups.OBJECT_GROUPS:
        chosen = plain.get(group) or {}
        if group == "optimizer" and chosen:
            named = {name: OmegaConf.select(config, f"model.{name}") for name in ("name", "pretrained")}
            chosen = optimizer_for(chosen, schema.task[TARGET], plain.get("model") and plain["model"] | named)
        if group in groups.OF_THE_TASK and not takes(schema.task[TARGET], group):
            _check_unused(group, schema.task[TARGET], overrides)
            chosen = None
        elif group == "synthesis":
            chosen = chosen or None
        schema[group], values[group] = chosen if chosen is None else group_config(group, chosen), chosen
    for group in groups.NAMED_GROUPS:
        values[group] = _members(group, plain.get(group) or {})
        schema[group] = {name: group_config(f"{group}.{name}", each) for name, each in values[group].items()}
    schema.backward = structured_config(options_of(BackwardConfig))
    schema.backward.kind = default_backward((values["model"] or {}).get(TARGET))
    try:
        return cast(DictConfig, OmegaConf.merge(schema, plain | values))
    except CONFIGURATION_ERRORS as error:
        raise explained(error, keys(schema)) from None


def keys(config: DictConfig) -> list[str]:
    """Of all options, and the names of the groups."""
    plain = to_plain(config)
    return [*plain, *(f"{group}.{name}" for group, node in plain.items() if isinstance(node, dict) for name in node)]


def group_config(where: str, plain: dict[str, Any]) -> DictConfig:
    """The options of a class or function, as its signature has them: a structured config.

    Args:
        where: the group, or a name in it, such as ``callbacks.memory``.
        plain: what is given.
    """
    schema = schema_of(where)
    target = plain.get(TARGET) if isinstance(plain, dict) else None
    if not isinstance(target, str):
        raise UserError(f"{where}: an option is needed; give {where}=... or {where}.{TARGET}=package.Class")
    with as_user_error(f"{where}.{TARGET}"):
        options = schema.options(target)
        takes_others = signature(target).takes_others
    found = {TARGET: Option("str", target, "")}
    for name, option in options.items():
        if name in plain or not (name in schema.known or option.default is UNKNOWN):
            found[name] = option
    reserved = {*schema.names, *schema.elsewhere} if takes_others else plain.keys()
    others = {name: Option("", None, "") for name in plain if name not in {*found, *reserved}}
    config = structured_config(found | others, plain.keys() - {TARGET})
    for name, value in plain.items():
        if isinstance(value, dict) and isinstance(config._get_node(name), ListConfig):  # OmegaConf would name no key
            raise UserError(f"{where}.{name}: give a list, in brackets: [a,b]")
    return config


def checked(command: str, config: DictConfig) -> RunConfig:
    """A structured config as dataclasses, which check what types cannot say."""
    try:
        values = to_plain(config, resolve=True)
    except CONFIGURATION_ERRORS as error:
        raise explained(error, keys(config)) from None
    for group in groups.OBJECT_GROUPS:
        values[group] = values[group] and _object(values[group])
    for group in groups.NAMED_GROUPS:
        values[group] = {name: _object(each) for name, each in values[group].items()}
    trainer = values["trainer"].arguments
    if trainer.get("precision") == groups.AUTO:
        trainer["precision"] = precision_of(trainer["accelerator"], values.get("device"))
    try:
        with as_user_error("backward"):
            values["backward"] = BackwardConfig(**values["backward"])
        return COMMANDS[command](**values)
    except (ValueError, TypeError) as error:
        raise UserError(str(error)) from error


def _object(plain: dict[str, Any]) -> ObjectConfig:
    return ObjectConfig(plain.pop(TARGET), plain)


def precision_of(accelerator: str, planned: str | None = None) -> str:
    """That of ``trainer.precision=auto``; ``planned``: the option ``device`` of ``plan``, whose GPU need not be here."""
    if planned is not None and (planned != groups.AUTO or accelerator == groups.AUTO):
        accelerator = "cpu" if planned == "cpu" else "gpu"
    if accelerator in ("cpu", "mps"):
        return "32-true"
    import torch

    if torch.cuda.is_available():
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        has_bfloat16 = accelerator == "gpu" and not torch.backends.mps.is_available()
    return "bf16-mixed" if has_bfloat16 else "32-true"


def to_container(config: RunConfig) -> dict[str, Any]:
    """The configuration in plain containers. :func:`structured` reverses it."""

    def plain(value: Any) -> Any:
        return value.plain() if isinstance(value, ObjectConfig) else asdict(value) if is_dataclass(value) else value

    found = {option.name: plain(getattr(config, option.name)) for option in fields(config)}
    return found | {group: {name: plain(each) for name, each in found[group].items()} for group in groups.NAMED_GROUPS}


def _check_unused(group: str, task: str, overrides: Iterable[str]) -> None:
    for word in overrides:
        if re.match(rf"[+~]?{group}[.=]", word):
            raise UserError(f"{word}: {'the given task' if task == PYTHON_OBJECT else task} takes no {group}")


def without_replaced_options(
    plain: dict[str, Any], overrides: Iterable[str], before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What Hydra composed, without the options of classes that are replaced. They are arguments of another class.

    ``optimizer._target_=...`` among the overrides replaces all that a file of the group gives. The same for other groups, for
    each callback and each logger, and not for ``trainer``, whose class stays Lightning's.

    Args:
        before: the configuration of a checkpoint. Its options go where a file or an override names another class.
    """
    keys, result = {*map(key_of, overrides)}, deepcopy(plain)
    for where, target in targets(plain):
        node, old = _mapping(result, where), _mapping(before, where)
        replaces = f"{where}.{TARGET}" in keys and where != "trainer"
        if target == old.get(TARGET, "") or not (replaces or old):
            continue
        for option, value in [*node.items()]:
            is_given = any(f"{key}.".startswith(f"{where}.{option}.") for key in keys)
            if not is_given and (replaces or (option in old and old[option] == value)):
                del node[option]
    return result


def _mapping(config: Any, where: str) -> dict[str, Any]:
    """What a configuration holds there; {}: no mapping."""
    for part in where.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config if isinstance(config, dict) else {}


def _members(group: str, plain: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The members of a group that is a mapping from names, without those that null takes away."""
    if not isinstance(plain, dict):
        raise UserError(f"{group}: {plain!r} is not a mapping from names to classes")
    members = {name: value for name, value in plain.items() if value is not None}
    for name, value in members.items():
        if not isinstance(value, dict) or TARGET not in value:
            near = did_you_mean(name, members.keys() - {name})
            raise UserError(
                f"{group}.{name}: it names no class; give {group}.{name}.{TARGET}=package.Class, or {group}.{name}=null{near}"
            )
    return members


LOG = "log.txt"
"""What Python's logging has written, in the folder of a run."""

LOGGING = {
    "formatters": {"timed": {"format": "%(asctime)s  %(message)s"}},
    "handlers": {
        "file": {
            "class": "logging.FileHandler",
            "formatter": "timed",
            "filename": "${log_file:}",
            "delay": True,  # a run that is refused leaves no folder
            "encoding": "utf-8",
            "errors": "backslashreplace",
        },
        "console": {"class": "logging.StreamHandler", "level": "WARNING"},
    },
    "root": {"level": "WARNING", "handlers": ["file", "console"]},
    "loggers": {"holotrain": {"level": "INFO"}},
}
"""Hydra's ``job_logging``."""


def config_folder() -> str:
    """The folder ``conf``: inside the package in a wheel, next to it in a checkout."""
    package = Path(__file__).parents[1]
    return str(next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir()))


def register(resume: bool = False) -> None:
    """Fills the ConfigStore; ``resume``: use the folder of the latest run or sweep instead of a new one."""
    _store_options()
    # Cached like Hydra's ${now:}, because every use within one launch must give the same folder.
    OmegaConf.register_new_resolver(
        "run_folder", lambda kind, root: run_folder(kind, root, resume), replace=True, use_cache=True
    )
    # Unresolved, because the name of a folder may look like an interpolation.
    OmegaConf.register_new_resolver(
        "log_file", lambda *, _root_: str(Path(to_plain(_root_.hydra.runtime)["output_dir"], LOG)), replace=True
    )


@cache
def _store_options() -> None:
    store = ConfigStore.instance().store
    for command in COMMANDS:
        store(name=command, node=options(command, ["_self_", "_common"]))
    for name, node in models().items():
        store(name=name, node=node, group="model")
    for name in OPTIONS:
        store(name=name, node={"kind": name}, group="backward")


@cache
def models() -> dict[str, dict[str, Any]]:
    """The options of the group ``model`` that holotrain has: those of ``conf/_models.json``, by name."""
    file = json.loads(Path(config_folder(), "_models.json").read_text(encoding="utf-8"))
    found = {name: {TARGET: target} for name, target in file["others"].items()}
    for family, sizes in file["families"].items():
        for size, arguments in sizes.items():
            name = f"{family.lower()}_{size}"
            found[name] = {TARGET: f"holotrain.models.{family}", **arguments}
            found[f"rev_{name}"] = {TARGET: f"holotrain.models.Rev{family}", **arguments}
    return found


def options(command: str, parts: list[Any]) -> DictConfig:
    """The primary configuration of a command: its options with their defaults, and its groups; ``parts``: the defaults list.

    Hydra composes a group from any keys; ``structured`` checks them.
    """
    groups = {group: DictConfig({}, flags={"struct": False}) for group in GROUPS}
    own = defaults_of(options_of(COMMANDS[command]))
    hydra = {
        "job": {"name": command},
        "job_logging": LOGGING,
        "output_subdir": None,  # the run's config.yaml is written by holotrain, resolved and checked
        "run": {"dir": "${run_folder:${hydra.job.name},${output_dir}}"},
        "sweep": {"dir": "${run_folder:${hydra.job.name}/sweeps,${output_dir}}", "subdir": "${hydra.job.num}"},
    }
    quiet = [{f"override hydra/{log}_logging": "none"} for log in ("hydra", "job")]
    return DictConfig(own | groups | {"defaults": [*parts, *quiet], "hydra": hydra})


@contextmanager
def own_hydra() -> Generator[None]:
    """Composes apart from what somebody else's Hydra in this process has initialised, and leaves that as it was."""
    other, base = GlobalHydra.instance(), VersionBase.instance().getbase()
    GlobalHydra.set_instance(GlobalHydra.__new__(GlobalHydra))
    GlobalHydra.instance().clear()
    try:
        yield
    finally:
        GlobalHydra.set_instance(other)
        VersionBase.instance().version_base = base


def composed(primary: str, overrides: list[str], config_dir: str | None = None, with_hydra: bool = False) -> DictConfig:
    """A primary configuration under some overrides, unresolved; inside a Hydra job, with the search path of that job."""
    if GlobalHydra.instance().is_initialized():
        return compose(primary, overrides, with_hydra)
    with initialize_config_dir(config_folder(), version_base="1.3"):
        if config_dir:
            overrides = [*overrides, f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]
        return compose(primary, overrides, with_hydra)


def member_names(group: str, config_dir: str | None = None) -> set[str]:
    """The names in the files of a group whose options are mappings, such as ``callbacks``."""
    return {str(name) for path in _files(f"{group}/*.yaml", config_dir) for name in OmegaConf.load(path)} - {"defaults"}


def option_names(config_dir: str | None = None) -> dict[str, list[str]]:
    """The options of every group, from ``conf`` and the user's folder; models and schedules have no files of their own."""
    groups = {"model": {*models()}, "backward": {*OPTIONS}}
    for path in _files("*/*.yaml", config_dir):
        groups.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(options) for group, options in sorted(groups.items())}


def _files(pattern: str, config_dir: str | None) -> list[Path]:
    return [path for folder in (config_folder(), config_dir) if folder for path in Path(folder).glob(pattern)]


def require_new_names(config_dir: str) -> None:
    """Refuses an option in the user's folder with the name of one of ours, which Hydra would silently choose."""
    ours = option_names()
    for path in sorted(Path(config_dir).glob("*/*.yaml")):
        if path.stem in ours.get(path.parent.name, ()):
            raise UserError(f"--config-dir: {path} has the name of an option that holotrain has; give it another name")


def key_of(override: str) -> str:
    """The option or group that an override is about."""
    return override.lstrip("+~").partition("=")[0]
