"""Classes and functions: by their full name, with their arguments, and in their signatures those that they pass on.

A configuration names one as ``{"_target_": "package.Class", "argument": value}``.
"""

import importlib.util
import inspect
import os
import pkgutil
import re
import sys
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from inspect import Parameter, Signature, cleandoc, signature
from pathlib import Path
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
    except (ImportError, TypeError, IndexError) as error:  # the last of a list that is too short
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


def named_packages(argv: Sequence[str]) -> set[str]:
    """The packages that a command line names: of classes (``_target_=``), in ``trust=``, and of classes in the YAML files of
    its ``--config-dir``."""
    words = [word for word in argv if TARGET in word or word.lstrip("+").startswith("trust=")]
    values = [word.partition("=")[2] for word in words]
    flags = [*argv, ""]
    folders = [flags[place + 1] for place, word in enumerate(argv) if word in ("--config-dir", "-cd")]
    folders += [word.partition("=")[2] for word in argv if word.startswith("--config-dir=")]
    for path in [path for folder in folders if folder for path in Path(folder).rglob("*.yaml") if path.is_file()]:
        values += re.findall(rf"{TARGET}: *(\S+)", path.read_text(encoding="utf-8", errors="replace"))
    return {name.partition(".")[0] for value in values for name in re.findall(r"[A-Za-z]\w*(?:\.\w+)*", value)}


class _Here(MetaPathFinder):
    """Finds some packages in a folder, after all other places."""

    def __init__(self, packages: Collection[str], folder: str) -> None:
        self.packages, self.folder = packages, folder

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return PathFinder.find_spec(fullname, [self.folder]) if path is None and fullname in self.packages else None


def find_here(packages: Collection[str]) -> None:
    """Has these packages, and no others, be found in the working directory, if they are nowhere else."""
    sys.meta_path.append(_Here(packages, os.getcwd()))


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
        value = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return False
    return (inspect.isclass(value) or inspect.isfunction(value)) and is_of(value.__module__, packages)


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def blaming(what: str) -> Generator[None]:
    """Turns whatever a library raises inside into a ValueError, in one line that begins with ``what``: libraries raise many
    kinds of errors for files that somebody has crafted, and those in Rust panic, which is no Exception."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise  # such as a signal
        reason = f"there is no {error}" if isinstance(error, KeyError) else first_line(error)
        raise ValueError(f"{what}: {reason}") from error


class ShowsInherited:
    """Its subclasses show the arguments of their base classes too. Those of users keep their own signature."""

    def __init_subclass__(cls: Any, **others: Any) -> None:
        super().__init_subclass__(**others)
        cls.__signature__ = None  # not that of a base class
        if is_of(cls.__module__, ["holotrain"]):
            show_arguments(cls)


def show_arguments(cls: Any, chain: Iterable[type] | None = None, last: type | None = None) -> None:
    """Shows in the signature and the docstring of a class the arguments that it passes on. Each class describes only its own.

    If the last class of the chain takes any arguments, the class keeps its own signature.

    Args:
        chain: the class and those that it passes its options on to, in order; None: it and its base classes.
        last: the class of the chain whose keywords are shown after those of the others.
    """
    classes: list[type] = []
    owners: dict[str, tuple[type, Parameter]] = {}
    for each in chain or cls.__mro__:
        if "__init__" not in vars(each):
            continue
        classes.append(each)
        try:
            parameters = list(signature(vars(each)["__init__"]).parameters.values())[1:]
        except (TypeError, ValueError):  # of a descriptor, or of C
            return
        kinds = {parameter.kind for parameter in parameters}
        if Parameter.VAR_POSITIONAL in kinds:
            return
        for parameter in parameters:
            if parameter.kind is not Parameter.VAR_KEYWORD:
                passed_on = parameter if each is classes[0] else parameter.replace(kind=Parameter.KEYWORD_ONLY)
                owners.setdefault(parameter.name, (each, passed_on))
        if Parameter.VAR_KEYWORD not in kinds:
            break
    shown = sorted(owners.items(), key=lambda item: (item[1][1].kind, item[1][0] is last))
    cls.__signature__ = Signature([parameter for _, (_, parameter) in shown])
    described = {owner: descriptions(cleandoc(owner.__doc__ or "")) for owner in classes}
    lines = [described[owner][name] for name, (owner, _) in shown if name in described[owner]]
    if lines and cls.__doc__ and classes != [cls]:  # python -OO has no docstrings
        cls.__doc__ = _with_arguments(cleandoc(cls.__doc__), "".join(dict.fromkeys(lines)))


SECTION = re.compile(r"^(?:Args|Arguments|Parameters):\n((?: {2,}.*\n?|\n(?= {2,}))+)", re.MULTILINE)


def descriptions(docstring: str) -> dict[str, str]:
    """The lines below ``Args:`` of a docstring without common indentation, by the name of each argument."""
    section = SECTION.search(docstring)
    if section is None:
        return {}
    margin = re.match(" *", section[1])[0]  # ty: ignore[not-subscriptable]
    by_name = {}
    for item in re.split(rf"\n+(?={margin}\S)", section[1].rstrip()):
        names = item.partition(":")[0].strip().partition(" (")[0]
        for name in names.split(","):
            by_name[name.strip()] = f"{item}\n"
    return by_name


def _with_arguments(text: str, lines: str) -> str:
    if SECTION.search(text):
        return SECTION.sub(lambda _: f"Args:\n{lines}", text, count=1)
    before, *after = re.split(r"^(?=Shapes:|Attributes:|Raises:)", text, maxsplit=1, flags=re.MULTILINE)
    return "\n\n".join([before.rstrip(), f"Args:\n{lines}".rstrip(), *after])
