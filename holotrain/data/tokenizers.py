"""Text to token ids and back: bytes, byte-level BPE, and any tokenizer.json."""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
from tokenizers import ByteLevelBPETokenizer
from tokenizers import Tokenizer as Encoder

from holotrain.errors import UserError, as_user_error, check_choice
from holotrain.files import from_json, read_text
from holotrain.numeric import require_at_least
from holotrain.targets import blaming

NAMES = {
    "pad": ("<pad>", "[PAD]", "<|pad|>", "<|padding|>"),
    "start": ("<s>", "[CLS]", "<bos>", "<|begin_of_text|>", "<|startoftext|>"),
    "end": ("</s>", "[SEP]", "<eos>", "<|end_of_text|>", "<|endoftext|>"),
    "mask": ("<mask>", "[MASK]", "<|mask|>"),
}
"""The special tokens that tasks need: padding, the start of a document, its end, a masked position; and common names of each.
The first one is used if a token has to be added."""

SETTING = {"pad": "pad_token", "start": "bos_token", "end": "eos_token", "mask": "mask_token"}
"""What transformers call them."""


CHAT = "chat_template"
"""The entry of a tokenizer's JSON that holds the chat template of its model, which may be null, and the names of its special
tokens: ``{"template": ..., "tokens": {"eos_token": ...}}``. Other programs expect them in files of their own."""


SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
"""Where transformers keep the chat template, beside tokenizer.json: in the first, or alone in the second."""


class Tokenizer(ABC):
    """Text to token ids, and back.

    Attributes:
        vocab_size: number of ids, including special tokens.
        chat: how its model writes messages, see ``CHAT``; None: it has no template.
        specials: the ids of ``pad``, ``start``, ``end`` and, if there is one, ``mask``; text never encodes to one of them.
    """

    vocab_size: int
    specials: dict[str, int]
    chat: dict[str, Any] | None = None

    pad_id = property(lambda self: self.specials["pad"])
    start_id = property(lambda self: self.specials["start"])
    end_id = property(lambda self: self.specials["end"])

    @property
    def mask_id(self) -> int:
        """Raises a UserError if there is no mask token."""
        if "mask" not in self.specials:
            raise UserError("data.tokenizer: it has no mask token, which masked_lm needs")
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

    @abstractmethod
    def spelled(self, ids: Sequence[int] | np.ndarray) -> str:
        """The same with the special tokens, for people to read."""

    @property
    @abstractmethod
    def byte_lengths(self) -> np.ndarray:
        """(vocab_size,) int64: the number of UTF-8 bytes that each id stands for, 0 for special tokens.

        Bits per byte of a text are the sum of its tokens' losses (nats) divided by ``ln 2 * byte_lengths[targets].sum()``.
        """

    @abstractmethod
    def to_json(self) -> str:
        """The tokenizer as JSON, for a file or a checkpoint; :func:`tokenizer_from_json` reads it."""


def utf8(text: str | bytes) -> bytes:
    """A text in UTF-8. Half of a surrogate pair, which JSON can hold and UTF-8 cannot, becomes ``?``."""
    return text if isinstance(text, bytes) else text.encode("utf-8", errors="replace")


BYTES = 256


class ByteTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes of UTF-8; the special tokens follow."""

    vocab_size = BYTES + len(NAMES)
    specials = {role: BYTES + index for index, role in enumerate(NAMES)}

    def encode_batch(self, texts: Sequence[str | bytes]) -> tuple[np.ndarray, np.ndarray]:
        encoded = [utf8(text) for text in texts]
        lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
        return np.frombuffer(b"".join(encoded), dtype=np.uint8).astype(self.dtype), lengths

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids)
        return ids[ids < BYTES].astype(np.uint8).tobytes().decode("utf-8", errors="replace")

    def spelled(self, ids: Sequence[int] | np.ndarray) -> str:
        named = {index: NAMES[role][0].encode() for role, index in self.specials.items()}
        return b"".join(named.get(token) or bytes([token]) for token in map(int, ids)).decode("utf-8", errors="replace")

    @property
    def byte_lengths(self) -> np.ndarray:
        return (np.arange(self.vocab_size) < BYTES).astype(np.int64)

    def to_json(self) -> str:
        return json.dumps({"type": "bytes", "specials": self.specials})


MOST_IDS = 32
"""Ids that a text gives at most for each of its bytes, of which NFKC makes 11."""


# Unless this is set, the library warns in every forked process; with "true" it waits there for threads that a fork does not
# copy. So it has threads here and none in a forked process, whatever the user has set.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))


class SubwordTokenizer(Tokenizer):
    """A tokenizer of the tokenizers library.

    Its special tokens are found by their usual names, or as the settings of its model name them. The token that ends a document
    also stands for a missing start or padding, so that the vocabulary stays that of the model; without an end, all are added.
    Text that spells a special token (``<s>``) is ordinary text.

    Args:
        text: the contents of a tokenizer.json.
        where: the origin of the text, for messages.

    Raises:
        UserError: it is not a tokenizer, or all names of a special token are ordinary tokens.
    """

    def __init__(self, text: str, where: str = "tokenizer.json") -> None:
        text, self._settings = plain_json(text, where)
        self.chat = self._settings if self._settings and self._settings["template"] else None
        self._where = where
        with self._blamed("is not a tokenizer.json"):
            self._encoder = Encoder.from_str(text)
            last = max(self._encoder.get_vocab(with_added_tokens=True).values(), default=0)
            if last > len(text):  # embeddings and tables have as many rows
                raise ValueError(f"an id is {last}, and it has {len(text)} characters")
        self._encoder.no_padding()
        self._encoder.no_truncation()
        self._encoder.encode_special_tokens = True
        self.specials = self._special_ids()
        for role in ("pad", "start", "end"):
            self._add(role)
        self.vocab_size = 1 + max(self._encoder.get_vocab(with_added_tokens=True).values())  # shared ones have gaps

    @contextmanager
    def _blamed(self, said: str) -> Generator[None]:
        with as_user_error("data.tokenizer"), blaming(f"{self._where} {said}"):
            yield

    def add_mask(self) -> None:
        """Adds a mask token, if there is none."""
        self._add("mask")
        self.vocab_size = max(self.vocab_size, 1 + self.mask_id)

    @classmethod
    def trained(cls, texts: Iterable[str], vocab_size: int) -> "SubwordTokenizer":
        """Byte-level BPE (Sennrich et al., 2016; Radford et al., 2019). The order of the texts does not matter.

        Args:
            texts: read once, one after another.
            vocab_size: number of ids, including special tokens; fewer if the texts do not have enough pairs to merge.
        """
        require_at_least(ByteTokenizer.vocab_size, vocab_size=vocab_size)
        encoder = ByteLevelBPETokenizer()
        special = [names[0] for names in NAMES.values()]
        plain = (utf8(text).decode() for text in texts)
        encoder.train_from_iterator(plain, vocab_size, min_frequency=0, show_progress=False, special_tokens=special)
        return cls(encoder.to_str())

    def encode_batch(self, texts: Sequence[str | bytes]) -> tuple[np.ndarray, np.ndarray]:
        raw = [utf8(text) for text in texts]
        plain = [text.decode("utf-8", errors="replace") for text in raw]
        with self._blamed("cannot encode a text"):
            encoded = [found.ids for found in self._encoder.encode_batch_fast(plain, add_special_tokens=False)]
            lengths = np.fromiter(map(len, encoded), dtype=np.int64, count=len(encoded))
            size = sum(map(len, raw))
            if lengths.sum() > MOST_IDS * (size + len(texts)):
                raise ValueError(f"it makes {lengths.sum()} tokens of {size} bytes")
        return np.fromiter(chain.from_iterable(encoded), dtype=self.dtype, count=int(lengths.sum())), lengths

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        ids = np.asarray(ids, dtype=np.int64)
        ordinary = ids[~np.isin(ids, list(self.specials.values()))]
        with self._blamed("cannot decode tokens"):
            return self._encoder.decode(ordinary.tolist(), skip_special_tokens=True)

    def spelled(self, ids: Sequence[int] | np.ndarray) -> str:
        with self._blamed("cannot decode tokens"):
            return self._encoder.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=False)

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
        return self._encoder.to_str() if self._settings is None else with_chat(self._encoder.to_str(), self._settings)

    def _special_ids(self) -> dict[str, int]:
        special = {token.content: index for index, token in self._encoder.get_added_tokens_decoder().items() if token.special}
        settings = self._settings["tokens"] if self._settings else {}
        ids = {}
        for role, names in NAMES.items():
            for name in (*names, settings.get(SETTING[role])):
                if name in special:
                    ids[role] = special[name]
                    break
        return {"pad": ids["end"], "start": ids["end"], **ids} if "end" in ids else ids

    def _add(self, role: str) -> None:
        """Adds a special token with one of its usual names, if there is none for this role."""
        if role in self.specials:
            return
        free = next((name for name in NAMES[role] if self._encoder.token_to_id(name) is None), None)
        if free is None:
            taken = ", ".join(NAMES[role])
            lacks = f"{self._where} has no special token {NAMES[role][0]}"
            raise UserError(f"data.tokenizer: {lacks}, and {taken} are ordinary tokens in it")
        self._encoder.add_special_tokens([free])
        self.specials[role] = cast(int, self._encoder.token_to_id(free))


def spelled(token: str) -> str:
    """The text of a token that is not byte-level: WordPiece (##), SentencePiece (U+2581 for a space, <0x0A>)."""
    if len(token) == 6 and token.startswith("<0x"):
        return "?"  # one byte
    return token.removeprefix("##").replace("\u2581", " ")


def tokenizer_from_json(text: str, where: str = "tokenizer.json") -> Tokenizer:
    """The tokenizer of :meth:`Tokenizer.to_json`, or of any tokenizer.json. Nothing in the text is executed.

    Raises:
        UserError: the text is not a tokenizer; the message names ``where`` it is from.
    """
    try:
        content = from_json(text)
    except ValueError as error:
        raise UserError(f"data.tokenizer: {where} is not a tokenizer.json ({error})") from error
    if content == json.loads(ByteTokenizer().to_json()):
        return ByteTokenizer()
    return SubwordTokenizer(text, where)


def tokenizer_named(name: str) -> Tokenizer | None:
    """The tokenizer ``byte``, or that of a tokenizer.json at a path; None for ``bpe``, which needs documents to be trained.

    Raises:
        UserError: there is no such file, or it is not a tokenizer.
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "bpe":
        return None
    path = Path(name).expanduser()
    if path.suffix != ".json" and not path.exists():
        check_choice("data.tokenizer", name, ["byte", "bpe", "PATH/tokenizer.json"])
    return tokenizer_from_json(with_template_of(path.parent, tokenizer_text(path)), str(path))


def plain_json(text: str, where: str = "tokenizer.json") -> tuple[str, dict[str, Any] | None]:
    """A tokenizer.json as other programs read it, and the ``CHAT`` that was in it."""
    if f'"{CHAT}"' not in text:
        return text, None
    try:
        content = from_json(text)
    except ValueError:
        return text, None  # who reads it says that it is no tokenizer.json
    if not isinstance(content, dict):
        return text, None
    chat = content.pop(CHAT, None)
    tokens = chat.get("tokens") if isinstance(chat, dict) else None
    texts = [chat.get("template") or "", *tokens, *tokens.values()] if isinstance(tokens, dict) else [None]
    if chat is not None and not all(isinstance(each, str) for each in texts):
        raise UserError(f"data.tokenizer: the chat template in {where} is damaged")
    return json.dumps(content), chat


def with_chat(text: str, chat: dict[str, Any]) -> str:
    """A tokenizer.json with ``CHAT`` in it."""
    return json.dumps(from_json(text) | {CHAT: chat})


def with_template_of(folder: Path, text: str) -> str:
    """A tokenizer.json with the chat template and the names of special tokens in the folder of its model, if there are any.

    Raises:
        UserError: a file cannot be read.
    """
    settings, jinja = folder / SETTINGS, folder / TEMPLATE
    try:
        said = from_json(read_text(settings)) if settings.is_file() else {}
        template = read_text(jinja) if jinja.is_file() else said.get(CHAT)
        if isinstance(template, list):  # several, each with a name
            template = next((each.get("template") for each in template if each.get("name") == "default"), None)
        tokens = {name: each.get("content") if isinstance(each, dict) else each for name, each in said.items()}
        named = {name: each for name, each in tokens.items() if name.endswith("_token") and isinstance(each, str)}
        template = template if isinstance(template, str) else None
    except (OSError, ValueError, AttributeError, TypeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"data.tokenizer: cannot read the chat template in {folder} ({reason})") from error
    if not template and not named:
        return text
    try:
        return with_chat(text, {"template": template, "tokens": named})
    except (ValueError, TypeError):
        return text  # who reads it says that it is no tokenizer.json


def tokenizer_text(path: Path) -> str:
    """The content of a tokenizer.json. Raises a UserError if it cannot be read."""
    try:
        return read_text(path)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"data.tokenizer: cannot read {path} ({reason})") from error
