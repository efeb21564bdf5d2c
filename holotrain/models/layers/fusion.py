"""Fusion of the two streams of a reversible model into one, at its end and between its sequences of blocks."""

import torch
from torch import Tensor, nn


class TwoStreamFusion(nn.Module):
    """Concatenates the two streams, normalises, and averages over tokens. 2 x (B, ..., C) -> (B, 2C)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(2 * dim, eps=1e-6)

    def forward(self, y1: Tensor, y2: Tensor) -> Tensor:
        return self.norm(torch.cat((y1, y2), dim=-1)).flatten(1, -2).mean(dim=1)


class LearnedFusion(nn.Module):
    """Concatenates the two streams and projects them linearly, initially to their average. 2 x (..., C) -> (..., C)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.project = nn.Linear(2 * dim, dim)
        self.become_the_average()

    @torch.no_grad()
    def become_the_average(self) -> None:
        half = torch.eye(self.project.out_features) / 2
        self.project.weight.copy_(torch.cat((half, half), dim=1))
        nn.init.zeros_(self.project.bias)

    def forward(self, y1: Tensor, y2: Tensor) -> Tensor:
        return self.project(torch.cat((y1, y2), dim=-1))
