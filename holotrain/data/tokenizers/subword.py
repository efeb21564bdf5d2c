"""Subwords: byte-level BPE trained on the training documents, or any tokenizer.json, with the tokenizers library."""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain

import numpy as np
from tokenizers import Tokenizer as Encoder
from tokenizers import decoders, models, pre_tokenizers, trainers

from holotrain.data.tokenizers.tokenizer import ROLES, Tokenizer, utf8
from holotrain.errors import UserError

NAMES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "start": ("<s>", "[CLS]", "<bos>", "<|begin_of_text|>", "<|startoftext|>"),
    "end": ("</s>", "[SEP]", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
}
"""Common names of special tokens; the first one is used if a token has to be added."""

PARALLELISM = "TOKENIZERS_PARALLELISM"
ASKED = os.environ.get(PARALLELISM)
"""The user's own setting for the library's threads."""

SMALLEST = 256 + len(ROLES)
"""A byte-level vocabulary without a single merge."""


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the tokenizers library.

    Its special tokens are found by their usual names and added if they are missing. Text that spells one
    (``<s>``) is ordinary text.

    Args:
        text: the contents of a tokenizer.json.
        where: the origin of the text, for messages.

    Raises:
        UserError: it is not a tokenizer, or all names of a special token are ordinary tokens.
    """

    def __init__(self, text: str, where: str = "tokenizer.json") -> None:
        try:
            self._encoder = Encoder.from_str(text)
        except Exception as error:  # the library raises Exception itself
            raise UserError(f"data.tokenizer: {where} is not a tokenizer.json ({error})") from error
        self._encoder.no_padding()
        self._encoder.no_truncation()
        self._encoder.encode_special_tokens = True
        self.specials = {role: self._special(names, where) for role, names in NAMES.items()}
        self.vocab_size = 1 + max(self._encoder.get_vocab(with_added_tokens=True).values())  # shared ones have gaps

    @classmethod
    def trained(cls, texts: Iterable[str], vocab_size: int) -> "SubwordTokenizer":
        """Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019). The order of the texts does not matter.

        Args:
            texts: read once, one after another.
            vocab_size: number of ids, including special tokens; fewer if the texts do not have enough pairs to merge.

        Raises:
            UserError: ``vocab_size`` is smaller than the number of bytes and special tokens.
        """
        if vocab_size < SMALLEST:
            raise UserError(f"data.vocab_size: {vocab_size} is out of range; bytes and special tokens alone are {SMALLEST}")
        encoder = Encoder(models.BPE())
        encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        encoder.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[names[0] for names in NAMES.values()],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        with parallelism():
            encoder.train_from_iterator((utf8(text).decode() for text in texts), trainer)
        return cls(encoder.to_str())

    def encode_batch(self, texts: Sequence[str | bytes]) -> tuple[np.ndarray, np.ndarray]:
        plain = [utf8(text).decode("utf-8", errors="replace") for text in texts]
        with parallelism():
            encoded = [found.ids for found in self._encoder.encode_batch_fast(plain, add_special_tokens=False)]
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        return np.fromiter(chain.from_iterable(encoded), dtype=self.dtype, count=int(lengths.sum())), lengths

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids, dtype=np.int64)
        ordinary = ids[~np.isin(ids, list(self.specials.values()))]
        return self._encoder.decode(ordinary.tolist(), skip_special_tokens=True)

    @cached_property
    def byte_lengths(self) -> np.ndarray:
        """See :class:`Tokenizer`. Exact for byte-level tokenizers; others count the text as they normalise it."""
        lengths = np.zeros(self.vocab_size, dtype=np.int64)
        added = self._encoder.get_added_tokens_decoder()
        byte_level = '"ByteLevel"' in json.dumps(json.loads(self._encoder.to_str())["decoder"])
        for token, index in self._encoder.get_vocab(with_added_tokens=True).items():
            if index in added:
                lengths[index] = 0 if added[index].special else len(utf8(token))
            else:
                lengths[index] = len(token) if byte_level else len(utf8(spelled(token)))
        return lengths

    def to_json(self) -> str:
        return self._encoder.to_str()

    def _special(self, names: Sequence[str], where: str) -> int:
        """The id of the special token with one of these names, which is added if there is none."""
        special = {token.content: index for index, token in self._encoder.get_added_tokens_decoder().items() if token.special}
        for name in names:
            if name in special:
                return special[name]
        for name in names:
            if self._encoder.token_to_id(name) is None:
                self._encoder.add_special_tokens([name])
                return self._encoder.token_to_id(name)
        taken = ", ".join(names)
        raise UserError(f"data.tokenizer: {where} has no special token {names[0]}, and {taken} are ordinary tokens in it")


def spelled(token: str) -> str:
    """The text of a token that is not byte-level: WordPiece (##), SentencePiece (U+2581 for a space, <0x0A>)."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return "?"  # one byte
    return token.removeprefix("##").replace("\u2581", " ")


@contextmanager
def parallelism() -> Iterator[None]:
    """Enables the library's threads inside, and disables them outside unless the user has chosen otherwise.

    Otherwise the library prints a warning in every worker process that a loader forks later.
    """
    os.environ[PARALLELISM] = ASKED or "true"
    try:
        yield
    finally:
        os.environ[PARALLELISM] = ASKED or "false"
