"""A causal language model of transformers, trained a chunk of its sequence at a time, through its own cache of keys and values.

The chunks run in order without a graph, and only keys and values of all layers stay. Then each chunk runs again, the last one
first, with its graph: attention reads the kept keys and values, and the gradients that later chunks have for them are summed.
So all that works token by token, the head and its loss included, is there for one chunk alone, and nothing of the model has to
be known or cut. Gradients are those of the whole sequence. (Chunks: OOMB, arXiv 2602.02108, which is inexact.)
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holotrain.reversible.chunk_keys import ChunkedKeys
from holotrain.reversible.chunk_weights import weights_of
from holotrain.reversible.chunked_call import ChunkedCall, HuggingFaceCall, arguments_by_name, require_taken
from holotrain.reversible.context import has_no_data
from holotrain.reversible.graph_generators import next_pair, used
from holotrain.reversible.replaced_forward import ReplacedForward
from holotrain.reversible.settings import Call, put_back, states_of
from holotrain.reversible.tiled_cross_entropy import KnownGradients
from holotrain.reversible.tiled_loss import ModelsLoss, language_model

COMPARED = 32
"""Tokens of the first call that are taken in chunks and at once, to compare what they give."""


CHUNK = 1024
"""Tokens of a chunk, if none are given."""

HIDING = 8192
"""Queries of a key above which it and its value come over PCIe 5 (50 GB/s) as fast as an H100 computes attention to them in 16
bits (4e14 operations a second): of D numbers each, they are 4 D bytes, and 4 D operations a query. At 8,000 both are equal."""


def train_in_chunks(model: nn.Module, chunk: int | None = None, keys: str = "device") -> nn.Module:
    """Takes a causal language model's sequences a chunk at a time in training, in place.

    The model is called as ever, with labels, and returns the loss, with ``logits`` None. Its gradients are made in this call,
    and are given to the parameters in the backward, once.

    Args:
        model: of transformers, maybe within a model of peft; or GPT or RevGPT of :mod:`holotrain.models`. What its blocks keep
            within a chunk is :func:`~holotrain.reversible.recompute`'s matter.
        chunk: tokens. None: 1,024; where keys are on the host, as many as hide their copies behind attention.
        keys: where keys, values and their gradients are kept: on the ``"device"``, or on the ``"host"``, in pinned main memory,
            from which they come ahead of their use; the device's memory does not grow with the sequence then. On a CPU both are
            main memory.

    Returns:
        the model.

    Raises:
        ValueError: there is no such model, or its attention reads more than what came before. At the call: it has an argument
            that cannot be cut, or its loss is no sum over tokens.
    """
    if chunk is not None and (not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1):
        raise ValueError(f"chunk must be a number of tokens, not {chunk!r}")
    if keys not in ("device", "host"):
        raise ValueError(f"keys must be 'device' or 'host', not {keys!r}")
    if hasattr(model, "chunked_call"):
        if keys == "host":
            raise ValueError(f"{type(model).__name__} keeps keys on the device: take keys='device'")
        ChunkedGPT.remove_all(model)
        ChunkedGPT(model).chunk = chunk or CHUNK
        return model
    found = language_model(model)
    if found is None or found.config.is_encoder_decoder:
        raise ValueError(
            f"{type(model).__name__} is no causal language model of transformers, GPT or RevGPT, so it takes no chunks"
        )
    ChunkedForward.remove_all(model)
    chunked = ChunkedForward(found)
    chunked.chunk, chunked.on_host = chunk or _usual_chunk(found.config, keys), keys == "host"
    return model


def _usual_chunk(config: Any, keys: str) -> int:
    config = config.get_text_config(decoder=True)
    queries = config.num_attention_heads // (getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    return max(CHUNK, HIDING // queries) if keys == "host" else CHUNK


class ChunkedForward(ModelsLoss):
    """The forward of a language model, which goes through its sequence in chunks in training with labels."""

    KEY, WHAT = "_chunked_forward", "model"
    NOT_DONE = "its sequence is not taken in chunks"
    chunk: int
    on_host: bool

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._compared = False

    def train(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        own = self.own()
        given = arguments_by_name(own, arguments, keywords)
        labels = given.get("labels") if self._runs else None
        if labels is None or not any(weight.requires_grad for weight in self.module.parameters()):
            return self.pass_on(arguments, keywords)
        if not self.module.training:  # an evaluation looks at the logits
            return self.pass_on_in_eval(arguments, keywords)
        require_taken(self.module, given, self.on_host)
        Call(given["input_ids"].device)  # which refuses torch.func
        if not self._compared and not has_no_data(given["input_ids"]):
            self._compared = _require_equal(self.module, own, given["input_ids"][:1, :COMPARED], self.on_host)
        return loss_in_chunks(self.module, own, HuggingFaceCall(self.module, given, self.on_host), self.chunk)


class ChunkedGPT(ReplacedForward):
    """The forward of a model of ours, which goes through its sequence in chunks in training with targets."""

    KEY, WHAT = "_chunked_forward", "model"
    chunk: int

    def train(self, arguments: tuple, keywords: dict[str, Any]) -> Any:
        own = self.own()
        given = arguments_by_name(own, arguments, keywords)
        trains = self.module.training and any(weight.requires_grad for weight in self.module.parameters())
        if given.keys() != {"tokens", "targets"} or not trains:
            return self.pass_on(arguments, keywords)
        Call(given["tokens"].device)  # which refuses torch.func
        return loss_in_chunks(self.module, own, self.module.chunked_call(**given), self.chunk)


def loss_in_chunks(model: Any, own: Callable, sequence: ChunkedCall, chunk: int) -> Any:
    """What the model returns, with the loss alone. Its node knows all gradients."""
    weights, device = weights_of(model, own, sequence), sequence.labels.device
    length = sequence.labels.shape[1]
    chunks = [(start, min(start + chunk, length)) for start in range(0, length, chunk)]
    states, pairs, after = [], [], None
    try:
        with sequence.attention(), _without_checkpoints(model), weights.around():
            with torch.no_grad():
                for each in chunks[:-1]:  # the last one runs with its graph at once
                    states.append(states_of(device))
                    pairs.append(next_pair(device))
                    sequence.keys.begin(each[0])
                    with used(pairs[-1], again=False):
                        sequence.run(*each)
                    _require_filled(model, sequence.keys, each[1])
            result, total = weights.differentiate(sequence, *chunks[-1])
            _require_filled(model, sequence.keys, length)
            after = states_of(device)
            for each, then, pair in zip(reversed(chunks[:-1]), reversed(states), reversed(pairs), strict=True):
                put_back(then)
                with used(pair, again=True):
                    total = total + weights.differentiate(sequence, *each)[1]
        known = weights.gradients()
    finally:
        weights.release()
        sequence.keys.finish()
        if after is not None:
            put_back(after)
    count = sequence.divisor()
    if weights.divisor is not None:  # of their gradients already
        total, count = total / count, torch.ones_like(count)
    loss = KnownGradients.apply(total, count, [*known.values()], *known)
    return loss if isinstance(result, Tensor) else type(result)(loss=loss)


def _require_filled(model: Any, keys: ChunkedKeys, stop: int) -> None:
    if not keys.are_filled(stop):
        raise ValueError(
            f"{type(model).__name__} does not keep keys and values of every token in every layer, so it takes no chunks; call "
            "undo(model)"
        )


@contextmanager
def _without_checkpoints(model: Any) -> Generator[None]:
    """Inside, transformers checkpoints no blocks, for which it would turn the cache off, and embeddings have no gradient of
    their own, which peft asks for with checkpoints."""
    checkpointing: list[Any] = [part for part in model.modules() if getattr(part, "gradient_checkpointing", False)]
    of_embeddings = bool(getattr(model, "_require_grads_hooks", None) or getattr(model, "_require_grads_hook", None))
    for part in checkpointing:
        part.gradient_checkpointing = False
    if of_embeddings:
        model.disable_input_require_grads()
    try:
        yield
    finally:
        for part in checkpointing:
            part.gradient_checkpointing = True
        if of_embeddings:
            model.enable_input_require_grads()


@torch.no_grad()
def _require_equal(model: Any, own: Callable, ids: Tensor, on_host: bool) -> bool:
    """Whether a row has been compared, which takes two tokens.

    Raises:
        ValueError: it has other logits, or another loss, in two chunks than at once, or logits that depend on later tokens.
    """
    if ids.shape[1] < 2:
        return False
    modes = {part: part.training for part in model.modules()}
    # Without dropout. In eval(), a layer of bitsandbytes packs its weights for a CPU, and loses its gradient.
    for part in modes:
        part.training = modes[part] and isinstance(part, nn.Linear)
    try:
        whole, parts = own(input_ids=ids, labels=ids, use_cache=False, return_dict=True), _in_two(model, own, ids, on_host)
        other = own(input_ids=torch.cat([ids[:, :-1], (ids[:, -1:] + 1) % 2], 1), use_cache=False, return_dict=True)
    finally:
        for part, mode in modes.items():
            part.training = mode
    is_half = whole.logits.dtype.itemsize < 4 or torch.is_autocast_enabled(ids.device.type)
    bound, expected = (0.05 if is_half else 1e-3), whole.logits.float()
    loss = (parts[0].loss + parts[1].loss) / (ids.shape[1] - 1)
    is_equal = _are_near(torch.cat([part.logits for part in parts], 1).float(), expected, bound)
    is_causal = _are_near(other.logits[:, :-1].float(), expected[:, :-1], 1e-3 if is_half else 1e-5)
    if not (is_equal and is_causal and _are_near(loss, whole.loss, bound)):
        raise ValueError(
            f"{type(model).__name__} computes something else in chunks than at once (loss {loss:.6g} and {whole.loss:.6g}), or "
            "reads later tokens, so it takes none; call undo(model)"
        )
    return True


def _are_near(found: Tensor, expected: Tensor, bound: float) -> bool:
    return bool((found - expected).norm() <= bound * expected.norm())


def _in_two(model: Any, own: Callable, ids: Tensor, on_host: bool) -> list[Any]:
    """What a model returns for the halves of a row."""
    length = ids.shape[1]
    sequence = HuggingFaceCall(model, {"input_ids": ids, "labels": ids}, on_host)
    halves = []
    try:
        with sequence.attention():
            for start, stop in ((0, length // 2), (length // 2, length)):
                sequence.keys.begin(start)
                halves.append(own(**sequence.arguments(start, stop)))
            return halves
    except Exception as error:  # of models whose layers keep something else, of many kinds
        reason = f"{type(model).__name__} does not run on a cache of keys and values alone, so it takes no chunks"
        raise ValueError(f"{reason} ({type(error).__name__}: {error!s:.200}); call undo(model)") from error
