"""Tokenizers by name, and from the JSON they were stored as."""

import json
from pathlib import Path

from holotrain.checks import one_of
from holotrain.data.tokenizers.byte import ByteTokenizer
from holotrain.data.tokenizers.tokenizer import Tokenizer
from holotrain.errors import UserError
from holotrain.outside import from_json


def tokenizer_from_json(text: str, where: str = "tokenizer.json") -> Tokenizer:
    """The tokenizer of :meth:`Tokenizer.to_json`, or of any tokenizer.json. Nothing in the text is executed.

    Args:
        where: the origin of the text, for messages.

    Raises:
        UserError: the text is not a tokenizer.
    """
    try:
        content = from_json(text)
    except ValueError as error:
        raise UserError(f"data.tokenizer: {where} is not a tokenizer.json ({error})") from error
    if content == json.loads(ByteTokenizer().to_json()):
        return ByteTokenizer()
    from holotrain.data.tokenizers.subword import SubwordTokenizer

    return SubwordTokenizer(text, where)


def known_tokenizer(name: str) -> Tokenizer | None:
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
        one_of("data.tokenizer", name, ["byte", "bpe", "PATH/tokenizer.json"])
    try:
        return tokenizer_from_json(path.read_text(encoding="utf-8"), str(path))
    except UnicodeDecodeError as error:
        raise UserError(f"data.tokenizer: {path} is not a tokenizer.json (not UTF-8 at byte {error.start})") from error
    except OSError as error:
        raise UserError(f"data.tokenizer: cannot read {path} ({error.strerror or error})") from error
