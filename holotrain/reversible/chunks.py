"""A causal language model of transformers, trained a chunk of its sequence at a time, through its own cache of keys and values.

The chunks run in order without a graph, and only keys and values of all layers stay. Then each chunk runs again, the last one
first, with its graph: attention reads the kept keys and values, and the gradients that later chunks have for them are summed.
So all that works token by token, the head and its loss included, is there for one chunk alone, and nothing of the model has to
be known or cut. Gradients are those of the whole sequence. (Chunks: OOMB, arXiv 2602.02108, which is inexact.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holotrain.reversible.context import has_no_data
from holotrain.reversible.replaced_forward import ReplacedForward
from holotrain.reversible.settings import State, put_back, sources_of
from holotrain.reversible.tiled_cross_entropy import KnownGradients
from holotrain.reversible.tiled_loss import IGNORED, language_model

CUT = ("input_ids", "position_ids", "token_type_ids")
TAKEN = (*CUT, "attention_mask", "labels", "shift_labels", "num_items_in_batch")
"""Arguments that a model may be called with."""

LOOKED_AT = 32
"""Tokens of the first call on which chunks are compared with the whole."""


def train_in_chunks(model: nn.Module, chunk: int = 1024) -> nn.Module:
    """Takes a causal language model's sequences a chunk at a time in training, in place.

    The model is called as ever, with labels, and returns the loss, with ``logits`` None. Its gradients are made in this call,
    and are given to the parameters in the backward, once.

    Args:
        model: of transformers, maybe within a model of peft. What its blocks keep within a chunk is
            :func:`~holotrain.reversible.recompute`'s matter.
        chunk: tokens.

    Returns:
        the model.

    Raises:
        ValueError: there is no such model, or its attention reads more than what came before. At the call: it has an argument
            that cannot be cut, or its loss is no sum over tokens.
    """
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1:
        raise ValueError(f"chunk must be a number of tokens, not {chunk!r}")
    found = language_model(model)
    if found is None or found.config.is_encoder_decoder:
        raise ValueError(f"{type(model).__name__} is no causal language model of transformers, so it takes no chunks")
    take_whole(model)
    ChunkedForward(found).chunk = chunk
    return model


def take_whole(model: nn.Module) -> None:
    """Takes back what :func:`train_in_chunks` did."""
    ChunkedForward.remove_all(model)


class ChunkedForward(ReplacedForward):
    """The forward of a language model, which goes through its sequence in chunks in training with labels."""

    KEY, WHAT = "_chunked_forward", "model"
    chunk: int

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._proven = False

    def train(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        own = self.own()
        given = _by_name(own, arguments, keywords)
        if given.get("labels") is None:
            return self.pass_on(arguments, keywords)
        if not self.module.training:  # an evaluation looks at the logits
            return self.pass_on_in_eval(arguments, keywords)
        _require_taken(self.module, given)
        if not self._proven and not has_no_data(given["input_ids"]):
            _require_equal(self.module, own, given)
            self._proven = True
        return _loss_in_chunks(self.module, own, given, self.chunk)


def _by_name(forward: Callable, arguments: tuple, keywords: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, without those that are None."""
    signature = inspect.signature(forward)
    given = signature.bind(*arguments, **keywords).arguments
    rest = [name for name, each in signature.parameters.items() if each.kind is each.VAR_KEYWORD]
    for name in rest:
        given |= given.pop(name, {})
    return {name: value for name, value in given.items() if value is not None}


def _require_taken(model: Any, given: dict[str, Any]) -> None:
    refused = [name for name in given if name not in (*TAKEN, "use_cache", "return_dict")]
    if "input_ids" not in given or refused:
        wrong = f"with {', '.join(refused)}" if refused else "without input_ids"
        raise ValueError(f"{type(model).__name__} was called {wrong}; chunks take {', '.join(TAKEN)}: call undo(model)")
    for name in ("attention_mask", "position_ids"):
        if name in given and given[name].ndim != 2:
            raise ValueError(f"chunks take {name} of (B, T), not {tuple(given[name].shape)}: call undo(model)")


class _Sequence:
    """The arguments of a call, by chunk.

    Attributes:
        length: tokens.
        cache: of keys and values.
        labels: (B, T), of the token that follows each.
    """

    def __init__(self, model: Any, given: dict[str, Any]) -> None:
        from holotrain.reversible.chunk_cache import ChunkCache

        self._given, self.length = given, given["input_ids"].shape[1]
        self.cache = ChunkCache(model.config.get_text_config(decoder=True).num_hidden_layers, self.length)
        ids, mask, positions = given["input_ids"], given.get("attention_mask"), given.get("position_ids")
        if mask is not None and not has_no_data(mask) and bool(mask.all()):
            mask = None
        labels = given.get("shift_labels")
        self.labels = nn.functional.pad(given["labels"], (0, 1), value=IGNORED)[:, 1:] if labels is None else labels
        self._mask, self._documents = mask, None
        if positions is not None and mask is None and not has_no_data(positions):  # transformers looks for them without a cache
            self._documents = _documents(positions.expand(len(ids), -1))
        # Its name has changed within transformers 5.
        self._cache = "cache" if "cache" in inspect.signature(_base_of(model).forward).parameters else "past_key_values"

    def chunk(self, start: int, stop: int) -> dict[str, Any]:
        """What the model gets for the tokens of a chunk."""
        self.cache.begin(start)
        given = {name: self._given[name][:, start:stop] for name in CUT if name in self._given}
        if self._documents is not None:
            given["attention_mask"] = _within_documents(self._documents, start, stop)
        elif self._mask is not None:
            given["attention_mask"] = self._mask[:, :stop]
        return given | {self._cache: self.cache, "use_cache": True}

    def targets(self, start: int, stop: int) -> dict[str, Any]:
        """What the model gets besides, to return the sum of the losses of a chunk."""
        labels = self.labels[:, start:stop].contiguous()
        return {"labels": labels, "shift_labels": labels, "num_items_in_batch": 1}


def _documents(positions: Tensor) -> Tensor | None:
    """The number of the document of each token, where position ids begin anew; None: there is one."""
    begins = positions[:, 1:] != positions[:, :-1] + 1
    return nn.functional.pad(begins.cumsum(1), (1, 0)) if bool(begins.any()) else None


def _within_documents(documents: Tensor, start: int, stop: int) -> Tensor:
    """(B, 1, tokens of the chunk, tokens so far): which of these each token reads."""
    causal = torch.ones(stop - start, stop, dtype=torch.bool, device=documents.device).tril(start)
    return (documents[:, start:stop, None] == documents[:, None, :stop])[:, None] & causal


def _base_of(model: Any) -> nn.Module:
    return getattr(model, model.base_model_prefix)


def _loss_in_chunks(model: Any, own: Callable, given: dict[str, Any], chunk: int) -> Any:
    """What the model returns, with the loss alone. Its node knows all gradients."""
    sequence, weights, device = _Sequence(model, given), _Weights(model, own), given["input_ids"].device
    starts = range(0, sequence.length, chunk)
    chunks = [(start, min(start + chunk, sequence.length)) for start in starts]
    with _attention_of_chunks(model):
        states = []
        with torch.no_grad():
            for each in chunks[:-1]:  # the last one runs with its graph at once
                states.append(_random_states(device))
                _base_of(model)(**sequence.chunk(*each))
                _require_filled(model, sequence.cache, each[1])
        result, total = weights.differentiate(sequence, *chunks[-1])
        _require_filled(model, sequence.cache, sequence.length)
        after = _random_states(device)
        for each, then in zip(reversed(chunks[:-1]), reversed(states), strict=True):
            put_back(then)
            total = total + weights.differentiate(sequence, *each)[1]
        put_back(after)
    count = given.get("num_items_in_batch")
    count = (sequence.labels != IGNORED).sum() if count is None else torch.as_tensor(count, device=device)
    known = weights.gradients()
    return type(result)(loss=KnownGradients.apply(total, count, [*known.values()], *known))


def _random_states(device: torch.device) -> list[State]:
    return [source.read() for source in sources_of(device)]


def _require_filled(model: Any, cache: Any, stop: int) -> None:
    if any(layer.filled != stop for layer in cache.layers):
        raise ValueError(
            f"{type(model).__name__} does not keep keys and values of every token in every layer (layers of another kind, or "
            "gradient_checkpointing=True, which turns the cache off), so it takes no chunks; call undo(model)"
        )


@contextmanager
def _attention_of_chunks(model: Any) -> Generator[None]:
    """Inside, ``sdpa`` is one that makes no mask where a chunk is causal and nothing else."""
    from holotrain.reversible.chunk_cache import NAME

    config = model.config.get_text_config(decoder=True)
    before = config._attn_implementation
    if before == "sdpa" and model._supports_attention_backend:  # others know two or three names
        config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = before


class _Weights(nn.Module):
    """A model on leaves that share the memory of its parameters. Their gradients are summed over chunks, in fp32 at least.

    So hooks of the parameters see one gradient, and an outer backward gives it to them.
    """

    def __init__(self, model: nn.Module, own: Callable) -> None:
        super().__init__()
        self.model, self._own = model, own
        self._parameters_of = {name: each for name, each in model.named_parameters() if each.requires_grad}
        self._leaves = {name: nn.Parameter(each.detach()) for name, each in self._parameters_of.items()}
        self._sums: dict[str, Tensor] = {}
        for name, leaf in self._leaves.items():
            leaf.register_post_accumulate_grad_hook(lambda leaf, name=name: self._add(name, leaf))

    def _add(self, name: str, leaf: Tensor) -> None:
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if name in self._sums:
            self._sums[name] += gradient
        else:
            self._sums[name] = gradient.to(torch.promote_types(gradient.dtype, torch.float32))

    def forward(self, arguments: dict[str, Any]) -> Any:
        return self._own(**arguments)

    def differentiate(self, sequence: _Sequence, start: int, stop: int) -> tuple[Any, Tensor]:
        """Runs a chunk with its graph, and adds its gradients; returns what the model returned, and the sum of the losses."""
        arguments = sequence.chunk(start, stop) | sequence.targets(start, stop)
        named: dict[str, Tensor] = {f"model.{name}": leaf for name, leaf in self._leaves.items()}
        with torch.enable_grad():
            result = torch.func.functional_call(self, named, (arguments,))
        if getattr(result, "aux_loss", None) is not None:
            raise ValueError(
                "the loss of this mixture of experts is no sum over tokens, so it takes no chunks; set "
                "output_router_logits=False in its configuration, or call undo(model)"
            )
        with torch.autocast(result.loss.device.type, enabled=False):
            result.loss.backward()
        return result, result.loss.detach()

    def gradients(self) -> dict[Tensor, Tensor]:
        """The parameters that have a gradient, with it."""
        return {self._parameters_of[name]: total for name, total in self._sums.items()}


@torch.no_grad()
def _require_equal(model: Any, own: Callable, given: dict[str, Any]) -> None:
    """Raises a ValueError if the first tokens have other logits, or another loss, in two chunks than at once."""
    ids = given["input_ids"][:1, :LOOKED_AT]
    length = ids.shape[1]
    if length < 2:
        return
    modes = {part: part.training for part in model.modules()}
    model.eval()
    try:
        whole, parts = own(input_ids=ids, labels=ids, use_cache=False), _in_two(model, own, ids)
    finally:
        for part, mode in modes.items():
            part.training = mode
    expected, found = whole.logits.float(), torch.cat([part.logits for part in parts], 1).float()
    loss = (parts[0].loss + parts[1].loss) / (length - 1)
    bound = 0.05 if whole.logits.dtype.itemsize < 4 or torch.is_autocast_enabled(ids.device.type) else 1e-3
    if not ((found - expected).norm() < bound * expected.norm() and (loss - whole.loss).abs() < bound * whole.loss.abs()):
        raise ValueError(
            f"{type(model).__name__} computes something else in chunks than at once (loss {loss:.6g} and {whole.loss:.6g}), so "
            "it takes none; call undo(model)"
        )


def _in_two(model: Any, own: Callable, ids: Tensor) -> list[Any]:
    """What a model returns for the halves of a row."""
    length = ids.shape[1]
    sequence = _Sequence(model, {"input_ids": ids, "labels": ids})
    try:
        with _attention_of_chunks(model):
            return [
                own(**sequence.chunk(*each), **sequence.targets(*each)) for each in ((0, length // 2), (length // 2, length))
            ]
    except Exception as error:  # of models whose layers keep something else, of many kinds
        reason = f"{type(model).__name__} does not run on a cache of keys and values alone, so it takes no chunks"
        raise ValueError(f"{reason} ({type(error).__name__}: {error!s:.200}); call undo(model)") from error
