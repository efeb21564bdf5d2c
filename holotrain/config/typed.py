"""A whole configuration: with the defaults of every option, checked, as dataclasses, and back in plain containers."""

import re
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import asdict, fields, is_dataclass
from typing import Any

from holotrain.checks import naming_group
from holotrain.config.arguments import key_of
from holotrain.config.chosen import Chosen, checked_values, chosen, defaults, named_defaults
from holotrain.config.given import GIVEN
from holotrain.config.schema.backward import BackwardConfig
from holotrain.config.schema.classes import default_backward, takes
from holotrain.config.schema.commands import COMMANDS, options_of
from holotrain.config.schema.run import NAMED, OF_THE_TASK, OPEN, RunConfig
from holotrain.config.signatures import defaults_of
from holotrain.errors import UserError
from holotrain.targets import TARGET


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
    with naming_group("backward"):
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


def with_own_options(plain: dict[str, Any], overrides: Iterable[str], kept: dict[str, Any] | None = None) -> dict[str, Any]:
    """A composed configuration in which ``optimizer._target_=...`` among the overrides replaces the whole group.

    What the file of the group's option gives are arguments of another class. The same for other groups, for each callback and
    each logger, and not for ``trainer``, whose class stays Lightning's.

    Args:
        kept: the configuration of a checkpoint, whose options are those of the class if it names the same one.
    """
    given = {*map(key_of, overrides)}
    result = deepcopy(plain)
    for where in {key.removesuffix(f".{TARGET}") for key in given if key.endswith(f".{TARGET}")} - {"trainer"}:
        group, _, name = where.partition(".")
        node, name, before = (result.get(group), name, (kept or {}).get(group)) if name else (result, group, kept)
        if isinstance(node, dict) and isinstance(options := node.get(name), dict):
            was = before.get(name) if isinstance(before, dict) else None
            if isinstance(was, dict) and was.get(TARGET) == options.get(TARGET):
                continue
            is_given = {option: any(f"{key}.".startswith(f"{where}.{option}.") for key in given) for option in options}
            node[name] = {option: value for option, value in options.items() if is_given[option]}
    return result


def container(config: RunConfig) -> dict[str, Any]:
    """The configuration in plain containers. ``typed`` reverses it."""
    found = {}
    for name in (option.name for option in fields(config)):
        value = getattr(config, name)
        found[name] = value.plain() if isinstance(value, Chosen) else asdict(value) if is_dataclass(value) else value
    for group in NAMED:
        found[group] = {name: each.plain() for name, each in found[group].items()}
    return found
