"""Refusals that name the nearest valid choice."""

import difflib
from collections.abc import Iterable

from holotrain.errors import UserError


def nearest(word: str, choices: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest of the choices, or nothing."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def one_of(option: str, value: str, choices: Iterable[str]) -> None:
    """
    Raises:
        UserError: ``value`` is none of the choices.
    """
    choices = list(choices)
    if value not in choices:
        raise UserError(f"data.{option}: {value!r} is not one of {', '.join(choices)}.{nearest(value, choices)}")


def at_least(option: str, value: int, least: int) -> None:
    """
    Raises:
        UserError: ``value`` is less.
    """
    if value < least:
        raise UserError(f"data.{option}: {value} is out of range; it must be at least {least}")
