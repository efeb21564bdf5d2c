"""The options of a class or function: names, types, defaults and meanings, read from its source without importing it.

A signature and its docstring are the only place where an option is written down. They are read by griffe, because the import of
Lightning alone takes longer than a mistake on the command line should take to be reported, and because a name in a file is then
checked without running code. OmegaConf checks values against them, as structured configs.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from functools import cache, reduce
from operator import or_
from pathlib import Path
from typing import Any

import griffe
from hydra.errors import HydraException, MissingConfigException
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from holotrain.errors import UserError, did_you_mean
from holotrain.files import read_json
from holotrain.targets import descriptions, first_line

REQUIRED, UNKNOWN = object(), object()
"""The default of an option that has none, and one that is no literal."""


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


@dataclass(frozen=True)
class Signature:
    """The options of a class or function, by name, in order.

    Args:
        bases: full names of the class and its base classes; of a function none.
        takes_others: whether it accepts keywords that are not among the options.
    """

    options: dict[str, Option]
    bases: tuple[str, ...]
    takes_others: bool


@cache
def signature(target: str) -> Signature:
    """Of a class or function, by its full name. Raises a ValueError if there is none, or its source cannot be read."""
    found = _found(target)
    if isinstance(found, griffe.Function):
        options, others = _parameters(found, found.docstring)
        return Signature(options, (), others)
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
    return Signature(options, tuple(lineage), others)


def _on_the_command_line(text: str) -> str:
    """What a docstring says of an argument, without markup, and with the command line's word for None."""
    return re.sub(r"\bNone\b", "null", re.sub(r"(?::[a-z:]+:)?`+~?([^`]*)`+", r"\1", text))


def _parameters(function: griffe.Function, *docstrings: griffe.Docstring | None) -> tuple[dict[str, Option], bool]:
    lines = {name: text for docstring in docstrings if docstring for name, text in descriptions(docstring.value).items()}
    meanings = {name: _on_the_command_line(" ".join(text.partition(":")[2].split())) for name, text in lines.items()}
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
        raise ValueError(f"there is no package {parts[0]!r} with a source in Python, installed or in this folder")
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
    places = getattr(spec, "submodule_search_locations", None) or []
    found = [file for place in places for file in (Path(place, *rest, "__init__.py"), Path(place, *rest).with_suffix(".py"))]
    found = found if rest else [Path(getattr(spec, "origin", None) or "")]
    return next((file for file in found if file.suffix == ".py" and file.is_file()), None)


KINDS: dict[str, Any] = {
    **{"int": int, "float": float, "bool": bool, "str": str, "Path": str},
    **dict.fromkeys(("list", "List", "Sequence", "Iterable", "Collection", "tuple", "Tuple"), list),
    **dict.fromkeys(("dict", "Dict", "Mapping"), dict),
    "Tensor": None,  # which no configuration can hold
}
"""The types in annotations that OmegaConf checks, by their names. An option of another type takes any value."""


def structured_config(options: Mapping[str, Option], given: Collection[str] = ()) -> DictConfig:
    """Options with their defaults and types. Those without a default are missing, and those that are given."""
    fields = []
    for name, option in options.items():
        default = MISSING if option.default is REQUIRED or name in given else option.default
        kind = _type_of_text(option.type or "Any")
        if option.default is None and kind not in (None, Any):
            kind |= None
        fields.append((name, Any if kind is None else kind, field(default_factory=lambda value=default: value)))
    return OmegaConf.structured(make_dataclass("Options", fields))


def _type_of_text(annotation: str) -> Any:
    try:
        return _type_of(ast.parse(annotation, mode="eval").body)
    except SyntaxError:
        return Any


def _type_of(annotation: ast.expr) -> Any:
    """The type that OmegaConf knows for an annotation. It is not evaluated, because an untrusted file may name whatever has a
    source."""
    match annotation:
        case ast.BinOp(op=ast.BitOr()):
            return _union([_type_of(annotation.left), _type_of(annotation.right)])
        case ast.Constant(value=str(quoted)):
            return _type_of_text(quoted)
        case ast.Constant(value=None):
            return None
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return KINDS.get(name, Any)
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name)):
            inner = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else [annotation.slice]
            if name == "Literal":
                choices = [each.value for each in inner if isinstance(each, ast.Constant) and isinstance(each.value, str)]
                return Enum("Choice", list(zip(choices, choices, strict=True))) if len(choices) == len(inner) else Any
            kinds = [_type_of(each) for each in inner if getattr(each, "value", None) is not ...]
            if name in ("Union", "Optional"):
                return _union([*kinds, *([None] if name == "Optional" else [])])
            kind = KINDS.get(name, Any)
            return kind[*(kinds if kind is dict else kinds[:1])] if kind in (list, dict) and Any not in kinds else kind
    return Any


def _union(kinds: list[Any]) -> Any:
    """The union, if OmegaConf knows it: of numbers, truth values and words."""
    some = [kind for kind in kinds if kind is not None]
    if len(some) > 1:
        some = [str if isinstance(kind, type) and issubclass(kind, Enum) else kind for kind in some]
        if any(kind not in (int, float, bool, str) for kind in some):
            return Any
    kind = reduce(or_, dict.fromkeys(some)) if some else None
    return kind if len(some) == len(kinds) or kind in (None, Any) else kind | None


def literally(node: Any) -> Any:
    """What was resolved already is not to be resolved again: a prompt may well hold a dollar and a brace."""
    if isinstance(node, dict):
        return {key: literally(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return [literally(value) for value in node]
    return literal(node) if isinstance(node, str) else node


def literal(text: str) -> str:
    """Escapes interpolations, so that OmegaConf resolves the result to ``text``."""
    return re.sub(r"(\\*)\$\{", lambda found: 2 * found[1] + r"\${", text)


def read_fields(path: Path, kinds: dict[str, str], what: str, lacking: Collection[str] = ()) -> dict[str, Any]:
    """The fields of a JSON file that anybody may have written, as their types (``kinds``, as annotations) take them. Others are
    passed over; those that may be ``lacking`` are None then. ``what``: what the file is, for messages."""
    try:
        found = read_json(path)
        return typed_fields({name: None for name in lacking} | {name: found[name] for name in kinds if name in found}, kinds)
    except (OSError, TypeError, UserError, ValueError) as error:
        raise UserError(f"{path} is not a readable {what} of a run: {error!s:.200}") from error


def typed_fields(values: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
    """The values as their types, which are annotations, take them. Raises a UserError if one is missing or of another type."""
    with explaining():
        schema = structured_config({name: Option(kind, REQUIRED, "") for name, kind in kinds.items()})
        return to_plain(OmegaConf.merge(schema, literally(values)), resolve=True)


def to_plain(node: DictConfig | ListConfig, resolve: bool = False) -> Any:
    """What Hydra composed, or a part of it, in plain containers; ``resolve``: without interpolations, and complete."""
    return OmegaConf.to_container(node, resolve=resolve, throw_on_missing=resolve, enum_to_str=True)


@contextmanager
def explaining(options: Collection[str] = ()) -> Generator[None]:
    """Raises a UserError if Hydra, OmegaConf or a dataclass of options refuse what is done inside; ``options``: all keys."""
    try:
        yield
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(error, options) from None  # in Python, what follows would be pages of Hydra's frames
    except (ValueError, TypeError, AssertionError) as error:  # also of group=null, group=3, and of Hydra's own options
        raise UserError(first_line(error)) from None


def explained(error: Exception, options: Collection[str]) -> UserError:
    """What Hydra or OmegaConf refuse, in one line with the nearest valid choice."""
    cause = error.__cause__ or error
    key, text = getattr(cause, "full_key", None) or "", first_line(cause)
    unknown = re.search(r"Could not (?:override|delete from config\.) '([\w./@-]+)'", str(error))
    if isinstance(error, MissingConfigException):
        key, _, option = (error.missing_cfg_file or "").rpartition("/")
        plugin = f"; a plugin of Hydra: pip install 'holotrain[{option.partition('_')[0]}]'" if key.startswith("hydra/") else ""
        text = f"there is no {option!r} among its options{plugin}.{_near(option, error.options)}"
    elif unknown or isinstance(cause, ConfigKeyError):
        key = unknown[1] if unknown else key
        text = f"there is no such option.{_near(key, options)}"
    elif isinstance(cause, MissingMandatoryValue):
        text = f"a value is needed; give {key}=..."
    elif choice := re.fullmatch(r"Invalid value '(.*)', expected one of \[(.*)\]", text):
        text = f"{choice[1]!r} is not one of {choice[2]}.{_near(choice[1], choice[2].split(', '))}"
    elif "Ambiguous value" in text:
        text += "; for a sweep over several values, add -m; a list has brackets: key=[a,b]"
    elif raised := re.fullmatch(r"UserError raised while resolving interpolation: (.*)", text):
        return UserError(raised[1])
    return UserError(f"{key}: {text}" if key and not text.startswith(key) else text)


def _near(key: str, options: Collection[str] | None) -> str:
    """`` Did you mean 'optimizer.lr'?`` for ``optimizer.ls``, and for ``lr``."""
    parent, _, name = key.rpartition(".")
    siblings = [each.rpartition(".")[2] for each in options or () if each.rpartition(".")[0] == parent]
    same = [each for each in options or () if each.rpartition(".")[2] == name]
    return f" Did you mean {same[0]!r}?" if same else did_you_mean(name, siblings)
