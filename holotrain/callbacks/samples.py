"""Samples: texts that a causal language model writes."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import lightning.pytorch as pl
import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from holotrain.callbacks.drawing import log_text
from holotrain.models import generate
from holotrain.models.generation import Sampling, can_generate
from holotrain.numeric import require_at_least


class Samples(pl.Callback):
    """Logs sampled continuations of prompts at each validation, for causal language models in any Lightning Trainer.

    The random numbers come from a generator of its own with the same seed each time, so that texts of different steps differ by
    the weights only, and the training is not changed.

    Args:
        prompts: texts to continue; None: the beginnings of ``count`` validation documents of the data module.
        count: number of documents.
        tokens: number of tokens to add to each prompt.
        temperature: of the sampling; 0: always the likeliest token.
        tokenizer: with ``encode``, ``decode`` and ``end_id``; None: the data module's. See
            :class:`~holotrain.data.tokenizers.Tokenizer`.
        seed: of the samples.

    The model is ``pl_module.model``, or else the module itself. Compiled blocks run uncompiled here.

    Logs ``val/samples``, with the first process's model. Logs nothing with a model that cannot generate, without a tokenizer or
    prompts, and with sharded parameters (FSDP, tensor parallel).

    Raises:
        ValueError: at the start: a prompt fills the model's context.
    """

    def __init__(
        self,
        prompts: Sequence[str] | None = None,
        count: int = 2,
        tokens: int = 64,
        temperature: float = 1.0,
        tokenizer: Any = None,
        seed: int = 0,
    ) -> None:
        if prompts is not None and (isinstance(prompts, str) or not prompts):
            raise ValueError("prompts must be a list of at least one text")
        require_at_least(1, count=count, tokens=tokens)
        self.prompts = None if prompts is None else list(prompts)
        self.count, self.tokens, self.seed = count, tokens, seed
        self.sampling = Sampling(temperature)
        self.tokenizer: Any = tokenizer
        self._starts: list[Tensor] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        model = model_of(pl_module)
        data = trainer.datamodule  # ty: ignore[missing-attribute]
        self.tokenizer = self.tokenizer or getattr(data, "tokenizer", None)
        if self.tokenizer is None or not can_generate(model):
            return
        context = cast(int, model.context)
        if self.prompts is not None:
            self._starts = [torch.from_numpy(self.tokenizer.encode(text).astype("int64")) for text in self.prompts]
            self._starts = [start if len(start) else torch.tensor([self.tokenizer.end_id]) for start in self._starts]
            if max(map(len, self._starts)) >= context:
                raise ValueError(f"a prompt of Samples fills the model's context of {context} tokens")
        elif hasattr(data, "part"):
            longest = max(min(self.tokens // 2, context // 4), 1)
            self._starts = list(beginnings(data.part("val"), self.count, longest))

    # Before on_validation_end: then an average of the weights is still in place, and the time does not count as training.
    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.sanity_checking or not (self._starts and trainer.loggers):
            return
        model = model_of(pl_module)
        sharded = any(isinstance(each, DTensor) or each.is_meta for each in model.parameters())
        if trainer.is_global_zero and not sharded:
            rows = [
                [self.tokenizer.decode(start.tolist()), text]
                for start, text in zip(self._starts, self._texts(trainer, model, pl_module.device), strict=True)
            ]
            log_text(trainer.loggers, "val/samples", ["prompt", "continuation"], rows, trainer.global_step)

    def _texts(self, trainer: pl.Trainer, model: nn.Module, device: torch.device) -> list[str]:
        generator = torch.Generator(device).manual_seed(self.seed)
        end = self.tokenizer.end_id
        # Each length of the cache would be compiled anew.
        with trainer.precision_plugin.forward_context(), torch.compiler.set_stance("force_eager"):
            steps = generate(model, self._starts, self.tokens, self.sampling, end, generator)
            try:
                tokens = torch.stack([*steps], dim=1).tolist()
            except ValueError as error:  # NaN: the training goes on, and its loss shows it
                return [f"({error})"] * len(self._starts)
        return [self.tokenizer.decode(row[: row.index(end)] if end in row else row) for row in tokens]


def model_of(pl_module: pl.LightningModule) -> nn.Module:
    return getattr(pl_module, "model", pl_module)


def beginnings(corpus: Any, count: int, longest: int) -> Iterator[Tensor]:
    """The first tokens of documents spread over a part, at most ``longest``, and at most half of each document."""
    lengths = np.diff(corpus.offsets) - 1  # without the end token
    documents = np.flatnonzero(lengths)
    for place in range(min(count, len(documents))):
        document = documents[place * len(documents) // min(count, len(documents))]
        first = int(corpus.offsets[document])
        taken = min(longest, -(-int(lengths[document]) // 2))
        yield torch.from_numpy(corpus.tokens[first : first + taken].astype(np.int64))
