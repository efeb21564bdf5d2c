"""A call of a causal language model of transformers, by chunks of its sequence: what is taken, and what is refused."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from holotrain.reversible.attention_parts import forget_mask
from holotrain.reversible.chunk_keys import ChunkedKeys
from holotrain.reversible.tiled_loss import IGNORED

OF_TOKENS = ("input_ids", "attention_mask", "position_ids", "labels", "shift_labels")
TAKEN = (*OF_TOKENS, "num_items_in_batch", "use_cache", "return_dict")
"""Arguments that a model may be called with."""

OF_DOCUMENTS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
"""Where documents begin in a row, for kernels: ``sdpa`` ignores them, since position ids tell it."""


def arguments_by_name(forward: Callable, arguments: tuple, keywords: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without those that are None."""
    signature = inspect.signature(forward)
    given = signature.bind(*arguments, **keywords).arguments
    rest = [name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD]
    for name in rest:
        given |= given.pop(name, {})
    return {name: value for name, value in given.items() if value is not None}


def require_taken(model: Any, given: dict[str, Any], on_host: bool) -> None:
    """Raises a ValueError for a call that cannot be taken in chunks, with keys and values in main memory or not."""
    config, name = model.config.get_text_config(decoder=True), type(model).__name__
    chunked = "chunked_attention" in (getattr(config, "layer_types", None) or ())
    if on_host and (config._attn_implementation != "sdpa" or not model._supports_attention_backend or chunked):
        raise ValueError(
            f"{name} reads keys in main memory only where it takes attn_implementation='sdpa', and has no code of its own for "
            "it, nor windows that do not slide: take keys='device'"
        )
    taken = TAKEN + (OF_DOCUMENTS if "position_ids" in given and config._attn_implementation == "sdpa" else ())
    refused = [name for name, value in given.items() if name not in taken and value is not False]
    refused += [name for name in ("output_hidden_states", "output_attentions") if getattr(config, name, False)]
    refused += ["return_dict=False"] if given.get("return_dict") is False else []
    if "input_ids" not in given or refused:
        wrong = f"with {', '.join(refused)}" if refused else "without input_ids"
        raise ValueError(f"{name} was called {wrong}; chunks take {', '.join(TAKEN)}: call undo(model)")
    length = given["input_ids"].shape[-1]
    for each in OF_TOKENS:
        shape = tuple(given[each].shape) if each in given else (1, length)
        if len(shape) != 2 or shape[1] != length or not length:
            raise ValueError(f"chunks take {each} of (B, T), not {shape}, and input_ids of T={length}: call undo(model)")
    ropes = getattr(config, "rope_parameters", None) or {}
    for rope in (ropes, *(each for each in ropes.values() if isinstance(each, dict))):
        if rope.get("rope_type") not in ("dynamic", "longrope"):
            continue
        known = rope.get("original_max_position_embeddings") or config.max_position_embeddings
        if length > known:
            raise ValueError(
                f"the rotation of {name}'s positions ({rope['rope_type']}) depends on the length of a sequence above {known} "
                "tokens, which a chunk does not know: call undo(model)"
            )


class ChunkedCall(ABC):
    """The arguments of a call, by chunk.

    Attributes:
        keys: keys and values.
        labels: (B, T), of the token that follows each.
        count: by what the sum of the losses is divided; None: by the number of labels that count.
    """

    keys: ChunkedKeys
    labels: Tensor
    count: Any = None

    def divisor(self) -> Tensor:
        """By what the sum of the losses is divided."""
        if self.count is None:
            return (self.labels != IGNORED).sum()
        return torch.as_tensor(self.count, device=self.labels.device)

    @abstractmethod
    def run(self, start: int, stop: int) -> None:
        """Runs the model without its head, for keys and values of a chunk."""

    @abstractmethod
    def arguments(self, start: int, stop: int) -> dict[str, Any]:
        """What the model gets to return the sum of the losses of a chunk."""

    def attention(self) -> AbstractContextManager[None]:
        """Inside, the model's attention is one for chunks."""
        return nullcontext()


class HuggingFaceCall(ChunkedCall):
    """That of a model of transformers."""

    def __init__(self, model: Any, given: dict[str, Any], on_host: bool) -> None:
        from holotrain.reversible.chunk_cache import ChunkCache

        config, ids, positions = model.config.get_text_config(decoder=True), given["input_ids"], given.get("position_ids")
        self._ids, self._positions, self._mask = ids, positions, given.get("attention_mask")
        self._model, self._on_host, self.count = model, on_host, given.get("num_items_in_batch")
        self._cache = ChunkCache(config, ids.shape[1], on_host)
        self.keys = self._cache.chunks
        labels = given.get("shift_labels")
        self.labels = nn.functional.pad(given["labels"], (0, 1), value=IGNORED)[:, 1:] if labels is None else labels
        self._documents = None
        # transformers separates documents where it gets neither a mask nor a cache.
        caches = given.get("use_cache", getattr(config, "use_cache", False))
        if positions is not None and self._mask is None and not caches and _is_known(positions):
            self._documents = _documents(positions.expand(len(ids), -1))
        if self._documents is not None and (config._attn_implementation != "sdpa" or _has_windows(config)):
            raise ValueError(
                f"{type(model).__name__} got several documents in a row, which chunks take with attn_implementation='sdpa' and "
                "without sliding windows: call undo(model)"
            )
        if self._mask is not None and _hides_nothing(self._mask, self.labels, on_host):
            self._mask = None
        if self._mask is not None and config._attn_implementation == "eager" and not bool(self._mask[:, 0].all()):
            raise ValueError(
                f"{type(model).__name__} got padding on the left, of which attn_implementation='eager' lets rows read later "
                "tokens, so it takes no chunks: take 'sdpa', or call undo(model)"
            )
        # What transformers calls the argument of a cache; it was past_key_values before 5.24.
        self._name = "cache" if "cache" in inspect.signature(base_of(model).forward).parameters else "past_key_values"

    def _chunk(self, start: int, stop: int) -> dict[str, Any]:
        given: dict[str, Any] = {"input_ids": self._ids[:, start:stop], "use_cache": True, "return_dict": True}
        if self._positions is not None:
            given["position_ids"] = self._positions[:, start:stop]
        if self._documents is not None:
            given["attention_mask"] = _within_documents(self._documents, start, stop)
        elif self._mask is not None:
            given["attention_mask"] = self._mask[:, :stop]
        return given | {self._name: self._cache}

    def run(self, start: int, stop: int) -> None:
        base_of(self._model)(**self._chunk(start, stop))

    def arguments(self, start: int, stop: int) -> dict[str, Any]:
        labels = self.labels[:, start:stop].contiguous()
        return self._chunk(start, stop) | {"labels": labels, "shift_labels": labels, "num_items_in_batch": 1}

    @contextmanager
    def attention(self) -> Generator[None]:
        """Inside, ``sdpa`` is one that makes no mask where a chunk is causal and nothing else, or fetches what it reads."""
        from holotrain.reversible.chunk_attention import ON_DEVICE, ON_HOST

        config = self._model.config.get_text_config(decoder=True)
        before = config._attn_implementation
        if before == "sdpa" and self._model._supports_attention_backend:  # others know two or three names
            config._attn_implementation = ON_HOST if self._on_host else ON_DEVICE
        try:
            yield
        finally:
            config._attn_implementation = before
            forget_mask()


def _is_known(tensor: Tensor) -> bool:
    """Whether its values can be read: in a plan, those of integers can, unless they are many."""
    return type(tensor) is Tensor and not tensor.is_meta


def _hides_nothing(mask: Tensor, labels: Tensor, on_host: bool) -> bool:
    """Whether tokens are hidden on the right alone, and teach nothing: the others come before them, and do not read them.

    It is assumed of a plan with keys in main memory, which would refuse others.
    """
    if _is_known(mask) and bool(mask.all()):
        return True
    if not (_is_known(mask) and _is_known(labels)):
        return on_host
    begins = mask[:, 1:] > mask[:, :-1]
    return not bool(begins.any() | ((mask == 0) & (labels != IGNORED)).any())


def _documents(positions: Tensor) -> Tensor | None:
    """The number of the document of each token, where position ids begin anew; None: there is one."""
    begins = positions[:, 1:] != positions[:, :-1] + 1
    return nn.functional.pad(begins.cumsum(1), (1, 0)) if bool(begins.any()) else None


def _within_documents(documents: Tensor, start: int, stop: int) -> Tensor:
    """(B, 1, tokens of the chunk, tokens so far): which of these each token reads."""
    causal = torch.ones(stop - start, stop, dtype=torch.bool, device=documents.device).tril(start)
    return (documents[:, start:stop, None] == documents[:, None, :stop])[:, None] & causal


def _has_windows(config: Any) -> bool:
    kinds = getattr(config, "layer_types", None) or ()
    return getattr(config, "sliding_window", None) is not None or any(kind != "full_attention" for kind in kinds)


def base_of(model: Any) -> nn.Module:
    """The model without its head; Llama 4 names it wrongly, and so gives itself."""
    return model.model if model.base_model is model else model.base_model
