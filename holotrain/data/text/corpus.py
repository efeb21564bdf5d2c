"""The tokens of one part, mapped from the disk, not loaded."""

from pathlib import Path

import numpy as np

from holotrain.data.text.cache import manifest_of
from holotrain.data.text.tokenise import TOKENIZER


class Corpus:
    """The documents of a part.

    A worker process maps the files anew: what is pickled is the folder.

    Attributes:
        tokens: (T,) uint16 or uint32, the documents end to end, an end token after each.
        offsets: (D + 1,) int64, where each begins, and T.
        labels: (D,) int64, the class of each or -1; None where there are no classes.
        bytes: UTF-8 bytes of text, the end tokens not counted.
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
    """The JSON of the tokenizer that a folder's tokens are of."""
    return (folder / TOKENIZER).read_text(encoding="utf-8")
