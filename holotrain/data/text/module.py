"""What all text data sets share: the cache of tokens, the tokenizer, and the loaders of both layouts."""

import contextlib
from abc import abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np
import torch

from holotrain.data.fixed import FixedBatches
from holotrain.data.loader import Loader, ResumableLoader
from holotrain.data.text.batches import Batched, as_it_is
from holotrain.data.text.buckets import BucketBatchSampler, by_length, padded, padding
from holotrain.data.text.byte_tokenizer import ByteTokenizer
from holotrain.data.text.cache import built, key_of, manifest_of
from holotrain.data.text.content import ContentHashes
from holotrain.data.text.corpus import Corpus, stored_tokenizer
from holotrain.data.text.documents import Pieces
from holotrain.data.text.packed import PackedBlocks, PackedInOrder
from holotrain.data.text.readers import UNITS
from holotrain.data.text.restored import known_tokenizer, tokenizer_from_json
from holotrain.data.text.sources import Source
from holotrain.data.text.tokenise import Documents, tokenised
from holotrain.data.text.tokenizer import Tokenizer
from holotrain.errors import UserError
from holotrain.ranges import require_at_least, require_one_of, require_within

FORMAT = 1
"""Version of the cache's folders. Increase it whenever the same settings would write something else."""

LAYOUTS = ("packed", "documents")


class TextDataModule(pl.LightningDataModule):
    """Text in three parts: train, val, test, tokenised once into a folder of ``cache_dir``.

    Args:
        layout: packed: documents are joined and cut into blocks of equal length, for causal language models; documents: single
            documents, batched by length, for masked language models and classification
        labels: read the classes of documents, if there are any; documents without a class are then left out of batches
        context: context length in tokens: of a packed block, or the maximum of a document with its special tokens
        batch_size: packed blocks (or, if max_tokens is null, documents) per step; auto: the largest that fits into memory, by
            the plan
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
        num_workers: worker processes that load text; 0: load in the training process
        pin_memory: pin batches in host memory for faster copies to a GPU; null: if a GPU is used
        seed: seed of the order of batches

    Attributes:
        tokenizer, vocab_size: known at once; for a ``"bpe"``, after ``prepare_data``.
        class_names, num_classes: known after ``prepare_data``; [] and 0 if documents have no labels.

    Raises:
        ValueError: a value out of range.
        UserError: there is no such tokenizer.
    """

    text_field = "text"
    """Field or column that holds the text, in files of rows."""

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
        num_workers: int = 0,
        pin_memory: bool | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        require_one_of(LAYOUTS, layout=layout)
        if unit is not None:
            require_one_of(UNITS, unit=unit)
        require_at_least(1 if layout == "packed" else 3, context=context)  # start, end, and something between
        require_at_least(1, pad_to_multiple_of=pad_to_multiple_of)
        if context % pad_to_multiple_of:
            raise ValueError(f"pad_to_multiple_of must divide context, but {pad_to_multiple_of} does not divide {context}")
        require_at_least(1, batch_size=batch_size)
        if layout == "packed":
            max_tokens = None  # blocks have one length
        elif max_tokens is not None and max_tokens < context:
            raise ValueError(f"max_tokens must be at least context, {context}, not {max_tokens}")
        require_within(0, 1, val_fraction=val_fraction, test_fraction=test_fraction)
        if val_fraction + test_fraction >= 1:
            raise ValueError(f"val_fraction and test_fraction, {val_fraction} and {test_fraction}, leave no training")
        require_at_least(ByteTokenizer.vocab_size, vocab_size=vocab_size)  # a bpe begins with the bytes
        require_at_least(0, num_workers=num_workers)
        tokenizer = tokenizer or "byte"
        self.layout, self.labels, self.context, self.batch_size, self.asked_unit = layout, labels, context, batch_size, unit
        self.max_tokens, self.bucketing, self.multiple = max_tokens, bucketing, pad_to_multiple_of
        self.fractions = (val_fraction, test_fraction)
        self.recipe = {"tokenizer": tokenizer, "vocab_size": vocab_size}
        self.cache = Path(cache_dir).expanduser()
        self.loading = {
            "num_workers": num_workers,
            "pin_memory": torch.cuda.is_available() if pin_memory is None else pin_memory,
            "collate_fn": as_it_is,
        }
        self.seed = seed
        self._folder: Path | None = None
        self._given = tokenizer_from_json(tokenizer_json, "tokenizer_json") if tokenizer_json else known_tokenizer(tokenizer)
        self._tokenizer = self._given

    @abstractmethod
    def source(self) -> Source:
        """Where the text comes from."""

    @property
    def unit(self) -> Literal["file", "paragraph", "line"]:
        """What a document is."""
        return self.asked_unit or self.usual_unit

    @property
    def usual_unit(self) -> Literal["file", "paragraph"]:
        """The unit unless another is asked for."""
        return "file" if self.layout == "packed" else "paragraph"

    @property
    def tokenizer(self) -> Tokenizer:
        assert self._tokenizer is not None, "a bpe is trained by prepare_data"
        return self._tokenizer

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocab_size

    @property
    def manifest(self) -> dict:
        """The manifest of the cache's folder: ``parts``, ``classes``, ``skipped`` and more."""
        assert self._folder is not None, "text is read by prepare_data"
        return manifest_of(self._folder)

    @property
    def class_names(self) -> list[str]:
        return self.manifest["classes"]

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """For each part: the number of ``documents``, ``tokens`` (with an end token per document) and ``bytes`` of text."""
        return self.manifest["parts"]

    def prepare_data(self) -> None:
        """Tokenises the text, if it is not in the cache yet.

        Raises:
            UserError: there is no text, some of it cannot be read, a part would be empty, or the cache cannot be written.
        """
        source = self.source()
        files = source.files()
        hashes = ContentHashes(self.cache / "index.json")
        try:
            content = [(file.name, file.group, file.part, hashes.of(file.path)) for file in files]
        except OSError as error:
            raise UserError(f"data: cannot read {error.filename} ({error.strerror})") from error
        identity = [FORMAT, content, source.settings, self.fractions, self._tokenizer_key()]
        documents = Documents(source, files, *self.fractions)

        def build(folder: Path) -> dict:
            return {"format": FORMAT, "settings": identity[2:], "content": key_of(content)} | tokenised(
                documents, self._made_tokenizer, folder
            )

        try:
            self._folder = built(self.cache, key_of(identity), build, hashes)
            hashes.save()
        except OSError as error:
            raise UserError(f"data.cache_dir: cannot write {error.filename or self.cache} ({error.strerror})") from error
        self._tokenizer = tokenizer_from_json(stored_tokenizer(self._folder))
        if self._given is None:  # so that a run that is given the trained tokenizer finds the same tokens
            also = self.cache / key_of([*identity[:-1], self._tokenizer.fingerprint])
            with contextlib.suppress(OSError):  # there already, or a file system without links
                also.symlink_to(self._folder.name)

    def setup(self, stage: str | None = None) -> None:
        """Opens the folder that ``prepare_data`` built, here or in another process."""
        if self._folder is None:
            self.prepare_data()

    def part(self, name: str) -> Corpus:
        """The tokens of ``train``, ``val`` or ``test``."""
        assert self._folder is not None, "parts are there after setup"
        return Corpus(self._folder, name)

    @property
    def padding(self) -> dict[str, float]:
        """The share of padding in training, in ``bucketed`` and in ``random`` batches; {} for packed blocks."""
        if self.layout == "packed":
            return {}
        return padding(self._pieces("train").lengths, self.batch_size, self.max_tokens, self.multiple, self.seed)

    @property
    def longest(self) -> int:
        """Tokens of the longest training document, including start, end and padding."""
        return int(padded(self._pieces("train").lengths, self.multiple).max())

    def train_dataloader(self) -> ResumableLoader:
        if self.layout == "packed":
            blocks = PackedBlocks(self.part("train"), self.context, self.seed)
            return ResumableLoader(blocks, self.batch_size, self.seed, **self.loading)
        pieces = self._pieces("train")
        widths = padded(pieces.lengths, self.multiple)
        sampler = BucketBatchSampler(widths, self.batch_size, self.max_tokens, self.bucketing, self.seed)
        return ResumableLoader(pieces, batch_sampler=sampler, **self.loading)

    def val_dataloader(self) -> Loader:
        return self._evaluation("val")

    def test_dataloader(self) -> Loader:
        return self._evaluation("test")

    def predict_dataloader(self) -> Loader:
        """The test part; documents come with ``index`` (B,), their number in it, because they are sorted by length."""
        return self._evaluation("test", numbered=True)

    def _evaluation(self, part: str, numbered: bool = False) -> Loader:
        if self.layout == "packed":
            blocks = PackedInOrder(self.part(part), self.context)
            return self._fixed(blocks, blocks.batches(self.batch_size))
        pieces = self._pieces(part, numbered)
        return self._fixed(pieces, by_length(padded(pieces.lengths, self.multiple), self.batch_size, self.max_tokens))

    def _pieces(self, part: str, numbered: bool = False) -> Pieces:
        classified = self.num_classes > 0
        return Pieces(self.part(part), self.tokenizer, self.context, classified, self.multiple, numbered)

    def _fixed(self, dataset: Batched, batches: list[np.ndarray]) -> Loader:
        return Loader(dataset, batch_sampler=FixedBatches(batches), **self.loading)

    def _tokenizer_key(self) -> Any:
        """The tokenizer's part of the cache's key: its fingerprint, or how it will be trained."""
        return self._given.fingerprint if self._given is not None else self.recipe

    def _made_tokenizer(self, texts: Iterator[str]) -> Tokenizer:
        if self._given is not None:
            return self._given
        from holotrain.data.text.subword_tokenizer import SubwordTokenizer

        return SubwordTokenizer.trained(texts, self.recipe["vocab_size"])
