"""Swin transformers: a reversible one and its plain twin (Liu et al., ICCV 2021), from the same parts.

Blocks attend within windows of a feature map, every second block within windows shifted by half. Between stages the map is
halved and its channels are doubled. Halving cannot be inverted, so each stage is reversible by itself (PaReprop, arXiv
2306.09342).
Shapes: B batch, S x S the feature map, N windows of T = window^2 tokens, C channels, H heads, D = C / H head width.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.layers.attention import head_width, with_one_kernel
from holotrain.models.layers.blocks import (
    AttentionBranch,
    Branches,
    Divisible,
    LearnedFusion,
    MLPBranch,
    MLPFusion,
    Reversible,
    TwoStreamFusion,
    as_streams,
    drop_path_rates,
    make_sequences,
)
from holotrain.models.layers.patches import PatchMap, PatchMerging, initialise
from holotrain.numeric import require_at_least, require_one_of, require_within


class Swin(Divisible, nn.Module):
    """The plain Swin transformer: LayerNorm, mean over tokens, linear head.

    Args:
        image_size: height and width of an image in pixels
        patch_size: height and width of a patch in pixels; null: 4 for images of 64 pixels or more, else 2
        channels: color channels of an image
        classes: number of classes
        dim: embedding width of the first stage; it doubles from stage to stage
        depths: number of blocks of each stage
        heads: attention heads of each stage
        window: height and width of an attention window, in tokens; a smaller map is one window
        mlp_ratio: width of the MLP's hidden layer divided by the stage's width
        dropout: dropout of the embedding, the attention output and the MLP
        attention_dropout: dropout of the attention weights; above 0, training on a CPU has no fused attention and is slower
        drop_path: stochastic depth rate of the last block; it rises linearly from 0 at the first block
        shift_all: shift every other block also where one window is the whole map, as PaReprop's authors do
        backward: store the activations of each block, or only its input and recompute them; a list: of each block

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).

    Raises:
        ValueError: sizes that do not divide, a value out of range, depths and heads of different lengths, a ``backward`` that a
            plain model cannot have.
    """

    stages: Any

    def __init__(
        self,
        image_size: int = 224,
        patch_size: int | None = None,
        channels: int = 3,
        classes: int = 1000,
        dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        heads: Sequence[int] = (3, 6, 12, 24),
        window: int = 7,
        mlp_ratio: float = 4.0,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        drop_path: float = 0.0,
        shift_all: bool = False,
        backward: str | Sequence[str] = "autograd",
    ) -> None:
        super().__init__()
        if not depths or len(depths) != len(heads):
            raise ValueError(f"depths and heads need one number for each stage, not {list(depths)} and {list(heads)}")
        require_at_least(1, dim=dim, heads=heads, window=window, depths=depths)
        require_at_least(0.01, mlp_ratio=mlp_ratio)
        require_within(0, 1, dropout=dropout, attention_dropout=attention_dropout, drop_path=drop_path)
        if patch_size is None:  # the published size, and less for small images, so that they have tens of tokens
            patch_size = 4 if image_size >= 64 else 2
        require_at_least(1, patch_size=patch_size)
        widths = [dim * 2**stage for stage in range(len(depths))]
        self.embedding = PatchMap(image_size, patch_size, channels, dim, dropout)
        size = image_size // patch_size
        stages: list[Branches] = []
        for width, stage_heads, rates in zip(widths, heads, drop_path_rates(drop_path, depths), strict=True):
            branches: Branches = []
            for block, rate in enumerate(rates):
                shifted = block % 2 == 1 and (shift_all or window < size)
                norm = nn.LayerNorm(width)
                attention = WindowAttention(width, stage_heads, size, window, shifted, dropout, attention_dropout)
                mlp = MLPBranch(width, int(width * mlp_ratio), dropout, rate, eps=1e-5)
                branches.append((AttentionBranch(norm, attention, rate), mlp))
            stages.append(branches)
            size = -(-size // 2)
        # The first stage takes the embedding unchanged.
        mergings: list[nn.Module] = [nn.Identity(), *map(PatchMerging, widths[:-1])]
        self._add_stages(mergings, make_sequences(self, stages, backward), widths, classes)
        initialise(self, nn.Linear)
        for module in self.modules():
            if isinstance(module, LearnedFusion):
                module.become_the_average()

    def _add_stages(self, mergings: list[nn.Module], sequences: list[Any], widths: list[int], classes: int) -> None:
        self.stages = nn.Sequential(*map(Stage, mergings, sequences))
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stages(self.embedding(images))
        return self.head(self.norm(x).mean(dim=(1, 2)))

    @property
    def depth(self) -> int:
        return sum(self._depths)

    @property
    def _depths(self) -> list[int]:
        """Blocks of each stage."""
        return [len(stage.blocks.blocks) for stage in self.stages]

    def require_divisible(self) -> None:
        if any(getattr(stage.blocks, "grid", None) is not None for stage in self.stages):
            raise ValueError("exact streams have one grid for all blocks of a stage; use backward.exact=false")

    def outside(self) -> tuple[list[nn.Module], list[nn.Module]]:
        return [self.embedding], [self.norm, self.head]

    def enter(self, images: Tensor) -> tuple[Tensor, ...]:
        return (self.embedding(images),) * self.streams

    def leave(self, streams: tuple[Tensor, ...]) -> Tensor:
        return self.head(self.norm(streams[0]).mean(dim=(1, 2)))

    def part(self, start: int, stop: int) -> nn.Module:
        """Blocks of one or several stages. What joins two stages is with the last block of the first of them."""
        found: list[nn.Module] = []
        for number, (stage, depth) in enumerate(zip(self.stages, self._depths, strict=True)):
            begin, end = max(start, 0), min(stop, depth)
            if begin < end:
                found.append(stage.blocks.part(begin, end))
                if end == depth and number + 1 < len(self.stages):
                    found.append(Joint(stage.fusion, self.stages[number + 1].merging))
            start, stop = start - depth, stop - depth
        return nn.ModuleList(found)

    def run(self, part: nn.Module, streams: tuple[Tensor, ...], images: Tensor, *others: Tensor | None) -> tuple[Tensor, ...]:
        for piece in cast(nn.ModuleList, part):
            streams = as_streams(piece(*streams))
        return streams

    def stream_shape(self, images: Tensor, block: int) -> tuple[int, ...]:
        depths = list(accumulate(self._depths))
        stage = next(number for number, end in enumerate(depths) if block < end)
        attention = self.stages[stage].blocks.blocks[0].f.attention
        return len(images), attention.size, attention.size, attention.project.in_features


FUSIONS: dict[str, type[nn.Module]] = {"linear": LearnedFusion, "mlp": MLPFusion}


class RevSwin(Reversible, Swin):
    """The reversible Swin transformer.

    ``store`` counts blocks over all stages. Its twin is the ``Swin`` with the same arguments. The parameters differ only where
    two streams need it: each stage starts both streams from its input and fuses them at its end (``stages.*.fusion``). The last
    stage's fusion concatenates, normalises and averages over tokens (``stages.*.fusion.norm`` instead of ``norm``), which
    doubles the width of ``head``.

    Args:
        fusion: what fuses the streams before a stage that follows: linear, a Linear(2C, C) that starts as their average; mlp,
            two layers as in the launch scripts of PaReprop's authors

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).

    Raises:
        ValueError: as of the ``Swin``; another ``fusion``.
    """

    def __init__(self, *, fusion: Literal["linear", "mlp"] = "linear", **arguments: Any) -> None:
        require_one_of(FUSIONS, fusion=fusion)
        self._fusion = FUSIONS[fusion]
        super().__init__(**arguments)

    def _add_stages(self, mergings: list[nn.Module], sequences: list[Any], widths: list[int], classes: int) -> None:
        fusions = [*map(self._fusion, widths[:-1]), TwoStreamFusion(widths[-1], eps=1e-5)]
        self.stages = nn.Sequential(*map(Stage, mergings, sequences, fusions))
        self.head = nn.Linear(2 * widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.embedding(images)))

    def outside(self) -> tuple[list[nn.Module], list[nn.Module]]:
        return [self.embedding], [self.stages[-1].fusion, self.head]

    def leave(self, streams: tuple[Tensor, ...]) -> Tensor:
        return self.head(self.stages[-1].fusion(*streams))


class Stage(nn.Module):
    """Merging, then blocks on maps of one size. (B, 2S, 2S, C / 2) -> (B, S, S, C).

    Args:
        fusion: of the two streams of reversible blocks, which both start from the merged map.
    """

    def __init__(self, merging: nn.Module, blocks: nn.Module, fusion: nn.Module | None = None) -> None:
        super().__init__()
        self.merging = merging
        self.blocks = blocks
        self.fusion = fusion

    def forward(self, x: Tensor) -> Tensor:
        x = self.merging(x)
        return self.blocks(x) if self.fusion is None else self.fusion(*self.blocks(x, x))


class Joint(nn.Module):
    """From the last block of a stage to the first of the next: the streams are fused, merged, and begin anew.

    (B, 2S, 2S, C / 2) each -> (B, S, S, C) each.
    """

    def __init__(self, fusion: nn.Module | None, merging: nn.Module) -> None:
        super().__init__()
        self.fusion = fusion
        self.merging = merging

    def forward(self, *streams: Tensor) -> tuple[Tensor, ...]:
        x = streams[0] if self.fusion is None else self.fusion(*streams)
        return (self.merging(x),) * len(streams)


def into_windows(x: Tensor, window: int, heads: int) -> Tensor:
    """(B, S, S, C) -> (B, N * H, T, D): each head of each window becomes a separate head."""
    x = x.unflatten(3, (heads, -1)).unflatten(2, (-1, window)).unflatten(1, (-1, window))
    return x.permute(0, 1, 3, 5, 2, 4, 6).flatten(4, 5).flatten(1, 3)


def out_of_windows(x: Tensor, window: int, heads: int) -> Tensor:
    """(B, N * H, T, D) -> (B, S, S, C)."""
    across = round((x.shape[1] // heads) ** 0.5)
    x = x.unflatten(2, (window, window)).unflatten(1, (across, across, heads))
    return x.permute(0, 1, 4, 2, 5, 3, 6).flatten(5, 6).flatten(3, 4).flatten(1, 2)


def shifted_window_mask(size: int, window: int, shift: int) -> Tensor:
    """Which tokens of a window must not see each other, because only the cyclic shift made them neighbours.

    Args:
        size: of the feature map, a multiple of ``window``.

    Returns:
        bool (N, 1, T, T), True where two tokens of a window come from opposite edges of the map.
    """
    place = torch.arange(size)
    region = (place >= size - window).long() + (place >= size - shift).long()
    region = into_windows((3 * region[:, None] + region)[None, :, :, None], window, heads=1)[0]  # (N, T, 1)
    return (region != region.mT)[:, None]


class RelativePositionBias(nn.Module):
    """A learned number for each head and each relative position of two tokens in a window. () -> (H, T, T)."""

    def __init__(self, window: int, heads: int) -> None:
        super().__init__()
        span = 2 * window - 1
        self.position = nn.Parameter(torch.zeros(span**2, heads))  # named as all positions, which do not decay
        place = torch.arange(window)
        step = place[:, None] - place + window - 1  # from one row, or column, to another
        index = span * step[:, None, :, None] + step[None, :, None, :]
        self.index: Tensor
        self.register_buffer("index", index.reshape(window**2, window**2), persistent=False)

    def forward(self) -> Tensor:
        return self.position[self.index].permute(2, 0, 1)


class WindowAttention(nn.Module):
    """Multi-head self-attention within windows, with a relative position bias. (B, S, S, C) -> (B, S, S, C).

    If the size of the map is not a multiple of the window, it is padded with zeros below and to the right. Tokens see the
    padding, as in the published models. A window that is not smaller than the map becomes the whole map.

    Args:
        dim, heads: C and H.
        size: S.
        window: tokens along a window, at least 1.
        shifted: by half a window, cyclically; tokens of opposite edges do not see each other.
        dropout, attention_dropout: on the output and on the attention weights.

    Raises:
        ValueError: ``dim`` is not a multiple of ``heads``.
    """

    def __init__(
        self, dim: int, heads: int, size: int, window: int, shifted: bool, dropout: float, attention_dropout: float
    ) -> None:
        super().__init__()
        head_width(dim, heads)
        self.heads = heads
        self.window = min(window, size)
        self.shift = self.window // 2 if shifted else 0
        self.size = size
        self.padding = -size % self.window
        self.attention_dropout = attention_dropout
        self.bias = RelativePositionBias(self.window, heads)
        mask = shifted_window_mask(size + self.padding, self.window, self.shift) if self.shift else None
        self.register_buffer("mask", mask, persistent=False)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.project = nn.Linear(dim, dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x.roll((-self.shift, -self.shift), dims=(1, 2)) if self.shift else x
        x = F.pad(x, (0, 0, 0, self.padding, 0, self.padding)) if self.padding else x
        q, k, v = (into_windows(part, self.window, self.heads) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.attention_dropout if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=self._added(q), dropout_p=dropout, is_causal=False)
        x = out_of_windows(x, self.window, self.heads)[:, : self.size, : self.size]
        x = x.roll((self.shift, self.shift), dims=(1, 2)) if self.shift else x
        return self.dropout(self.project(x))

    def _added(self, q: Tensor) -> Tensor:
        """The bias of the scores for N * H heads, (1, N * H, T, T), shared by the whole batch to save memory."""
        bias = self.bias()[None]
        if self.mask is None:
            bias = bias.expand(q.shape[1] // self.heads, -1, -1, -1)
        else:
            bias = bias.masked_fill(self.mask, float("-inf"))
        bias = bias.flatten(0, 1)[None].to(q.dtype)  # attention's fast kernels need four dimensions
        return with_one_kernel(bias) if self.training else bias
