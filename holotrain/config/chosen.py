"""What a configuration group chooses: any class or function, by its full name, and the arguments that it is given."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from holotrain.checks import did_you_mean, naming_group
from holotrain.config.signatures import REQUIRED, Option, checked, defaults_of, signature
from holotrain.errors import UserError
from holotrain.targets import TARGET, called, made


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

    @property
    def bases(self) -> tuple[str, ...]:
        """Full names of the class and its base classes; of a function none."""
        return signature(self.target).bases

    def with_arguments(self, **arguments: Any) -> Chosen:
        return replace(self, arguments=self.arguments | arguments)

    def plain(self) -> dict[str, Any]:
        return {TARGET: self.target, **self.arguments}

    def make(self, *positional: Any, **given: Any) -> Any:
        """Calls it, with its own arguments and others, which take precedence. Imports its module.

        Raises:
            ValueError: it cannot be imported or called, or refuses a value.
        """
        return called(self.target, *positional, **made(self.arguments) | given)


@dataclass(frozen=True)
class Filled:
    """What the program knows of the parameters of a group's class.

    Args:
        names: parameters that the program fills in, which are no options.
        known: parameters that the program fills in if it knows them; if not, they are options that need a value.
        also: another class whose parameters are options too, and come first.
        unless_given: options that the program fills in where they are null, which is their default.
        or_auto: options that may be ``"auto"``, which the program replaces before the class sees it.
    """

    names: tuple[str, ...] = ()
    known: tuple[str, ...] = ()
    also: str | None = None
    unless_given: tuple[str, ...] = ()
    or_auto: tuple[str, ...] = ()

    def options(self, target: str) -> dict[str, Option]:
        """
        Raises:
            ValueError: there is no such class or function.
        """
        others = signature(self.also).options if self.also else {}
        options = signature(target).options | others
        for name in options.keys() & {*self.unless_given}:
            kind = options[name].type and f"{options[name].type} | None"
            options[name] = replace(options[name], type=kind, default=None)
        for name in options.keys() & {*self.or_auto}:
            options[name] = replace(options[name], type=options[name].type and f'{options[name].type} | Literal["auto"]')
        return {name: option for name, option in options.items() if name not in self.names}

    def takes(self, target: str, name: str) -> bool:
        """Whether the class takes keywords that its signature does not name, and this may be one of them."""
        return signature(target).takes_others and name not in self.names

    def make(self, where: str, choice: Chosen, of: type, *positional: Any, **known: Any) -> Any:
        """Calls what is chosen, with what the program knows of those parameters that are not given.

        Args:
            where: the group, or a name in it.
            of: the class of what is made.

        Raises:
            UserError: it cannot be imported or called, refuses a value, or makes something else.
        """
        own = {name: value for name, value in choice.arguments.items() if value is not None or name not in self.unless_given}
        names = {*signature(choice.target).options, *choice.arguments}
        filled = {name: value for name, value in known.items() if name in names and own.get(name) is None}
        with naming_group(where, self.options(choice.target)):
            made = replace(choice, arguments=own).make(*positional, **filled)
        if not isinstance(made, of):
            raise UserError(f"{where}: {choice.target} is not a {of.__name__}; calling it gives a {type(made).__name__}")
        return made


def defaults(group: str, plain: dict[str, Any], filled: Filled) -> dict[str, Any]:
    """The options of a group with the defaults of its target's signature.

    Args:
        plain: the group as composed.

    Raises:
        UserError: there is no such class or function.
    """
    target = plain.get(TARGET) if isinstance(plain, dict) else None
    if not isinstance(target, str):
        raise UserError(f"{group}: an option is needed; give {group}=... or {group}.{TARGET}=package.Class")
    try:
        options = filled.options(target)
    except ValueError as error:
        raise UserError(f"{group}.{TARGET}: {error}") from error
    told = {name: value for name, value in defaults_of(options).items() if name not in filled.known}
    return {TARGET: target, **told, **plain}


def checked_values(group: str, options: dict[str, Option], plain: dict[str, Any]) -> dict[str, Any]:
    """The values of a group, or with ``group=""`` of the options outside of groups, as their types take them.

    Raises:
        UserError: an unknown option, or a value of another type.
    """
    found = {}
    for name, value in plain.items():
        key = f"{group}.{name}" if group else str(name)
        if name not in options:
            where = f"in {group}" if group else "among the options"
            raise UserError(f"{key}: there is no {name!r} {where}.{did_you_mean(str(name), options)}")
        as_default = value == options[name].default  # which its annotation need not allow
        found[name] = value if as_default else checked(key, options[name].type, value)
    return found


def chosen(group: str, plain: dict[str, Any], filled: Filled) -> Chosen:
    """Checks the options of a group against the signature of its target.

    Args:
        plain: with defaults.

    Raises:
        UserError: an unknown option, a value of another type, or a value that is missing.
    """
    target, options = plain[TARGET], filled.options(plain[TARGET])
    given = {name: value for name, value in plain.items() if name != TARGET}
    others = {name: value for name, value in given.items() if name not in options and filled.takes(target, name)}
    arguments = others | checked_values(group, options, {name: given[name] for name in given if name not in others})
    for name, option in options.items():
        if option.default is REQUIRED and name not in arguments and name not in filled.known:
            raise UserError(f"{group}.{name}: a value is needed; give {group}.{name}=...")
    return Chosen(target, arguments)


def named_defaults(group: str, plain: dict[str, Any], filled: Filled) -> dict[str, Any]:
    """:func:`defaults` for a group that is a mapping from names. Null takes a name away.

    Raises:
        UserError: a name that stands for nothing.
    """
    if not isinstance(plain, dict):
        raise UserError(f"{group}: {plain!r} is not a mapping from names to classes")
    known = [name for name, value in plain.items() if isinstance(value, dict) and TARGET in value]
    for name, value in plain.items():
        if name not in known and isinstance(value, dict):
            new = f"a new one needs {group}.{name}.{TARGET}=package.Class"
            raise UserError(f"{group}.{name}: there is no {name!r} in {group}; {new}.{did_you_mean(name, known)}")
        if name not in known and value is not None:
            raise UserError(f"{group}.{name}: {value!r} names no class; to leave {name} out, give {group}.{name}=null")
    return {name: defaults(f"{group}.{name}", plain[name], filled) for name in known}
