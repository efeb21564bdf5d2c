"""A whole configuration: with the defaults of every option, checked, as dataclasses, and back in plain containers."""

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from holotrain.config import option_groups as groups
from holotrain.config.annotations import checked
from holotrain.config.command_options import COMMANDS, RunConfig, options_of
from holotrain.config.composition import key_of
from holotrain.config.objects import PYTHON_OBJECT, ObjectConfig
from holotrain.config.option_groups import (
    GONE,
    BackwardConfig,
    default_backward,
    optimizer_for,
    require_not_gone,
    schema_of,
    takes,
)
from holotrain.config.signatures import REQUIRED, Option, defaults_of, signature
from holotrain.errors import UserError, as_user_error, did_you_mean
from holotrain.targets import TARGET, targets


def structured(command: str, plain: dict[str, Any]) -> RunConfig:
    """A configuration, resolved and in plain containers, as dataclasses.

    Raises:
        UserError: an unknown option, a value of another type or out of range, or a combination that cannot be.
    """
    return checked_config(command, with_defaults(command, plain))


def checked_config(command: str, values: dict[str, Any]) -> RunConfig:
    """:func:`structured`, of a configuration that has all defaults."""
    values = dict(values)
    for group in groups.OBJECT_GROUPS:
        values[group] = values[group] and object_config(group, values[group])
    trainer = values["trainer"].arguments
    if trainer.get("precision") == groups.AUTO:
        accelerator = trainer["accelerator"]
        if command == "plan" and values["device"] != groups.AUTO:
            accelerator = "gpu" if values["device"] == "cuda" else values["device"]
        elif command == "plan" and accelerator == groups.AUTO:  # plans are for a GPU, which this machine need not have
            accelerator = "gpu"
        trainer["precision"] = precision_of(accelerator)
    for group in groups.NAMED_GROUPS:
        values[group] = {name: object_config(f"{group}.{name}", each) for name, each in values[group].items()}
    with as_user_error("backward"):
        values["backward"] = BackwardConfig(**_checked_options("backward", options_of(BackwardConfig), values["backward"]))
    try:
        return COMMANDS[command](**_checked_options("", options_of(COMMANDS[command]), values))
    except ValueError as error:
        raise UserError(str(error)) from error


def precision_of(accelerator: str) -> str:
    """The precision of ``trainer.precision=auto``."""
    if accelerator in ("cpu", "mps"):
        return "32-true"
    import torch

    if torch.cuda.is_available():
        has_bfloat16 = torch.cuda.is_bf16_supported(including_emulation=False)
    else:  # a plan may be for the GPU of another machine
        has_bfloat16 = accelerator == "gpu" and not torch.backends.mps.is_available()
    return "bf16-mixed" if has_bfloat16 else "32-true"


def to_container(config: RunConfig) -> dict[str, Any]:
    """The configuration in plain containers. :func:`structured` reverses it."""

    def plain(value: Any) -> Any:
        return value.plain() if isinstance(value, ObjectConfig) else asdict(value) if is_dataclass(value) else value

    found = {option.name: plain(getattr(config, option.name)) for option in fields(config)}
    return found | {group: {name: plain(each) for name, each in found[group].items()} for group in groups.NAMED_GROUPS}


def with_defaults(
    command: str, plain: dict[str, Any], overrides: Iterable[str] = (), named: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A configuration with the defaults of all options that it does not mention. Checks no values.

    Args:
        overrides: those of the command line, none of which may be about a group that the task does not take.
        named: options of the model without interpolations, where they are known: on them other defaults depend.
    """
    options = options_of(COMMANDS[command])
    found = defaults_of(options) | plain
    for group in groups.OBJECT_GROUPS:
        chosen = plain.get(group) or None
        if group == "optimizer" and isinstance(chosen, dict):
            chosen = optimizer_for(chosen, found["task"][TARGET], found["model"] and found["model"] | (named or {}))
        if group in groups.OF_THE_TASK and not takes(found["task"][TARGET], group):
            _check_unused(group, found["task"][TARGET], overrides)
            chosen = None
        elif chosen or group != "synthesis":
            chosen = group_defaults(group, chosen or {})
        found[group] = chosen
    for group in groups.NAMED_GROUPS:
        members = _members(group, plain.get(group) or {})
        found[group] = {name: group_defaults(f"{group}.{name}", each) for name, each in members.items()}
    if not isinstance(chosen := plain.get("backward") or {}, dict):
        raise UserError(f"backward: {chosen!r} is not a mapping")
    of_model = {"kind": default_backward((found["model"] or {}).get(TARGET))}
    found["backward"] = defaults_of(options_of(BackwardConfig)) | of_model | chosen
    return {name: found[name] for name in options} | found


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


def group_defaults(group: str, plain: dict[str, Any]) -> dict[str, Any]:
    """The options of a group as composed, after the defaults of its target's signature."""
    schema = schema_of(group)
    target = plain.get(TARGET) if isinstance(plain, dict) else None
    if not isinstance(target, str):
        raise UserError(f"{group}: an option is needed; give {group}=... or {group}.{TARGET}=package.Class")
    try:
        options = schema.options(target)
    except ValueError as error:
        raise UserError(f"{group}.{TARGET}: {error}") from error
    defaults = {name: value for name, value in defaults_of(options).items() if name not in schema.known}
    return {TARGET: target, **defaults, **plain}


def object_config(group: str, plain: dict[str, Any]) -> ObjectConfig:
    """Checks the options of a group, with defaults, against the signature of its target."""
    schema, target = schema_of(group), plain[TARGET]
    options = schema.options(target)
    values = {name: value for name, value in plain.items() if name != TARGET}
    free = values.keys() - options.keys() - {*schema.names, *schema.elsewhere} if signature(target).takes_others else {}
    arguments = {name: values.pop(name) for name in plain if name in free} | _checked_options(group, options, values)
    for name, option in options.items():
        if option.default is REQUIRED and name not in arguments and name not in schema.known:
            raise UserError(f"{group}.{name}: a value is needed; give {group}.{name}=...")
    return ObjectConfig(target, arguments)


def _checked_options(group: str, options: dict[str, Option], plain: dict[str, Any]) -> dict[str, Any]:
    """The values of a group, or with ``group=""`` of the options outside of groups, as their types take them."""
    found = {}
    for name, value in plain.items():
        key = f"{group}.{name}" if group else str(name)
        if name not in options:
            if key in GONE and value in (None, "pre"):  # their defaults, in an older checkpoint
                continue
            require_not_gone(key)
            where = f"in {group}" if group else "among the options"
            raise UserError(f"{key}: there is no {name!r} {where}.{did_you_mean(str(name), options)}")
        as_default = value == options[name].default  # which its annotation need not allow
        found[name] = value if as_default else checked(key, options[name].type, value)
    return found


def _members(group: str, plain: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The members of a group that is a mapping from names, without those that null takes away."""
    if not isinstance(plain, dict):
        raise UserError(f"{group}: {plain!r} is not a mapping from names to classes")
    known = [name for name, value in plain.items() if isinstance(value, dict) and TARGET in value]
    for name, value in plain.items():
        if name not in known and isinstance(value, dict):
            new = f"a new one needs {group}.{name}.{TARGET}=package.Class"
            raise UserError(f"{group}.{name}: there is no {name!r} in {group}; {new}.{did_you_mean(name, known)}")
        if name not in known and value is not None:
            raise UserError(f"{group}.{name}: {value!r} names no class; to leave {name} out, give {group}.{name}=null")
    return {name: plain[name] for name in known}
