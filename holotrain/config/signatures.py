"""The options of a class or function: names, types, defaults and meanings, read from its source without importing it.

A signature and its docstring are the only place where an option is written down. They are read by griffe, because the import of
Lightning alone takes longer than a mistake on the command line should take to be reported, and because a name in a file is then
checked without running code.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import griffe

from holotrain.checks import did_you_mean
from holotrain.errors import UserError
from holotrain.targets import is_of, is_public_name

REQUIRED = object()
"""The default of an option that has none."""

UNKNOWN = object()
"""A default that is no literal."""


@dataclass(frozen=True)
class Option:
    """One parameter of a class or function.

    Args:
        type: its annotation as source; empty: any value.
        default: its value, :data:`REQUIRED` or :data:`UNKNOWN`.
        meaning: its description in the docstring.
    """

    name: str
    type: str
    default: Any
    meaning: str


@dataclass(frozen=True)
class Signature:
    """The options of a class or function.

    Args:
        target: its full name, where it is defined.
        options: by name, in order.
        bases: full names of the class and its base classes; of a function none.
        takes_others: whether it accepts keywords that are not among the options.
        meaning: the first line of its docstring.
    """

    target: str
    options: dict[str, Option]
    bases: tuple[str, ...]
    takes_others: bool
    meaning: str


@cache
def signature(target: str) -> Signature:
    """
    Args:
        target: full name of a class or function, such as ``torch.optim.AdamW``.

    Raises:
        ValueError: there is no such class or function, or its source cannot be read.
    """
    found = _found(target)
    if isinstance(found, griffe.Function):
        options, others = _parameters(found, found.docstring)
        return Signature(found.path, options, (), others, _first_line(found.docstring))
    if not isinstance(found, griffe.Class):
        raise ValueError(f"{target} is not a class or function")
    lineage = list(_lineage(found))
    options, others = {}, False
    for each in lineage:
        made = each.members.get("__init__")
        if not isinstance(made, griffe.Function):
            continue
        own, others = _parameters(made, made.docstring, each.docstring)
        options = {**options, **{name: option for name, option in own.items() if name not in options}}
        if not others:  # **keywords are those of the base class
            break
    names = tuple(each.path for each in lineage)
    return Signature(found.path, options, names, others, _first_line(found.docstring))


def is_defined_in(target: str, packages: Iterable[str]) -> bool:
    """:func:`holotrain.targets.is_defined_in`, from the sources: nothing is imported."""
    try:
        found = _found(target)
    except ValueError:
        return False
    is_one = isinstance(found, griffe.Class | griffe.Function) and isinstance(found.parent, griffe.Module)
    return is_public_name(target) and is_one and is_of(found.parent.path, packages)


def _parameters(function: griffe.Function, *docstrings: griffe.Docstring | None) -> tuple[dict[str, Option], bool]:
    meanings = {}
    for docstring in filter(None, docstrings):
        for section in docstring.parse("google", warnings=False):
            if section.kind is griffe.DocstringSectionKind.parameters:
                for described in section.value:
                    for name in described.name.split(","):
                        meanings[name.strip()] = " ".join(described.description.split())
    options, others = {}, False
    for parameter in function.parameters:
        if parameter.kind is griffe.ParameterKind.var_keyword:
            others = True
        elif parameter.name != "self" and parameter.kind is not griffe.ParameterKind.var_positional:
            annotation = "" if parameter.annotation is None else str(parameter.annotation)
            options[parameter.name] = Option(
                parameter.name, annotation, _literal(parameter.default), meanings.get(parameter.name, "")
            )
    return options, others


def _literal(default: str | griffe.Expr | None) -> Any:
    if default is None:
        return REQUIRED
    try:
        value = ast.literal_eval(str(default))
    except (ValueError, SyntaxError):
        return UNKNOWN
    return list(value) if isinstance(value, tuple) else value


def _first_line(docstring: griffe.Docstring | None) -> str:
    return docstring.value.strip().splitlines()[0] if docstring and docstring.value.strip() else ""


def _lineage(cls: griffe.Class) -> Iterator[griffe.Class]:
    """The class and its base classes, depth first, as far as their sources can be read."""
    seen, waiting = set(), [cls]
    while waiting:
        each = waiting.pop(0)
        if each.path in seen:
            continue
        seen.add(each.path)
        yield each
        bases = []
        for base in each.bases:
            try:
                bases.append(_found(base if isinstance(base, str) else base.canonical_path))
            except ValueError:  # a built-in class
                continue
        waiting = [base for base in bases if isinstance(base, griffe.Class)] + waiting


def _found(target: str) -> griffe.Object:
    """What a full name stands for, through imports of other modules."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        module = _module(".".join(parts[:length]))
        if module is not None:
            break
    else:
        raise ValueError(f"there is no package {parts[0]!r} with a source in Python")
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


WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word", "None": "null"}


def checked(where: str, annotation: str, value: Any) -> Any:
    """The value as a parameter of this type takes it: a whole number becomes a float, a number becomes a word.

    Raises:
        UserError: it is of another type.
    """
    try:
        kinds = list(_alternatives(ast.parse(annotation, mode="eval").body)) if annotation else []
    except SyntaxError:
        return value
    kinds = [kind for kind in kinds if _name(kind) != "Tensor"]  # which no configuration can hold
    if not kinds or any(not _is_known(kind) for kind in kinds):
        return value  # any value may be right
    fitted = [converted for fits, converted in (_fitted(kind, value) for kind in kinds) if fits]
    if fitted:
        return next((converted for converted in fitted if type(converted) is type(value)), fitted[0])
    choices = [choice for kind in kinds for choice in _choices(kind)]
    if isinstance(value, str) and choices and all(_name(kind) in ("Literal", "None") for kind in kinds):
        raise UserError(f"{where}: {value!r} is not one of {', '.join(map(str, choices))}.{did_you_mean(value, choices)}")
    words = " or ".join(dict.fromkeys(_in_words(kind) for kind in kinds))
    raise UserError(f"{where}: {value!r} is not {words}")


def _alternatives(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        yield from _alternatives(node.left)
        yield from _alternatives(node.right)
    elif isinstance(node, ast.Subscript) and _name(node) in ("Union", "Optional"):
        inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        for each in inner:
            yield from _alternatives(each)
        if _name(node) == "Optional":
            yield ast.Constant(None)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from _alternatives(ast.parse(node.value, mode="eval").body)
    else:
        yield node


def _name(node: ast.expr) -> str:
    node = node.value if isinstance(node, ast.Subscript) else node
    if isinstance(node, ast.Constant):
        return "None"
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


LISTS = ("list", "List", "Sequence", "Iterable", "Collection", "tuple", "Tuple")
DICTS = ("dict", "Dict", "Mapping")


def _is_known(node: ast.expr) -> bool:
    return _name(node) in (*WORDS, *LISTS, *DICTS, "Literal", "Path")


def _choices(node: ast.expr) -> list[Any]:
    if _name(node) != "Literal":
        return []
    given = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    return [each.value for each in given if isinstance(each, ast.Constant)]


def _fitted(node: ast.expr, value: Any) -> tuple[bool, Any]:
    """Whether a value is of a type, and what it becomes."""
    name = _name(node)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if name == "None":
        return value is None, None
    if name == "bool":
        return isinstance(value, bool), value
    if name == "int":
        return number and isinstance(value, int), value
    if name == "float":
        return number and not math.isnan(value), float(value) if number else value
    if name in ("str", "Path"):
        return isinstance(value, str) or number, str(value)
    if name == "Literal":
        return any(value == choice and type(value) is type(choice) for choice in _choices(node)), value
    if name in DICTS:
        return isinstance(value, dict), value
    if not isinstance(value, list | tuple):
        return False, value
    elements = list(_elements(node, len(value)))
    if len(elements) != len(value):
        return False, value
    fitted = [_any_fitted(element, each) for element, each in zip(elements, value, strict=True)]
    return all(fits for fits, _ in fitted), [converted for _, converted in fitted]


def _elements(node: ast.expr, length: int) -> Iterable[ast.expr | None]:
    """The type of each element of a list or tuple; None: any."""
    if not isinstance(node, ast.Subscript):
        return [None] * length
    inner = node.slice
    if _name(node) not in ("tuple", "Tuple"):
        return [inner] * length
    inner = inner.elts if isinstance(inner, ast.Tuple) else [inner]
    if len(inner) == 2 and isinstance(inner[1], ast.Constant) and inner[1].value is ...:
        return [inner[0]] * length
    return inner


def _any_fitted(node: ast.expr | None, value: Any) -> tuple[bool, Any]:
    kinds = list(_alternatives(node)) if node is not None else []
    if not kinds or not all(map(_is_known, kinds)):
        return True, value
    return next((result for result in (_fitted(kind, value) for kind in kinds) if result[0]), (False, value))


def _in_words(node: ast.expr) -> str:
    name = _name(node)
    if name in LISTS:
        if isinstance(node, ast.Subscript) and name in ("tuple", "Tuple") and isinstance(node.slice, ast.Tuple):
            return f"a list of {len(node.slice.elts)} values"
        return "a list"
    if name in DICTS:
        return "a mapping"
    choices = _choices(node)
    return f"one of {', '.join(map(repr, choices))}" if choices else WORDS.get(name, "a path")
