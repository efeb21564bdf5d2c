"""The last touch on an update u, by what it and the gradient g have in common, layer by layer: ``a u + b g``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holotrain.synthesis.recipe import Recipe


@dataclass
class Products:
    """Inner products by layer: (layers,) each."""

    gg: Tensor
    gu: Tensor
    uu: Tensor

    def combined(self, a: Tensor, b: Tensor) -> Products:
        """With ``a u + b g`` in the place of u."""
        return Products(self.gg, a * self.gu + b * self.gg, a * a * self.uu + 2 * a * b * self.gu + b * b * self.gg)

    def figures(self) -> Tensor:
        """(cosine of the whole update to the whole gradient, norm of the update)."""
        gg, gu, uu = (total.sum() for total in (self.gg, self.gu, self.uu))
        return torch.stack((gu / (gg.sqrt() * uu.sqrt()).clamp_min(torch.finfo(gg.dtype).tiny), uu.sqrt()))


def coefficients(products: Products, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """a and b of each layer.

    In this order: u at the norm of g, a share of g mixed in, and as much of g added as the floor of the cosine needs. With u's
    part along g p and across it q, a cosine c needs p = q c / sqrt(1 - c^2).
    """
    tiny = torch.finfo(products.gg.dtype).tiny
    a, b = torch.ones_like(products.gg), torch.zeros_like(products.gg)
    if recipe.match_norm:
        a = (products.gg / products.uu.clamp_min(tiny)).sqrt()
    if recipe.mix:
        a, b = a * (1 - recipe.mix), b + recipe.mix
    if (floor := recipe.cosine_floor) is not None:
        mixed = products.combined(a, b)
        norm = mixed.gg.sqrt().clamp_min(tiny)
        along = mixed.gu / norm
        across = (mixed.uu - along * along).clamp_min(0).sqrt()
        lacking = (across * floor / (1 - floor * floor) ** 0.5 - along).clamp_min(0)
        b = b + torch.where(mixed.gg > 0, lacking / norm, 0)
    return a, b
