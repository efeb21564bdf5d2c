"""A whole configuration: as Hydra composes it from files and overrides, with the defaults of every option, checked, as
dataclasses, and back in plain containers."""

import json
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from holotrain.config import option_groups as groups
from holotrain.config.command_options import COMMANDS, RunConfig, options_of
from holotrain.config.option_groups import (
    GROUPS,
    STRATEGIES,
    BackwardConfig,
    ObjectConfig,
    default_backward,
    optimizer_for,
    schema_of,
    takes,
)
from holotrain.config.signatures import (
    REQUIRED,
    UNKNOWN,
    Option,
    explaining,
    literally,
    signature,
    structured_config,
    to_plain,
)
from holotrain.errors import UserError, as_user_error
from holotrain.folders import run_folder
from holotrain.schedules import OPTIONS
from holotrain.targets import TARGET


def structured(command: str, plain: dict[str, Any]) -> RunConfig:
    """A configuration, resolved and in plain containers, as dataclasses. Raises a UserError if there is a mistake in it."""
    return checked(command, with_defaults(command, OmegaConf.create(literally(plain))))


def with_defaults(command: str, config: DictConfig) -> DictConfig:
    """A configuration that Hydra composed as a structured config, whose names and types are checked: those of all options."""
    plain = to_plain(config)
    schema, values = structured_config(options_of(COMMANDS[command])), {}
    for group in groups.OBJECT_GROUPS:
        chosen = plain.get(group) or {}
        if group == "optimizer" and chosen:
            named = {name: OmegaConf.select(config, f"model.{name}") for name in ("name", "pretrained")}
            chosen = optimizer_for(chosen, plain.get("model") and plain["model"] | named)
        if (group in groups.OF_THE_TASK and not takes(schema.task[TARGET], group)) or (group == "synthesis" and not chosen):
            chosen = None
        schema[group], values[group] = chosen if chosen is None else group_config(group, chosen), chosen
    for group in groups.NAMED_GROUPS:
        values[group] = {name: each for name, each in (plain.get(group) or {}).items() if each is not None}
        schema[group] = {name: group_config(f"{group}.{name}", each) for name, each in values[group].items()}
    schema.backward = structured_config(options_of(BackwardConfig))
    schema.backward.kind = default_backward((values["model"] or {}).get(TARGET))
    with explaining(keys(schema)):
        return cast(DictConfig, OmegaConf.merge(schema, plain | values))


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
        options, takes_others = schema.options(target), signature(target).takes_others
    found = {name: option for name, option in options.items() if name in plain or option.default is not UNKNOWN}
    others = plain.keys() - {TARGET, *options} - (schema.reserved if takes_others else plain.keys())
    found = {TARGET: Option("str", target, "")} | found | {name: Option("", None, "") for name in others}
    return structured_config(found, plain.keys() - {TARGET})


def checked(command: str, config: DictConfig) -> RunConfig:
    """A structured config as dataclasses, which check what types cannot say."""
    with explaining(keys(config)):
        values = to_plain(config, resolve=True)
    for group in groups.OBJECT_GROUPS:
        values[group] = values[group] and _object(values[group])
    for group in groups.NAMED_GROUPS:
        values[group] = {name: _object(each) for name, each in values[group].items()}
    trainer = values["trainer"].arguments
    if trainer.get("precision") == groups.AUTO:
        trainer["precision"] = precision_of(trainer["accelerator"], values.get("device"))
    with explaining():
        with as_user_error("backward"):
            values["backward"] = BackwardConfig(**values["backward"])
        return COMMANDS[command](**values)


def _object(plain: dict[str, Any]) -> ObjectConfig:
    return ObjectConfig(plain.pop(TARGET), plain)


def precision_of(accelerator: str, planned: str | None = None) -> str:
    """That of ``trainer.precision=auto``; ``planned``: the option ``device`` of ``plan``, whose GPU need not be here."""
    if planned is not None and (planned != groups.AUTO or accelerator == groups.AUTO):
        accelerator = "cpu" if planned == "cpu" else "gpu"
    if accelerator in ("cpu", "mps"):
        return "32-true"
    import torch

    has_bfloat16 = accelerator == "gpu" and not torch.backends.mps.is_available()
    if torch.cuda.is_available():
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    return "bf16-mixed" if has_bfloat16 else "32-true"


def to_container(config: RunConfig) -> dict[str, Any]:
    """The configuration in plain containers. :func:`structured` reverses it."""

    def plain(value: Any) -> Any:
        return value.plain() if isinstance(value, ObjectConfig) else asdict(value) if is_dataclass(value) else value

    found = {option.name: plain(getattr(config, option.name)) for option in fields(config)}
    return found | {group: {name: plain(each) for name, each in found[group].items()} for group in groups.NAMED_GROUPS}


def without_replaced_options(
    plain: dict[str, Any], overrides: Iterable[str], before: dict[str, Any] | None = None
) -> dict[str, Any]:
    """What Hydra composed, without the options of classes that are replaced. They are arguments of another class.

    ``optimizer._target_=...`` among the overrides replaces all that a file of the group gives. The same for other groups, for
    each callback and each logger, and not for ``trainer``, whose class stays Lightning's.

    Args:
        before: the configuration of a checkpoint. Its options go where a file or an override names another class.
    """
    keys, result, old = {*map(key_of, overrides)}, deepcopy(plain), nodes_of(before or {})
    for where, node in nodes_of(result).items():
        was, replaces = old.get(where, {}), f"{where}.{TARGET}" in keys and where != "trainer"
        for option in [*node] if node.get(TARGET) != was.get(TARGET, "") else []:
            is_given = any(f"{key}.".startswith(f"{where}.{option}.") for key in keys)
            if not is_given and (replaces or (option in was and was[option] == node[option])):
                del node[option]
    return result


def nodes_of(plain: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The options of each class or function in a configuration, by group, or by name in a group such as ``callbacks``."""
    found = {group: plain.get(group) for group in groups.OBJECT_GROUPS}
    for group in groups.NAMED_GROUPS:
        found |= {f"{group}.{name}": node for name, node in (plain.get(group) or {}).items()}
    return {where: node for where, node in found.items() if isinstance(node, dict)}


LOG = "log.txt"
"""What Python's logging has written, in the folder of a run."""

LOGGING = {
    "formatters": {"timed": {"format": "%(asctime)s  %(message)s"}},
    "handlers": {
        "file": {
            **{"class": "logging.FileHandler", "formatter": "timed", "filename": f"${{hydra.runtime.output_dir}}/{LOG}"},
            **{"delay": True, "encoding": "utf-8", "errors": "backslashreplace"},  # a run that is refused leaves no folder
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


@cache
def _store_options() -> None:
    store = ConfigStore.instance().store
    for command in COMMANDS:
        store(name=command, node=options(command, ["_self_", "_common"]))
    for group, nodes in stored().items():
        for name, node in nodes.items():
            store(name=name, node=node, group=group)


PACKAGES = {"model": "holotrain.models", "data": "holotrain.data", "optimizer": "holotrain.tasks.optimizer_functions"}
"""Where the classes and functions are that ``conf/_options.json`` names."""


@cache
def stored() -> dict[str, dict[str, dict[str, Any]]]:
    """The options of groups that have no file of their own, by group and name: those of ``conf/_options.json`` and others."""
    file = json.loads(Path(config_folder(), "_options.json").read_text(encoding="utf-8"))
    found: dict[str, dict[str, dict[str, Any]]] = {"backward": {name: {"kind": name} for name in OPTIONS}}
    found["trainer"] = {name: {"defaults": ["default"], "accelerator": name} for name in ("cpu", "gpu")}
    found["trainer"] |= {name: {"defaults": ["default"], "strategy": name, "devices": "auto"} for name in STRATEGIES}
    for group, classes in file["classes"].items():
        found[group] = {name: {TARGET: f"{PACKAGES[group]}.{target}"} for name, target in classes.items()}
    for size, arguments in file["sizes"].items():
        found["model"][size.lower()] = {TARGET: f"holotrain.models.{size.partition('_')[0]}", **arguments}
        found["model"][f"rev_{size.lower()}"] = {TARGET: f"holotrain.models.Rev{size.partition('_')[0]}", **arguments}
    return found


def options(command: str, parts: list[Any]) -> DictConfig:
    """The primary configuration of a command: its options with their defaults, and its groups; ``parts``: the defaults list.

    Hydra composes a group from any keys; ``structured`` checks them.
    """
    groups = {group: DictConfig({}, flags={"struct": False}) for group in GROUPS}
    own = {name: each.default for name, each in options_of(COMMANDS[command]).items() if each.default is not REQUIRED}
    hydra = {
        "job": {"name": command},
        "job_logging": LOGGING,
        "output_subdir": None,  # the run's config.yaml is written by holotrain, resolved and checked
        "run": {"dir": "${run_folder:${hydra.job.name},${output_dir}}"},
        "sweep": {"dir": "${run_folder:${hydra.job.name}/sweeps,${output_dir}}", "subdir": "${hydra.job.num}"},
    }
    quiet = [{f"override hydra/{log}_logging": "none"} for log in ("hydra", "job")]
    return DictConfig(own | groups | {"defaults": [*parts, *quiet], "hydra": hydra})


def composed(primary: str, overrides: list[str], config_dir: str | None = None, with_hydra: bool = False) -> DictConfig:
    """A primary configuration under some overrides, unresolved."""
    GlobalHydra.instance().clear()  # of somebody else
    with initialize_config_dir(config_folder(), version_base="1.3"):
        if config_dir:
            overrides = [*overrides, f"hydra.searchpath=[file://{Path(config_dir).resolve()}]"]
        return compose(primary, overrides, with_hydra)


def option_names(config_dir: str | None = None) -> dict[str, list[str]]:
    """The options of every group, from ``conf``, the user's folder, and those without a file."""
    found = {group: {*nodes} for group, nodes in stored().items()}
    for folder in filter(None, (config_folder(), config_dir)):
        for path in Path(folder).glob("*/*.yaml"):
            found.setdefault(path.parent.name, set()).add(path.stem)
    return {group: sorted(options) for group, options in sorted(found.items())}


def key_of(override: str) -> str:
    """The option or group that an override is about."""
    return override.lstrip("+~").partition("=")[0]
