"""Dynamic masking for masked language modelling (Devlin et al., "BERT", 2019, section 3.1; Liu et al., "RoBERTa", 2019)."""

import torch
from torch import Tensor

from holotrain.models.layers.text import IGNORED


def masked(
    tokens: Tensor,
    candidates: Tensor,
    mask_id: int,
    words: Tensor,
    probability: float = 0.15,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Chooses tokens to predict: of every ten, eight show the mask, one a random word, one the word itself.

    Args:
        tokens: (B, T).
        candidates: (B, T), True where a token may be chosen: neither padding nor special tokens.
        mask_id: the mask token.
        words: (W,) the tokens that a random word is drawn from.
        probability: of choosing each candidate.
        generator: on the tokens' device; None: the global one.

    Returns:
        the tokens to show (B, T), and targets (B, T): the original word where a token was chosen, -100 elsewhere.
    """
    uniform = {"generator": generator, "device": tokens.device}
    chosen = (torch.rand(tokens.shape, **uniform) < probability) & candidates
    way = torch.rand(tokens.shape, **uniform)
    random = words[torch.randint(len(words), tokens.shape, **uniform)]
    shown = tokens.where(~(chosen & (way < 0.8)), mask_id)
    shown = torch.where(chosen & (way >= 0.8) & (way < 0.9), random, shown)
    return shown, tokens.where(chosen, IGNORED)
