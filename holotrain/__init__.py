"""holotrain trains transformers whose activations do not fit in memory, at close to the speed of those that do."""

from typing import Any

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "load":  # only when asked for: the command line's help does not wait for torch
        from holotrain.models.saved import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
