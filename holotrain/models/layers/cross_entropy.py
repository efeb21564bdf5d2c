"""Cross-entropy of a linear layer's output, in pieces: logits over a long vocabulary are never in memory as a whole.

The gradient with respect to logits, softmax(logits) - one_hot(target), needs only the logits. So each piece of rows computes
its logits, its loss and its gradients at once and frees the logits. Nothing is computed twice.
Shapes: N tokens, C channels, V words.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100
"""The target of a token to ignore, as in torch.nn.functional.cross_entropy."""

PIECE = 2**24
"""Number of logits in memory at once: 64 MiB in fp32."""


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None = None, piece: int = PIECE
) -> Tensor:
    """The mean cross-entropy of ``hidden @ weight.T + bias`` against ``targets``; NaN if all targets are ignored.

    Under autocast, products are computed in its precision, softmax and sums in fp32.

    Args:
        hidden: (N, C).
        weight, bias: (V, C), (V,).
        targets: (N,) of class indices; -100 is ignored.
        piece: number of logits in memory at once, at least one row of V.

    Second derivatives are not supported.
    """
    device = hidden.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    count = (targets != IGNORED).sum()
    with torch.autocast(device, enabled=False):
        return _LinearCrossEntropy.apply(hidden, weight, bias, targets, piece, torch.is_grad_enabled()) / count


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of losses."""

    @staticmethod
    def forward(
        ctx, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, piece: int, differentiated: bool
    ) -> Tensor:
        # Parameters require gradients under no_grad too.
        wanted = ctx.needs_input_grad[:3] if differentiated else (False, False, False)
        accumulated = torch.promote_types(hidden.dtype, torch.float32)
        loss = hidden.new_zeros((), dtype=accumulated)
        grad_hidden = torch.empty_like(hidden) if wanted[0] else None
        grad_weight = torch.zeros_like(weight, dtype=accumulated) if wanted[1] else None
        grad_bias = torch.zeros_like(bias, dtype=accumulated) if wanted[2] else None
        rows = max(1, piece // len(weight))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = F.linear(hidden[part], weight, bias).to(accumulated)
            counted = targets[part] != IGNORED
            words = targets[part].clamp_min(0)[:, None]
            normaliser = logits.logsumexp(dim=-1, keepdim=True)
            loss += ((normaliser - logits.gather(1, words)).squeeze(1) * counted).sum()
            if not any(wanted):
                continue
            gradient = logits.sub_(normaliser).exp_()
            gradient.scatter_add_(1, words, gradient.new_full((), -1.0).expand_as(words)).mul_(counted[:, None])
            if wanted[2]:
                grad_bias += gradient.sum(dim=0)
            gradient = gradient.to(hidden.dtype)
            if wanted[0]:
                torch.mm(gradient, weight, out=grad_hidden[part])
            if wanted[1]:
                grad_weight += gradient.T @ hidden[part]
        ctx.gradients = grad_hidden, grad_weight, grad_bias
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        # Scaled here, after the products: half-precision gradients divided by N first would underflow.
        scaled = (None if gradient is None else gradient * grad.to(gradient.dtype) for gradient in ctx.gradients)
        return *scaled, None, None, None
