"""holotrain trains transformers whose activations do not fit in memory, at close to the speed of those that do."""

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holotrain.api import Result, export, fit, generate, load, plan, predict, test, validate
    from holotrain.config.start import compose
    from holotrain.errors import UserError

__version__ = "0.1.0"
__all__ = ["Result", "UserError", "compose", "export", "fit", "generate", "load", "plan", "predict", "test", "validate"]

_ELSEWHERE = {"compose": "holotrain.config.start", "UserError": "holotrain.errors"}


def __getattr__(name: str) -> Any:
    if name in __all__:  # only when asked for: the command line's help does not wait for torch
        return getattr(importlib.import_module(_ELSEWHERE.get(name, "holotrain.api")), name)
    if (Path(__file__).parent / name / "__init__.py").is_file():  # holotrain.data after import holotrain
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
