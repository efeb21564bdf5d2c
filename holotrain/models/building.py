"""Makes a model by the full name of its class."""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from holotrain.targets import TARGET, instantiate, is_defined_in, missing_package, targets

GONE = ("reversible", "blocks")
"""Arguments of models of other libraries that older exports have, and that mattered in training alone."""


@contextmanager
def allocated() -> Generator[None]:
    """
    Raises:
        ValueError: an allocation within it failed on the CPU.
    """
    try:
        yield
    except RuntimeError as error:
        if not any(words in str(error) for words in ("can't allocate memory", "size calculation overflowed")):
            raise
        refused = str(error).strip().splitlines()[-1]
        raise ValueError(f"its weights do not fit into memory; holotrain plan shows their size ({refused})") from error


def build(
    target: str, arguments: dict[str, Any], trust: Collection[str] = (), vouched: Collection[tuple[str, str]] = ()
) -> nn.Module:
    """A newly initialised model.

    Args:
        target: full name of the class, such as ``holotrain.models.RevViT``.
        arguments: those of the class; a mapping with ``_target_`` among them stands for what it names.
        trust: packages whose own classes and functions may be called, in addition to holotrain's models.
        vouched: pairs of a place, as :func:`~holotrain.targets.targets` gives it, and a name that may be called there.

    Raises:
        ValueError: a class that is not trusted or does not exist, invalid arguments, or a model that is too large.
    """
    named = {TARGET: target, **arguments}
    for where, each in targets(named):
        if not isinstance(each, str):
            raise ValueError("the name of a class in it is not a string")
        if missing := missing_package(each):
            raise ValueError(f"{each} is needed, and {missing}")
        if (where, each) not in vouched and _our_class(each) is None and not is_defined_in(each, trust):
            raise ValueError(f"{each} is not a model of holotrain; to trust its package, pass trust={each.partition('.')[0]!r}")
    with allocated():
        model = instantiate(named)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{target} is not a torch.nn.Module; calling it gives {type(model).__name__}")
    return model


def build_for(
    weights: Mapping[str, Tensor],
    target: str,
    arguments: dict[str, Any],
    trust: Collection[str] = (),
    vouched: Collection[tuple[str, str]] = (),
) -> nn.Module:
    """What :func:`build` makes, for weights of a file beside its description.

    Raises:
        ValueError: as :func:`build`; a model of ours would be larger than its weights, and could take all memory.
    """
    from holotrain.models import ImageErrorDiffusion
    from holotrain.models.external import ExternalModel

    kind = _our_class(target) if isinstance(target, str) else None
    if kind is not None and issubclass(kind, ExternalModel):  # which its own library builds
        arguments = {name: value for name, value in arguments.items() if name not in GONE}
    elif kind is not None:
        if kind is not ImageErrorDiffusion:  # whose layers share a tensor
            _require_few_blocks(arguments, weights)
        with torch.device("meta"):
            tensors = build(target, arguments, trust, vouched).state_dict().values()
        numbers, size = sum(tensor.numel() for tensor in tensors), sum(tensor.nbytes for tensor in weights.values())
        if numbers > 2 * size:  # of 4 bits
            raise ValueError(f"it has {numbers} weights, and there are {size} bytes of them")
    return build(target, arguments, trust, vouched)


def _require_few_blocks(arguments: dict[str, Any], weights: Mapping[str, Tensor]) -> None:
    depths = arguments.get("depths", arguments.get("depth"))
    blocks = sum(each for each in (depths if isinstance(depths, list) else [depths]) if isinstance(each, int))
    if blocks > len(weights):
        raise ValueError(f"it has {blocks} blocks, and there are weights for {len(weights)} at most")


def _our_class(target: str) -> type[nn.Module] | None:
    """The model of holotrain, or its wrapper of one of another library, of this name; None: it is no such name."""
    from holotrain import models

    package, _, name = target.rpartition(".")
    found = getattr(models, name, None)
    is_ours = package == models.__name__ and name in models.__all__ and isinstance(found, type) and issubclass(found, nn.Module)
    return found if is_ours else None
