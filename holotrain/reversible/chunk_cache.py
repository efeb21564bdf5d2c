"""Keys and values of a sequence that is taken in chunks, and their gradients, as a cache of transformers.

Imported only with transformers. (Chunks: OOMB, arXiv 2602.02108.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

NAME = "holotrain_chunks"
"""Of the attention that takes the place of transformers' ``sdpa`` in a chunk."""


class ChunkLayer(DynamicLayer):
    """Keys and values of one layer, for all tokens, of which those before the present chunk are known.

    Attributes:
        start: the first token of the present chunk.
        filled: the number of tokens whose keys and values are there.
    """

    def __init__(self, length: int) -> None:
        super().__init__()
        self._length, self.start, self.filled = length, 0, 0
        self._kept: list[Tensor] = []
        self._sums: list[Tensor] = []
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *rest: Any, **keywords: Any) -> tuple[Tensor, Tensor]:
        """Returns keys and values up to the end of the chunk: (B, heads, tokens, width of a head)."""
        new = key_states, value_states
        stop = self.start + key_states.shape[-2]
        if not self._kept:
            self._kept = [each.new_empty(*each.shape[:-2], self._length, each.shape[-1]) for each in new]
        if stop > self.filled:  # else the chunk runs again
            for each, kept in zip(new, self._kept, strict=True):
                kept[..., self.start : stop, :] = each.detach()
            self.filled = stop
        if not torch.is_grad_enabled():
            return self._kept[0][..., :stop, :], self._kept[1][..., :stop, :]
        if not self._sums:
            self._sums = [torch.zeros_like(kept) for kept in self._kept]  # of 16 bits, too: sums of fp32 are no better
        keys, values = map(_UpTo.apply, new, self._kept, self._sums, [self.start] * 2)
        return keys, values

    def get_seq_length(self) -> int:
        return self.start

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.start + query_length, 0


class _UpTo(torch.autograd.Function):
    """All keys (or values) up to the end of a chunk.

    The gradients of those before the chunk are added to sums; those of its own are completed by what later chunks have added.
    """

    @staticmethod
    def forward(ctx, new: Tensor, kept: Tensor, sums: Tensor, start: int) -> Tensor:
        ctx.sums, ctx.start, ctx.stop = sums, start, start + new.shape[-2]
        return kept[..., : ctx.stop, :]

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ctx.sums[..., : ctx.stop, :] += gradient
        return ctx.sums[..., ctx.start : ctx.stop, :], None, None, None


class ChunkCache(Cache):
    """The cache of all layers. A block may run again with it: what is there already is not added twice."""

    runs_again = True

    def __init__(self, layers: int, length: int) -> None:
        self.chunks = [ChunkLayer(length) for _ in range(layers)]
        super().__init__(layers=[*self.chunks])

    def begin(self, start: int) -> None:
        """Before the chunk that begins at a token."""
        for layer in self.chunks:
            layer.start = start


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The last tokens' attention to all, causal where there is no mask. Keys and values of groups are not copied."""
    if attention_mask is not None or query.shape[-2] == key.shape[-2]:
        return sdpa_attention_forward(module, query, key, value, attention_mask, dropout, scaling, **keywords)
    groups, length, tokens = query.shape[1] // key.shape[1], query.shape[-2], key.shape[-2]
    if query.is_cuda:  # a kernel knows which rows these are
        bias = causal_lower_right(length, tokens)
        out = F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scaling, enable_gqa=groups > 1)
    else:  # the queries of a group stand one below the other
        folded = query.reshape(len(query), key.shape[1], groups * length, -1)
        mask = _last_rows(length, tokens, groups, query.dtype, query.device)
        out = F.scaled_dot_product_attention(folded, key, value, mask, dropout, scale=scaling)
        out = out.reshape(*query.shape[:-1], -1)
    return out.transpose(1, 2).contiguous(), None


_latest: dict[tuple[Any, ...], Tensor] = {}
"""The mask of the latest chunk, for all layers. It holds numbers: a CPU would make them of a boolean one in each layer."""


def _last_rows(length: int, tokens: int, groups: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    key = length, tokens, groups, dtype, device, torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    mask = _latest.get(key)
    if mask is None:
        _latest.clear()
        numbers = torch.full((length, tokens), float("-inf"), dtype=dtype, device=device)
        _latest[key] = mask = numbers.triu(tokens - length + 1).repeat(groups, 1)
    return mask


def forget_mask() -> None:
    """After a step: its memory goes."""
    _latest.clear()


def _mask(*, mask_function: Callable, attention_mask: Tensor | None, allow_is_causal_skip: bool = True, **keywords: Any):
    """None where a chunk is causal and nothing else."""
    if mask_function is causal_mask_function and attention_mask is None:
        return None
    return sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False, **keywords)


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, _mask)
