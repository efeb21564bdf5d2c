"""How a chat is written, by the tokenizer's own chat template or plainly, and which of its tokens are learned.

Plainly: ``user: Hi\\nassistant: Hello`` and the end token.
"""

import json
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from holotrain.data.text.chat_forms import ASSISTANT, NOT_WRITTEN, THOUGHTS, Chat, Message, with_texts_as_arguments
from holotrain.data.tokenizers import Tokenizer, plain_json
from holotrain.errors import as_user_error
from holotrain.targets import blaming, needed

MARKED = re.compile(r"\{%-?\s*generation\b")
"""What a template has that says itself where answers are."""

MARK = "\ue000\uf8ff"
"""Characters that no text has."""

LONGEST = 2**20
"""Characters that a template may write, beside 16 for each of the messages and tools."""

Piece = tuple[str, bool, bool]
"""A text, whether it is learned, and whether the end token follows, which is learned with it."""


class Way(NamedTuple):
    """How a template takes messages."""

    arguments_as_texts: bool = False
    content_in_parts: bool = False


WAYS = (Way(), Way(arguments_as_texts=True), Way(content_in_parts=True))

Sequenced = tuple[np.ndarray, np.ndarray]
"""The tokens (T,) of a row, and whether each is learned."""


def plainly(chat: Chat) -> list[Piece]:
    """A chat as text for a tokenizer without a template, up to the last answer; tools and calls of them are JSON."""
    pieces, before = [], f"tools: {json.dumps(chat.tools)}\n" if chat.tools else ""
    for number, message in enumerate(chat.messages):
        if message["role"] == ASSISTANT:
            calls = [json.dumps(call.get("function", call)) for call in message.get("tool_calls", ())]
            said = "\n".join([message["content"]] * bool(message["content"] or not calls) + calls)
            pieces += [(f"{before}{ASSISTANT}:", False, False), (f" {said}", number in chat.learned, True)]
            before = ""
        else:
            before += f"{message['role']}: {message['content']}\n"
    return pieces


def of_pieces(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Sequenced:
    """The tokens of pieces, each encoded alone, as a prompt is by ``generate``."""
    ids: list[int] = []
    learned: list[bool] = []
    for text, is_learned, ends in pieces:
        own = [*tokenizer.encode(text).tolist(), *([tokenizer.end_id] if ends else [])]
        ids += own
        learned += [is_learned] * len(own)
    if learned[0]:  # after an empty prompt, whose place generate gives to the end token
        ids, learned = [tokenizer.end_id, *ids], [False, *learned]
    return np.array(ids), np.array(learned)


def chat_to_answer(messages: Sequence[Message], tokenizer: Tokenizer, writer: Any) -> tuple[np.ndarray, int]:
    """The tokens (T,) after which the assistant answers, and the token that ends its answer.

    Args:
        writer: from :func:`chat_writer`.

    Raises:
        UserError: the chat template of the tokenizer cannot write the messages.
    """
    answered = Chat([*messages, {"role": ASSISTANT, "content": "Hello"}], [len(messages)])
    if writer is None:
        return of_pieces(plainly(answered)[:-1], tokenizer)[0], tokenizer.end_id
    with as_user_error("generate"), blaming("the chat template of the tokenizer cannot write the messages"):
        text = written_by(writer, answered)[1](messages, add_generation_prompt=True)
        ids, learned = of_template(answered, writer)
        start = np.array(writer(text, add_special_tokens=False)["input_ids"])
    added = writer.added_tokens_decoder
    special = [each for each in ids[learned].tolist() if each in added and added[each].special]
    return start, special[-1] if special else tokenizer.end_id


def chat_writer(tokenizer: Tokenizer) -> Any:
    """The tokenizer of transformers with the same chat template; None: there is no template."""
    with as_user_error("data.tokenizer"), blaming("its chat template cannot be read"):
        return None if tokenizer.chat is None else _of_transformers(tokenizer.to_json())


@lru_cache(maxsize=4)
def _of_transformers(text: str) -> Any:
    """The tokenizer of transformers with the chat template of a tokenizer from ``to_json``."""
    from tokenizers import Tokenizer as Encoder

    tokenizer, chat = plain_json(text)
    assert chat is not None, "without a chat template, messages are written plainly"
    transformers = needed("transformers", "chat templates need transformers", "huggingface")
    options = {"chat_template": chat["template"], **chat["tokens"]}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=Encoder.from_str(tokenizer), **options)


def unused_in(chat: Chat, tokenizer: Any) -> list[str]:
    """Keys of messages that are written nowhere; ``tokenizer``: one of transformers, or None."""
    keys = {key for message in chat.messages for key in message} - NOT_WRITTEN
    words = set(re.findall(r"\w+", tokenizer.chat_template)) if tokenizer else set()
    return sorted(keys - words - (set(THOUGHTS) if words.intersection(THOUGHTS) else set()))


def of_template(chat: Chat, tokenizer: Any) -> Sequenced:
    """The tokens that ``tokenizer.apply_chat_template`` gives, and which of them are learned: the turns of answers as the
    template writes them, with what ends each, or of these the part that a template marks itself.

    Args:
        tokenizer: one of transformers.

    Raises:
        ValueError: an answer is not found in what the template writes.
    """
    whole, write = written_by(tokenizer, chat)
    marked = None
    if MARKED.search(tokenizer.chat_template):
        encoded = write(chat.messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
        marked = np.array(encoded["assistant_masks"], dtype=bool)
        if len(chat.learned) == sum(message["role"] == ASSISTANT for message in chat.messages):
            return np.array(encoded["input_ids"]), marked
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, places = np.array(encoded["input_ids"]), np.array(encoded["offset_mapping"]).reshape(-1, 2)
    specials = {number: each.content for number, each in tokenizer.added_tokens_decoder.items() if each.special}
    special = places[[number in specials for number in encoded["input_ids"]]]
    learned = np.zeros(len(ids), dtype=bool)
    for number in chat.learned:
        first, last = turn_in(whole, chat.messages, number, write, tuple(specials.values()))
        last = _closed(whole, first, last, special)
        learned |= (places[:, 1] > first) & (places[:, 0] < last)
    return ids, learned if marked is None else learned & marked


def written_by(tokenizer: Any, chat: Chat) -> tuple[str, Callable[..., Any]]:
    """A chat as a template writes it, and a function that writes others in the same way: the first of ``WAYS`` in which the
    template writes what is learned. Raises what it raises, or a ValueError, if there is none."""
    refusals = []
    for way in WAYS:
        write = partial(_write, tokenizer, chat.tools, way)
        try:
            whole = write(chat.messages)
            _require_written(whole, chat, write)
            return whole, write
        except Exception as error:  # a template raises many kinds
            refusals.append(error)
    raise refusals[0]


def _write(tokenizer: Any, tools: list[Any] | None, way: Way, messages: Sequence[Message], **options: Any) -> Any:
    if way.arguments_as_texts:
        messages = with_texts_as_arguments(messages)
    if way.content_in_parts:
        messages = [each | {"content": [{"type": "text", "text": each["content"]}]} for each in messages]
    written = tokenizer.apply_chat_template(list(messages), tools=tools, **{"tokenize": False, **options})
    excess = len(written) - LONGEST if isinstance(written, str) else 0
    if excess > 0 and excess > 16 * len(str([messages, tools])):  # before it is tokenised
        raise ValueError(f"it makes {len(written)} characters of them")
    return written


def _require_written(whole: str, chat: Chat, write: Callable[..., str]) -> None:
    """Raises a ValueError if an answer is not written: a chat without what it calls or says is written in the same way."""
    for number in chat.learned:
        message, without = chat.messages[number], None
        name = "tool_calls" if message.get("tool_calls") else "content"
        text = message["content"].rpartition("</think>")[2].strip()
        if name == "content" and not text:
            continue  # reasoning alone, which may be dropped
        silent = {key: part for key, part in message.items() if key != name} | ({"content": ""} if name == "content" else {})
        with suppress(Exception):  # a template raises many kinds
            without = write([*chat.messages[:number], silent, *chat.messages[number + 1 :]])
        if without == whole or (name == "content" and text not in whole):
            raise ValueError(f"it does not write the {name} of message {number + 1}")


def turn_in(
    whole: str, messages: list[Message], number: int, write: Callable[..., str], specials: Sequence[str]
) -> tuple[int, int]:
    """Where an answer begins and ends in a chat that a template wrote.

    It begins where the template asks for it, and ends where the chat up to it ends. But a template may write a chat that ends
    there in another way than one that goes on, as those do that drop earlier reasoning, and some write no chat that begins with
    an answer. Then a mark in the content says where that is; after calls of tools comes one of the ``specials``.

    Raises:
        ValueError: its place is not found, or the next message begins before it ends.
    """
    before = through = None
    with suppress(Exception):  # a template raises many kinds
        before = write(messages[:number], add_generation_prompt=True)
    with suppress(Exception):
        through = write(messages[: number + 1])
    first = len(before) if before is not None and whole.startswith(before) else None
    last = len(through) if through is not None and whole.startswith(through) else None
    content, calls = messages[number]["content"], messages[number].get("tool_calls")
    for place in (0, content.rfind("</think>") + len("</think>")):  # some templates drop what is before the second
        if first is None:
            first = _place_of_mark(whole, messages, number, place, write)
    limit = _place_of_mark(whole, messages, number + 1, 0, write) if number + 1 < len(messages) else None
    limit = len(whole) if limit is None else limit
    if last is None:
        _, mark, after = write(_marked(messages, number, len(content))).rpartition(MARK)
        last = len(whole) - len(after) if mark and whole.endswith(after) else first if calls else None
        if last is not None and calls:
            found = [whole.find(each, last) + len(each) for each in specials if (through or whole).rstrip().endswith(each)]
            last = max((place for place in found if last < place <= limit), default=None)
    if first is None or last is None or not first <= last <= limit:
        raise ValueError(f"message {number + 1} is not found in one piece in what it writes")
    return first, last


def _marked(messages: list[Message], number: int, place: int) -> list[Message]:
    content = messages[number]["content"]
    changed = messages[number] | {"content": f"{content[:place]}{MARK}{content[place:]}"}
    return [*messages[:number], changed, *messages[number + 1 :]]


def _place_of_mark(whole: str, messages: list[Message], number: int, place: int, write: Callable[..., str]) -> int | None:
    """Where a message is written whose content has the mark; None: it is not written, or what is before it changes."""
    before, mark, _ = write(_marked(messages, number, place)).partition(MARK)
    return len(before) if mark and whole.startswith(before) else None


def _closed(whole: str, first: int, last: int, special: np.ndarray) -> int:
    """The end of a turn with the special token that ends it, without what a template writes after that; ``special`` (S, 2):
    where these tokens begin and end."""
    last = first + len(whole[first:last].rstrip())
    if last > first and last in special[:, 1]:
        return last
    after = special[special[:, 0] >= last]
    return int(after[0, 1]) if len(after) and not whole[last : after[0, 0]].strip() else last
