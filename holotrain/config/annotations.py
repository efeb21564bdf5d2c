"""Options as structured configs of OmegaConf, which checks their names and types; and in one line what it refuses."""

import ast
import re
from collections.abc import Collection, Mapping
from dataclasses import field, make_dataclass
from enum import Enum
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from holotrain.config.option_groups import require_not_gone
from holotrain.config.signatures import REQUIRED, Option
from holotrain.errors import UserError, did_you_mean
from holotrain.files import read_json
from holotrain.targets import first_line

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
    """The fields of a JSON file that anybody may have written, as their types take them. Other fields are passed over.

    Args:
        kinds: the type of each field, as an annotation.
        what: what the file is, for messages.
        lacking: fields that the file need not have, which are None then.
    """
    try:
        found = read_json(path)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is not a readable {what}: {error!s:.200}") from error
    try:
        if not isinstance(found, dict):
            raise UserError("it is not a mapping")
        return typed_fields({name: None for name in lacking} | {name: found[name] for name in kinds if name in found}, kinds)
    except UserError as error:
        raise UserError(f"{path} is not the {what} of a run: {error!s:.200}") from error


def typed_fields(values: dict[str, Any], kinds: dict[str, str]) -> dict[str, Any]:
    """The values as their types, which are annotations, take them. Raises a UserError if one is missing or of another type."""
    try:
        schema = structured_config({name: Option(kind, REQUIRED, "") for name, kind in kinds.items()})
        return to_plain(OmegaConf.merge(schema, literally(values)), resolve=True)
    except CONFIGURATION_ERRORS as error:
        raise explained(error) from None


def to_plain(node: DictConfig | ListConfig, resolve: bool = False) -> Any:
    """What Hydra composed, or a part of it, in plain containers; ``resolve``: without interpolations, and complete."""
    return OmegaConf.to_container(node, resolve=resolve, throw_on_missing=resolve, enum_to_str=True)


CONFIGURATION_ERRORS = (HydraException, OmegaConfBaseException)

PLUGINS = {"optuna": "optuna", "joblib": "joblib", "submitit_local": "submitit", "submitit_slurm": "submitit"}
"""The extra that installs each plugin of Hydra, by the plugin's name."""


def explained(error: Exception, options: Collection[str] = ()) -> UserError:
    """What Hydra or OmegaConf refuse, in one line with the nearest valid choice.

    Args:
        options: the keys of all options, such as ``optimizer.lr``.
    """
    cause = error.__cause__ or error
    key, text = getattr(cause, "full_key", None) or "", first_line(cause)
    unknown = re.search(r"Could not (?:override|delete from config\.) '([\w./@-]+)'", str(error))
    if isinstance(error, MissingConfigException):
        group, _, option = (error.missing_cfg_file or "").rpartition("/")
        if extra := PLUGINS.get(option) if group.startswith("hydra/") else None:
            return UserError(f"{group}={option}: the package is not installed; pip install 'holotrain[{extra}]'")
        return UserError(
            f"{group}={option}: there is no {option!r} among the options of {group}.{_near(option, error.options)}"
        )
    if isinstance(error, OverrideParseException):
        return UserError(f"{error.override}: write key=value without spaces around =; close brackets, quote special characters")
    if "Ambiguous value" in text:
        return UserError(f"{text}; to run a sweep over several values, add -m; a list has brackets: key=[a,b]")
    if unknown or isinstance(cause, ConfigKeyError):
        key = unknown[1] if unknown else key
        require_not_gone(key)
        return UserError(f"{key}: there is no such option.{_near(key, options)}")
    if isinstance(cause, MissingMandatoryValue):
        return UserError(f"{key}: a value is needed; give {key}=...")
    if resolving := re.fullmatch(r"(\w+) raised while resolving interpolation: (.*)", text):
        return UserError(resolving[2] if resolving[1] == UserError.__name__ else f"{key}: {resolving[2]}")
    if choice := re.fullmatch(r"Invalid value '(.*)', expected one of \[(.*)\]", text):
        text = f"{choice[1]!r} is not one of {choice[2]}.{_near(choice[1], choice[2].split(', '))}"
    if "is not a ListConfig" in text:
        text = "give a list, in brackets: [a,b]"
    return UserError(f"{key}: {text}" if key and key not in text else text)


def _near(key: str, options: Collection[str] | None) -> str:
    """`` Did you mean 'optimizer.lr'?`` for ``optimizer.ls``, and for ``lr``."""
    parent, _, name = key.rpartition(".")
    siblings = [each.rpartition(".")[2] for each in options or () if each.rpartition(".")[0] == parent]
    same = [each for each in options or () if each.rpartition(".")[2] == name]
    return f" Did you mean {same[0]!r}?" if same else did_you_mean(name, siblings)
