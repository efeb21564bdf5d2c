"""Objects that a configuration group names: any class or function, by its full name, with its arguments."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from holotrain.config.signatures import signature
from holotrain.targets import TARGET

PYTHON_OBJECT = "holotrain.config.objects.python_object"
"""What a configuration, and so a checkpoint, names in place of an object that Python code passed to a run."""


def python_object(kind: str) -> NoReturn:
    """An object of Python code. No file can name it, so the command line cannot make it.

    Args:
        kind: full name of the object's class
    """
    raise ValueError(f"a {kind} that Python code made is needed; give it to holotrain.fit, test, ... as an object")


@dataclass(frozen=True)
class ObjectConfig:
    """A class or function and its arguments, which are also attributes.

    Args:
        target: its full name, as the user wrote it.
        arguments: by name, in plain containers.
        object: what Python code made in its place. What is not among the arguments is an attribute of it.
    """

    target: str
    arguments: dict[str, Any] = field(default_factory=dict)
    object: Any = field(default=None, repr=False)

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("arguments", ()):
            return self.arguments[name]
        if self.__dict__.get("object") is None or name.startswith("__"):
            raise AttributeError(f"{self.__dict__.get('target')} is not given {name!r}")
        return getattr(self.object, name)

    @property
    def name(self) -> str:
        """The last part of the name of the class."""
        return self.target.rpartition(".")[2] if self.object is None else type(self.object).__name__

    @property
    def bases(self) -> tuple[str, ...]:
        """Full names of the class and its base classes; of a function none."""
        return signature(self.target).bases if self.object is None else tuple(map(full_name, type(self.object).__mro__))

    def with_arguments(self, **arguments: Any) -> ObjectConfig:
        return replace(self, arguments=self.arguments | arguments)

    def plain(self) -> dict[str, Any]:
        return {TARGET: self.target, **self.arguments}


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
