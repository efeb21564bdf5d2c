"""Packed sequences: the tokens of a padded batch one after another, without the padding.

All layers but attention work on each token by itself, so they save the padding's share of time and memory. Attention needs no
mask and keeps PyTorch's fastest kernels: that for packed sequences on a GPU, elsewhere one call for all sequences of a length.
Shapes: B batch, T tokens, N tokens that are no padding, C channels, H heads, D head width.
"""

from collections import Counter

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F
from torch.nn.attention.varlen import varlen_attn

LEAST_PADDING = 1 / 8
"""With less padding, packing gains about as much as it costs."""


class Packing:
    """Where the tokens of a padded batch lie, from the shortest sequence to the longest. On a GPU this waits for the mask.

    Args:
        mask: (B, T), True for tokens, False for padding.
    """

    def __init__(self, mask: Tensor) -> None:
        self.shape = mask.shape
        lengths, order = mask.sum(1).sort(stable=True)
        self.places = torch.arange(mask.numel(), device=mask.device).view(mask.shape)[order][mask[order]]
        self.counts = Counter(length for length in lengths.tolist() if length)
        self.ends = F.pad(lengths.cumsum(0), (1, 0)).int()

    @property
    def padding(self) -> float:
        """The share of the batch that is padding."""
        return 1 - len(self.places) / max(1, self.shape.numel())

    def packed(self, x: Tensor) -> Tensor:
        """(B, T, C) -> (1, N, C)."""
        return x.flatten(0, 1)[self.places].unsqueeze(0)

    def padded(self, x: Tensor) -> Tensor:
        """(1, N, C) -> (B, T, C), with zeros for padding."""
        return x.new_zeros(self.shape.numel(), x.shape[-1]).index_copy(0, self.places, x[0]).unflatten(0, self.shape)

    def attended(self, q: Tensor, k: Tensor, v: Tensor, dropout: float) -> Tensor:
        """Attention within each sequence, (1, H, N, D) each -> (1, H, N, D)."""
        if q.is_cuda and not q.shape[-1] % 8:
            longest = max(self.counts)
            each = (x[0].transpose(0, 1) for x in (q, k, v))
            return varlen_attn(*each, self.ends, self.ends, longest, longest).transpose(0, 1).unsqueeze(0)
        sizes = [length * count for length, count in self.counts.items()]
        found = []
        for length, *each in zip(self.counts, *(x[0].split(sizes, dim=1) for x in (q, k, v)), strict=True):
            q, k, v = (x.unflatten(1, (-1, length)).transpose(0, 1) for x in each)  # (sequences, H, length, D)
            found.append(F.scaled_dot_product_attention(q, k, v, dropout_p=dropout).transpose(0, 1).flatten(1, 2))
        return torch.cat(found, dim=1).unsqueeze(0)


def packing_of(mask: Tensor, x: Tensor, dropout: float) -> Packing | None:
    """How to pack a batch; None where that has no advantage: without a kernel for it on this device, and in compiled code.

    On a GPU the kernel takes 16 bits and has no dropout, and a captured graph cannot wait for the mask.

    Args:
        mask: (B, T), True for tokens, False for padding.
        x: (B, T, C), what the blocks read.
        dropout: of attention weights.
    """
    if isinstance(mask, FakeTensor) or torch.compiler.is_compiling():
        return None
    if mask.is_cuda:
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
        modern = torch.cuda.get_device_capability(mask.device) >= (8, 0)
        if dropout or dtype.itemsize != 2 or not modern or torch.cuda.is_current_stream_capturing():
            return None
    return Packing(mask) if mask.device.type in ("cpu", "cuda") else None
