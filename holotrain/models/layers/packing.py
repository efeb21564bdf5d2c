"""Packed sequences: the tokens of a padded batch one after another, without the padding.

All layers but attention work on each token by itself, so they save the padding's share of time and memory. Attention needs no
mask and keeps PyTorch's fastest kernels: that for packed sequences on a GPU, elsewhere one call for all sequences of a length.
Shapes: B batch, T tokens, N tokens that are no padding, C channels, H heads, D head width.
"""

from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

LEAST_PADDING = 1 / 8
"""With less padding, packing gains about as much as it costs."""


class Packing:
    """Where the tokens of a padded batch lie, from the shortest sequence to the longest.

    Args:
        mask: (B, T), on the CPU, True for tokens, False for padding.
        device: of the batch.
    """

    def __init__(self, mask: Tensor, device: torch.device) -> None:
        self.shape = mask.shape
        lengths, order = mask.sum(1).sort(stable=True)
        self.counts = Counter(length for length in lengths.tolist() if length)
        self.places = _moved(torch.arange(mask.numel()).view(mask.shape)[order][mask[order]], device)
        self.ends = _moved(F.pad(lengths.cumsum(0), (1, 0)).int(), device)

    def packed(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (1, N, C)."""
        return x.flatten(0, 1)[self.places].unsqueeze(0)

    def padded(self, x: Tensor) -> Tensor:
        """(1, N, C) -> (B, T, C), with zeros for padding."""
        return x.new_zeros(self.shape.numel(), x.shape[-1]).index_copy(0, self.places, x[0]).unflatten(0, self.shape)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Attention within each sequence, (1, H, N, D) each -> (1, H, N, D)."""
        if q.is_cuda:
            longest = max(self.counts)
            each = (x[0].transpose(0, 1) for x in (q, k, v))
            return cast(Tensor, varlen_attn(*each, self.ends, self.ends, longest, longest)).transpose(0, 1).unsqueeze(0)
        sizes = [length * count for length, count in self.counts.items()]
        found = []
        for length, *each in zip(self.counts, *(x[0].split(sizes, dim=1) for x in (q, k, v)), strict=True):
            q, k, v = (x.unflatten(1, (-1, length)).transpose(0, 1) for x in each)  # (sequences, H, length, D)
            found.append(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(0, 1).flatten(1, 2))
        return torch.cat(found, dim=1).unsqueeze(0)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def padding_context(mask: Tensor, x: Tensor, width: int, dropout: float, packs: bool = True) -> dict[str, Any]:
    """The keyword arguments of attention for a batch: a ``packing`` or a ``mask``, or nothing where there is no padding.

    Only a mask on the CPU is looked into. Reading one on a GPU waits for all kernels that were launched.

    Args:
        mask: (B, T), True for tokens, False for padding.
        x: (B, T, C), what the blocks read.
        width: D.
        dropout: of attention weights.
        packs: whether the blocks can read packed sequences.

    Raises:
        ValueError: the mask is not boolean, as tokenizers' masks of 0 and 1 are not.
    """
    if mask.dtype != torch.bool:
        raise ValueError(f"mask is of {mask.dtype}, not torch.bool; give mask.bool(), True for tokens")
    readable = mask.device.type == "cpu" and not isinstance(mask, FakeTensor) and not torch.compiler.is_compiling()
    padding = 1 - mask.sum().item() / max(1, mask.numel()) if packs and readable else 1
    if not padding:
        return {}
    if LEAST_PADDING <= padding < 1 and has_kernel(x, width, dropout):
        return {"packing": Packing(mask, x.device)}
    return {"mask": mask.to(x.device, non_blocking=True)[:, None, None, :]}


def has_kernel(x: Tensor, width: int, dropout: float) -> bool:
    """Whether attention of packed sequences is fast here; arguments as in :func:`padding_context`.

    On a GPU it is torch's ``varlen_attn``, whose FlashAttention takes 16 bits and heads of 8, 16, ... 256 channels, on Ampere
    and later (``flash_api.cpp``). It has no dropout.
    """
    if not x.is_cuda:
        return x.device.type == "cpu"
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    return (
        dtype in (torch.float16, torch.bfloat16)
        and not width % 8
        and width <= 256
        and not dropout
        and torch.backends.cuda.flash_sdp_enabled()
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and not torch.cuda.is_current_stream_capturing()  # a graph would keep the lengths of one batch
    )
