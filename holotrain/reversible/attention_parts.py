"""Attention to a part of the keys and values, whose result can be joined with those of other parts.

It is joined by the logarithms of the sums of exponentials (Milakov and Gimelshein, arXiv 1805.02867), of which each part's
gradients follow without the others (Dao et al., arXiv 2205.14135). Queries of a group of heads stand one below the other: query
(B, G, H / G * L, D) of L tokens, key (B, G, T, D), value (B, G, T, V).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from holotrain.reversible.context import has_no_data

aten = torch.ops.aten

ROWS = 512
"""Queries of a group that are taken at a time where no kernel knows the mask, or the dtype: their scores are in memory."""


class Reach(NamedTuple):
    """Which keys of a part the queries read: those up to their own position, within a window of tokens or not.

    Args:
        length: of the queries, L.
        offset: the position of the first query, less that of the first key.
    """

    length: int
    offset: int
    window: int | None

    def is_all(self, tokens: int) -> bool:
        """Whether all read all keys."""
        return self.offset >= tokens - 1 and (self.window is None or self.offset + self.length <= self.window)

    def is_causal(self, tokens: int) -> bool:
        """Whether the keys are those of the queries, without a window."""
        return not self.offset and tokens == self.length and (self.window is None or tokens <= self.window)


def attend(query: Tensor, key: Tensor, value: Tensor, reach: Reach, scale: float) -> tuple[Tensor, Tensor]:
    """Attention to a part, and the logarithms of its sums of exponentials, (B, G, H / G * L)."""
    kernel = _kernel(query, key, value, reach)
    if kernel == "flash":
        return aten._scaled_dot_product_flash_attention(query, key, value, scale=scale)[:2]
    if kernel == "causal flash":
        given = _by_heads(query, key, value, reach.length)
        out, logs = aten._scaled_dot_product_flash_attention(*given, is_causal=True, scale=scale)[:2]
        return out.reshape(*query.shape[:-1], -1), logs.reshape(query.shape[:-1])
    mask = None if reach.is_all(key.shape[-2]) else mask_of(reach, query, key)
    if kernel == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, attn_mask=mask, scale=scale)
    outs, logs = [], []
    for rows in _tiles(query):
        scores = _scores(query, key, mask, scale, rows)
        logs.append(scores.logsumexp(-1))
        outs.append((scores - logs[-1][..., None]).exp().to(value.dtype) @ value)
    return torch.cat(outs, 2), torch.cat(logs, 2)


def gradients(
    known: tuple[Tensor, Tensor, Tensor], query: Tensor, key: Tensor, value: Tensor, reach: Reach, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Of queries, keys and values, for a part.

    Args:
        known: the gradient of all parts' attention, what it gave, and its logarithms.
    """
    gradient, out, logs = known
    kernel = _kernel(query, key, value, reach)
    if kernel == "flash":
        return _flash_gradients(gradient, query, key, value, out, logs, False, scale)
    if kernel == "causal flash":
        heads = _by_heads(query, key, value, reach.length)
        one = heads[0].shape
        of_query, *others = _flash_gradients(
            gradient.reshape(one), *heads, out.reshape(one), logs.reshape(one[:-1]), True, scale
        )
        of_key, of_value = (each.unflatten(1, (key.shape[1], -1)).sum(2) for each in others)
        return of_query.reshape(query.shape), of_key, of_value
    mask = None if reach.is_all(key.shape[-2]) else mask_of(reach, query, key)
    if kernel == "cpu":
        given = (gradient, query, key, value, out, logs, 0.0, False)
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, attn_mask=mask, scale=scale)
    of_queries, of_key, of_value = [], torch.zeros_like(key), torch.zeros_like(value)
    for rows in _tiles(query):
        weights = (_scores(query, key, mask, scale, rows) - logs[:, :, rows, None]).exp()
        given = gradient[:, :, rows]
        of_weights = (given @ value.mT).to(logs.dtype) - (given * out[:, :, rows]).sum(-1, keepdim=True, dtype=logs.dtype)
        of_scores = (weights * of_weights * scale).to(query.dtype)
        of_queries.append(of_scores @ key)
        of_key += of_scores.mT @ query[:, :, rows]
        of_value += weights.to(value.dtype).mT @ given
    return torch.cat(of_queries, 2), of_key, of_value


def _kernel(query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> str:
    """What computes attention to a part, and its gradients: a kernel of torch, or products of some ``rows`` at a time."""
    if query.device.type == "cpu":
        return "cpu" if key.shape == value.shape else "rows"
    if not _has_flash(query, value):
        return "rows"
    return "flash" if reach.is_all(key.shape[-2]) else "causal flash" if reach.is_causal(key.shape[-2]) else "rows"


def _tiles(query: Tensor) -> list[slice]:
    return [slice(start, start + ROWS) for start in range(0, query.shape[2], ROWS)]


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float, rows: slice) -> Tensor:
    scores = (query[:, :, rows] @ key.mT).to(torch.promote_types(query.dtype, torch.float32)) * scale
    return scores if mask is None else scores + mask[rows]


def _has_flash(query: Tensor, value: Tensor) -> bool:
    """Whether the GPU's kernel takes heads of this width and type."""
    width = query.shape[-1]
    fits = width == value.shape[-1] and width % 8 == 0 and width <= 256 and query.dtype.itemsize == 2
    return fits and query.is_cuda and (has_no_data(query) or torch.cuda.get_device_capability(query.device) >= (8, 0))


def _by_heads(query: Tensor, key: Tensor, value: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """(B, H, L, D) and the same of keys and values, as often as a group has heads: the kernel's causal mask is for these."""
    groups = query.shape[2] // length
    queries = query.unflatten(2, (groups, length)).flatten(1, 2)
    return queries, key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)


def _flash_gradients(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logs: Tensor, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    seed = torch.empty(2, dtype=torch.uint64, device=query.device)  # of a dropout that there is not
    given = (gradient, query, key, value, out, logs, None, None, query.shape[-2], key.shape[-2], 0.0, is_causal)
    return aten._scaled_dot_product_flash_attention_backward(*given, seed, seed[:0], scale=scale)


_latest: dict[tuple[Any, ...], Tensor] = {}
"""The mask of the latest chunk, for all layers. It holds numbers: a CPU would make them of a boolean one in each layer."""


def mask_of(reach: Reach, query: Tensor, key: Tensor) -> Tensor:
    """(H / G * L, T): 0 where a query reads a key, else a number so low that its exponential is 0."""
    length, offset, window = reach
    fake = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)
    place = reach, key.shape[-2], query.shape[-2], query.dtype, query.device, fake
    mask = _latest.get(place)
    if mask is None:
        _latest.clear()
        lowest = torch.full((length, key.shape[-2]), torch.finfo(query.dtype).min / 2, dtype=query.dtype, device=query.device)
        mask = lowest.triu(offset + 1)
        if window is not None:
            mask += lowest.tril(offset - window)
        _latest[place] = mask = mask.repeat(query.shape[-2] // length, 1)
    return mask


def forget_mask() -> None:
    """After a step: its memory goes."""
    _latest.clear()
