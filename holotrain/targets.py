"""Classes and functions by their full name, with their arguments: ``{"_target_": "package.Class", "argument": value}``."""

import importlib.util
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from types import ModuleType
from typing import Any

TARGET, PARTIAL = "_target_", "_partial_"


def instantiate(value: Any, *positional: Any, **keywords: Any) -> Any:
    """A plain value, or what it names: every mapping with ``_target_``, at any depth, is replaced by what the class or function
    returns; with ``_partial_: true`` by a ``functools.partial`` of it.

    Not Hydra's ``instantiate``, which resolves interpolations once more.

    Args:
        positional, keywords: further arguments of the outermost class or function; keywords replace those of the mapping.

    Raises:
        ValueError: a class cannot be imported or called, or refuses a value.
    """
    if isinstance(value, list | tuple):
        return type(value)(instantiate(each) for each in value)
    if not isinstance(value, dict):
        return value
    arguments = {name: instantiate(each) for name, each in value.items() if name not in (TARGET, PARTIAL)}
    if TARGET not in value:
        return arguments
    target = value[TARGET]
    try:
        function = pkgutil.resolve_name(target)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{target}: {first_line(error)}") from error
    if value.get(PARTIAL):
        return partial(function, *positional, **(arguments | keywords))
    try:
        return function(*positional, **(arguments | keywords))
    except (ImportError, TypeError) as error:
        raise ValueError(f"{target}: {first_line(error)}") from error


def targets(node: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The classes that a configuration names, at any depth, with where."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            if key == TARGET:
                yield where, value
            else:
                yield from targets(value, f"{where}.{key}" if where else str(key))
    elif isinstance(node, list | tuple):
        for place, value in enumerate(node):
            yield from targets(value, f"{where}[{place}]")


def is_of(module: str, packages: Iterable[str]) -> bool:
    """Whether a module is one of the packages or in one of them, by its name."""
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def is_public_name(target: str) -> bool:
    """Whether this is a dotted name without private parts, which cannot reach into an object's attributes by ``:``."""
    return re.fullmatch(r"[A-Za-z]\w*(\.[A-Za-z]\w*)+", target) is not None


def missing_package(target: str) -> str:
    """What is wrong and what to do, if Python finds no package of this name; else empty. Nothing is imported."""
    package = target.partition(".")[0]
    if not is_public_name(target) or importlib.util.find_spec(package) is not None:
        return ""
    return f"there is no package {package!r} here; install it, or start in the folder that holds it"


def needed(module: str, by: str, extra: str) -> ModuleType:
    """A module of a package that comes with an extra of holotrain.

    Raises:
        ValueError: it is not installed; says ``by`` what it is needed, and how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ValueError(f"{by}: pip install 'holotrain[{extra}]'") from error


def is_defined_in(target: str, packages: Iterable[str]) -> bool:
    """Whether this names a class or function that a module of the packages defines, not what it imports or an attribute of a
    class. Imports modules of the packages only."""
    module, _, name = target.rpartition(".")
    if not is_public_name(target) or not is_of(module, packages):
        return False
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return False
    return (inspect.isclass(found) or inspect.isfunction(found)) and is_of(found.__module__, packages)


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
