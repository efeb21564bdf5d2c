"""Which files or documents are held out: a function of their names or contents only, not of machine, order or seed."""

import hashlib
from collections.abc import Sequence

PARTS = ("train", "val", "test")

FEW = 20
"""With fewer files than this, documents are held out instead, if files hold several."""


def held_out_files(names: Sequence[str], val_fraction: float, test_fraction: float) -> list[str]:
    """The part of each file: those whose names have the lowest hashes are for the test, the highest for validation.

    Adding a file moves at most one other. A fraction above 0 holds out at least one file.
    """
    order = sorted(range(len(names)), key=lambda index: fraction_of(names[index]))
    test, val = (max(round(len(names) * share), 1) if share else 0 for share in (test_fraction, val_fraction))
    parts = ["train"] * len(names)
    for index in order[len(names) - val :]:
        parts[index] = "val"
    for index in order[:test]:
        parts[index] = "test"
    return parts


def held_out_document(text: str, val_fraction: float, test_fraction: float) -> str:
    """The part of a document, chosen by a hash of its text, so that equal documents are always in the same part."""
    place = fraction_of(text)
    return "test" if place < test_fraction else "val" if place < test_fraction + val_fraction else "train"


def fraction_of(text: str) -> float:
    """A hash in [0, 1)."""
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", errors="replace"), digest_size=6).digest(), "big") / 2**48
