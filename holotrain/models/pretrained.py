"""Published weights: recognised by the names of their tensors, renamed to ours, fitted to other sizes, loaded into a model.

Shapes: T tokens of an image, S x S its patches, C channels.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from holotrain.models.building import allocated
from holotrain.models.gpt import GPT
from holotrain.models.layers.attention import Attention
from holotrain.models.layers.patches import resized_positions
from holotrain.models.mvit import MViT
from holotrain.models.roberta import RoBERTa
from holotrain.models.swin import Swin
from holotrain.models.vit import ViT
from holotrain.numeric import counted

Weights = dict[str, Tensor]

ROBERTA_OFFSET = 2
"""Rows before the position of the first token: RoBERTa counts positions from the number of its padding token, which is 1."""

POSITION, WORD, WORD_BIAS = "embedding.position", "embedding.word.weight", "head.bias"


@dataclass(frozen=True)
class Source:
    """A kind of weights.

    Args:
        name: for messages.
        model: the class of the models, plain and reversible, that they are for.
        tensors: regular expressions, each of which the name of one of them matches.
        names: their names, or parts of them (regular expressions) -> the same in ours, replaced in this order.
        prefix: of the names in a model with a head.
        prepare: what is done to them before they are renamed, without the prefix.
    """

    name: str
    model: type[nn.Module]
    tensors: tuple[str, ...]
    names: dict[str, str]
    prefix: str = ""
    prepare: Callable[[Weights], Weights] = dict


def _swin(weights: Weights) -> Weights:
    # The authors count a merging with the stage before it, timm and we with the stage after it.
    shift = int("layers.0.downsample.reduction.weight" in weights)
    return {
        re.sub(r"(?<=^layers\.)\d+(?=\.downsample)", lambda stage: str(int(stage[0]) + shift), name): tensor
        for name, tensor in weights.items()
        if not name.endswith((".relative_position_index", ".attn_mask"))  # which follow from the sizes
    }


def _mvit(weights: Weights) -> Weights:
    def block(found: re.Match[str]) -> str:
        stage, number = int(found[1]), int(found[2])
        number -= stage > 0  # the first block is the transition
        return f"stages.{stage}.{'transition' if number < 0 else f'blocks.blocks.{number}'}."

    for name in weights:
        if re.search("^cls_token|^pos_embed|shortcut_proj_mlp", name):  # the last is of mvitv2_large
            raise ValueError(f"an MViT has no place for {name}")
    return {re.sub(r"^stages\.(\d+)\.blocks\.(\d+)\.", block, name): tensor for name, tensor in weights.items()}


def _roberta(weights: Weights) -> Weights:
    word, position, segment = (f"embeddings.{kind}_embeddings.weight" for kind in ("word", "position", "token_type"))
    weights = dict(weights)
    weights.pop("lm_head.decoder.bias", None)
    _require_tied(weights.pop("lm_head.decoder.weight", None), weights[word], "RoBERTa")
    # That of the first segment is added to every token.
    weights[position] = weights[position][ROBERTA_OFFSET:] + weights.pop(segment)[:1]
    for name in [name for name in weights if ".attention.self.query." in name]:
        parts = [weights.pop(name.replace("query", part)) for part in ("query", "key", "value")]
        weights[name.replace("query", "qkv")] = torch.cat(parts)
    return {name: x for name, x in weights.items() if name not in ("embeddings.position_ids", "embeddings.token_type_ids")}


def _gpt2(weights: Weights) -> Weights:
    weights = dict(weights)
    _require_tied(weights.pop("lm_head.weight", None), weights["wte.weight"], "GPT-2")
    return {
        name: tensor.t() if re.search(r"\.c_\w+\.weight$", name) else tensor  # its matrices are transposed
        for name, tensor in weights.items()
        if not name.endswith((".attn.bias", ".attn.masked_bias"))
    }


def _require_tied(head: Tensor | None, embedding: Tensor, name: str) -> None:
    if head is not None and not torch.equal(head, embedding):
        raise ValueError(f"the head of these {name} weights is not tied to the embedding; in holotrain it always is")


def _ours(weights: Weights) -> Weights:
    return {name: x for name, x in weights.items() if not name.endswith(".grid.step")}  # which depends on the data


TIMM = {
    r"^patch_embed\.proj\.": "embedding.project.",
    r"\.norm1\.": ".f.norm.",
    r"\.attn\.qkv\.": ".f.attention.qkv.",
    r"\.attn\.proj\.": ".f.attention.project.",
    r"\.norm2\.": ".g.norm.",
    r"\.mlp\.fc1\.": ".g.widen.",
    r"\.mlp\.fc2\.": ".g.narrow.",
    r"^head\.fc\.": "head.",
}
"""What the names of timm's models have in common."""

SOURCES = (
    Source(  # vit_*, deit_*: with a class token, or averaged over tokens (fc_norm)
        "a timm ViT",
        ViT,
        (r"^patch_embed\.proj\.weight$", "^pos_embed$", r"^blocks\.0\.attn\.qkv\.weight$", r"^blocks\.0\.mlp\.fc1\.weight$"),
        {
            r"^cls_token$": "embedding.class_token",
            r"^pos_embed$": POSITION,
            r"^blocks\.": "blocks.blocks.",
            r"\.ls1\.gamma$": ".f.scale.weight",
            r"\.ls2\.gamma$": ".g.scale.weight",
            r"^fc_norm\.": "norm.",
        }
        | TIMM,
        prepare=lambda weights: {name: x.flatten() if name == "cls_token" else x for name, x in weights.items()},
    ),
    Source(  # swin_*_patch4_window7_224, and the authors' repository, whose names are almost the same
        "a timm Swin",
        Swin,
        (r"^patch_embed\.proj\.weight$", r"^layers\.0\.blocks\.0\.attn\.relative_position_bias_table$"),
        {
            r"^patch_embed\.norm\.": "embedding.norm.",
            r"^layers\.(\d+)\.downsample\.reduction\.": r"stages.\1.merging.project.",
            r"^layers\.(\d+)\.downsample\.norm\.": r"stages.\1.merging.norm.",
            r"^layers\.(\d+)\.blocks\.": r"stages.\1.blocks.blocks.",
            r"\.attn\.relative_position_bias_table$": ".f.attention.bias.position",
        }
        | TIMM,
        prepare=_swin,
    ),
    Source(
        "a timm MViTv2",
        MViT,
        (r"^patch_embed\.proj\.weight$", r"^stages\.0\.blocks\.0\.attn\.pool_q\.weight$"),
        {
            r"\.shortcut_proj_attn\.": ".f.shortcut.",
            r"\.attn\.pool_([qkv])\.": r".f.attention.pool_\1.conv.",
            r"\.attn\.norm_([qkv])\.": r".f.attention.pool_\1.norm.",
            r"\.attn\.rel_pos_h$": ".f.attention.height_position",
            r"\.attn\.rel_pos_w$": ".f.attention.width_position",
        }
        | TIMM,
        prepare=_mvit,
    ),
    Source(  # roberta-base, roberta-large, XLM-R, for RoBERTa(norm="post"): a block's norms follow its sums
        "a Hugging Face RoBERTa",
        RoBERTa,
        (
            *(rf"^embeddings\.{kind}_embeddings\.weight$" for kind in ("word", "position", "token_type")),
            r"^encoder\.layer\.0\.attention\.self\.query\.weight$",
        ),
        {
            r"^embeddings\.word_embeddings\.": "embedding.word.",
            r"^embeddings\.position_embeddings\.weight$": POSITION,
            r"^embeddings\.LayerNorm\.": "embedding.norm.",
            r"^encoder\.layer\.": "blocks.blocks.",
            r"\.attention\.self\.qkv\.": ".f.attention.qkv.",
            r"\.attention\.output\.dense\.": ".f.attention.project.",
            r"\.attention\.output\.LayerNorm\.": ".f.norm.",
            r"\.intermediate\.dense\.": ".g.widen.",
            r"\.output\.dense\.": ".g.narrow.",
            r"\.output\.LayerNorm\.": ".g.norm.",
            r"^lm_head\.dense\.": "head.dense.",
            r"^lm_head\.layer_norm\.": "head.norm.",
            r"^lm_head\.bias$": WORD_BIAS,
            r"^classifier\.dense\.": "head.dense.",
            r"^classifier\.out_proj\.": "head.classify.",
        },
        "roberta.",
        _roberta,
    ),
    Source(  # gpt2, gpt2-medium, ..., for GPT(positions="learned", gelu="tanh")
        "a Hugging Face GPT-2",
        GPT,
        (r"^wte\.weight$", r"^wpe\.weight$", r"^h\.0\.attn\.c_attn\.weight$"),
        {
            r"^wte\.": "embedding.word.",
            r"^wpe\.weight$": POSITION,
            r"^h\.": "blocks.blocks.",
            r"\.ln_1\.": ".f.norm.",
            r"\.attn\.c_attn\.": ".f.attention.qkv.",
            r"\.attn\.c_proj\.": ".f.attention.project.",
            r"\.ln_2\.": ".g.norm.",
            r"\.mlp\.c_fc\.": ".g.widen.",
            r"\.mlp\.c_proj\.": ".g.narrow.",
            r"^ln_f\.": "norm.",
        },
        "transformer.",
        _gpt2,
    ),
    Source(  # of a checkpoint, or of a saved model; a branch with an adapter is inside the adapter
        "a holotrain model", nn.Module, (r"(^|\.)blocks\.\d+\.f\.",), {r"\.([fg])\.branch\.": r".\1."}, "model.", _ours
    ),
)


@dataclass(frozen=True)
class Loaded:
    """A report of what happened to each tensor, by our names.

    Args:
        source: the kind of weights.
        loaded: tensors that the model took over.
        missing: tensors that the weights do not have, which stay as initialised, such as a reversible model's fusions.
        unexpected: tensors that the model does not have.
        head: the model's head, if it stays as initialised because the weights have none or one of another shape.
        resized: tensors that were loaded in another size: positions of another image size or of shorter texts.
    """

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    head: tuple[str, ...]
    resized: tuple[str, ...]

    def __str__(self) -> str:
        """A line for people: the number of tensors that were loaded, and the names of all others."""
        new = {"new, random": (*self.missing, *self.head)}
        parts = new | {"left out": self.unexpected, "of another size, fitted": self.resized}
        lists = [f"{name}: {', '.join(sorted(names))}" for name, names in parts.items() if names]
        return "; ".join([f"{counted(len(self.loaded), 'tensor')} of {self.source}", *lists])


def load_pretrained(model: nn.Module, weights: Weights) -> Loaded:
    """Loads weights of its family into a model, in place. Add adapters afterwards.

    The branches of plain and reversible models have the same names, so each can load the weights of the other. A head is loaded
    completely or, if any part of it has another shape, not at all.

    Raises:
        ValueError: the weights are of an unknown source or of another family, a tensor outside the head has another shape,
            fewer than half of the parameters fit, or memory is too small to rename them. The model is then unchanged.
    """
    require_whole(weights)
    kind = type(model).__name__
    source = _source(weights)
    if not isinstance(model, source.model):
        raise ValueError(f"these weights are for {source.name}; the model is a {kind}")
    try:
        with allocated():
            renamed = _by_head(_renamed(source, weights), model)
            fitted = _fitted(renamed, model)
    except KeyError as error:
        raise ValueError(f"these weights, of {source.name}, lack {error.args[0]}") from error
    except torch.OutOfMemoryError:
        raise
    except (IndexError, RuntimeError, TypeError) as error:
        raise ValueError(f"tensors of these weights have other shapes than those of {source.name}: {error}") from error
    own = dict(model.named_parameters())
    strange = [name for name in fitted if name.startswith("embedding.") and name not in (*own, "embedding.class_token")]
    if source is SOURCES[-1] and strange:
        raise ValueError(f"these weights are of another family than {kind}, which has no {strange[0]}")
    # Blocks of all families have the same names, so the embedding of ours decides. A user's model may have none.
    embedding = {name for name in own if name.startswith("embedding.")}
    if embedding and embedding.isdisjoint(fitted):
        raise ValueError(f"the weights of {source.name} do not fit: they have no part of the embedding of this {kind}")
    found = take_over(own, fitted, source.name, {name for name in (*own, *fitted) if name.startswith("head.")})
    return replace(found, resized=tuple(n for n in found.loaded if n in renamed and renamed[n].shape != fitted[n].shape))


def require_whole(weights: Weights) -> None:
    """Raises a ValueError if layers of peft stand beside these weights, or some of them are in few bits."""
    if any(name.endswith(".numbers") or ".base_layer." in name for name in weights):
        raise ValueError(
            "these weights are in few bits or beside layers of peft; write them whole with holotrain export ckpt_path=... "
            "to=FOLDER, and start from FOLDER"
        )


def take_over(own: Mapping[str, Tensor], weights: Weights, source: str, head: Collection[str] = ()) -> Loaded:
    """Copies weights into a model, in place.

    Args:
        own: the tensors of the model.
        weights: the weights, under the same names.
        source: what they are of, for messages.
        head: names of the part that may have other shapes, or other tensors; all of it is then left out.

    Raises:
        ValueError: another tensor has another shape or kind of numbers, or fewer than half of the model's tensors are among
            them. The model is then unchanged.
    """
    whole = all(name in own and name in weights and own[name].shape == weights[name].shape for name in head)
    left_out = () if whole else tuple(name for name in own if name in head)
    loaded = tuple(name for name in own if name in weights and name not in left_out)
    require_floats(weights, {name: own[name] for name in loaded}, source)
    for name in loaded:
        if weights[name].shape != own[name].shape:
            saved, expected = tuple(weights[name].shape), tuple(own[name].shape)
            raise ValueError(f"the weights of {source} do not fit: {name} is {saved} there and {expected} in this model")
    reached = {id(own[name]) for name in loaded}  # one tensor may have several names
    missing = tuple(name for name in own if id(own[name]) not in reached and name not in left_out)
    if 2 * len(missing) > len(own):
        present = f"they have {len(own) - len(missing)} of the {len(own)} tensors of this model"
        raise ValueError(f"the weights of {source} do not fit: {present}")
    with torch.no_grad():
        for name in loaded:
            own[name].copy_(weights[name])
    return Loaded(source, loaded, missing, tuple(name for name in weights if name not in own), left_out, ())


def require_floats(weights: Weights, own: Mapping[str, Tensor], source: str) -> None:
    """Raises a ValueError if weights are not floating-point numbers where those of the model are; torch would convert them."""
    for name, tensor in own.items():
        if name in weights and tensor.is_floating_point() and not weights[name].is_floating_point():
            raise ValueError(f"the weights of {source} do not fit: {name} is {weights[name].dtype}, not a floating-point type")


def _source(weights: Weights) -> Source:
    # BERT without a head has the names of RoBERTa, but two segments.
    segments = weights.get("embeddings.token_type_embeddings.weight")
    bert = segments is not None and segments.shape[:1] > (1,) and not any("lm_head." in name for name in weights)
    for source in SOURCES:
        names = [name.removeprefix(source.prefix) for name in weights]
        if all(any(re.search(tensor, name) for name in names) for tensor in source.tensors) and not bert:
            return source
    known, first = ", ".join(source.name for source in SOURCES), next(iter(weights), "nothing")
    raise ValueError(f"these weights are of no known model ({known}); the first tensor is {first}")


def _renamed(source: Source, weights: Weights) -> Weights:
    found = {}
    for name, tensor in source.prepare({name.removeprefix(source.prefix): x for name, x in weights.items()}).items():
        for pattern, replacement in source.names.items():
            name = re.sub(pattern, replacement, name)
        found[name] = tensor
    return found


def _by_head(weights: Weights, model: nn.Module) -> Weights:
    """Renames ``qkv`` (3C, ...), whose rows are all queries, all keys and all values, to ``query_key_value``, whose rows are
    ordered by head."""
    attentions = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    found = {}
    for name, rows in weights.items():
        attention = attentions.get(name.rpartition(".qkv.")[0])
        if attention is not None:
            name = name.replace(".qkv.", ".query_key_value.")
            if len(rows) % (3 * attention.heads) == 0:  # another size is refused by its shape
                rows = rows.unflatten(0, (3, attention.heads, -1)).transpose(0, 1).flatten(0, 2)
        found[name] = rows
    return found


def _fitted(weights: Weights, model: nn.Module) -> Weights:
    """The weights, adapted to the model.

    ViT: positions are resized to its image size and class token. Text: the first positions are used for shorter sequences, and
    words that were added to the vocabulary, such as special tokens, keep the model's values.
    RoBERTa: norms of a post-norm model are moved to where a pre-norm or reversible one has them.
    """
    own = dict(model.named_parameters())
    if isinstance(model, RoBERTa) and "embedding.norm.weight" in weights and "embedding.norm.weight" not in own:
        weights = _pre_norm(weights)
    for name in (WORD, WORD_BIAS):
        if name in weights and name in own and len(weights[name]) < len(own[name]):
            added = own[name].detach()[len(weights[name]) :]
            if added.shape[1:] == weights[name].shape[1:]:
                weights = weights | {name: torch.cat((weights[name], added.to(weights[name])))}
    if POSITION not in weights or POSITION not in own:
        return weights
    if isinstance(model, ViT):
        tokens = ("embedding.class_token" in each for each in (weights, own))
        return weights | {POSITION: resized_positions(weights[POSITION], own[POSITION].detach(), *tokens)}
    return weights | {POSITION: weights[POSITION][: len(own[POSITION])]}


def _pre_norm(weights: Weights) -> Weights:
    """Moves the norms of a post-norm RoBERTa to where a pre-norm one has them.

    In post-norm, the input of a branch is the output of the norm after the previous branch: for attention in block i, the norm
    of block i - 1's MLP (in the first block, the embedding's); for the MLP, the norm of the attention in its block. So each
    branch takes over that norm as its own, and the last norm becomes the final one. Every branch then reads inputs that are
    normalised as in training.

    The outputs still differ: post-norm also normalises the residual stream, so the stream is small again after every branch,
    while in pre-norm it grows and the share of each branch differs. The weights are a start for fine-tuning.
    """
    moved = {"embedding.norm.": "blocks.blocks.0.f.norm."}
    found = (re.match(r"blocks\.blocks\.(\d+)\.[fg]\.norm\.", name) for name in weights)
    blocks = {int(each[1]) for each in found if each}
    for block in blocks:
        moved[f"blocks.blocks.{block}.f.norm."] = f"blocks.blocks.{block}.g.norm."
        moved[f"blocks.blocks.{block}.g.norm."] = f"blocks.blocks.{block + 1}.f.norm."
    moved[f"blocks.blocks.{max(blocks, default=0)}.g.norm."] = "norm."
    return {
        next((new + name.removeprefix(old) for old, new in moved.items() if name.startswith(old)), name): tensor
        for name, tensor in weights.items()
    }
