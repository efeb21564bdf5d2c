"""RoBERTa weights of Hugging Face (``roberta-base``, ``roberta-large``, XLM-R), for ``RoBERTa(norm="post")``."""

import torch
from torch import Tensor

from holotrain.models.pretrained.names import renamed_by

# A part of their names -> the same in ours. Indices of blocks do not change; a block's norms follow its sums.
_RENAMED = (
    (r"^embeddings\.word_embeddings\.", "embedding.word."),
    (r"^embeddings\.position_embeddings\.weight$", "embedding.position"),
    (r"^embeddings\.LayerNorm\.", "embedding.norm."),
    (r"^encoder\.layer\.", "blocks.blocks."),
    (r"\.attention\.self\.qkv\.", ".f.attention.qkv."),
    (r"\.attention\.output\.dense\.", ".f.attention.project."),
    (r"\.attention\.output\.LayerNorm\.", ".f.norm."),
    (r"\.intermediate\.dense\.", ".g.widen."),
    (r"\.output\.dense\.", ".g.narrow."),
    (r"\.output\.LayerNorm\.", ".g.norm."),
    (r"^lm_head\.dense\.", "head.dense."),
    (r"^lm_head\.layer_norm\.", "head.norm."),
    (r"^lm_head\.bias$", "head.bias"),
    (r"^classifier\.dense\.", "head.dense."),
    (r"^classifier\.out_proj\.", "head.classify."),
)
_WORD = "embeddings.word_embeddings.weight"
_POSITION = "embeddings.position_embeddings.weight"
_SEGMENT = "embeddings.token_type_embeddings.weight"
_DROPPED = ("embeddings.position_ids", "embeddings.token_type_ids", "lm_head.decoder.weight", "lm_head.decoder.bias")

OFFSET = 2
"""Rows before that of the first token: RoBERTa starts to count positions after its padding token, which is word 1."""


def recognises(weights: dict[str, Tensor]) -> bool:
    """Whether these are a state_dict of RoBERTa, with or without a head. BERT has the same names, but two segments."""
    named = any(name.startswith(("roberta.", "lm_head.")) for name in weights)
    weights = _bare(weights)
    if not {_WORD, _POSITION, _SEGMENT, "encoder.layer.0.attention.self.query.weight"} <= weights.keys():
        return False
    return named or len(weights[_SEGMENT]) == 1


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names of a post-norm :class:`~holotrain.models.RoBERTa`.

    The embedding of the first segment, which is added to every token, is added to the positions.

    Raises:
        ValueError: the head for masked words is not tied to the embedding; ours is.
    """
    weights = _bare(weights)
    head = weights.get("lm_head.decoder.weight", weights[_WORD])
    if not torch.equal(head, weights[_WORD]):
        raise ValueError("the head of these RoBERTa weights is not tied to the embedding; in holotrain it always is")
    weights[_POSITION] = weights[_POSITION][OFFSET:] + weights.pop(_SEGMENT)[:1]
    for name in list(weights):
        if ".attention.self.query." in name:
            parts = [weights.pop(name.replace("query", part)) for part in ("query", "key", "value")]
            weights[name.replace("query", "qkv")] = torch.cat(parts)
    return {renamed_by(_RENAMED, name): tensor for name, tensor in weights.items() if name not in _DROPPED}


def _bare(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the names of the encoder without a head."""
    return {name.removeprefix("roberta."): tensor for name, tensor in weights.items()}
