"""Weights of timm's MViTv2, renamed to ours."""

import re

from torch import Tensor

# Within a block: timm's name, ours.
_PARTS = {
    "norm1": "f.norm",
    "shortcut_proj_attn": "f.shortcut",
    "attn.qkv": "f.attention.qkv",
    "attn.pool_q": "f.attention.pool_q.conv",
    "attn.pool_k": "f.attention.pool_k.conv",
    "attn.pool_v": "f.attention.pool_v.conv",
    "attn.norm_q": "f.attention.pool_q.norm",
    "attn.norm_k": "f.attention.pool_k.norm",
    "attn.norm_v": "f.attention.pool_v.norm",
    "attn.rel_pos_h": "f.attention.height_position",
    "attn.rel_pos_w": "f.attention.width_position",
    "attn.proj": "f.attention.project",
    "norm2": "g.norm",
    "mlp.fc1": "g.widen",
    "mlp.fc2": "g.narrow",
}
_OUTSIDE = {"patch_embed.proj": "embedding.project", "norm": "norm", "head.fc": "head"}


def recognises(weights: dict[str, Tensor]) -> bool:
    """Whether these are the weights of a MultiScaleVit, as timm names them."""
    return {"patch_embed.proj.weight", "stages.0.blocks.0.attn.pool_q.weight"} <= set(weights)


def renamed(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors under the names of :class:`~holotrain.models.MViT`.

    Raises:
        ValueError: a tensor that our model does not have: a class token, a width that grows in the MLP (mvitv2_large).
    """
    return {_renamed(name): tensor for name, tensor in weights.items()}


def _renamed(name: str) -> str:
    stem = name.removesuffix(".weight").removesuffix(".bias")
    block = re.fullmatch(r"stages\.(\d+)\.blocks\.(\d+)\.(.+)", stem)
    part = _PARTS.get(block[3]) if block else _OUTSIDE.get(stem)
    if part is None:
        raise ValueError(f"an MViT has no place for {name}")
    if block:
        stage, number = int(block[1]), int(block[2])
        if stage > 0:  # the first block is the transition
            number -= 1
        part = f"stages.{stage}.{'transition' if number < 0 else f'blocks.blocks.{number}'}.{part}"
    return part + name[len(stem) :]
