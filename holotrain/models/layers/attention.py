"""Multi-head self-attention, shared by ViT, RoBERTa and GPT.

Shapes: B batch, T tokens, C channels, H heads, D = C / H head width, S tokens that are attended to.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.layers.kv_cache import KVCache
from holotrain.models.layers.packing import Packing
from holotrain.models.layers.rotary import Rotation, rotated


def with_one_kernel(bias: Tensor) -> Tensor:
    """Marks a learned bias of the scores so that attention uses the same kernel with and without a graph.

    PyTorch chooses another kernel, which rounds differently, for a bias that requires grad. A training forward that stores
    nothing must use the same kernel as its recomputation. Otherwise gradients are off by the difference (4% in bf16).
    """
    if not (torch.is_grad_enabled() or torch.compiler.is_compiling()):
        bias.requires_grad_()
    return bias


class Attention(nn.Module):
    """Multi-head self-attention on PyTorch's scaled_dot_product_attention. (B, T, C) -> (B, T, C).

    The rows of ``query_key_value`` are ordered by head: D for the queries of a head, D for its keys and D for its values. So a
    contiguous part of them is whole heads, which a process can hold. State dicts of earlier versions, with ``qkv``, load.

    Args:
        dim, heads: C, H.
        dropout: on the output.
        attention_dropout: on the attention weights.
        causal: a token sees itself and the tokens before it.
        layer: its number in the model, which is its index in a :class:`KVCache`.

    Raises:
        ValueError: ``dim`` is not a multiple of ``heads``.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        causal: bool = False,
        layer: int = 0,
    ) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"dim must be a multiple of heads, but {dim} is not a multiple of {heads}")
        self.heads = heads
        self.width = dim // heads
        self.attention_dropout = attention_dropout
        self.causal = causal
        self.layer = layer
        self.query_key_value = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        rotation: Rotation | None = None,
        cache: KVCache | None = None,
        packing: Packing | None = None,
    ) -> Tensor:
        """
        Args:
            mask: True where a query sees a key, broadcast to (B, H, T, S). It replaces ``causal``.
            rotation: of rotary positions.
            cache: keys and values of the tokens before ``x``; the mask is then the cache's, and without one a single query sees
                all keys.
            packing: of the sequences that ``x``, (1, N, C), consists of; a token sees those of its own.
        """
        # The number of heads is that of this process.
        q, k, v = self.query_key_value(x).unflatten(-1, (-1, 3, self.width)).permute(3, 0, 2, 1, 4)  # each (B, H, T, D)
        if rotation is not None:
            q, k = rotated(q, rotation), rotated(k, rotation)
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        dropout = self.attention_dropout if self.training else 0.0
        if packing is not None:
            x = packing.attended(q, k, v, dropout)
        else:
            causal = self.causal and mask is None and q.shape[2] == k.shape[2]
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal)
        return self.dropout(self.project(x.transpose(1, 2).flatten(2)))

    def by_head(self, stacked: Tensor) -> Tensor:
        """The rows of a matrix or bias, ordered by head.

        Args:
            stacked: (3C, ...), the queries of all heads, their keys and their values. Other shapes are returned unchanged.
        """
        if not stacked.ndim or len(stacked) != 3 * self.width * self.heads:
            return stacked
        return stacked.unflatten(0, (3, self.heads, self.width)).transpose(0, 1).flatten(0, 2)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        order_by_head(state_dict, self, prefix)
        super()._load_from_state_dict(state_dict, prefix, *others)


def order_by_head(state_dict: dict[str, Any], module: nn.Module, prefix: str = "") -> bool:
    """Renames ``qkv`` in a state dict, whose rows are stacked, to ``query_key_value``, ordered by head, in place.

    Args:
        prefix: of the module's names in the state dict.

    Returns:
        Whether there was any.
    """
    found = False
    for name, attention in module.named_modules(prefix=prefix.removesuffix(".")):
        if isinstance(attention, Attention):
            stacked = f"{name}.qkv.".removeprefix(".")
            for key in [key for key in state_dict if key.startswith(stacked)]:
                ordered = f"{stacked.removesuffix('qkv.')}query_key_value.{key.removeprefix(stacked)}"
                state_dict[ordered] = attention.by_head(state_dict.pop(key))
                found = True
    return found
