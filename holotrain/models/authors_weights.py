"""Weights of reversible networks of images under the names that their authors gave them: of SlowFast the RevViT and RevMViT
(Mangalam et al., CVPR 2022), of minREV the RevSwin (Zhu and Mangalam, "PaReprop", 2023)."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from holotrain.models.mvit import MViT
from holotrain.models.swin import RevSwin
from holotrain.models.vit import ViT

NAMES = {
    r"^patch_embed\.proj\.": "embedding.project.",
    r"^patch_embed\.norm\.": "embedding.norm.",
    r"^pos_embed$": "embedding.position",
    r"^head\.projection\.": "head.",
    r"\.(F\.norm|norm1)\.": ".f.norm.",
    r"\.(F\.)?attn\.proj\.": ".f.attention.project.",
    r"\.F\.attn\.pool_([qkv])\.": r".f.attention.pool_\1.conv.",
    r"\.F\.attn\.norm_([qkv])\.": r".f.attention.pool_\1.norm.",
    r"\.attn\.relative_position_bias_table$": ".f.attention.bias.position",
    r"\.(F\.)?attn\.": ".f.attention.",
    r"\.(G\.norm|norm2)\.": ".g.norm.",
    r"\.(G\.)?mlp\.fc1\.": ".g.widen.",
    r"\.(G\.)?mlp\.fc2\.": ".g.narrow.",
    r"\.pre_q_fuse\.fuse_fn\.fc1\.": ".fusion.0.",
    r"\.pre_q_fuse\.fuse_fn\.fc2\.": ".fusion.2.",
    r"\.lateral_fuse\.fuse_fn\.fc1\.": ".fusion.mix.",
    r"\.lateral_fuse\.fuse_fn\.fc2\.": ".fusion.project.",
    r"\.downsample\.reduction\.": ".merging.project.",
    r"\.downsample\.": ".merging.",
}
"""Ours for theirs, applied one after the other, once a block has its place."""


def renamed(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Weights of these authors under the names that they have in a model; any others unchanged.

    Raises:
        ValueError: the model is no network of the authors, whatever its sizes.
    """
    if any(name.startswith("rev_backbone.layers.") for name in weights):
        if not isinstance(model, ViT | MViT) or getattr(model.embedding, "position", None) is None:
            raise ValueError("these weights are of SlowFast; rev_vit_small, rev_vit_base and rev_mvit_paper_base take them")
        places = _places_of_layers(model)
    elif any(".lateral_fuse." in name for name in weights):
        _require_network_of_minrev(model)
        places = _places_of_stages(model)
    else:
        return weights
    found = {}
    for theirs, tensor in weights.items():
        name = theirs
        for prefix, place in places.items():
            if name.startswith(prefix):
                name = place + name.removeprefix(prefix)
                break
        for pattern, ours in NAMES.items():
            name = re.sub(pattern, ours, name)
        if ".conv." in name and tensor.ndim == 5 and tensor.shape[2] == 1:
            tensor = tensor.squeeze(2)  # of one image, which is a video there
        if not name.endswith(".relative_position_index"):
            found[name] = tensor
    return _with_joined_queries(found, model)


def _places_of_layers(model: Any) -> dict[str, str]:
    """Our prefix for that of each layer of SlowFast, and for its last norm."""
    if isinstance(model, ViT):
        places, norm = [f"blocks.blocks.{block}." for block in range(model.depth)], "fusion.norm."
    else:
        places, norm = [], "norm."
        for number, stage in enumerate(model.stages):
            places += [f"stages.{number}.transition."] if number else []
            places += [f"stages.{number}.blocks.blocks.{block}." for block in range(len(stage.blocks.blocks))]
    return {f"rev_backbone.layers.{layer}.": place for layer, place in enumerate(places)} | {"norm.": norm}


def _places_of_stages(model: Any) -> dict[str, str]:
    """The same of minREV, where what joins two stages belongs to the first of them."""
    places = {"norm.": f"stages.{len(model.stages) - 1}.fusion.norm."}
    for stage in range(len(model.stages)):
        places[f"layers.{stage}.blocks."] = f"stages.{stage}.blocks.blocks."
        places[f"layers.{stage}.downsample."] = f"stages.{stage + 1}.downsample."
        places[f"layers.{stage}."] = f"stages.{stage}."
    return places


def _require_network_of_minrev(model: Any) -> None:
    is_theirs = isinstance(model, RevSwin) and hasattr(model.stages[0].fusion, "mix")
    for stage in model.stages if is_theirs else ():
        attentions = [block.f.attention for block in stage.blocks.blocks[1::2]]
        is_theirs &= all(attention.shift or attention.window == 1 for attention in attentions)
    if not is_theirs:
        raise ValueError("these weights are of minREV, whose RevSwin is that with fusion=mlp and shift_all=true")


def _with_joined_queries(weights: dict[str, Tensor], model: Any) -> dict[str, Tensor]:
    """One layer for queries, keys and values, in the order of its rows that our attention has."""
    own = model.state_dict()
    for name in [name for name in weights if ".f.attention.q." in name]:
        parts = [weights[each] for each in (name.replace(".q.", f".{part}.") for part in "qkv") if each in weights]
        joined = name.replace(".q.", ".query_key_value." if isinstance(model, ViT) else ".qkv.")
        if joined not in own:  # a deeper network's
            continue
        shape = (own[joined].shape[0] // 3, *own[joined].shape[1:])
        if [part.shape for part in parts] != [shape] * 3:
            raise ValueError(
                f"these weights do not fit: {name} is {tuple(weights[name].shape)} there, not {shape}, or its k or v"
            )
        if isinstance(model, ViT):  # by head
            heads = model.blocks.blocks[0].f.attention.heads
            parts = [torch.stack([part.unflatten(0, (heads, -1)) for part in parts], dim=1).flatten(0, 2)]
        weights[joined] = torch.cat(parts)
        for part in "qkv":
            del weights[name.replace(".q.", f".{part}.")]
    return weights
