"""The last change of an update u, layer by layer: ``a u + b g``, where g is the gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from holotrain.synthesis.recipe import Recipe


@dataclass
class Products:
    """Inner products of each layer, (layers,) each."""

    gg: Tensor
    gu: Tensor
    uu: Tensor

    def combined(self, a: Tensor, b: Tensor) -> Products:
        """The products with ``a u + b g`` in place of u."""
        return Products(self.gg, a * self.gu + b * self.gg, a * a * self.uu + 2 * a * b * self.gu + b * b * self.gg)

    def figures(self) -> Tensor:
        """(cosine of the whole update and the whole gradient, norm of the update)."""
        gg, gu, uu = (total.sum() for total in (self.gg, self.gu, self.uu))
        return torch.stack((gu / (gg.sqrt() * uu.sqrt()).clamp_min(torch.finfo(gg.dtype).tiny), uu.sqrt()))


def coefficients(products: Products, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """Returns a and b of each layer.

    In this order: u is scaled to the norm of g, a share of g is mixed in, and as much of g is added as the cosine floor needs.
    If p is the part of u along g and q the part orthogonal to it, a cosine of c needs p = q c / sqrt(1 - c^2).
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
