"""Attention of a chunk of a sequence to all that came before it, in place of transformers' ``sdpa``.

Where keys and values are in main memory, they come part by part. Imported only with transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.bias import causal_lower_right
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, sdpa_mask

from holotrain.reversible.attention_parts import Reach, attend, gradients, mask_of
from holotrain.reversible.chunk_keys import HostLayer, Part, as_read

ON_DEVICE, ON_HOST = "holotrain_chunks", "holotrain_chunks_on_host"
"""Names of the attention that takes the place of transformers' ``sdpa`` in a chunk, by where keys and values are."""


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
    length, tokens = query.shape[-2], key.shape[-2]
    if query.is_cuda:  # a kernel knows which rows these are
        bias = causal_lower_right(length, tokens)
        out = F.scaled_dot_product_attention(
            query, key, value, bias, dropout, scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
    else:
        folded = _folded(query, key)
        mask = mask_of(Reach(length, tokens - length, None), folded, key)
        out = F.scaled_dot_product_attention(folded, key, value, mask, dropout, scale=scaling)
        out = out.reshape(*query.shape[:-1], -1)
    return out.transpose(1, 2).contiguous(), None


def _folded(query: Tensor, key: Tensor) -> Tensor:
    """The queries of a group stand one below the other: (B, H, T, D) -> (B, heads of keys, H / heads of keys * T, D)."""
    return query.reshape(len(query), key.shape[1], -1, query.shape[-1])


_ONLY_CAUSAL = (
    "keys in main memory take masks that are causal, with a window or without, and no others, as for documents in a row or "
    'padding on the left: take keys="device"'
)


def _attention_on_host(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The attention of a chunk's queries to its own keys and values, and to those in main memory."""
    if attention_mask is not None:
        raise ValueError(_ONLY_CAUSAL)
    if dropout:
        raise ValueError(
            f"{type(module).__name__} drops out attention, which keys in main memory cannot; set its probability to 0 in "
            'the configuration, or take keys="device"'
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer = HostLayer.latest(key)
    query, key, value = map(as_read, (query, key, value))
    out = _PartByPart.apply(_folded(query, key), key, value, layer, scale)
    return out.reshape(*query.shape[:-1], -1).transpose(1, 2).contiguous(), None


class _PartByPart(torch.autograd.Function):
    """Attention to all parts of a layer. Shapes: query (B, G, H / G * T, D), key (B, G, T, D), value (B, G, T, V)."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, layer: HostLayer, scale: float) -> Tensor:
        ctx.layer, ctx.scale = layer, scale
        before, own = layer.before(), layer.own()
        out, logs = attend(query, key, value, _reach(own, own, layer.window), scale)
        for part in before:
            more, more_logs = attend(query, *part.take(), _reach(own, part, layer.window), scale)
            both = torch.logaddexp(logs, more_logs)
            out = out * (logs - both).exp()[..., None] + more * (more_logs - both).exp()[..., None]
            logs = both
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, logs)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value, out, logs = ctx.saved_tensors
        layer, scale, known = ctx.layer, ctx.scale, (gradient.contiguous(), out, logs)
        own = layer.own()
        own.fetch_sums()
        before = layer.before(sums=True)
        total, *of_own = gradients(known, query, key, value, _reach(own, own, layer.window), scale)
        total = total.to(logs.dtype)
        for part in before:
            of_query, *others = gradients(known, query, *part.take(), _reach(own, part, layer.window), scale)
            total += of_query
            part.add(others)
        for each, later in zip(of_own, own.take_sums(), strict=False):  # no later chunk: nothing to add
            each += later
        return total.to(query.dtype), of_own[0], of_own[1], None, None


def _reach(own: Part, part: Part, window: int | None) -> Reach:
    """Of the present chunk's queries, into a part."""
    return Reach(own.stop - own.start, own.start - part.start, window)


def _mask(*, mask_function: Callable, attention_mask: Tensor | None, allow_is_causal_skip: bool = True, **keywords: Any):
    """None where a chunk is causal and nothing else."""
    if mask_function is causal_mask_function and attention_mask is None:
        return None
    return sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False, **keywords)


def _no_mask(*, attention_mask: Tensor | None, allow_is_causal_skip: bool = True, **keywords: Any) -> None:
    """Layers know their windows. A mask that may be skipped is causal, within a window at most."""
    if attention_mask is not None or not allow_is_causal_skip:
        raise ValueError(_ONLY_CAUSAL)


for name, attention, mask in ((ON_DEVICE, _attention, _mask), (ON_HOST, _attention_on_host, _no_mask)):
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)
