"""Checks of arguments by the functions and classes that take them. Each raises a ValueError that names the argument."""

import math
from collections.abc import Iterable, Sequence


def require_at_least(least: float, **arguments: float | Sequence[float] | None) -> None:
    """
    Args:
        arguments: numbers, or lists of them, by name. None and words, such as ``"auto"``, stand for no number.

    Raises:
        ValueError: one of them is below ``least``, or not finite.
    """
    for name, value in arguments.items():
        for number in value if isinstance(value, Sequence) else [value]:
            if number is None or isinstance(number, str):
                continue
            if not math.isfinite(number) or number < least:
                raise ValueError(f"{name} must be at least {least}, not {number}")


def require_within(low: float, high: float, closed: bool = False, **arguments: float) -> None:
    """
    Args:
        closed: allow ``high`` itself.
        arguments: numbers by name.

    Raises:
        ValueError: one of them is outside of [low, high).
    """
    for name, value in arguments.items():
        if not (low <= value < high or (closed and value == high)):
            raise ValueError(f"{name} must be in [{low}, {high}{']' if closed else ')'}, not {value}")


def require_one_of(choices: Iterable[str], **arguments: str) -> None:
    """
    Raises:
        ValueError: an argument is none of the choices.
    """
    *others, last = choices
    for name, value in arguments.items():
        if value not in (*others, last):
            raise ValueError(f"{name} must be {', '.join(others)} or {last}, not {value!r}")
