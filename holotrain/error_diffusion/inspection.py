"""Diagnostics of a network that learns by error diffusion."""

from __future__ import annotations

import torch
from torch import Tensor

from holotrain.error_diffusion.network import ErrorDiffusionNetwork
from holotrain.error_diffusion.rules import BACKPROPAGATION, slope

FLAT = 1e-3
"""Slopes |o| (1 - |o|), at most 1/4, below which the weights of a cell hardly change."""


def sign_violations(network: ErrorDiffusionNetwork) -> Tensor:
    """The share of weights with the wrong sign, that is, with a magnitude below 0. A scalar."""
    parameters = list(network.parameters())
    wrong = sum((parameter.detach() < 0).sum() for parameter in parameters)
    return wrong / sum(parameter.numel() for parameter in parameters)


def dead_cells(network: ErrorDiffusionNetwork, x: Tensor) -> Tensor:
    """The share of hidden cells that are saturated for every sample of x, (B, I), and learn nothing from it. A scalar."""
    return (slope(network.activities(x)).amax(dim=2) < FLAT).float().mean()


def alignment(network: ErrorDiffusionNetwork, x: Tensor, grad: Tensor) -> Tensor:
    """The cosine of the network's update and that of gradient descent, over all weights. A scalar.

    Args:
        x: (B, I).
        grad: (B, D), the gradient of the loss with respect to the outputs.
    """
    by_rule = _gradient(network, x, grad)
    with network.ruled_by(BACKPROPAGATION):
        return torch.cosine_similarity(by_rule, _gradient(network, x, grad), dim=0)


def _gradient(network: ErrorDiffusionNetwork, x: Tensor, grad: Tensor) -> Tensor:
    learning = tuple(parameter for parameter in network.parameters() if parameter.requires_grad)
    with torch.enable_grad():
        outputs = network(x)
        gradients = torch.autograd.grad(outputs, learning, grad.to(outputs.dtype))
    return torch.cat([gradient.flatten() for gradient in gradients])
