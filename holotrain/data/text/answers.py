"""Rows of which a causal language model learns the answers alone: chats, and prompts with completions. A row is a sequence.

Chats are written by the tokenizer's own chat template, or plainly: ``user: Hi\\nassistant: Hello`` and the end token.
"""

import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from holotrain.data.hub import column
from holotrain.data.text.tokenise import Batch, Corpus, DocumentRules, Row, held_out_document, offsets_of, table
from holotrain.data.tokenizers import Tokenizer, plain_json
from holotrain.errors import UserError
from holotrain.files import from_json
from holotrain.numeric import counted
from holotrain.targets import first_line, needed

ASSISTANT = "assistant"
"""The role whose messages are answers."""

MARKED = re.compile(r"\{%-?\s*generation\b")
"""What a template has that says itself where answers are."""

Message = dict[str, Any]

Piece = tuple[str, bool]
"""A text, and whether it is an answer."""

Sequenced = tuple[np.ndarray, np.ndarray]
"""The tokens (T,) of a row, and whether each is of an answer."""


@dataclass(frozen=True)
class AnswerRules(DocumentRules):
    """How rows become sequences of which some tokens are answers.

    Attributes:
        messages: column of chats; None: the rows have a prompt and a completion.
        prompt, completion: columns of these.
    """

    messages: str | None = None
    prompt: str = "prompt"
    completion: str | None = None

    @property
    def columns(self) -> list[str]:
        return [self.messages] if self.messages else [self.prompt, str(self.completion)]

    def checked(self, dataset: Any) -> "AnswerRules":
        from datasets import Value

        if self.messages:
            column(dataset, "data.messages", self.messages, self.source)
            return self
        for option, name in (("prompt", self.prompt), ("completion", str(self.completion))):
            kind = column(dataset, f"data.{option}", name, self.source)
            if not (isinstance(kind, Value) and ("string" in kind.dtype or kind.dtype == "null")):
                raise UserError(f"data.{option}: column {name!r} holds no text, but {kind}")
        return self

    def refusal(self, row: Row) -> str:
        try:
            self.pieces(row)
        except ValueError as error:
            return str(error)
        return ""

    def documents(self, batch: Mapping[str, Sequence[Any]], part: str, first: int = 0) -> Iterator[tuple[str, None]]:
        for _, row in self.rows(batch, first):
            text = "".join(text for text, _ in self.pieces(row))
            if (self.part or held_out_document(text, *self.fractions)) == part:
                yield text, None

    def features(self, tokenizer: Tokenizer) -> dict[str, Any]:
        from datasets import LargeList, Value

        return super().features(tokenizer) | {"answers": LargeList(Value("uint8"))}

    def tokens(self, batch: Mapping[str, Sequence[Any]], places: Sequence[int], part: str, tokenizer: Tokenizer) -> pa.Table:
        """The ``tokens`` of each row of a part, and its ``answers``: 1 for each token of an answer."""
        found = []
        writer = chat_writer(tokenizer) if self.messages else None
        for number, row in self.rows(batch, places[0]):
            pieces = self.pieces(row)
            written = "".join(text for text, _ in pieces)
            if (self.part or held_out_document(written, *self.fractions)) != part:
                continue
            if writer is None or self.messages is None:
                found.append(of_pieces(pieces, tokenizer))
                continue
            try:
                found.append(of_template(messages_in(row[self.messages], self.messages), writer))
            except Exception as error:  # a template raises many kinds
                reason = f"row {number} of {self.source} cannot be written with the tokenizer's chat template"
                if not self.skip:
                    raise UserError(f"data: {reason} ({first_line(error)})") from error
                warnings.warn(f"data: left out: {reason} ({first_line(error)})", stacklevel=2)
        lengths = np.array([len(ids) for ids, _ in found], dtype=np.int64)
        ids, answers = (np.concatenate([np.zeros(0, bool), *each]) for each in zip(*found, strict=True)) if found else ([], [])
        listed = pa.LargeListArray.from_arrays(offsets_of(lengths), np.asarray(answers, dtype=np.uint8))
        return table(np.asarray(ids, dtype=tokenizer.dtype), lengths, [None] * len(found)).append_column("answers", listed)

    def pieces(self, row: Row) -> list[Piece]:
        """A row in plain writing. Raises a ValueError that says what is wrong with it."""
        if self.messages:
            return plainly(chat_of(row[self.messages], self.messages))
        prompt, completion = (row[name] for name in self.columns)
        for name, missing in ((self.prompt, prompt is None), (self.completion, not completion)):
            if missing:
                raise ValueError(f"has nothing in {name!r}")
        return [(prompt, False), (completion, True)]


def chat_of(value: Any, name: str) -> list[Message]:
    """The messages in a field. Raises a ValueError if it holds none, or no answer."""
    messages = messages_in(value, name)
    if not any(each["role"] == ASSISTANT for each in messages):
        raise ValueError(f"has no message of the role assistant in {name!r}")
    return messages


def messages_in(value: Any, name: str) -> list[Message]:
    """The messages in a field, which may be JSON, as in a CSV file. Raises a ValueError if it holds none."""
    try:
        found = from_json(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    if not (isinstance(found, list) and found and all(isinstance(each, dict) for each in found)):
        raise ValueError(f"has no list of messages in {name!r}")
    messages = [{key: part for key, part in each.items() if part is not None} for each in found]
    for number, each in enumerate(messages, 1):
        if not (isinstance(each.get("role"), str) and isinstance(each.get("content"), str)):
            raise ValueError(f"has no text as role or content in message {number} of {name!r}")
    return messages


def plainly(messages: Sequence[Message]) -> list[Piece]:
    """Messages as text for a tokenizer without a template, up to the last answer."""
    pieces, before = [], ""
    for message in messages:
        if message["role"] == ASSISTANT:
            pieces += [(f"{before}{ASSISTANT}:", False), (f" {message['content']}", True)]
            before = ""
        else:
            before += f"{message['role']}: {message['content']}\n"
    return pieces


def of_pieces(pieces: Sequence[Piece], tokenizer: Tokenizer) -> Sequenced:
    """The tokens of pieces, each encoded alone, as a prompt is by ``generate``. The end token ends an answer and is of it."""
    ids: list[int] = []
    answers: list[bool] = []
    for text, answer in pieces:
        own = [*tokenizer.encode(text).tolist(), *([tokenizer.end_id] if answer else [])]
        ids += own
        answers += [answer] * len(own)
    if answers[0]:  # after an empty prompt, whose place generate gives to the end token
        ids, answers = [tokenizer.end_id, *ids], [False, *answers]
    return np.array(ids), np.array(answers)


def chat_to_answer(messages: Sequence[Message], tokenizer: Tokenizer, writer: Any) -> tuple[np.ndarray, int]:
    """The tokens (T,) after which the assistant answers, and the token that ends its answer.

    Args:
        writer: from :func:`chat_writer`.

    Raises:
        UserError: the chat template of the tokenizer cannot write the messages.
    """
    answered = [*messages, {"role": ASSISTANT, "content": "Hello"}]
    if writer is None:
        return of_pieces(plainly(answered)[:-1], tokenizer)[0], tokenizer.end_id
    try:
        text = writer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        ids, answers = of_template(answered, writer)
    except Exception as error:  # a template raises many kinds
        raise UserError(f"the chat template of the tokenizer cannot write the messages ({first_line(error)})") from error
    added = writer.added_tokens_decoder
    special = [each for each in ids[answers].tolist() if each in added and added[each].special]
    return np.array(writer(text, add_special_tokens=False)["input_ids"]), special[-1] if special else tokenizer.end_id


def chat_writer(tokenizer: Tokenizer) -> Any:
    """The tokenizer of transformers with the same chat template; None: there is no template."""
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


def of_template(messages: list[Message], tokenizer: Any) -> Sequenced:
    """The tokens that ``tokenizer.apply_chat_template`` gives.

    A template may mark answers itself. Else an answer begins where the template asks for one, and ends with the special token
    after its content.

    Args:
        tokenizer: one of transformers.

    Raises:
        ValueError: an answer is not found in what the template writes.
    """
    if MARKED.search(tokenizer.chat_template):
        encoded = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
        return np.array(encoded["input_ids"]), np.array(encoded["assistant_masks"], dtype=bool)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True)
    ids, places = np.array(encoded["input_ids"]), np.array(encoded["offset_mapping"])
    added = tokenizer.added_tokens_decoder
    special = np.array([number in added and added[number].special for number in encoded["input_ids"]])
    answers = np.zeros(len(ids), dtype=bool)
    for first, last in answers_in(whole, messages, tokenizer):
        ends = places[special & (places[:, 0] >= last)]
        if len(ends) and not whole[last : ends[0, 0]].strip():
            last = ends[0, 1]
        answers |= (places[:, 1] > first) & (places[:, 0] < last)
    return ids, answers


def answers_in(whole: str, messages: list[Message], tokenizer: Any) -> list[tuple[int, int]]:
    """Where the answers begin and end in a chat that a template wrote, without their end tokens."""
    numbers = [number for number, message in enumerate(messages) if message["role"] == ASSISTANT]
    asked = [tokenizer.apply_chat_template(messages[:each], tokenize=False, add_generation_prompt=True) for each in numbers]
    for number, before in zip(numbers, asked, strict=True):
        if not whole.startswith(before):
            raise ValueError(f"what comes before message {number + 1} is written in another way when that is asked for")
    firsts, spans = [len(before) for before in asked], []
    for number, first, limit in zip(numbers, firsts, [*firsts[1:], len(whole)], strict=True):
        content, written = messages[number]["content"].strip(), whole[first:limit]
        blank = len(written) - len(written.lstrip())
        place = blank if written[blank:].startswith(content) else written.rfind(content)  # after what a template adds
        if place < 0:
            raise ValueError(f"message {number + 1} is not written as it is")
        spans.append((first, first + place + len(content)))
    return spans


class Answers(Dataset):
    """Rows of at most ``context`` tokens; longer ones are cut. One whose answers begin later is left out.

    Batches are ``tokens`` (B, T) int64, padded with the pad token to the longest, ``lengths`` (B,) int64, and ``answers``
    (B, T) bool, True for the tokens that a model learns.

    Args:
        multiple: T is rounded up to a multiple of this.
        numbered: also return ``index`` (B,), the number of each row in the part.

    Attributes:
        lengths: (N,) int64, tokens of each row.
        cut, left_out: number of rows.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, context: int, multiple: int, numbered: bool) -> None:
        assert corpus.answers is not None, "the rows have no answers"
        self.tokens, self.answers, self.pad_id = corpus.tokens, corpus.answers, tokenizer.pad_id
        self.multiple, self.numbered = multiple, numbered
        begins, lengths = np.asarray(corpus.offsets[:-1]), np.diff(corpus.offsets)
        kept = np.ones(len(lengths), dtype=bool)
        for row, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
            kept[row] = self.answers[begin + 1 : begin + min(length, context)].any()  # else its loss would be NaN
        self.cut, self.left_out = int((lengths > context).sum()), int((~kept).sum())
        if not kept.any():
            raise UserError(f"data.context: no answer of the {corpus.part} part begins within {context} tokens; raise it")
        self.begins, self.lengths = begins[kept], np.minimum(lengths[kept], context)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitems__(self, keys: Sequence[int]) -> Batch:
        lengths = self.lengths[keys]
        tokens = np.full((len(keys), -(-lengths.max() // self.multiple) * self.multiple), self.pad_id)
        answers = np.zeros(tokens.shape, dtype=bool)
        for row, (begin, length) in enumerate(zip(self.begins[keys].tolist(), lengths.tolist(), strict=True)):
            tokens[row, :length] = self.tokens[begin : begin + length]
            answers[row, :length] = self.answers[begin : begin + length]
        arrays = {"tokens": tokens, "lengths": lengths, "answers": answers}
        batch = {name: torch.from_numpy(each) for name, each in arrays.items()}
        return batch | {"index": torch.tensor(keys)} if self.numbered else batch


def warn_of_cut(parts: Sequence[Answers], context: int) -> None:
    """Says how many rows, and of how many, are longer than the context."""
    cut, left_out = sum(part.cut for part in parts), sum(part.left_out for part in parts)
    total = counted(left_out + sum(map(len, parts)), "row")
    if cut or left_out:
        others = f"; {left_out} left out, since no answer begins before" if left_out else ""
        warnings.warn(f"data.context: {cut} of {total} cut at {context} tokens{others}", stacklevel=2)
