"""holotrain trains transformers whose activations do not fit in memory, at close to the speed of those that do."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holotrain.api import export, fit, generate, load, plan, predict, test, validate
    from holotrain.config.command_line import compose
    from holotrain.errors import UserError

__version__ = "0.1.0"
__all__ = ["UserError", "compose", "export", "fit", "generate", "load", "plan", "predict", "test", "validate"]

_PACKAGES = (
    *("callbacks", "data", "error_diffusion", "models", "optimizers", "overlap", "parallel", "planning", "reversible"),
    *("synthesis", "tasks"),
)
"""Packages for use in one's own code, which need no import of their own."""

_ELSEWHERE = {"compose": "holotrain.config.command_line", "UserError": "holotrain.errors"}


def __getattr__(name: str) -> Any:
    if name in __all__:  # only when asked for: the command line's help does not wait for torch
        return getattr(importlib.import_module(_ELSEWHERE.get(name, "holotrain.api")), name)
    if name in _PACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
