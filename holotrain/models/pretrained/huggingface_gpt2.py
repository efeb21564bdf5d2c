"""GPT-2 weights of Hugging Face (``gpt2``, ``gpt2-medium``, ...), for ``GPT(positions="learned", gelu="tanh")``."""

import re

import torch
from torch import Tensor

from holotrain.models.pretrained.names import renamed_by

# A part of their names -> the same in ours. Indices of blocks do not change.
_RENAMED = (
    (r"^wte\.", "embedding.word."),
    (r"^wpe\.weight$", "embedding.position"),
    (r"^h\.", "blocks.blocks."),
    (r"\.ln_1\.", ".f.norm."),
    (r"\.attn\.c_attn\.", ".f.attention.qkv."),
    (r"\.attn\.c_proj\.", ".f.attention.project."),
    (r"\.ln_2\.", ".g.norm."),
    (r"\.mlp\.c_fc\.", ".g.widen."),
    (r"\.mlp\.c_proj\.", ".g.narrow."),
    (r"^ln_f\.", "norm."),
)
_MASKS = (".attn.bias", ".attn.masked_bias")


def recognises(weights: dict[str, Tensor]) -> bool:
    """Whether these are a state_dict of GPT-2, with or without its head."""
    return {"wte.weight", "wpe.weight", "h.0.attn.c_attn.weight"} <= _bare(weights).keys()


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names of :class:`~holotrain.models.GPT`.

    Raises:
        ValueError: the head is not tied to the embedding; ours is.
    """
    weights = _bare(weights)
    head = weights.pop("lm_head.weight", None)
    if head is not None and not torch.equal(head, weights["wte.weight"]):
        raise ValueError("the head of these GPT-2 weights is not tied to the embedding; in holotrain it always is")
    return {
        # GPT-2's matrices are transposed.
        renamed_by(_RENAMED, name): tensor.T if re.search(r"\.c_\w+\.weight$", name) else tensor
        for name, tensor in weights.items()
        if not name.endswith(_MASKS)
    }


def _bare(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """With the names of the model without its head."""
    return {name.removeprefix("transformer."): tensor for name, tensor in weights.items()}
