"""Tokenizers by name, and out of the text they were stored as."""

import json
from pathlib import Path

from holotrain.checks import one_of
from holotrain.data.text.byte_tokenizer import ByteTokenizer
from holotrain.data.text.tokenizer import Tokenizer
from holotrain.errors import UserError


def tokenizer_from_json(text: str, where: str = "tokenizer.json") -> Tokenizer:
    """The tokenizer of :meth:`Tokenizer.to_json`, or of any tokenizer.json. Text is read; nothing in it is executed.

    Args:
        where: what holds the text, for messages.

    Raises:
        UserError: it is no tokenizer.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UserError(f"data.tokenizer: {where} is no tokenizer.json ({error})") from error
    if content == json.loads(ByteTokenizer().to_json()):
        return ByteTokenizer()
    from holotrain.data.text.subword_tokenizer import SubwordTokenizer

    return SubwordTokenizer(text, where)


def known_tokenizer(name: str) -> Tokenizer | None:
    """``byte``, or the path of a tokenizer.json; None for ``bpe``, which documents must be there to train.

    Raises:
        UserError: there is no such file, or it holds no tokenizer.
    """
    if name == "byte":
        return ByteTokenizer()
    if name == "bpe":
        return None
    path = Path(name).expanduser()
    if path.suffix != ".json" and not path.exists():
        one_of("data.tokenizer", name, ["byte", "bpe", "PATH/tokenizer.json"])
    try:
        return tokenizer_from_json(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"data.tokenizer: {path} is no tokenizer.json (not UTF-8 at byte {error.start})") from error
    except OSError as error:
        raise UserError(f"data.tokenizer: cannot read {path} ({error.strerror})") from error
