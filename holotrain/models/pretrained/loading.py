"""Loads weights into a model, and reports what was loaded."""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from holotrain.models.gpt import GPT
from holotrain.models.layers.attention import order_by_head
from holotrain.models.mvit import MViT
from holotrain.models.pretrained import huggingface_gpt2, huggingface_roberta, ours, timm_mvit, timm_swin, timm_vit
from holotrain.models.pretrained.fitting import fitted
from holotrain.models.roberta import RoBERTa
from holotrain.models.swin import Swin
from holotrain.models.vit import ViT


@dataclass(frozen=True)
class Source:
    """A kind of weights.

    Args:
        name: for messages.
        recipe: a module with the functions ``recognises`` and ``renamed``.
        model: the class of the models, plain and reversible, that they are for.
    """

    name: str
    recipe: ModuleType
    model: type[nn.Module]


SOURCES = (
    Source("a timm ViT", timm_vit, ViT),
    Source("a timm Swin", timm_swin, Swin),
    Source("a timm MViTv2", timm_mvit, MViT),
    Source("a Hugging Face RoBERTa", huggingface_roberta, RoBERTa),
    Source("a Hugging Face GPT-2", huggingface_gpt2, GPT),
    Source("a holotrain model", ours, nn.Module),
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
        parts = {
            "new": (*self.missing, *self.head),
            "left out": self.unexpected,
            "of another size, fitted": self.resized,
        }
        said = [f"{name}: {', '.join(sorted(names))}" for name, names in parts.items() if names]
        return "; ".join([f"{len(self.loaded)} tensors of {self.source}", *said])


def load_pretrained(model: nn.Module, weights: dict[str, Tensor]) -> Loaded:
    """Loads weights of its family into a model, in place. Add adapters afterwards.

    The branches of plain and reversible models have the same names, so each can load the weights of the other. A head is loaded
    completely or, if any part of it has another shape, not at all.

    Raises:
        ValueError: the weights are of an unknown source or of another family, a tensor outside the head has another shape, or
            fewer than half of the parameters fit. The model is then unchanged.
    """
    source = _source(weights)
    if not isinstance(model, source.model):
        raise ValueError(f"these weights are for {source.name}; the model is a {type(model).__name__}")
    own = dict(model.named_parameters())
    renamed = source.recipe.renamed(weights)
    order_by_head(renamed, model)
    given = fitted(renamed, model)
    head = [name for name in own if name.startswith("head.")]
    if _shapes(own, head) == _shapes(given, [name for name in given if name.startswith("head.")]):
        head = []
    loaded = [name for name in own if name in given and name not in head]
    strange = [name for name in given if name not in own and name.startswith("embedding.")]
    if source.recipe is ours and strange:
        raise ValueError(f"these weights are of another family than {type(model).__name__}, which has no {strange[0]}")
    for name in loaded:
        if given[name].shape != own[name].shape:
            there, here = tuple(given[name].shape), tuple(own[name].shape)
            raise ValueError(f"these weights are of another size: {name} is {there} there and {here} in this model")
    # Blocks of all families have the same names, so the embedding of ours decides. A user's model may have none.
    embedding = {name for name in own if name.startswith("embedding.")}
    if 2 * len(loaded) < len(own) or (embedding and embedding.isdisjoint(loaded)):
        raise ValueError(
            f"these weights, of {source.name}, do not fit: {len(loaded)} of the {len(own)} parameters of this "
            f"{type(model).__name__} are among them"
        )
    with torch.no_grad():
        for name in loaded:
            own[name].copy_(given[name])
    return Loaded(
        source=source.name,
        loaded=tuple(loaded),
        missing=tuple(name for name in own if name not in given and name not in head),
        unexpected=tuple(name for name in given if name not in own),
        head=tuple(head),
        resized=tuple(name for name in loaded if name in renamed and renamed[name].shape != given[name].shape),
    )


def _source(weights: dict[str, Tensor]) -> Source:
    for source in SOURCES:
        if source.recipe.recognises(weights):
            return source
    known, first = ", ".join(source.name for source in SOURCES), next(iter(weights), "nothing")
    raise ValueError(f"these weights are of no known model ({known}); the first tensor is {first}")


def _shapes(tensors: dict[str, Tensor], names: list[str]) -> dict[str, torch.Size]:
    return {name: tensors[name].shape for name in names}
