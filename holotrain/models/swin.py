"""Swin transformers: a reversible one and its plain twin (Liu et al., ICCV 2021), from the same parts.

Blocks attend within windows of a feature map, every second block within shifted windows. Between stages the map is halved and
its channels are doubled. Halving cannot be inverted, so each stage is reversible by itself (PaReprop, arXiv 2306.09342).
"""

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Literal

from torch import Tensor, nn

from holotrain.models.layers.branches import AttentionBranch, Branches, MLPBranch
from holotrain.models.layers.fusion import LearnedFusion, TwoStreamFusion
from holotrain.models.layers.patches import PatchMap, PatchMerging
from holotrain.models.layers.residual import ResidualBlock, ResidualSequence
from holotrain.models.layers.reversible import Reversible
from holotrain.models.layers.stages import stored_by_stage
from holotrain.models.layers.windows import RelativePositionBias, WindowAttention
from holotrain.ranges import require_at_least, require_within
from holotrain.reversible import ReversibleBlock, ReversibleSequence

# Tiny to large as published, for 224 pixels and patches of 4; nano suits 32 pixels and patches of 2.
SWIN_SIZES: dict[str, dict[str, Any]] = {
    "nano": {"dim": 32, "depths": (2, 2, 2), "heads": (1, 2, 4), "window": 4},
    "tiny": {"dim": 96, "depths": (2, 2, 6, 2), "heads": (3, 6, 12, 24), "window": 7},
    "small": {"dim": 96, "depths": (2, 2, 18, 2), "heads": (3, 6, 12, 24), "window": 7},
    "base": {"dim": 128, "depths": (2, 2, 18, 2), "heads": (4, 8, 16, 32), "window": 7},
    "large": {"dim": 192, "depths": (2, 2, 18, 2), "heads": (6, 12, 24, 48), "window": 7},
}


class Swin(nn.Module):
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
        attention_dropout: dropout of the attention weights
        drop_path: stochastic depth rate of the last block; it rises linearly from 0 at the first block
        backward: store the activations of each block, or only its input and recompute them; a list: of each block

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).

    Raises:
        ValueError: sizes that do not divide, a value out of range, depths and heads of different lengths, a ``backward`` that a
            plain model cannot have.
    """

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
        backward: Literal["autograd", "checkpoint"] | Sequence[str] = "autograd",
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
        total = sum(depths)
        rates = (drop_path * block / max(total - 1, 1) for block in range(total))
        self.embedding = PatchMap(image_size, patch_size, channels, dim, dropout)
        size = image_size // patch_size
        branches = []
        for width, depth, stage_heads in zip(widths, depths, heads, strict=True):
            attention = {"heads": stage_heads, "size": size, "window": window, "attention_dropout": attention_dropout}
            branches.append(_stage_branches(width, islice(rates, depth), int(width * mlp_ratio), dropout, attention))
            size = -(-size // 2)
        self._assemble(branches, widths, classes, backward)
        self.apply(_initialise)

    def _assemble(self, branches: list[Branches], widths: list[int], classes: int, backward: str | Sequence[str]) -> None:
        sequences = [ResidualSequence((ResidualBlock(f, g) for f, g in stage), backward) for stage in branches]
        self.stages = nn.Sequential(*map(Stage, _mergings(widths), sequences))
        self.norm = nn.LayerNorm(widths[-1])
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stages(self.embedding(images))
        return self.head(self.norm(x).mean(dim=(1, 2)))


class RevSwin(Reversible, Swin):
    """The reversible Swin transformer.

    Takes the keyword arguments of :class:`Swin` and of :class:`~holotrain.models.layers.reversible.Reversible`; ``store``
    counts blocks over all stages. Its twin is the ``Swin`` with the same arguments of the former. The parameters differ only
    where two streams need it: each stage starts both streams from its input and fuses them at its end, by a Linear(2C, C) that
    starts as their average (``stages.*.fusion.project``). The last stage's fusion concatenates, normalises and averages over
    tokens (``stages.*.fusion.norm`` instead of ``norm``), which doubles the width of ``head``.

    Shapes: images (B, channels, image_size, image_size) -> logits (B, classes).
    """

    def _assemble(self, branches: list[Branches], widths: list[int], classes: int, backward: str | Sequence[str]) -> None:
        stored = stored_by_stage(self._engine["store"], [len(stage) for stage in branches])
        sequences = [
            ReversibleSequence((ReversibleBlock(f, g) for f, g in stage), backward, **self._engine | {"store": blocks})
            for stage, blocks in zip(branches, stored, strict=True)
        ]
        fusions = [*map(LearnedFusion, widths[:-1]), TwoStreamFusion(widths[-1])]
        self.stages = nn.Sequential(*map(ReversibleStage, _mergings(widths), sequences, fusions))
        self.head = nn.Linear(2 * widths[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.stages(self.embedding(images)))


class Stage(nn.Module):
    """Merging, then blocks on maps of one size. (B, 2S, 2S, C / 2) -> (B, S, S, C)."""

    def __init__(self, merging: nn.Module, blocks: ResidualSequence) -> None:
        super().__init__()
        self.merging = merging
        self.blocks = blocks

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.merging(x))


class ReversibleStage(nn.Module):
    """Merging, blocks on two streams that both start from its result, and their fusion. (B, 2S, 2S, C / 2) -> (B, S, S, C)."""

    def __init__(self, merging: nn.Module, blocks: ReversibleSequence, fusion: nn.Module) -> None:
        super().__init__()
        self.merging = merging
        self.blocks = blocks
        self.fusion = fusion

    def forward(self, x: Tensor) -> Tensor:
        x = self.merging(x)
        return self.fusion(*self.blocks(x, x))


def _mergings(widths: list[int]) -> list[nn.Module]:
    """The layer before the blocks of each stage; the first stage takes the embedding unchanged."""
    return [nn.Identity(), *map(PatchMerging, widths[:-1])]


def _stage_branches(dim: int, rates: Iterable[float], hidden: int, dropout: float, attention: dict[str, Any]) -> Branches:
    """The branches of a stage's blocks; every second block shifts its windows. ``rates`` are their drop-paths."""
    return [
        (
            AttentionBranch(
                nn.LayerNorm(dim), WindowAttention(dim, shifted=block % 2 == 1, dropout=dropout, **attention), rate
            ),
            MLPBranch(dim, hidden, dropout, rate, eps=1e-5),
        )
        for block, rate in enumerate(rates)
    ]


def _initialise(module: nn.Module) -> None:
    """As published: truncated normal of 0.02 for weights and relative positions, zero for biases, PyTorch's own for patches.

    Apply it to children first, so that a fusion initialises its Linear last.
    """
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    elif isinstance(module, RelativePositionBias):
        nn.init.trunc_normal_(module.position, std=0.02)
    elif isinstance(module, LearnedFusion):
        module.become_the_average()
