"""Which tokens of a padded batch are real."""

import torch
from torch import Tensor


def attended(batch: dict[str, Tensor]) -> Tensor:
    """(B, T): True for tokens, False for the padding after them. The batch has ``tokens`` (B, T) and ``lengths`` (B,)."""
    tokens, lengths = batch["tokens"], batch["lengths"]
    return torch.arange(tokens.shape[1], device=tokens.device) < lengths[:, None]
