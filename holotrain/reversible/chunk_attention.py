"""Attention of a chunk of a sequence to all that came before it, in place of transformers' ``sdpa``.

Where keys and values are in main memory, they come part by part. What the parts give is joined by the logarithms of their sums
of exponentials (Milakov and Gimelshein, arXiv 1805.02867), from which each part's gradients follow by themselves (Dao et al.,
arXiv 2205.14135). Imported only with transformers.
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

from holotrain.reversible.chunk_cache import HostLayer, Part
from holotrain.reversible.context import has_no_data

aten = torch.ops.aten

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
    groups, length, tokens = query.shape[1] // key.shape[1], query.shape[-2], key.shape[-2]
    if query.is_cuda:  # a kernel knows which rows these are
        bias = causal_lower_right(length, tokens)
        out = F.scaled_dot_product_attention(query, key, value, bias, dropout, scale=scaling, enable_gqa=groups > 1)
    else:
        mask = _mask_of(length, tokens, tokens - length, None, groups, query)
        out = F.scaled_dot_product_attention(_folded(query, key), key, value, mask, dropout, scale=scaling)
        out = out.reshape(*query.shape[:-1], -1)
    return out.transpose(1, 2).contiguous(), None


def _folded(query: Tensor, key: Tensor) -> Tensor:
    """The queries of a group stand one below the other: (B, H, T, D) -> (B, heads of keys, H / heads of keys * T, D)."""
    return query.reshape(len(query), key.shape[1], -1, query.shape[-1])


_latest: dict[tuple[Any, ...], Tensor] = {}
"""The mask of the latest chunk, for all layers. It holds numbers: a CPU would make them of a boolean one in each layer."""


def _mask_of(length: int, tokens: int, offset: int, window: int | None, groups: int, like: Tensor) -> Tensor:
    """(groups * length, tokens): 0 where a row reads a token, whose position is at most ``offset`` above that of the row."""
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    key = length, tokens, offset, window, groups, like.dtype, like.device, fake
    mask = _latest.get(key)
    if mask is None:
        _latest.clear()
        lowest = torch.full((length, tokens), torch.finfo(like.dtype).min / 2, dtype=like.dtype, device=like.device)
        mask = lowest.triu(offset + 1)
        if window is not None:
            mask += lowest.tril(offset - window)
        _latest[key] = mask = mask.repeat(groups, 1)
    return mask


def forget_mask() -> None:
    """After a step: its memory goes."""
    _latest.clear()


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
    out = _PartByPart.apply(_folded(query, key), key, value, HostLayer.latest(key), scale)
    return out.reshape(*query.shape[:-1], -1).transpose(1, 2).contiguous(), None


class _PartByPart(torch.autograd.Function):
    """Attention to all parts of a layer. Shapes: query (B, G, H / G * T, D), key (B, G, T, D), value (B, G, T, V)."""

    @staticmethod
    def forward(ctx, query: Tensor, key: Tensor, value: Tensor, layer: HostLayer, scale: float) -> Tensor:
        ctx.layer, ctx.scale, ctx.start = layer, scale, layer.start
        before, own = layer.before(), layer.own()
        out, logs = _attend(query, key, value, _mask_between(own, own, layer.window, query), scale)
        for part in before:
            more, more_logs = _attend(query, *part.take(), _mask_between(own, part, layer.window, query), scale)
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
        total, *of_own = _gradients(known, query, key, value, _mask_between(own, own, layer.window, query), scale)
        total = total.to(logs.dtype)
        for part in before:
            of_query, *others = _gradients(known, query, *part.take(), _mask_between(own, part, layer.window, query), scale)
            total += of_query
            part.add(others)
        for each, later in zip(of_own, own.take_sums(), strict=False):  # no later chunk: nothing to add
            each += later
        return total.to(query.dtype), of_own[0], of_own[1], None, None


def _mask_between(own: Part, part: Part, window: int | None, query: Tensor) -> Tensor | None:
    """None: all tokens of a part are read by all of the chunk."""
    length, offset = own.stop - own.start, own.start - part.start
    if part is not own and (window is None or own.stop - part.start <= window):
        return None
    return _mask_of(length, part.stop - part.start, offset, window, query.shape[-2] // length, query)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Attention to a part, and the logarithms of its sums of exponentials, (B, G, H / G * T)."""
    if query.device.type == "cpu" and key.shape == value.shape:
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask, scale=scale)
    if mask is None and _has_flash(query, value):
        return aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[:2]
    scores = _scores(query, key, mask, scale)
    logs = scores.logsumexp(-1)
    return (scores - logs[..., None]).exp().to(value.dtype) @ value, logs


def _gradients(
    known: tuple[Tensor, Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values, for a part.

    Args:
        known: the gradient of all parts' attention, what it gave, and its logarithms.
    """
    gradient, out, logs = known
    given = (*known[:1], query, key, value, out, logs)
    if query.device.type == "cpu" and key.shape == value.shape:
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, False, attn_mask=mask, scale=scale)
    if mask is None and _has_flash(query, value):
        seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of a dropout that there is not
        sizes = (None, None, query.shape[-2], key.shape[-2])
        return aten._scaled_dot_product_flash_attention_backward(*given, *sizes, 0.0, False, seed, seed[:0], scale=scale)
    weights = (_scores(query, key, mask, scale) - logs[..., None]).exp()
    of_weights = (gradient @ value.mT).to(logs.dtype) - (gradient * out).sum(-1, keepdim=True, dtype=logs.dtype)
    of_scores = (weights * of_weights * scale).to(query.dtype)
    return of_scores @ key, of_scores.mT @ query, weights.to(value.dtype).mT @ gradient


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = (query @ key.mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
    return scores if mask is None else scores + mask


def _has_flash(query: Tensor, value: Tensor) -> bool:
    """Whether the GPU's kernel takes heads of this width and type."""
    width = query.shape[-1]
    fits = width == value.shape[-1] and width % 8 == 0 and width <= 256 and query.dtype.itemsize == 2
    return fits and query.is_cuda and (has_no_data(query) or torch.cuda.get_device_capability(query.device) >= (8, 0))


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
