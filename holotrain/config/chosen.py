"""What a configuration group chooses: any class or function, by its full name, and the arguments that it is given."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from holotrain.checks import did_you_mean
from holotrain.config.signatures import REQUIRED, UNKNOWN, Option, checked, signature
from holotrain.errors import UserError

TARGET = "_target_"


@dataclass(frozen=True)
class Chosen:
    """A class or function and its arguments, which are also attributes.

    Args:
        target: its full name, as the user wrote it.
        arguments: by name, in plain containers.
    """

    target: str
    arguments: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["arguments"][name]
        except KeyError:
            raise AttributeError(f"{self.__dict__.get('target')} is not given {name!r}") from None

    @property
    def name(self) -> str:
        """The last part of the target."""
        return self.target.rpartition(".")[2]

    def with_arguments(self, **arguments: Any) -> Chosen:
        return replace(self, arguments=self.arguments | arguments)

    def plain(self) -> dict[str, Any]:
        return {TARGET: self.target, **self.arguments}

    def make(self, *first: Any, **given: Any) -> Any:
        """Calls it, with its own arguments and others. Imports its module.

        Raises:
            ValueError: it cannot be imported or called, or refuses a value.
        """
        return _called(self.target, first, {name: made(value) for name, value in self.arguments.items()} | given)


def made(value: Any) -> Any:
    """An argument, which may itself name a class. Not Hydra's ``instantiate``, which resolves interpolations once more."""
    if isinstance(value, list):
        return [made(each) for each in value]
    if not isinstance(value, dict):
        return value
    arguments = {name: made(each) for name, each in value.items() if name != TARGET}
    return _called(value[TARGET], (), arguments) if TARGET in value else arguments


def _called(target: str, first: tuple, keywords: dict[str, Any]) -> Any:
    try:
        return pkgutil.resolve_name(target)(*first, **keywords)
    except (ImportError, AttributeError, TypeError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ValueError(f"{target}: {reason}") from error


class Filled:
    """What the program knows of the parameters of a group's class.

    Args:
        names: parameters that the program fills in, which are no options.
        also: another class whose parameters are options too, and come first.
    """

    def __init__(self, *names: str, also: str | None = None) -> None:
        self._names, self._also = names, also

    def options(self, target: str) -> dict[str, Option]:
        """
        Raises:
            ValueError: there is no such class or function.
        """
        others = signature(self._also).options if self._also else {}
        options = signature(target).options | others
        return {name: option for name, option in options.items() if name not in self._names}

    def takes(self, target: str, name: str) -> bool:
        """Whether the class takes keywords that its signature does not name, and this may be one of them."""
        return signature(target).takes_others and name not in self._names


def defaults(group: str, plain: dict[str, Any], filled: Filled) -> dict[str, Any]:
    """The options of a group with the defaults of its target's signature.

    Args:
        plain: the group as composed.

    Raises:
        UserError: there is no such class or function.
    """
    target = plain.get(TARGET)
    if not isinstance(target, str):
        raise UserError(f"{group}: an option is needed; give {group}=... or {group}.{TARGET}=package.Class")
    try:
        options = filled.options(target)
    except ValueError as error:
        raise UserError(f"{group}.{TARGET}: {error}") from error
    known = {name: option.default for name, option in options.items() if option.default not in (REQUIRED, UNKNOWN)}
    return {TARGET: target, **known, **plain}


def with_own_options(plain: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A composed configuration in which ``optimizer._target_=...`` among the overrides replaces the whole group.

    What the file of the group's option gives are arguments of another class. The same for ``scheduler``, and not for
    ``trainer``, whose class stays Lightning's.
    """
    given = {override.lstrip("+~").partition("=")[0] for override in overrides}
    result = dict(plain)
    for group in ("optimizer", "scheduler"):
        if f"{group}.{TARGET}" in given:
            own = {key.split(".")[1] for key in given if key.startswith(f"{group}.")}
            result[group] = {name: value for name, value in plain[group].items() if name in own}
    return result


def chosen(group: str, plain: dict[str, Any], filled: Filled) -> Chosen:
    """Checks the options of a group against the signature of its target.

    Args:
        plain: with defaults.

    Raises:
        UserError: an unknown option, a value of another type, or a value that is missing.
    """
    target, options = plain[TARGET], filled.options(plain[TARGET])
    arguments = {}
    for name, value in plain.items():
        if name in options:
            as_default = value == options[name].default  # which its annotation need not allow
            arguments[name] = value if as_default else checked(f"{group}.{name}", options[name].type, value)
        elif name != TARGET:
            if not filled.takes(target, name):
                raise UserError(f"{group}.{name}: there is no {name!r} in {group}.{did_you_mean(name, options)}")
            arguments[name] = value
    for name, option in options.items():
        if option.default is REQUIRED and name not in arguments:
            raise UserError(f"{group}.{name}: a value is needed; give {group}.{name}=...")
    return Chosen(target, arguments)
