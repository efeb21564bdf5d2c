"""Configurations in plain containers as dataclasses with checked names and types, and back."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from holotrain.config import option_groups as groups
from holotrain.config.command_options import COMMANDS, RunConfig, options_of
from holotrain.config.composition import key_of
from holotrain.config.signatures import UNKNOWN, Option, explaining, literally, signature, structured_config, to_plain
from holotrain.errors import UserError, as_user_error
from holotrain.targets import TARGET


def structured(command: str, plain: dict[str, Any]) -> RunConfig:
    """A configuration, resolved and in plain containers, as dataclasses. Raises a UserError if there is a mistake in it."""
    return checked(command, with_defaults(command, OmegaConf.create(literally(plain))))


def with_defaults(command: str, config: DictConfig) -> DictConfig:
    """A configuration that Hydra composed as a structured config, whose names and types are checked: those of all options."""
    plain = to_plain(config)
    schema, values = structured_config(options_of(COMMANDS[command])), {}
    named = {name: OmegaConf.select(config, f"model.{name}") for name in ("name", "pretrained")}
    for group in groups.OBJECT_GROUPS:
        chosen = plain.get(group) or {}
        if group == "optimizer" and chosen:
            chosen = groups.optimizer_for(chosen, plain.get("model") and plain["model"] | named)
        unused = group in ("model", "optimizer", "scheduler") and not groups.takes(schema.task[TARGET], group)
        chosen = None if unused or (group == "synthesis" and not chosen) else chosen
        schema[group], values[group] = chosen if chosen is None else group_config(group, chosen), chosen
    if values["model"] is not None:  # the classes of both are known now
        values["data"] = groups.data_for(values["data"], values["model"] | named)
    for group in groups.NAMED_GROUPS:
        values[group] = {name: each for name, each in (plain.get(group) or {}).items() if each is not None}
        schema[group] = {name: group_config(f"{group}.{name}", each) for name, each in values[group].items()}
    schema.backward = structured_config(options_of(groups.BackwardConfig))
    schema.backward.kind = groups.default_backward((values["model"] or {}).get(TARGET))
    with explaining(keys(schema)):
        return cast(DictConfig, OmegaConf.merge(schema, plain | values))


def keys(config: DictConfig) -> list[str]:
    """Of all options, and the names of the groups."""
    plain = to_plain(config)
    return [*plain, *(f"{group}.{name}" for group, node in plain.items() if isinstance(node, dict) for name in node)]


def group_config(where: str, plain: dict[str, Any]) -> DictConfig:
    """The options of a class or function, as its signature has them: a structured config. ``where``: the group, or a name in
    it, such as ``callbacks.memory``; ``plain``: what is given."""
    schema = groups.schema_of(where)
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
            values["backward"] = groups.BackwardConfig(**values["backward"])
        return COMMANDS[command](**values)


def _object(plain: dict[str, Any]) -> groups.ObjectConfig:
    return groups.ObjectConfig(plain.pop(TARGET), plain)


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
        return value.plain() if isinstance(value, groups.ObjectConfig) else asdict(value) if is_dataclass(value) else value

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
