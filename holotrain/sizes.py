"""Amounts as text."""

from __future__ import annotations

import math
import re

UNITS = {"B": 1} | {
    prefix + suffix: base**power
    for power, prefix in enumerate("KMGTPE", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000), ("", 1024))
}


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
    """``"1 thread"``, ``"2 threads"``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
