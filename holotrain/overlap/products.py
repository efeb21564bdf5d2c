"""The matrix products of a linear layer, each one library call, optionally into given memory."""

from __future__ import annotations

import torch
from torch import Tensor


def product(x: Tensor, matrix: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """[R, K] x [K, N] (+ [N]) to [R, N]."""
    return torch.mm(x, matrix, out=out) if bias is None else torch.addmm(bias, x, matrix, out=out)


def products(x: Tensor, matrix: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """[P, R, K] x [K, N] (+ [N]) to [P, R, N]. x and out may be slices of larger tensors along R; they are not copied."""
    matrices = matrix.expand(len(x), -1, -1)
    return torch.bmm(x, matrices, out=out) if bias is None else torch.baddbmm(bias, x, matrices, out=out)


def weight_gradients(
    grad: Tensor, x: Tensor | None, needs_weight: bool, needs_bias: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of weight and bias: dy [R, N], x [R, K] to [N, K] and [N]; None if not needed."""
    return grad.t() @ x if needs_weight else None, grad.sum(0) if needs_bias else None
