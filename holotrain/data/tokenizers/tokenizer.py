"""The interface of tokenizers: text to token ids and back, and how many bytes of text a token stands for."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

ROLES = ("pad", "start", "end", "mask")
"""The special tokens that tasks need: padding, the start of a document (bos, cls), its end (eos, sep), a masked position."""


class Tokenizer(ABC):
    """Text to token ids, and back.

    Attributes:
        vocab_size: number of ids, including special tokens.
        specials: the ids of ``pad``, ``start``, ``end`` and ``mask``; text never encodes to one of them.
    """

    vocab_size: int
    specials: dict[str, int]

    @property
    def pad_id(self) -> int:
        return self.specials["pad"]

    @property
    def start_id(self) -> int:
        return self.specials["start"]

    @property
    def end_id(self) -> int:
        return self.specials["end"]

    @property
    def mask_id(self) -> int:
        return self.specials["mask"]

    @property
    def dtype(self) -> np.dtype:
        """uint16 if it holds every id, otherwise uint32."""
        return np.dtype(np.uint16 if self.vocab_size <= 2**16 else np.uint32)

    @property
    def fingerprint(self) -> str:
        """A hash that is equal for tokenizers that encode in the same way."""
        return hashlib.blake2b(self.to_json().encode(), digest_size=16).hexdigest()

    def encode(self, text: str | bytes) -> np.ndarray:
        """The ids (T,) of a text, without special tokens; bytes are read as UTF-8."""
        return self.encode_batch([text])[0]

    @abstractmethod
    def encode_batch(self, texts: Sequence[str | bytes]) -> tuple[np.ndarray, np.ndarray]:
        """The concatenated ids of all texts (T,), of ``dtype``, and the number of ids of each text (N,), int64."""

    @abstractmethod
    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ids (T,), without special tokens; bytes that are not UTF-8 become U+FFFD."""

    @property
    @abstractmethod
    def byte_lengths(self) -> np.ndarray:
        """(vocab_size,) int64: the number of UTF-8 bytes that each id stands for, 0 for special tokens.

        Bits per byte of a text are the sum of its tokens' losses (nats) divided by ``ln 2 * byte_lengths[targets].sum()``.
        """

    @abstractmethod
    def to_json(self) -> str:
        """The tokenizer as JSON, for a file or a checkpoint; :func:`~holotrain.data.text.tokenizer_from_json` reads it."""


def utf8(text: str | bytes) -> bytes:
    """A text in UTF-8. Half of a surrogate pair, which JSON can hold and UTF-8 cannot, becomes ``?``."""
    return text if isinstance(text, bytes) else text.encode("utf-8", errors="replace")
