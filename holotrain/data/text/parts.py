"""Which files or documents are held out: a function of their names or contents only, not of machine, order or seed."""

import hashlib
from collections.abc import Sequence
from itertools import groupby

from holotrain.data.text.readers import ROWS
from holotrain.data.text.sources import SourceFile

PARTS = ("train", "val", "test")

FEW = 20
"""With fewer files than this, documents are held out instead, if files hold several."""


def whole_files(files: Sequence[SourceFile], unit: str) -> bool:
    """Whether whole files are held out: there are enough files, or each is one document."""
    drawn = [file for file in files if file.part is None]
    return len(drawn) >= FEW or (unit == "file" and not any(file.path.suffix in ROWS for file in drawn))


def held_out_files(files: Sequence[SourceFile], val_fraction: float, test_fraction: float) -> list[str]:
    """The part of each file: its own if it has one, otherwise chosen by a hash of its name, evenly from every group.

    Within a group the files with the lowest hashes are used for the test and those with the highest for validation, so adding
    a file moves at most one other. A fraction above 0 holds out at least one file.
    """
    parts = [file.part or "train" for file in files]
    drawn = sorted((index for index, file in enumerate(files) if file.part is None), key=lambda index: files[index].group)
    rank = {index: _fraction(files[index].name.encode()) for index in drawn}
    for part, fraction, highest in (("test", test_fraction, False), ("val", val_fraction / (1 - test_fraction), True)):
        if fraction == 0 or not drawn:
            continue
        chosen, before = set(), 0
        for _, group in groupby(drawn, key=lambda index: files[index].group):
            members = sorted(group, key=rank.get, reverse=highest)
            after = before + len(members)
            chosen.update(members[: round(after * fraction) - round(before * fraction)])
            before = after
        chosen = chosen or {(max if highest else min)(drawn, key=rank.get)}
        for index in chosen:
            parts[index] = part
        drawn = [index for index in drawn if index not in chosen]
    return parts


def held_out_document(text: str, val_fraction: float, test_fraction: float) -> str:
    """The part of a document, chosen by a hash of its text, so that equal documents are always in the same part."""
    place = _fraction(text.encode("utf-8", errors="replace"))
    return "test" if place < test_fraction else "val" if place < test_fraction + val_fraction else "train"


def _fraction(content: bytes) -> float:
    """In [0, 1)."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=6).digest(), "big") / 2**48
