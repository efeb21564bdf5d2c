"""Adapts weights to a model of the same family whose sizes or norms differ. Both use our names.

Shapes: T tokens of an image, S x S its patches, C channels.
"""

import re

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.roberta import RoBERTa
from holotrain.models.vit import ViT

POSITION = "embedding.position"
CLASS_TOKEN = "embedding.class_token"
WORD = "embedding.word.weight"
WORD_BIAS = "head.bias"


def fitted(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The weights, adapted to the model.

    ViT: positions are resized to its image size and class token. Text: the first positions are used for shorter sequences, and
    words that were added to the vocabulary, such as special tokens, keep the model's values.
    RoBERTa: norms of a post-norm model are moved to where a pre-norm or reversible one has them.
    """
    own = dict(model.named_parameters())
    if isinstance(model, RoBERTa) and "embedding.norm.weight" in weights and "embedding.norm.weight" not in own:
        weights = pre_norm(weights)
    for name in (WORD, WORD_BIAS):
        if name in weights and name in own and len(weights[name]) < len(own[name]):
            added = own[name].detach()[len(weights[name]) :]
            if added.shape[1:] == weights[name].shape[1:]:
                weights = weights | {name: torch.cat((weights[name], added.to(weights[name])))}
    if POSITION not in weights or POSITION not in own:
        return weights
    if isinstance(model, ViT):
        tokens = CLASS_TOKEN in weights, CLASS_TOKEN in own
        return weights | {POSITION: image_positions(weights[POSITION], own[POSITION].detach(), *tokens)}
    return weights | {POSITION: weights[POSITION][: len(own[POSITION])]}


def image_positions(given: Tensor, own: Tensor, given_class: bool, own_class: bool) -> Tensor:
    """Learned positions of patches, resized to another number of patches by bicubic interpolation as in timm.

    Args:
        given, own: (1, S^2, C), or (1, 1 + S^2, C) with the class token's position first; ``own`` has the wanted shape.
        given_class, own_class: whether they hold a class token's position. If only ``own`` does, it keeps its value.

    Returns:
        positions in the shape of ``own`` if ``given`` is of a square image; otherwise ``given``.
    """
    patches, wanted = given[:, int(given_class) :], own.shape[1] - own_class
    across, wanted_across = round(patches.shape[1] ** 0.5), round(wanted**0.5)
    if across**2 != patches.shape[1]:
        return given
    if across != wanted_across:
        image = patches.float().unflatten(1, (across, across)).permute(0, 3, 1, 2)
        image = F.interpolate(image, size=(wanted_across, wanted_across), mode="bicubic", antialias=True)
        patches = image.permute(0, 2, 3, 1).flatten(1, 2).to(given.dtype)
    if not own_class:
        return patches
    return torch.cat((given[:, :1] if given_class else own[:, :1].to(patches), patches), dim=1)


def pre_norm(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Moves the norms of a post-norm RoBERTa to where a pre-norm one has them.

    In post-norm, the input of a branch is the output of the norm after the previous branch: for attention in block i, the norm
    of block i - 1's MLP (in the first block, the embedding's); for the MLP, the norm of the attention in its block. So each
    branch takes over that norm as its own, and the last norm becomes the final one. Every branch then reads inputs that are
    normalised as in training.

    The outputs still differ: post-norm also normalises the residual stream, so the stream is small again after every branch,
    while in pre-norm it grows and the share of each branch differs. The weights are a start for fine-tuning.
    """
    norm_of_a_block = re.compile(r"blocks\.blocks\.(\d+)\.([fg])\.norm\.(\w+)")
    last = max(int(found[1]) for found in map(norm_of_a_block.fullmatch, weights) if found)

    def moved(name: str) -> str:
        found = norm_of_a_block.fullmatch(name)
        if not found:
            return re.sub(r"^embedding\.norm\.", "blocks.blocks.0.f.norm.", name)
        block, branch, kind = int(found[1]), found[2], found[3]
        if branch == "f":
            return f"blocks.blocks.{block}.g.norm.{kind}"
        return f"norm.{kind}" if block == last else f"blocks.blocks.{block + 1}.f.norm.{kind}"

    return {moved(name): tensor for name, tensor in weights.items()}
