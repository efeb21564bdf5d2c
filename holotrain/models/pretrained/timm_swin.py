"""Swin weights of timm (``swin_*_patch4_window7_224``) and of the authors' repository, whose names are almost the same."""

import re

from torch import Tensor

from holotrain.models.pretrained.names import renamed_by

# A part of timm's names -> the same in ours. Indices of stages and blocks do not change.
_RENAMED = (
    (r"^patch_embed\.proj\.", "embedding.project."),
    (r"^patch_embed\.norm\.", "embedding.norm."),
    (r"^layers\.(\d+)\.downsample\.reduction\.", r"stages.\1.merging.project."),
    (r"^layers\.(\d+)\.downsample\.norm\.", r"stages.\1.merging.norm."),
    (r"^layers\.(\d+)\.blocks\.", r"stages.\1.blocks.blocks."),
    (r"\.norm1\.", ".f.norm."),
    (r"\.attn\.relative_position_bias_table$", ".f.attention.bias.position"),
    (r"\.attn\.qkv\.", ".f.attention.qkv."),
    (r"\.attn\.proj\.", ".f.attention.project."),
    (r"\.norm2\.", ".g.norm."),
    (r"\.mlp\.fc1\.", ".g.widen."),
    (r"\.mlp\.fc2\.", ".g.narrow."),
    (r"^head\.fc\.", "head."),
)
_DERIVED = (".relative_position_index", ".attn_mask")


def recognises(weights: dict[str, Tensor]) -> bool:
    """Whether these are a state_dict of a Swin transformer of timm or of its authors (version 1)."""
    return {"patch_embed.proj.weight", "layers.0.blocks.0.attn.relative_position_bias_table"} <= weights.keys()


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names of :class:`~holotrain.models.Swin`, without buffers that follow from the sizes."""
    # The authors count a merging with the stage before it, timm and we with the stage after it.
    behind = "layers.0.downsample.reduction.weight" in weights
    return {_our_name(name, behind): tensor for name, tensor in weights.items() if not name.endswith(_DERIVED)}


def _our_name(name: str, behind: bool) -> str:
    if behind:
        name = re.sub(r"(?<=^layers\.)\d+(?=\.downsample)", lambda stage: str(int(stage[0]) + 1), name)
    return renamed_by(_RENAMED, name)
