"""The options of a class or function: names, types, defaults and meanings, read from its source without importing it.

A signature and its docstring are the only place where an option is written down. They are read by griffe, because the import of
Lightning alone takes longer than a mistake on the command line should take to be reported, and because a name in a file is then
checked without running code.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import griffe

from holotrain.errors import did_you_mean
from holotrain.targets import descriptions

REQUIRED, UNKNOWN = object(), object()
"""The default of an option that has none, and one that is no literal."""

INFINITE = re.compile(r"-?(((math|np|numpy|torch)\.)?inf|float\('-?inf'\))")  # which has no literal; griffe writes 1e999 as inf


@dataclass(frozen=True)
class Option:
    """One parameter of a class or function.

    Args:
        type: its annotation as source; empty: any value.
        default: its value, :data:`REQUIRED` or :data:`UNKNOWN`.
        meaning: its description in the docstring.
    """

    type: str
    default: Any
    meaning: str


def defaults_of(options: dict[str, Option]) -> dict[str, Any]:
    """The defaults of those options that have one."""
    return {name: option.default for name, option in options.items() if option.default not in (REQUIRED, UNKNOWN)}


@dataclass(frozen=True)
class Signature:
    """The options of a class or function, by name, in order.

    Args:
        bases: full names of the class and its base classes; of a function none.
        takes_others: whether it accepts keywords that are not among the options.
        meaning: its docstring.
    """

    options: dict[str, Option]
    bases: tuple[str, ...]
    takes_others: bool
    meaning: str


@cache
def signature(target: str) -> Signature:
    """Of a class or function, by its full name. Raises a ValueError if there is none, or its source cannot be read."""
    found = _found(target)
    if isinstance(found, griffe.Function):
        options, others = _parameters(found, found.docstring)
        return Signature(options, (), others, _text(found.docstring))
    if not isinstance(found, griffe.Class):
        raise ValueError(f"{target} is not a class or function")
    lineage = _lineage(found, {})
    options, others = {}, False
    for each in lineage.values():
        made = each.members.get("__init__")
        if not isinstance(made, griffe.Function):
            if any(str(decorator.value).startswith("dataclass") for decorator in each.decorators):
                options = _fields(each) | options
            continue
        own, others = _parameters(made, made.docstring, each.docstring)
        options = {**options, **{name: option for name, option in own.items() if name not in options}}
        if not others:  # **keywords are those of the base class
            break
    return Signature(options, tuple(lineage), others, _text(found.docstring))


def _parameters(function: griffe.Function, *docstrings: griffe.Docstring | None) -> tuple[dict[str, Option], bool]:
    lines = {name: text for docstring in docstrings if docstring for name, text in descriptions(docstring.value).items()}
    meanings = {name: " ".join(text.partition(":")[2].split()) for name, text in lines.items()}
    options, others = {}, False
    for parameter in function.parameters:
        if parameter.kind is griffe.ParameterKind.var_keyword:
            others = True
        elif parameter.name != "self" and parameter.kind is not griffe.ParameterKind.var_positional:
            annotation = "" if parameter.annotation is None else str(parameter.annotation)
            options[parameter.name] = Option(annotation, _literal(parameter.default), meanings.get(parameter.name, ""))
    return options, others


def _fields(cls: griffe.Class) -> dict[str, Option]:
    """The fields of a dataclass; the string below a field is its meaning."""
    return {
        name: Option(str(field.annotation), _literal(field.value), _text(field.docstring))
        for name, field in cls.members.items()
        # a ClassVar is no attribute of an instance
        if isinstance(field, griffe.Attribute) and "instance-attribute" in field.labels and field.annotation is not None
    }


def _text(docstring: griffe.Docstring | None) -> str:
    return " ".join(docstring.value.split()) if docstring else ""


def _literal(default: str | griffe.Expr | None) -> Any:
    if default is None:
        return REQUIRED
    if INFINITE.fullmatch(str(default)):
        return -math.inf if "-" in str(default) else math.inf
    try:
        value = ast.literal_eval(str(default))
    except (ValueError, SyntaxError):
        return UNKNOWN
    return list(value) if isinstance(value, tuple) else value


def _lineage(cls: griffe.Class, found: dict[str, griffe.Class]) -> dict[str, griffe.Class]:
    """``found`` with the class and its base classes, depth first, as far as their sources can be read."""
    if cls.path not in found:
        found[cls.path] = cls
        for base in cls.bases:
            with suppress(ValueError):  # a built-in class
                other = _found(base if isinstance(base, str) else base.canonical_path)
                if isinstance(other, griffe.Class):
                    _lineage(other, found)
    return found


def _found(target: str) -> griffe.Object:
    """What a full name stands for, through imports of other modules."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        module = _module(".".join(parts[:length]))
        if module is not None:
            break
    else:
        near = did_you_mean(parts[0], (file.stem for file in Path().glob("*.py")))
        raise ValueError(f"there is no package {parts[0]!r} with a source in Python, installed or in this folder.{near}")
    node: griffe.Object | griffe.Alias = module
    for place, part in enumerate(parts[length:], length):
        member = node.members.get(part)
        if member is None:
            for other in node.members.values():
                if isinstance(other, griffe.Alias) and other.wildcard and other.wildcard != node.path:
                    with suppress(ValueError):
                        return _found(".".join([other.wildcard, *parts[place:]]))
            near = did_you_mean(part, [name for name in node.members if not name.startswith("_")])
            raise ValueError(f"there is no {part!r} in {'.'.join(parts[:place])}.{near}")
        if isinstance(member, griffe.Alias):
            return _found(".".join([member.target_path, *parts[place + 1 :]]))
        node = member
    return node


@cache
def _module(name: str) -> griffe.Module | None:
    """A module's source, parsed. Nothing is imported."""
    path = _file(name)
    if path is None:
        return None
    parent = _module(name.rpartition(".")[0]) if "." in name else None
    try:
        return griffe.visit(name.rpartition(".")[2], filepath=path, code=path.read_text(encoding="utf-8"), parent=parent)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ValueError(f"the source of {name} cannot be read: {error}") from error


def _file(name: str) -> Path | None:
    top, *rest = name.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # a module without a specification, such as __main__
        return None
    for length in range(1, len(rest) + 1):
        if spec is None or spec.submodule_search_locations is None:
            return None
        spec = PathFinder.find_spec(".".join([top, *rest[:length]]), list(spec.submodule_search_locations))
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)
