"""What transformers for text share: token embeddings, their first values, and the loss over a long vocabulary.

Shapes: B batch, T tokens, N tokens of all sequences, C channels, V words.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class TokenEmbedding(nn.Module):
    """Embeds tokens and adds a learned position to each. (B, T) -> (B, T, dim).

    Args:
        vocab: number of words.
        context: the longest sequence, in tokens.
        positions: learn them; False if attention gets positions in another way.

    Raises:
        ValueError: a longer sequence, at the call.
    """

    def __init__(self, vocab: int, context: int, dim: int, positions: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        self.context = context
        self.word = nn.Embedding(vocab, dim)
        self.position = nn.Parameter(torch.zeros(context, dim)) if positions else None
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: Tensor, positions: Tensor | None = None) -> Tensor:
        """
        Args:
            positions: (B, T), of each token; None: 0, 1, 2, ...
        """
        if tokens.shape[1] > self.context:
            raise ValueError(f"the model reads up to {self.context} tokens at once, not {tokens.shape[1]}")
        x = self.word(tokens)
        if self.position is not None:
            x = x + (self.position[: tokens.shape[1]] if positions is None else self.position[positions])
        return self.dropout(x)


def initialise(model: nn.Module, depth: int) -> None:
    """Normal of 0.02, biases zero; in the last layer of each branch divided by sqrt(2 depth), as in GPT-2."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            ends_a_branch = name.rpartition(".")[2] in ("project", "narrow")
            nn.init.normal_(module.weight, std=0.02 / (2 * depth) ** 0.5 if ends_a_branch else 0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, TokenEmbedding):
            nn.init.normal_(module.word.weight, std=0.02)
            if module.position is not None:
                nn.init.normal_(module.position, std=0.02)


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
        grad_bias = torch.zeros_like(bias, dtype=accumulated) if wanted[2] and bias is not None else None
        rows = max(1, piece // len(weight))
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = F.linear(hidden[part], weight, bias).to(accumulated)
            counted = targets[part] != IGNORED
            classes = targets[part].clamp_min(0)[:, None]
            normaliser = logits.logsumexp(dim=-1, keepdim=True)
            loss += ((normaliser - logits.gather(1, classes)).squeeze(1) * counted).sum()
            if not any(wanted):
                continue
            gradient = logits.sub_(normaliser).exp_()
            gradient.scatter_add_(1, classes, gradient.new_full((), -1.0).expand_as(classes)).mul_(counted[:, None])
            if grad_bias is not None:
                grad_bias += gradient.sum(dim=0)
            gradient = gradient.to(hidden.dtype)
            if grad_hidden is not None:
                torch.mm(gradient, weight, out=grad_hidden[part])
            if grad_weight is not None:
                grad_weight += gradient.T @ hidden[part]
        ctx.gradients = grad_hidden, grad_weight, grad_bias
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad: Tensor):
        # Scaled here, after the products: half-precision gradients divided by N first would underflow.
        scaled = (None if gradient is None else gradient * grad.to(gradient.dtype) for gradient in ctx.gradients)
        return *scaled, None, None, None
