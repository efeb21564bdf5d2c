"""The tokens of one part, memory-mapped."""

from pathlib import Path

import numpy as np

from holotrain.data.text.cache import manifest_of
from holotrain.data.text.tokenise import TOKENIZER


class Corpus:
    """The documents of a part.

    A worker process maps the files again: only the folder is pickled.

    Attributes:
        tokens: (T,) uint16 or uint32, all documents, an end token after each.
        offsets: (D + 1,) int64, where each document begins, and T.
        labels: (D,) int64, the class of each document or -1; None if there are no classes.
        bytes: UTF-8 bytes of text, without the end tokens.
    """

    def __init__(self, folder: Path, part: str) -> None:
        self.folder, self.part = folder, part
        manifest = manifest_of(folder)
        self.bytes: int = manifest["parts"][part]["bytes"]
        self.offsets = np.load(folder / f"{part}.offsets.npy", mmap_mode="r")
        self.tokens = np.memmap(folder / f"{part}.bin", dtype=manifest["dtype"], mode="r")
        labels = folder / f"{part}.labels.npy"
        self.labels = np.load(labels, mmap_mode="r") if labels.exists() else None

    def __reduce__(self) -> tuple:
        return Corpus, (self.folder, self.part)


def stored_tokenizer(folder: Path) -> str:
    """The JSON of the tokenizer that made a folder's tokens."""
    return (folder / TOKENIZER).read_text(encoding="utf-8")
