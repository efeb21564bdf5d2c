"""Which tokens of a padded batch are real."""

import torch
from torch import Tensor


def attended(batch: dict[str, Tensor]) -> Tensor:
    """True for tokens, False for the padding behind them: (B, T), of ``tokens`` (B, T) and ``lengths`` (B,)."""
    tokens, lengths = batch["tokens"], batch["lengths"]
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
