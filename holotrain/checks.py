"""Checks of option values. Each raises a UserError with one line: which option, what is wrong, what is valid."""

import difflib
import math
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager

from holotrain.errors import UserError


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` with the nearest choice, or an empty string."""
    near = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" Did you mean {near[0]!r}?" if near else ""


def one_of(where: str, value: str | None, choices: Iterable[str]) -> None:
    choices = list(choices)
    if value not in choices:
        raise UserError(f"{where}: {value!r} is not one of {', '.join(choices)}.{did_you_mean(str(value), choices)}")


def at_least(where: str, value: float, least: float) -> None:
    if not math.isfinite(value) or value < least:
        raise UserError(f"{where}: {value} is out of range; it must be at least {least}")


def at_least_or_auto(where: str, value: object, least: int, others: str = "auto") -> None:
    """A whole number or ``"auto"``; ``others``: the valid words, for the message."""
    if value != "auto" and (isinstance(value, bool) or not isinstance(value, int)):
        raise UserError(f"{where}: {value!r} is not valid; give a whole number or {others}")
    if value != "auto":
        at_least(where, value, least)


def within(where: str, value: float, low: float, high: float, *, closed: bool = False) -> None:
    """``low <= value < high``; with ``closed``, ``value <= high``."""
    if not (low <= value < high or (closed and value == high)):
        raise UserError(f"{where}: {value} is out of range; it must be in [{low}, {high}{']' if closed else ')'}")


def amount(where: str, value: object) -> None:
    """A whole number of batches, or a fraction in [0, 1]."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < 0 or (isinstance(value, float) and value > 1):
        raise UserError(f"{where}: {value!r} is not valid; give a whole number of batches or a fraction in [0, 1]")


@contextmanager
def described_by(group: str, options: Collection[str] = ()) -> Iterator[None]:
    """Turns a ValueError inside into a UserError about this configuration group.

    Args:
        options: those of the group. If the message begins with the name of one, the error is about ``group.name``, as the user
            writes it.
    """
    try:
        yield
    except ValueError as error:
        raise UserError(_about(group, options, str(error))) from error


def _about(group: str, options: Collection[str], text: str) -> str:
    name, sign, rest = re.match(r"(\w*)(\W?)(.*)", text, re.DOTALL).groups()
    if name not in options or sign not in " =:" or rest.startswith(("and ", "or ")):  # about several, or about none
        return f"{group}: {text}"
    return f"{group}.{name}: {rest}" if sign == " " else f"{group}.{text}"
