"""The tokens of one part, memory-mapped."""

from typing import Any

import numpy as np
import pyarrow as pa


class Corpus:
    """The documents of a part.

    A worker process maps the files again: a data set of the datasets library is pickled as the paths of its files.

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
        self.dataset, self.part, self.classes = dataset, part, classes
        self.tokens = Tokens(dataset)
        lengths = [np.diff(chunk.offsets.to_numpy()) for chunk in dataset.data.column("tokens").chunks]
        self.offsets = np.concatenate([np.zeros(1, np.int64), *lengths]).cumsum()
        self.labels = None
        if classes:
            found = dataset.data.column("label").combine_chunks().dictionary_encode()
            number = [classes.index(name) for name in found.dictionary.to_pylist()]
            self.labels = np.array([*number, -1])[found.indices.fill_null(len(number)).to_numpy(zero_copy_only=False)]

    def __reduce__(self) -> tuple:
        return Corpus, (self.dataset, self.part, self.classes)


class Tokens:
    """The tokens of a data set in one row, a slice of which is an array."""

    def __init__(self, dataset: Any) -> None:
        chunks = [chunk.flatten() for chunk in dataset.data.column("tokens").chunks]
        self.row = pa.chunked_array(chunks, dataset.features["tokens"].feature.pa_type)

    def __len__(self) -> int:
        return len(self.row)

    def __getitem__(self, place: slice) -> np.ndarray:
        first, last, _ = place.indices(len(self.row))
        return self.row.slice(first, max(last - first, 0)).to_numpy()
