"""ViT weights of timm (``vit_*``, ``deit_*``): with a class token, or averaged over tokens (``fc_norm``)."""

from torch import Tensor

from holotrain.models.pretrained.names import renamed_by

# A part of timm's names -> the same in ours. Indices of blocks do not change.
_RENAMED = (
    (r"^patch_embed\.proj\.", "embedding.project."),
    (r"^cls_token$", "embedding.class_token"),
    (r"^pos_embed$", "embedding.position"),
    (r"^blocks\.", "blocks.blocks."),
    (r"\.norm1\.", ".f.norm."),
    (r"\.attn\.qkv\.", ".f.attention.qkv."),
    (r"\.attn\.proj\.", ".f.attention.project."),
    (r"\.ls1\.gamma$", ".f.scale.weight"),
    (r"\.norm2\.", ".g.norm."),
    (r"\.mlp\.fc1\.", ".g.widen."),
    (r"\.mlp\.fc2\.", ".g.narrow."),
    (r"\.ls2\.gamma$", ".g.scale.weight"),
    (r"^fc_norm\.", "norm."),
)


def recognises(weights: dict[str, Tensor]) -> bool:
    """Whether these are a state_dict of a vision transformer of timm."""
    return {"patch_embed.proj.weight", "pos_embed", "blocks.0.attn.qkv.weight", "blocks.0.mlp.fc1.weight"} <= weights.keys()


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names of :class:`~holotrain.models.ViT`."""
    ours = {renamed_by(_RENAMED, name): tensor for name, tensor in weights.items()}
    if "embedding.class_token" in ours:
        ours["embedding.class_token"] = ours["embedding.class_token"].flatten()
    return ours
