"""Rows of which a causal language model learns the answers alone: chats, and prompts with completions. A row is a sequence."""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch.utils.data import Dataset

from holotrain.data.hub import column
from holotrain.data.text.chat_forms import FORMS, OPTIONAL, Chat, chat_in, form_in, without_padding
from holotrain.data.text.learned import Piece, chat_writer, of_pieces, of_template, plainly, unused_in
from holotrain.data.text.tokenise import Batch, Corpus, DocumentRules, Row, held_out_document, offsets_of, table
from holotrain.data.tokenizers import Tokenizer
from holotrain.errors import UserError
from holotrain.numeric import counted
from holotrain.targets import blaming

AUTO = "auto"

ALPACA = ("instruction", "output")


@dataclass(frozen=True)
class AnswerRules(DocumentRules):
    """How rows become sequences of which some tokens are answers.

    Attributes:
        messages: column of chats; auto: what the columns say; None: that too, if there is no text and no completion.
        prompt, completion: columns of these.
        train_on: all answers of a chat, or the last.
        form: the columns of the chat, or of prompt and completion, when they are known.
        kinds: the types of the columns that are read.
    """

    messages: str | None = None
    prompt: str = "prompt"
    completion: str | None = None
    train_on: str = "all"
    form: tuple[str, ...] = ()
    kinds: Mapping[str, Any] = field(default_factory=dict)

    @property
    def columns(self) -> list[str]:
        return [*self.kinds]

    @property
    def is_chat(self) -> bool:
        """Whether rows are chats, of messages, and not a text and its continuation."""
        return len(self.form) == 1 or self.form == ALPACA or not all(_is_text(self.kinds[name]) for name in self.form)

    @property
    def described(self) -> str:
        return FORMS.get(self.form) or ", ".join(self.form)

    def checked(self, dataset: Any) -> DocumentRules:
        features, form = dataset.features or {}, form_in(dataset.features or {})
        if self.messages not in (None, AUTO):
            form = (self.messages,)
            column(dataset, "data.messages", self.messages, self.source)
        elif self.completion:
            form = (self.prompt, self.completion)
            for option, name in zip(("data.prompt", "data.completion"), form, strict=True):
                column(dataset, option, name, self.source)
        elif self.messages is None and (form is None or self.text in features):
            return DocumentRules(**{each.name: getattr(self, each.name) for each in fields(DocumentRules)}).checked(dataset)
        elif form is None:
            known = ", ".join(" and ".join(names) for names in FORMS)
            raise UserError(f"data.messages=auto: the rows of {self.source} have {', '.join(features)}; chats have {known}")
        kinds = {name: features[name] for name in form}
        found = replace(self, form=form, kinds=kinds)
        if found.is_chat:
            beside = OPTIONAL if form == ALPACA else OPTIONAL[:2]
            found = replace(found, kinds=kinds | {name: features[name] for name in beside if name in features})
        texts = {"system", "input", *(form if form == ALPACA or not found.is_chat else ())}
        for name, kind in found.kinds.items():
            if name in texts and not _is_text(kind):
                raise UserError(f"data: column {name!r} of {self.source} holds no text, but {kind}")
        return found

    def refusal(self, row: Row) -> str:
        try:
            self.pieces(row)
        except ValueError as error:
            return str(error)
        return ""

    def documents(self, batch: Mapping[str, Sequence[Any]], part: str, first: int = 0) -> Iterator[tuple[str, None]]:
        for _, row in self.rows(batch, first):
            text = "".join(text for text, *_ in self.pieces(row))
            if (self.part or held_out_document(text, *self.fractions)) == part:
                yield text, None

    def features(self, tokenizer: Tokenizer) -> dict[str, Any]:
        from datasets import LargeList, Value

        columns = {"answers": LargeList(Value("uint8")), "empty": Value("int64"), "unused": Value("string")}
        return super().features(tokenizer) | columns

    def tokens(self, batch: Mapping[str, Sequence[Any]], places: Sequence[int], part: str, tokenizer: Tokenizer) -> pa.Table:
        """The ``tokens`` of each row of a part, its ``answers``: 1 for each token of an answer, how many answers are ``empty``,
        and the keys of messages that are ``unused``."""
        found, empty, unused = [], [], []
        writer = chat_writer(tokenizer) if self.is_chat else None
        for number, row in self.rows(batch, places[0]):
            chat, pieces = self.chat(row), self.pieces(row)
            written = "".join(text for text, *_ in pieces)
            if (self.part or held_out_document(written, *self.fractions)) != part:
                continue
            try:
                with blaming(f"row {number} of {self.source} cannot be written with the tokenizer's chat template"):
                    found.append(of_template(chat, writer) if chat and writer else of_pieces(pieces, tokenizer))
            except ValueError as error:
                if not self.skip:
                    raise UserError(f"data: {error}") from error
                warnings.warn(f"data: left out: {error}", stacklevel=2)
                continue
            empty.append(chat.empty if chat else 0)
            unused.append(", ".join(map(repr, unused_in(chat, writer))) if chat else "")
        lengths = np.array([len(ids) for ids, _ in found], dtype=np.int64)
        ids, answers = (np.concatenate([np.zeros(0, bool), *each]) for each in zip(*found, strict=True)) if found else ([], [])
        listed = pa.LargeListArray.from_arrays(offsets_of(lengths), np.asarray(answers, dtype=np.uint8))
        written = table(np.asarray(ids, dtype=tokenizer.dtype), lengths, [None] * len(found)).append_column("answers", listed)
        written = written.append_column("empty", pa.array(empty, pa.int64()))
        return written.append_column("unused", pa.array(unused, pa.string()))

    def chat(self, row: Row) -> Chat | None:
        """The chat in a row; None: it is a text and its continuation. Raises a ValueError that says what is wrong with it."""
        if not self.is_chat:
            return None
        row = {name: without_padding(value, self.kinds[name]) for name, value in row.items()}
        return chat_in(row, self.form, self.train_on == "last")

    def pieces(self, row: Row) -> list[Piece]:
        """A row in plain writing. Raises a ValueError that says what is wrong with it."""
        if (chat := self.chat(row)) is not None:
            return plainly(chat)
        prompt, completion = (row[name] for name in self.form)
        for name, missing in zip(self.form, (prompt is None, not completion), strict=True):
            if missing:
                raise ValueError(f"has nothing in {name!r}")
        return [(prompt, False, False), (completion, True, True)]


def _is_text(kind: Any) -> bool:
    from datasets import Value

    return isinstance(kind, Value) and ("string" in kind.dtype or kind.dtype == "null")


class Answers(Dataset):
    """Rows of at most ``context`` tokens; longer ones are cut. One whose answers begin later is left out.

    Batches are ``tokens`` (B, T) int64, padded with the pad token to the longest, ``lengths`` (B,) int64, and ``answers``
    (B, T) bool, True for the tokens that a model learns.

    Args:
        multiple: T is rounded up to a multiple of this.
        numbered: also return ``index`` (B,), the number of each row in the part.

    Attributes:
        lengths: (N,) int64, tokens of each row.
        cut, left_out, unlearned: number of rows that are longer, whose answers begin later, and that have none to learn.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, context: int, multiple: int, numbered: bool) -> None:
        assert corpus.answers is not None, "the rows have no answers"
        self.tokens, self.answers, self.pad_id = corpus.tokens, corpus.answers, tokenizer.pad_id
        self.multiple, self.numbered = multiple, numbered
        begins, lengths = np.asarray(corpus.offsets[:-1]), np.diff(corpus.offsets)
        kept, learned = np.ones(len(lengths), dtype=bool), np.ones(len(lengths), dtype=bool)
        for row, (begin, length) in enumerate(zip(begins.tolist(), lengths.tolist(), strict=True)):
            kept[row] = self.answers[begin + 1 : begin + min(length, context)].any()  # else its loss would be NaN
            learned[row] = kept[row] or self.answers[begin : begin + length].any()
        self.cut, self.left_out, self.unlearned = (int(each.sum()) for each in (lengths > context, learned & ~kept, ~learned))
        if not learned.any():
            raise UserError(f"data: no row of the {corpus.part} part has an answer that is learned")
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


def warn_of_rows(tables: Sequence[Any], parts: Sequence[Answers], context: int) -> None:
    """Says what of the rows is not learned, and how many are longer than the context; ``tables``: of ``AnswerRules.tokens``."""
    cut, left_out, unlearned = (sum(getattr(part, name) for part in parts) for name in ("cut", "left_out", "unlearned"))
    total = counted(left_out + unlearned + sum(map(len, parts)), "row")
    if empty := sum(int(each.data.column("empty").to_numpy().sum()) for each in tables):
        warnings.warn(f"data: {counted(empty, 'answer')} without content or tool calls are not learned", stacklevel=2)
    if unlearned:
        warnings.warn(f"data: {unlearned} of {total} left out, since no answer in them is learned", stacklevel=2)
    if unused := sorted({key for each in tables for keys in each.unique("unused") for key in keys.split(", ") if key}):
        verb = "is" if len(unused) == 1 else "are"
        warnings.warn(f"data: rows have messages with {', '.join(unused)}, which {verb} not used", stacklevel=2)
    if cut or left_out:
        others = f"; {left_out} left out, since no answer begins before" if left_out else ""
        warnings.warn(f"data.context: {cut} of {total} cut at {context} tokens{others}", stacklevel=2)
