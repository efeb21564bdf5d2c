"""What all text data sets share: reading, the cache of tokens, the tokenizer, and the loaders of both layouts."""

import re
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from holotrain.data.hub import in_order, library_errors
from holotrain.data.loader import Loader, LoadingModule, ResumableLoader, StreamLoader, digest, in_places
from holotrain.data.sampler import FixedBatches
from holotrain.data.text.answers import AnswerRules, Answers, warn_of_rows
from holotrain.data.text.batches import (
    BucketBatchSampler,
    PackedBlocks,
    PackedInOrder,
    PackedStream,
    Pieces,
    held_out_of,
    padded,
)
from holotrain.data.text.tokenise import PARTS, Batch, Corpus, DocumentRules, OnCPU, Rows, as_it_is
from holotrain.data.tokenizers import ByteTokenizer, SubwordTokenizer, Tokenizer, tokenizer_from_json, tokenizer_named
from holotrain.errors import UserError, readable
from holotrain.numeric import counted, require_at_least, require_one_of, require_within

MOST_HELD_OUT = 0.5
"""The largest share of the documents that is held out where the shares that were given draw none."""


FRACTION, MOST_FRACTIONS = re.compile(r"[+-]?\d*\.?\d+(e[+-]?\d+)?", re.IGNORECASE), 20
"""A number, and so many classes may be called by numbers of which some have fractions, such as 4.5 stars."""


class TextDataModule(LoadingModule):
    """Text in three parts: train, val, test, tokenised once into Arrow files in ``cache_dir``.

    Args:
        layout: packed: documents are joined and cut into blocks of equal length, for causal language models; documents: single
            documents, batched by length, for masked language models and classification
        labels: read the classes of documents, if there are any; documents without a class are then left out of batches
        context: context length in tokens: of a packed block, or the maximum of a document with its special tokens
        batch_size: packed blocks, rows with answers or, if max_tokens is null, documents per step; auto: the largest that fits
            into memory, by the plan
        max_tokens: largest batch of documents, in tokens with padding; replaces batch_size; auto: as for batch_size; null: use
            batch_size
        bucketing: put documents of similar length into a batch; false: random documents
        pad_to_multiple_of: pad documents to the longest of their batch, rounded up to a multiple of this
        tokenizer: byte, bpe (trained on the training set) or path of a tokenizer.json; null: that of pretrained weights, else
            byte
        vocab_size: vocabulary size of tokenizer=bpe
        tokenizer_json: a tokenizer as its to_json returned it, for example from a checkpoint; it replaces tokenizer
        unit: what a document is: file (or row), paragraph or line; null: file if packed or if files have labels, else paragraph
        val_fraction: fraction of the files (of the documents, if there are few files) that is used for validation
        test_fraction: fraction of the files (of the documents, if there are few files) that is used for the test
        cache_dir: folder in which tokenized text is cached
        num_proc: processes that read and tokenise; null: this one
        streaming: read and tokenise the training part during training, in packed blocks, instead of before it; of the held-out
            parts, the first 2**20 characters are used
        epoch_batches: batches in an epoch of streaming=true, which has no end of its own

    Attributes:
        tokenizer, vocab_size: known at once; for a ``"bpe"``, after ``prepare_data``.
        class_names, num_classes: known after ``prepare_data``; [] and 0 if documents have no labels.
        chats, learns_chats: what form rows with answers have, and whether they are chats; known after ``prepare_data``.
    """

    label: str | None = None
    """Where the user's data have the classes."""

    show = 0
    """Rows that the first screen shows."""

    chats, learns_chats = "", False

    def __init__(
        self,
        layout: Literal["packed", "documents"] = "packed",
        labels: bool = True,
        context: int = 256,
        batch_size: int = 32,
        max_tokens: int | None = 8192,
        bucketing: bool = True,
        pad_to_multiple_of: int = 1,
        tokenizer: str | None = None,
        vocab_size: int = 8192,
        tokenizer_json: str | None = None,
        unit: Literal["file", "paragraph", "line"] | None = None,
        val_fraction: float = 0.01,
        test_fraction: float = 0.02,
        cache_dir: str = "data/text",
        num_proc: int | None = None,
        streaming: bool = False,
        epoch_batches: int = 1000,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        require_one_of(("packed", "documents"), layout=layout)
        if unit is not None:
            require_one_of(("file", "paragraph", "line"), unit=unit)
        require_at_least(1 if layout == "packed" else 3, context=context)  # start, end, and something between
        require_at_least(1, pad_to_multiple_of=pad_to_multiple_of)
        if context % pad_to_multiple_of:
            raise ValueError(f"pad_to_multiple_of must divide context, but {pad_to_multiple_of} does not divide {context}")
        require_at_least(1, batch_size=batch_size, max_tokens=max_tokens)
        if layout == "packed":
            max_tokens = None  # blocks have one length
        elif max_tokens is not None and max_tokens < context:
            raise ValueError(f"max_tokens must be at least context, {context}, not {max_tokens}")
        require_within(0, 1, val_fraction=val_fraction, test_fraction=test_fraction)
        if val_fraction + test_fraction >= 1:
            raise ValueError(f"val_fraction and test_fraction, {val_fraction} and {test_fraction}, leave no training")
        require_at_least(ByteTokenizer.vocab_size, vocab_size=vocab_size)  # a bpe begins with the bytes
        require_at_least(1, num_proc=num_proc, epoch_batches=epoch_batches)
        tokenizer = tokenizer or "byte"
        if streaming and layout != "packed":
            raise ValueError("streaming needs packed text: task=causal_lm")
        if streaming and tokenizer == "bpe" and tokenizer_json is None:
            raise ValueError("streaming needs a tokenizer that is trained: byte, or a tokenizer.json, as exports have")
        self.layout: str = layout
        self.labels, self.context, self.batch_size, self.chosen_unit = labels, context, batch_size, unit
        self.max_tokens, self.bucketing, self.multiple = max_tokens, bucketing, pad_to_multiple_of
        self.fractions, self.trained_size = (val_fraction, test_fraction), vocab_size
        self.cache = Path(cache_dir).expanduser()
        self.num_proc, self.streaming, self.epoch_batches = num_proc, streaming, epoch_batches
        self.loading["collate_fn"] = as_it_is
        self._tokenizer = (
            tokenizer_from_json(tokenizer_json, "tokenizer_json") if tokenizer_json else tokenizer_named(tokenizer)
        )
        if isinstance(self._tokenizer, SubwordTokenizer) and layout == "documents" and not labels:  # masked_lm
            self._tokenizer.add_mask()
        self._corpora: dict[str, Corpus] | None = None

    @abstractmethod
    def rows(self) -> list[Rows]:
        """The text and the labels, read with the datasets library."""

    def rules(self, **options: Any) -> DocumentRules:
        """How rows become documents, from the options of all text."""
        return replace(DocumentRules(unit=self.unit, fractions=self.fractions), **options)

    @property
    def unit(self) -> Literal["file", "paragraph", "line"]:
        """What a document is."""
        return self.chosen_unit or ("file" if self.layout != "documents" or self.label else "paragraph")

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "a bpe is trained by prepare_data"
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def class_names(self) -> list[str]:
        return self.part("val").classes

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """For each part: the number of ``documents`` and ``tokens``, with an end token per document; not of a stream."""
        assert self._corpora is not None, "text is read by prepare_data"
        return {name: {"documents": len(part.offsets) - 1, "tokens": len(part.tokens)} for name, part in self._corpora.items()}

    def prepare_data(self) -> None:
        """Reads and tokenises the text, if it is not in the cache yet; a stream reads its held-out parts. Once: Lightning
        calls this before each training and test."""
        if self._corpora is not None:
            return
        try:
            self.cache.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"data.cache_dir: cannot write {self.cache} ({error.strerror or error})") from error
        rows = self.rows()
        self._found_chats(rows)
        if self._tokenizer is None:
            self._tokenizer = self._trained(rows)
        if self.streaming:
            self._training = [each for each in rows if each.may_be_in("train")]
            found = {part: held_out_of(rows, part, self.tokenizer) for part in PARTS[1:]}
        else:
            found = self._parts(rows)
        _check(found, "" if self.layout == "answers" else ", or cut finer with data.unit=paragraph or line")
        classes = [] if self.streaming else _classes({part: tokens.unique("label") for part, tokens in found.items()})
        self._corpora = {part: Corpus(tokens, part, classes) for part, tokens in found.items()}
        if self.layout == "answers":
            warn_of_rows([*found.values()], [self._answers(part) for part in PARTS], self.context)

    def _found_chats(self, rows: list[Rows]) -> None:
        """Takes the layout of chats, and of prompts with completions, if the rows are such."""
        rules = [each.rules for each in rows if isinstance(each.rules, AnswerRules)]
        if rules and len(rules) < len(rows):
            other = next(each.rules.source for each in rows if not isinstance(each.rules, AnswerRules))
            raise UserError(f"data: {rules[0].source} holds chats, and {other} text; they cannot be read together")
        self.layout = "answers" if rules else self.layout
        self.chats = "; ".join(dict.fromkeys(each.described for each in rules))
        self.learns_chats = any(each.is_chat for each in rules)

    def _parts(self, rows: list[Rows]) -> dict[str, Any]:
        """The tokens of each part. Of few documents a small share may draw none: it is doubled until it does, which is said."""
        found = {part: self._tokens(rows, part) for part in PARTS}
        given = shares = [max((each.rules.fractions[place] for each in rows), default=0.0) for place in (0, 1)]
        count, drawn = sum(map(len, found.values())), any(each.rules.part is None for each in rows)
        while count and drawn:
            empty = [share > 0 and not len(found[part]) for share, part in zip(shares, PARTS[1:], strict=True)]
            if not any(empty):
                break
            shares = [max(2 * share, 1 / count) if none else share for share, none in zip(shares, empty, strict=True)]
            if sum(shares) > MOST_HELD_OUT:
                return found
            rows = [replace(each, rules=replace(each.rules, fractions=tuple(shares))) for each in rows]
            found = {part: self._tokens(rows, part) for part in PARTS}
        if shares != given:
            few = f"{counted(count, 'document')} are few for val_fraction {given[0]:.4g} and test_fraction {given[1]:.4g}"
            warnings.warn(f"data: {few}; taking {shares[0]:.4g} and {shares[1]:.4g}", stacklevel=2)
        return found

    def _tokens(self, rows: list[Rows], part: str) -> Any:
        from datasets import concatenate_datasets

        found = [each.tokens(part, self.tokenizer, self.cache, self.num_proc) for each in rows if each.may_be_in(part)]
        return concatenate_datasets([each for each in found if len(each)] or found[:1]) if found else []

    def setup(self, stage: str | None = None) -> None:
        """Opens what ``prepare_data`` wrote, here or in another process."""
        if self._corpora is None:
            self.prepare_data()

    def fingerprint(self) -> dict[str, Any]:
        """The number of documents and tokens of each part, and hashes of the tokenizer and of some of the tokens."""
        found: dict[str, Any] = {"tokenizer": digest(self.tokenizer.to_json())}
        for part, corpus in (self._corpora or {}).items():
            size = len(corpus.tokens)
            found |= {f"documents of {part}": len(corpus.offsets) - 1, f"tokens of {part}": size}
            found[f"content of {part}"] = digest(*(corpus.tokens[place : place + 1024].tobytes() for place in in_places(size)))
        return found

    def part(self, name: str) -> Corpus:
        """The tokens of ``train``, ``val`` or ``test``."""
        assert self._corpora is not None, "parts are there after setup"
        return self._corpora[name]

    def shown(self, before: str, after: str) -> list[str]:
        """The first ``show`` training rows as text, what is learned of each between these marks."""
        corpus, rows = self.part("train"), []
        for first, last in pairwise(corpus.offsets[: self.show + 1].tolist()):
            last = min(last, first + self.context)
            ids, learned = corpus.tokens[first:last], np.ones(last - first, dtype=bool)
            if corpus.answers is not None:
                learned = corpus.answers[first:last].astype(bool)
            cuts = [0, *(np.flatnonzero(np.diff(learned)) + 1).tolist(), len(ids)]
            texts = [(readable(self.tokenizer.spelled(ids[start:end])), learned[start]) for start, end in pairwise(cuts)]
            rows.append("".join(f"{before}{text}{after}" if is_learned else text for text, is_learned in texts))
        return rows

    @property
    def longest(self) -> int:
        """Tokens of the longest training document, including start, end and padding."""
        return int(padded(self._pieces("train").lengths, self.multiple).max())

    @property
    def batch_unit(self) -> int:
        return self.longest if self.max_tokens else 1

    def zeros(self, size: int) -> Batch:
        if self.layout == "packed":
            return {"tokens": torch.zeros(size, self.context + 1, dtype=torch.int64)}
        documents = -(-size // self.longest) if self.max_tokens else size
        lengths = torch.full((documents,), self.longest)
        lengths[1:] = max(self.longest - 1, 1)  # some padding, without which a model may leave out its mask
        batch = {"tokens": torch.zeros(documents, self.longest, dtype=torch.int64), "lengths": lengths}
        return batch | {"labels": torch.zeros_like(lengths)} if self.num_classes else batch

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        """Keeps the lengths on the CPU, too: to read them on a GPU is to wait for it."""
        moved = super().transfer_batch_to_device(batch, device, dataloader_idx)
        return moved | {"cpu_lengths": OnCPU(batch["lengths"])} if "lengths" in batch else moved

    def train_dataloader(self) -> ResumableLoader | StreamLoader:
        if self.streaming:
            if self.overfits:
                # Lightning (2.6) leaves DataLoader's classes changed where this raises.
                warnings.warn("overfit_batches: a stream has no batch twice; set streaming=False", stacklevel=2)
            stream = PackedStream(self._training, self.tokenizer, self.context, self.batch_size, self.seed)
            return StreamLoader(stream, self.epoch_batches, batch_size=None, **self.loading)
        if self.layout == "packed":
            if (size := len(self.part("train").tokens)) <= self.context:
                most = f"the train part has {counted(size, 'token')}: {size - 1} at most"
                raise UserError(f"data.context: {self.context} is out of range; {most}")
            blocks = PackedBlocks(self.part("train").tokens, self.context, self.seed)
            return self.training_loader(blocks, self.batch_size)
        pieces = self._pieces("train")
        widths = padded(pieces.lengths, self.multiple)
        sampler = BucketBatchSampler(widths, self.batch_size, self.max_tokens, self.bucketing, self.seed)
        return self.training_loader(pieces, batch_sampler=sampler)

    def val_dataloader(self) -> Loader:
        return self._evaluation("val")

    def test_dataloader(self) -> Loader:
        return self._evaluation("test")

    def predict_dataloader(self) -> Loader:
        """The test part; documents come with ``index`` (B,), their number in it, for they are grouped by length."""
        return self._evaluation("test", numbered=True)

    def _evaluation(self, part: str, numbered: bool = False) -> Loader:
        if self.layout == "packed":
            dataset = PackedInOrder(self.part(part).tokens, self.context)
            batches = dataset.batches(self.batch_size)
        else:
            dataset = self._pieces(part, numbered)
            widths = padded(dataset.lengths, self.multiple)
            batches = BucketBatchSampler(widths, self.batch_size, self.max_tokens, shard=(0, 1)).epoch_batches(0)
        return Loader(dataset, batch_sampler=FixedBatches(batches), **self.loading)

    def _pieces(self, part: str, numbered: bool = False) -> Pieces | Answers:
        if self.layout == "answers":
            return self._answers(part, numbered)
        return Pieces(self.part(part), self.tokenizer, self.context, self.multiple, numbered)

    def _answers(self, part: str, numbered: bool = False) -> Answers:
        return Answers(self.part(part), self.tokenizer, self.context, self.multiple, numbered)

    def _trained(self, rows: list[Rows]) -> Tokenizer:
        """A BPE trained on the training part, from the cache after the first time."""
        from datasets import Dataset
        from datasets.fingerprint import Hasher

        training = [each for each in rows if each.may_be_in("train")]

        def trained() -> Iterator[dict[str, str]]:
            texts = (text for each in training for batch in each.batches("train") for text in batch)
            yield {"json": SubwordTokenizer.trained(texts, self.trained_size).to_json()}

        key = Hasher.hash(["bpe", [(each.dataset._fingerprint, asdict(each.rules)) for each in training], self.trained_size])
        with library_errors(f"the text or its cache; if {self.cache} is damaged, delete it"):
            found = Dataset.from_generator(trained, cache_dir=str(self.cache), fingerprint=key)
            found.data.validate(full=True)  # else a damaged offset is followed out of the file
            return tokenizer_from_json(found[0]["json"])


def _check(parts: dict[str, Any], finer: str) -> None:
    counts = {part: len(tokens) for part, tokens in parts.items()}
    if not any(counts.values()):
        raise UserError("data: there is no text")
    for part, count in counts.items():
        if not count:
            fewer = "lower data.val_fraction and data.test_fraction" if part == "train" else f"raise data.{part}_fraction"
            left = f"no text is left for {part} (documents: {sum(counts.values())})"
            raise UserError(f"data: {left}; {fewer}{finer}")


def _classes(labels: dict[str, list[str | None]]) -> list[str]:
    """The sorted labels (as numbers, if all are numbers), without blanks around them, which are said."""
    given = {label for label in chain(*labels.values()) if label is not None}
    found = {label.strip() for label in given}
    if spaced := sorted(given - found):
        others = f" and {len(spaced) - 1} more" * (len(spaced) > 1)
        warnings.warn(f"data.label: blanks around {spaced[0]!r}{others} are not part of the class", stacklevel=2)
    fractions = any("." in label for label in found) and all(FRACTION.fullmatch(label) for label in found)
    if len(found) > MOST_FRACTIONS and fractions:
        raise UserError(f"data.label: {len(found)} labels such as {min(found)} are numbers with fractions: no regression here")
    if missing := sorted(found.difference(label.strip() for label in labels["train"] if label is not None)):
        raise UserError(f"data.label: class {missing[0]!r} is held out, but no training document has it")
    if len(found) == 1:
        raise UserError(f"data.label: there is only one class, {found.pop()!r}; at least two are needed")
    return in_order(found)
