"""The tokens of one part, memory-mapped, and what is cut from them into batches."""

from bisect import bisect_left, bisect_right
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

PARTS = ("train", "val", "test")

Batch = dict[str, Any]
"""``tokens`` (B, T) int64, and the other entries of the layout. Data sets of text gather one in ``__getitems__``."""


class Corpus:
    """The documents of a part.

    Args:
        dataset: has ``tokens`` and ``label``, see :meth:`~holotrain.data.text.tokenise.Rows.tokens`.
        part: its name.
        classes: names of the classes.

    Attributes:
        tokens: all documents, an end token after each.
        offsets: (D + 1,) int64, where each document begins, and the number of tokens.
        labels: (D,) int64, the class of each document or -1; None if there are no classes.
    """

    def __init__(self, dataset: Any, part: str, classes: list[str]) -> None:
        self.part, self.classes = part, classes
        self.tokens = Tokens(dataset)
        lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in dataset.data.column("tokens").chunks]
        self.offsets = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
        self.labels = None
        if classes:
            found = pc.index_in(dataset.data.column("label"), pa.array(classes))
            self.labels = found.fill_null(-1).to_numpy().astype(np.int64)


class Tokens:
    """The tokens of a data set in one row, a slice of which is an array: of the file itself, if it lies in one chunk.

    A worker process maps the files again: a data set of the datasets library is pickled as the paths of its files.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self.chunks = [chunk.flatten().to_numpy() for chunk in dataset.data.column("tokens").chunks]
        *self.begins, self.size = accumulate(map(len, self.chunks), initial=0)

    def __reduce__(self) -> tuple:
        return Tokens, (self.dataset,)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: slice) -> np.ndarray:
        first, last, _ = place.indices(self.size)
        number = bisect_right(self.begins, first) - 1
        begin = self.begins[number]
        found = self.chunks[number][first - begin : max(last - begin, 0)]
        if first + len(found) >= last:
            return found
        chosen = zip(self.begins[number : bisect_left(self.begins, last)], self.chunks[number:], strict=False)
        return np.concatenate([chunk[max(first - begin, 0) : last - begin] for begin, chunk in chosen])


def as_it_is(batch: Batch) -> Batch:
    """A collate function for batches that are complete already."""
    return batch
