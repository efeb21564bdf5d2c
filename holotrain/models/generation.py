"""Generates text with a causal model, token by token. A cache keeps the keys and values of earlier tokens."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from holotrain.models.layers.kv_cache import KVCache
from holotrain.models.sampling import Sampling


def generate(
    model: nn.Module,
    prompts: Sequence[Tensor],
    max_tokens: int,
    sampling: Sampling | None = None,
    end_id: int | None = None,
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
        end_id: the token that ends a text; its row is then filled with this token.
        generator: random generator on the model's device, for reproducible samples. None: the global one.
        compiled: run each step with torch.compile, with a cache of fixed size.

    Yields:
        the next token of every prompt, (B,), an ordinary tensor that the caller may change. Ends when all texts have ended.

    Raises:
        ValueError: an empty prompt, or one that fills the context (both at the call); the model gives NaN (at that token).
    """
    lengths = [len(prompt) for prompt in prompts]
    if not lengths or min(lengths) < 1:
        raise ValueError("a prompt needs at least one token")
    if max(lengths) >= model.context:
        raise ValueError(f"a prompt of {max(lengths)} tokens leaves no room in a context of {model.context}")
    room = min(max_tokens, model.context - max(lengths))
    return _generated(model, prompts, room, sampling or Sampling(), end_id, generator, compiled)


def _generated(
    model: nn.Module,
    prompts: Sequence[Tensor],
    room: int,
    sampling: Sampling,
    end_id: int | None,
    generator: torch.Generator | None,
    compiled: bool,
) -> Iterator[Tensor]:
    """Like :func:`generate`, for checked arguments and ``room`` new tokens. It never yields within inference mode."""
    lengths = [len(prompt) for prompt in prompts]
    longest = max(lengths)
    step: Callable[..., Tensor] = torch.compile(_step) if compiled else _step
    with torch.inference_mode():
        # Compiled code needs fixed shapes, so it reads the whole cache; otherwise empty places are left out.
        cache = model.cache(len(prompts), longest + room, static=compiled)
        logits, positions = _read(model, prompts, lengths, cache, model.norm.weight.device)
        ended = torch.zeros_like(positions, dtype=torch.bool)
    for count in range(1, room + 1):
        with torch.inference_mode():
            tokens = sampling.draw(logits, generator)
            if end_id is not None:
                tokens = tokens.masked_fill(ended, end_id)
                ended |= tokens == end_id
        with torch.inference_mode(False):  # a caller in inference mode gets an ordinary tensor too
            theirs = tokens.clone()
        yield theirs
        if count == room or (end_id is not None and bool(ended.all())):
            return
        with torch.inference_mode():
            end = cache.length if compiled else longest + count
            logits = step(model, tokens[:, None], cache, positions[:, None], end)
            positions = positions + 1


def _read(
    model: nn.Module, prompts: Sequence[Tensor], lengths: list[int], cache: KVCache, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Reads the prompts. Returns the logits after each last token, (B, V), and the positions of the next tokens, (B,)."""
    tokens = torch.zeros(len(prompts), max(lengths), dtype=torch.long, device=device)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    places = torch.arange(max(lengths), device=device).expand_as(tokens)
    hidden = model.hidden(tokens, cache=cache, positions=places, end=max(lengths))
    positions = torch.tensor(lengths, device=device)
    return model.logits(hidden[torch.arange(len(prompts), device=device), positions - 1]), positions


def _step(model: nn.Module, tokens: Tensor, cache: KVCache, positions: Tensor, end: int) -> Tensor:
    return model(tokens, cache=cache, positions=positions, end=end)[:, -1]
