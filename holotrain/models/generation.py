"""Generates text with a causal model, token by token. A cache keeps the keys and values of earlier tokens."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import pad_sequence

from holotrain.models.layers.attention import KVCache
from holotrain.numeric import require_at_least

WITHOUT_PLANS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""cuDNN's attention is left out: it builds a plan for each new length, which every token would wait for."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn. Defaults draw from the model's own distribution.

    Args:
        temperature: logits are divided by it; 0 always takes the likeliest token.
        top_k: draw among this many of the likeliest tokens; None: among all.
        top_p: draw among the fewest likeliest tokens whose probabilities reach this sum (nucleus sampling, Holtzman et al.,
            2020); None: among all. Applied after ``top_k``.

    Raises:
        ValueError: a value out of range.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        require_at_least(0, temperature=self.temperature)
        require_at_least(1, top_k=self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], not {self.top_p}")

    def probabilities(self, logits: Tensor) -> Tensor:
        """The probabilities (B, V) to draw from, for logits (B, V) and a temperature above 0."""
        logits = logits.float()
        temperature = max(self.temperature, torch.finfo(logits.dtype).tiny)  # what is below it would be 0
        logits = (logits - logits.amax(dim=-1, keepdim=True)) / temperature  # else a tiny temperature would overflow
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < least, float("-inf"))
        probabilities = logits.softmax(dim=-1)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = probabilities.sort(dim=-1, descending=True)
            reached_before = ordered.cumsum(dim=-1) - ordered >= self.top_p
            nucleus = ordered.masked_fill(reached_before, 0)
            probabilities = torch.zeros_like(probabilities).scatter(-1, order, nucleus / nucleus.sum(-1, keepdim=True))
        return probabilities

    def draw(self, logits: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The next tokens, (B,), for logits (B, V).

        Raises:
            ValueError: the logits are not finite, for example because the training has diverged.
        """
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        try:
            return torch.multinomial(self.probabilities(logits), 1, generator=generator).squeeze(-1)
        except RuntimeError as error:
            if logits.isfinite().all():
                raise
            raise ValueError("the model gives NaN or infinity for the next token; its training has diverged") from error


def can_generate(model: nn.Module) -> bool:
    """Whether :func:`generate` can continue texts with this model."""
    return hasattr(model, "context") and (hasattr(model, "cache") or hasattr(model, "reader"))


def generate(
    model: nn.Module,
    prompts: Sequence[Tensor],
    max_tokens: int,
    sampling: Sampling | None = None,
    end_id: int | Sequence[int] | None = None,
    generator: torch.Generator | None = None,
    compiled: bool = False,
) -> Iterator[Tensor]:
    """Continues all prompts as one batch.

    Each step leaves inference mode before it yields its tokens. So between tokens the caller can train the model, start another
    generation, or stop early.

    Args:
        model: such as :class:`~holotrain.models.GPT`, in eval mode.
        prompts: (T,) tokens each, of any lengths, at least one token.
        max_tokens: number of tokens to add to each; fewer if the model's context is full.
        sampling: how tokens are sampled; None: from the model's distribution.
        end_id: the token that ends a text, or several that do; its row is then filled with this token, or the first of them.
        generator: random generator on the model's device, for reproducible samples. None: the global one.
        compiled: run each step with torch.compile, with a cache of fixed size.

    Yields:
        the next token of every prompt, (B,), an ordinary tensor that the caller may change. Ends when all texts have ended.

    Raises:
        ValueError: no token to add, an empty prompt, one that fills the context, or a compiled model of another library (all at
            the call); the model gives NaN (at that token).
    """
    require_at_least(1, max_tokens=max_tokens)
    context = cast(int, model.context)
    if compiled and hasattr(model, "reader"):
        raise ValueError(f"a {type(model).__name__} is not compiled; use compile=false")
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) < 1:
        raise ValueError("a prompt needs at least one token")
    if max(lengths) >= context:
        raise ValueError(f"a prompt of {max(lengths)} tokens leaves no room in a context of {context}")
    room = min(max_tokens, context - max(lengths))
    sampling = sampling or Sampling()
    end_ids = [end_id] if isinstance(end_id, int) else list(end_id or ())
    ends = torch.tensor(end_ids, dtype=torch.long, device=next(model.parameters()).device)

    def drawn() -> Iterator[Tensor]:  # never yields within inference mode
        with torch.inference_mode():
            own = getattr(model, "reader", None)  # of a model of another library
            reader = Reader(model, prompts, room, compiled) if own is None else own(prompts)
        tokens = None
        for _ in range(room):
            with torch.inference_mode(), sdpa_kernel(WITHOUT_PLANS):
                last, tokens = tokens, sampling.draw(reader.read(tokens), generator)
                if end_ids and last is not None:  # what has ended stays so
                    tokens = tokens.masked_fill(torch.isin(last, ends), end_ids[0])
            with torch.inference_mode(False):  # a caller in inference mode gets an ordinary tensor too
                copy = tokens.clone()
            yield copy
            if end_ids and bool(torch.isin(tokens, ends).all()):
                return

    return drawn()


class Reader:
    """Reads prompts of different lengths, and then token by token, with a cache of keys and values.

    Args:
        model, prompts, compiled: see :func:`generate`.
        room: number of tokens to read after the prompts.
    """

    def __init__(self, model: nn.Module, prompts: Sequence[Tensor], room: int, compiled: bool) -> None:
        self._model: Any = model
        self._prompts, self._compiled = prompts, compiled
        self._step: Callable[..., Tensor] = torch.compile(_step) if compiled else _step
        lengths = [len(prompt) for prompt in prompts]
        self._end = max(lengths)
        # Compiled code needs fixed shapes, so it reads the whole cache; otherwise empty places are left out.
        self._cache: KVCache = self._model.cache(len(prompts), self._end + room, static=compiled)
        # Of the next tokens, (B,), or (1,) if all are at the same: then attention needs no mask.
        self._positions = torch.tensor(
            lengths if compiled or len(set(lengths)) > 1 else lengths[:1], device=self._model.norm.weight.device
        )

    def read(self, tokens: Tensor | None = None) -> Tensor:
        """The logits (B, V) of the token after ``tokens`` (B,); None: after the prompts."""
        if tokens is not None:
            self._end += 1
            end = self._cache.length if self._compiled else self._end
            logits = self._step(self._model, tokens[:, None], self._cache, self._positions[:, None], end)
            self._positions = self._positions + 1
            return logits
        device = self._positions.device
        tokens = pad_sequence([prompt.to(device, torch.long) for prompt in self._prompts], batch_first=True)
        places = torch.arange(self._end, device=device).expand_as(tokens)
        hidden = self._model.hidden(tokens, cache=self._cache, positions=places, end=self._end)
        return self._model.logits(hidden[torch.arange(len(tokens), device=device), self._positions - 1])


def _step(model: nn.Module, tokens: Tensor, cache: KVCache, positions: Tensor, end: int) -> Tensor:
    return model(tokens, cache=cache, positions=positions, end=end)[:, -1]
