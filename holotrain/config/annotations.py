"""Values that people and files give, checked against annotations."""

import ast
import math
import sys
from collections.abc import Collection
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Never, Union, get_args, get_origin

from holotrain.errors import UserError, did_you_mean
from holotrain.files import read_json

KINDS: dict[str, Any] = {
    **{kind.__name__: kind for kind in (int, float, bool, str, Path)},
    **dict.fromkeys(("list", "List", "Sequence", "Iterable", "Collection"), list),
    **dict.fromkeys(("tuple", "Tuple"), tuple),
    **dict.fromkeys(("dict", "Dict", "Mapping"), dict),
    "Tensor": Never,  # which no configuration can hold
}
"""The types in annotations of which a value is checked, by their names. Any value may be of another one."""

DESCRIPTIONS = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "a word", Path: "a path", NoneType: "null"},
    **{list: "a list", tuple: "a list", dict: "a mapping"},
}


def checked(where: str, annotation: str, value: Any) -> Any:
    """The value as a parameter of this type takes it: a whole number becomes a float, a number becomes a string. Raises a
    UserError if it is of another type."""
    try:
        hint = _hint(ast.parse(annotation or "Any", mode="eval").body)
    except SyntaxError:
        return value
    if fitted := _fitted(hint, value):
        return fitted[0]
    shown = f"{value!r:.100}"
    if type(value) is int and abs(value) >= 2**63:
        raise UserError(f"{where}: {shown} is too large")
    if type(value) is float and math.isinf(value):
        raise UserError(f"{where}: {shown} is not finite")
    kinds = get_args(hint) if get_origin(hint) is Union else (hint,)
    choices = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    if isinstance(value, str) and all(get_origin(kind) is Literal or kind is NoneType for kind in kinds):
        raise UserError(f"{where}: {shown} is not one of {', '.join(choices)}.{did_you_mean(value, choices)}")
    expected = " or ".join(dict.fromkeys(_described(kind) for kind in kinds if kind is not Never)) or "a tensor"
    raise UserError(f"{where}: {shown} is not {expected}.{did_you_mean(str(value), choices)}".removesuffix("."))


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
        checked("its content", "dict", found)
        fields = {name: checked(name, kind, found.get(name)) for name, kind in kinds.items()}
        if missing := [name for name in kinds if name not in found and name not in lacking]:
            raise UserError(f"it has no {missing[0]!r}")
        return fields
    except UserError as error:
        raise UserError(f"{path} is not the {what} of a run: {error!s:.200}") from error


def _hint(node: ast.expr) -> Any:
    """An annotation as a type. It is not evaluated, because an untrusted file may name anything that has a source."""
    match node:
        case ast.BinOp(op=ast.BitOr()):
            return Union[*map(_hint, (node.left, node.right))]  # ty: ignore[invalid-type-form]
        case ast.Constant(value=str(quoted)):
            return _hint(ast.parse(quoted, mode="eval").body)
        case ast.Constant():  # None, or the dots of tuple[int, ...]
            return node.value
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return KINDS.get(name, Any)
        case ast.Subscript(value=ast.Name(id=name) | ast.Attribute(attr=name)):
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if name == "Literal":
                return Literal[*(each.value for each in inner if isinstance(each, ast.Constant))]  # ty: ignore[invalid-type-form]
            if name in ("Union", "Optional"):
                null = [None] if name == "Optional" else []
                return Union[*map(_hint, inner), *null]  # ty: ignore[invalid-type-form]
            kind = KINDS.get(name, Any)
            return kind[*map(_hint, inner)] if kind in (list, tuple, dict) else kind
    return Any


def _fitted(hint: Any, value: Any) -> list[Any]:
    """What the value becomes as each of the types that it fits; first, where it keeps its type."""
    kind, inner = get_origin(hint) or hint, get_args(hint)
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is Union:
        found = [each for alternative in inner for each in _fitted(alternative, value)]
        return sorted(found, key=lambda each: type(each) is not type(value))
    if kind is Literal:
        return [choice for choice in inner if value == choice and type(value) is type(choice)]
    if kind is float:
        return [float(value)] if number and abs(value) <= sys.float_info.max else []  # neither NaN nor infinity
    if kind in (str, Path):
        return [str(value)] if number or isinstance(value, str) else []
    if kind is dict and isinstance(value, dict) and inner:
        return [value] if all(_fitted(inner[0], key) and _fitted(inner[1], each) for key, each in value.items()) else []
    if kind not in (list, tuple):
        fits = kind is Any or (type(value) is kind if kind in (int, bool) else kind is not Never and isinstance(value, kind))
        too_large = fits and kind is int and abs(value) >= 2**63  # torch takes no such number
        return [value] if fits and not too_large else []
    if not isinstance(value, list | tuple):
        return []
    kinds = inner if kind is tuple and ... not in inner and inner else (*inner, Any)[:1] * len(value)
    fitted = [_fitted(*pair) for pair in zip(kinds, value, strict=False)]
    return [[each[0] for each in fitted]] if len(kinds) == len(value) and all(fitted) else []


def _described(hint: Any) -> str:
    kind, inner = get_origin(hint) or hint, get_args(hint)
    if kind is Literal:
        return f"one of {', '.join(map(repr, inner))}"
    if kind is list and inner and inner[0] in DESCRIPTIONS:
        return f"a list, each of it {DESCRIPTIONS[inner[0]]}"
    return f"a list of {len(inner)} values" if kind is tuple and inner and ... not in inner else DESCRIPTIONS[kind]
