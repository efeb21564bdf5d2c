"""Weights into a model, with an account of what went where."""

from dataclasses import dataclass
from types import ModuleType

import torch
from torch import Tensor, nn

from holotrain.models.gpt import GPT
from holotrain.models.mvit import MViT
from holotrain.models.pretrained import huggingface_gpt2, huggingface_roberta, ours, timm_mvit, timm_swin, timm_vit
from holotrain.models.pretrained.fitting import fitted
from holotrain.models.roberta import RoBERTa
from holotrain.models.swin import Swin
from holotrain.models.vit import ViT


@dataclass(frozen=True)
class Source:
    """Where weights come from.

    Args:
        name: for people.
        recipe: a module that ``recognises`` such weights and gives them as ``renamed``.
        model: the class of models, plain and reversible, that they are for.
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
    """What became of each tensor, by our names.

    Args:
        source: whose weights they are.
        loaded: what the model took over.
        missing: what the weights lack, so that it stays as initialised, such as a reversible model's fusions.
        unexpected: what the model has no place for.
        head: the model's head, where it stays as initialised, since the weights have none or another: of other classes, of
            another width.
        resized: what was loaded in another size: positions of another image size, or of shorter texts.
    """

    source: str
    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    head: tuple[str, ...]
    resized: tuple[str, ...]

    def __str__(self) -> str:
        """For people: how many tensors were taken over, and by name the rest, a whole module by its own."""
        parts = {
            "new": (*self.missing, *self.head),
            "left out": self.unexpected,
            "of another size, fitted": self.resized,
        }
        said = [f"{name}: {', '.join(sorted(names))}" for name, names in parts.items() if names]
        return "; ".join([f"{len(self.loaded)} tensors of {self.source}", *said])


def load_pretrained(model: nn.Module, weights: dict[str, Tensor]) -> Loaded:
    """Gives a model weights of its family, in place; adapters are to be added afterwards.

    The branches of plain and reversible models have the same names, so each takes the weights of the other. A head is taken
    over whole or, where any of it has another shape, not at all.

    Raises:
        ValueError: weights of an unknown source or of another family; a tensor of another shape, outside the head; hardly
            anything fits. The model is then as it was.
    """
    source = _source(weights)
    if not isinstance(model, source.model):
        raise ValueError(f"these weights are of {source.name}; the model is a {type(model).__name__}")
    own = dict(model.named_parameters())
    renamed = source.recipe.renamed(weights)
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
    # Blocks of all families have the same names, so it is the embedding that tells whether weights of ours fit.
    if 2 * len(loaded) < len(own) or not any(name.startswith("embedding.") for name in loaded):
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
    raise ValueError(f"these weights are of no model that is known here ({known}); they begin with {first}")


def _shapes(tensors: dict[str, Tensor], names: list[str]) -> dict[str, torch.Size]:
    return {name: tensors[name].shape for name in names}
