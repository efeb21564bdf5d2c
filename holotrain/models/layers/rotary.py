"""Rotary positions: attention that depends on the distance between two tokens (Su et al., "RoFormer", 2021)."""

import torch
from torch import Tensor, nn

Rotation = tuple[Tensor, Tensor]
"""Cosine and sine of the angles by which the queries and keys at each position are rotated, (..., T, D / 2)."""


class RotaryPositions(nn.Module):
    """The angles of every position up to ``length``: position times base^(-2i / D) for the i-th pair of channels.

    Args:
        length: the longest sequence, in tokens.
        width: D, of an attention head.
        base: of the wavelengths.

    Raises:
        ValueError: an odd width.
    """

    def __init__(self, length: int, width: int, base: float = 10_000.0) -> None:
        super().__init__()
        if width % 2:
            raise ValueError(f"rotary positions need an even width of a head (dim / heads), not {width}")
        frequencies = base ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.arange(length, dtype=torch.float64)[:, None] * frequencies
        self.register_buffer("cosine", angles.cos().float(), persistent=False)
        self.register_buffer("sine", angles.sin().float(), persistent=False)

    def forward(self, positions: Tensor) -> Rotation:
        """
        Args:
            positions: (T,), the same for all sequences, or (B, T).
        """
        if positions.ndim == 1:
            return self.cosine[positions], self.sine[positions]
        return self.cosine[positions].unsqueeze(1), self.sine[positions].unsqueeze(1)  # the same for every head


def rotated(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotates queries or keys, (B, H, T, D); channel i is paired with channel i + D / 2."""
    cosine, sine = rotation
    first, second = x.float().chunk(2, dim=-1) if x.dtype.itemsize < 4 else x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, first * sine + second * cosine), dim=-1).to(x.dtype)
