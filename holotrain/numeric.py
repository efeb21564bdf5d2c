"""Numbers: the ranges that arguments must be in, amounts as text, and seeds from several numbers."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGTPE", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000), ("", 1024))
}


def require_at_least(least: float, **arguments: float | Sequence[float] | None) -> None:
    """
    Args:
        arguments: numbers, or lists of them, by name. None and ``"auto"`` stand for no number.

    Raises:
        ValueError: one of them is below ``least``, not finite, or another word.
    """
    for name, value in arguments.items():
        for number in value if isinstance(value, Sequence) and not isinstance(value, str) else [value]:
            if number is None or number == "auto":
                continue
            if isinstance(number, str):
                raise ValueError(f"{name}: {number!r} is not a number or auto")
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
    """Raises a ValueError if an argument is none of the choices."""
    *others, last = choices
    for name, value in arguments.items():
        if value not in (*others, last):
            raise ValueError(f"{name} must be {', '.join(others)} or {last}, not {value!r}")


def bits_in(option: str) -> int:
    """The number in an option such as ``"4bit"``."""
    return int(option.removesuffix("bit"))


def parse_bytes(text: str) -> int:
    """``"16GiB"``, ``"16 GB"`` (powers of 1000), ``"16G"`` (of 1024) or ``"4096 B"``.

    Raises:
        ValueError: the text has none of these forms.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    unit = next((unit for unit in UNITS if match and unit.lower() == match[2].lower()), None)
    if match is None or unit is None or not float(match[1]):
        raise ValueError(f"{text!r} is not an amount of memory; write a number and its unit, such as 16GiB or 800MiB")
    return int(float(match[1]) * UNITS[unit])


def unit_of(size: float) -> tuple[str, int]:
    """The unit to print a size in, and its number of bytes."""
    power = max(0, min(int(math.log2(max(abs(size), 1)) // 10), 6))
    return ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")[power], 1024**power


def in_words(size: float, up: bool = False) -> str:
    """A size as text, such as ``"1.5 GiB"``; ``up``: rounded up."""
    name, unit = unit_of(size)
    return f"{math.ceil(100 * size / unit) / 100:.2f} {name}" if up else f"{size / unit:.4g} {name}"


def counted(number: float, noun: str) -> str:
    """``"1 thread"``, ``"2 threads"``; a ``process`` is two ``processes``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{'es' if noun.endswith('s') else 's'}"


def mixed_seed(*numbers: int) -> int:
    """A 63-bit seed from several numbers. Close inputs give unrelated seeds (finalizer of splitmix64)."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & (2**64 - 1)
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & (2**64 - 1)
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & (2**64 - 1)
        state ^= state >> 31
    return state >> 1
