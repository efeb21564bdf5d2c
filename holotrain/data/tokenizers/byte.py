"""Bytes as tokens: there is no vocabulary to train, and every text can be encoded."""

import json
from collections.abc import Sequence

import numpy as np

from holotrain.data.tokenizers.tokenizer import ROLES, Tokenizer, utf8

BYTES = 256


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of UTF-8; the special tokens follow."""

    vocab_size = BYTES + len(ROLES)
    specials = {role: BYTES + index for index, role in enumerate(ROLES)}

    def encode_batch(self, texts: Sequence[str | bytes]) -> tuple[np.ndarray, np.ndarray]:
        encoded = [utf8(text) for text in texts]
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        return np.frombuffer(b"".join(encoded), dtype=np.uint8).astype(self.dtype), lengths

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids < BYTES].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    @property
    def byte_lengths(self) -> np.ndarray:
        return (np.arange(self.vocab_size) < BYTES).astype(np.int64)

    def to_json(self) -> str:
        return json.dumps({"type": "bytes", "specials": self.specials})
