"""Weights that a training starts from: copied into a model, with a report of what was taken over and what was not."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from holotrain.models.authors_weights import renamed
from holotrain.models.layers.patches import resized_positions
from holotrain.numeric import counted

Weights = dict[str, Tensor]

CLASS_TOKEN, POSITION = "embedding.class_token", "embedding.position"
OF_WORDS = ("embedding.word.weight", "head.bias")
"""Tensors with a row for each word of the vocabulary."""


@dataclass(frozen=True)
class Loaded:
    """A report of what happened to each tensor, by the names in the model.

    Args:
        source: what the weights are of.
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
    """Loads weights of a holotrain model, such as those of a checkpoint or an export, into one of its family, in place. The
    authors' weights of RevViT, RevMViT and RevSwin fit too (:mod:`holotrain.models.authors_weights`).

    The branches of plain and reversible models have the same names, so each can load the weights of the other. A head is loaded
    completely or, if any part of it has another shape, not at all. Positions are fitted to the model: those of images to its
    image size and class token, those of text are cut. Words that were added to the vocabulary keep the model's values.

    Raises:
        ValueError: the weights are of another family or library, a tensor outside the head has another shape, or fewer than
            half of the parameters fit. The model is then unchanged.
    """
    require_whole(weights)
    # Names in a checkpoint begin with that of the task's model. The step of an exact grid depends on the data.
    named = {name.removeprefix("model."): x for name, x in weights.items() if not name.endswith(".grid.step")}
    named = renamed(named, model)
    own = dict(model.named_parameters())
    here, there = ({name for name in names if name.startswith("embedding.")} for names in (own, named))
    if here and (here.isdisjoint(there) or there - here - {CLASS_TOKEN}):
        raise ValueError(
            f"these weights do not fit: their embedding is not that of a {type(model).__name__}; model=timm and "
            "model=huggingface take weights of other libraries"
        )
    fitted = named | _fitted(named, own)
    report = take_over(own, fitted, "a holotrain model", {name for name in (*own, *fitted) if name.startswith("head.")})
    return replace(report, resized=tuple(name for name in report.loaded if named[name].numel() != fitted[name].numel()))


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


def _fitted(weights: Weights, own: Mapping[str, Tensor]) -> Weights:
    """The weights whose sizes depend on that of images, texts or the vocabulary, in the model's own sizes where possible."""
    fitted = {}
    for name in (POSITION, *OF_WORDS):
        if name not in weights or name not in own:
            continue
        given, wanted = weights[name], own[name].detach()
        if name == POSITION and wanted.ndim > 2 and given.ndim > 2:  # of images; MViT's are a square
            patches = wanted.flatten(1, -2)
            resized = resized_positions(given.flatten(1, -2), patches, CLASS_TOKEN in weights, CLASS_TOKEN in own)
            fitted[name] = resized.view_as(wanted) if resized.shape == patches.shape else given
        elif given.ndim != wanted.ndim:
            continue
        elif name == POSITION:
            fitted[name] = given[: len(wanted)]
        elif len(given) < len(wanted) and given.shape[1:] == wanted.shape[1:]:
            fitted[name] = torch.cat((given, wanted[len(given) :].to(given)))
    return fitted
