"""A whole configuration: with the defaults of every option, checked, as dataclasses, and back in plain containers."""

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from holotrain.config.annotations import checked
from holotrain.config.command_options import COMMANDS, RunConfig, options_of
from holotrain.config.composition import key_of
from holotrain.config.given import PYTHON_OBJECT
from holotrain.config.objects import GroupSchema, ObjectConfig
from holotrain.config.option_groups import NAMED_GROUPS, OBJECT_GROUPS, OF_THE_TASK, BackwardConfig, default_backward, takes
from holotrain.config.signatures import REQUIRED, Option, defaults_of, signature
from holotrain.errors import UserError, as_user_error, did_you_mean
from holotrain.targets import TARGET, targets


def structured(command: str, plain: dict[str, Any]) -> RunConfig:
    """Checks a configuration and returns it as dataclasses.

    Args:
        plain: resolved, in plain containers.

    Raises:
        UserError: an unknown option, a value of another type or out of range, or a combination that cannot be.
    """
    return checked_config(command, with_defaults(command, plain))


def checked_config(command: str, values: dict[str, Any]) -> RunConfig:
    """:func:`structured`, of a configuration that has all defaults."""
    values = dict(values)
    for group, schema in OBJECT_GROUPS.items():
        values[group] = values[group] and object_config(group, values[group], schema)
    for group, schema in NAMED_GROUPS.items():
        values[group] = {name: object_config(f"{group}.{name}", each, schema) for name, each in values[group].items()}
    with as_user_error("backward"):
        values["backward"] = BackwardConfig(**_checked_options("backward", options_of(BackwardConfig), values["backward"]))
    try:
        return COMMANDS[command](**_checked_options("", options_of(COMMANDS[command]), values))
    except ValueError as error:
        raise UserError(str(error)) from error


def to_container(config: RunConfig) -> dict[str, Any]:
    """The configuration in plain containers. :func:`structured` reverses it."""

    def plain(value: Any) -> Any:
        return value.plain() if isinstance(value, ObjectConfig) else asdict(value) if is_dataclass(value) else value

    found = {option.name: plain(getattr(config, option.name)) for option in fields(config)}
    return found | {group: {name: plain(each) for name, each in found[group].items()} for group in NAMED_GROUPS}


def with_defaults(command: str, plain: dict[str, Any], overrides: Iterable[str] = ()) -> dict[str, Any]:
    """A configuration with the defaults of all options that it does not mention. Checks no values.

    Args:
        overrides: what a command line gives, which must not be in vain.

    Raises:
        UserError: a class that there is not, or a group that the task does not take.
    """
    options = options_of(COMMANDS[command])
    found = defaults_of(options) | plain
    for group, schema in OBJECT_GROUPS.items():
        chosen, task = plain.get(group) or None, found["task"]
        if group in OF_THE_TASK and not takes(task[TARGET], group):
            if in_vain := [word for word in overrides if re.match(rf"[+~]?{group}[.=]", word)]:
                named = "the given task" if task[TARGET] == PYTHON_OBJECT else task[TARGET]
                raise UserError(f"{in_vain[0]}: {named} takes no {group}")
            chosen = None
        elif chosen or group != "synthesis":
            chosen = group_defaults(group, chosen or {}, schema)
        found[group] = chosen
    for group, schema in NAMED_GROUPS.items():
        members = _members(group, plain.get(group) or {})
        found[group] = {name: group_defaults(f"{group}.{name}", each, schema) for name, each in members.items()}
    if not isinstance(chosen := plain.get("backward") or {}, dict):
        raise UserError(f"backward: {chosen!r} is not a mapping")
    usual = {"kind": default_backward((found["model"] or {}).get(TARGET))}
    found["backward"] = defaults_of(options_of(BackwardConfig)) | usual | chosen
    return {name: found[name] for name in options} | found


def with_replaced_classes(
    plain: dict[str, Any], overrides: Iterable[str], kept: dict[str, Any] | None = None
) -> dict[str, Any]:
    """A composed configuration in which ``optimizer._target_=...`` among the overrides replaces the whole group.

    What the file of the group's option gives are arguments of another class. The same for other groups, for each callback and
    each logger, and not for ``trainer``, whose class stays Lightning's.

    Args:
        kept: the configuration of a checkpoint, whose options are those of the class if it names the same one.
    """
    on_command_line, before = {*map(key_of, overrides)}, dict(targets(kept))
    result = deepcopy(plain)
    for where in {key.removesuffix(f".{TARGET}") for key in on_command_line if key.endswith(f".{TARGET}")} - {"trainer"}:
        group, _, name = where.partition(".")
        node, name = (result.get(group), name) if name else (result, group)
        if not isinstance(node, dict) or not isinstance(options := node.get(name), dict):
            continue
        if before.get(where, "") != options.get(TARGET):
            is_given = {
                option: any(f"{key}.".startswith(f"{where}.{option}.") for key in on_command_line) for option in options
            }
            node[name] = {option: value for option, value in options.items() if is_given[option]}
    return result


def group_defaults(group: str, plain: dict[str, Any], schema: GroupSchema) -> dict[str, Any]:
    """The options of a group as composed, after the defaults of its target's signature.

    Raises:
        UserError: there is no such class or function.
    """
    target = plain.get(TARGET) if isinstance(plain, dict) else None
    if not isinstance(target, str):
        raise UserError(f"{group}: an option is needed; give {group}=... or {group}.{TARGET}=package.Class")
    try:
        options = schema.options(target)
    except ValueError as error:
        raise UserError(f"{group}.{TARGET}: {error}") from error
    defaults = {name: value for name, value in defaults_of(options).items() if name not in schema.known}
    return {TARGET: target, **defaults, **plain}


def object_config(group: str, plain: dict[str, Any], schema: GroupSchema) -> ObjectConfig:
    """Checks the options of a group, with defaults, against the signature of its target.

    Raises:
        UserError: an unknown option, a value of another type, or a value that is missing.
    """
    target, options = plain[TARGET], schema.options(plain[TARGET])
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
