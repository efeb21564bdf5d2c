"""Makes a model by the full name of its class."""

from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from holotrain.targets import TARGET, instantiate, is_defined_in, missing_package, targets

SPARE = 1000
"""Numbers that the parameters of a model may have beyond twice those of its file."""

MOST_TENSORS = 20_000
"""Parameters that a model may have, counted as tensors: many times those of any model, and few enough to be counted soon."""


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


@contextmanager
def limited() -> Generator[None]:
    """Within it, making a module fails as soon as it has more than ``MOST_TENSORS`` parameters.

    Raises:
        ValueError: it has more, or an allocation on the CPU failed.
    """
    tensors = 0

    def count(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        nonlocal tensors
        tensors += 1
        if tensors > MOST_TENSORS:
            raise ValueError(f"it has more than {MOST_TENSORS} tensors of parameters; give it fewer blocks")

    hook = register_module_parameter_registration_hook(count)
    try:
        with allocated():
            yield
    finally:
        hook.remove()


def build(
    target: str,
    arguments: dict[str, Any],
    trust: Collection[str] = (),
    vouched: Collection[tuple[str, str]] = (),
    weights: Mapping[str, Tensor] | None = None,
) -> nn.Module:
    """A newly initialised model.

    Args:
        target: full name of the class, such as ``holotrain.models.RevViT``.
        arguments: those of the class; a mapping with ``_target_`` among them stands for what it names.
        trust: packages whose own classes and functions may be called, in addition to holotrain's models.
        vouched: pairs of a place, as :func:`~holotrain.targets.targets` gives it, and a name that may be called there.
        weights: those that it is to hold; a model of holotrain's that is much larger is not built.

    Raises:
        ValueError: a class that is not trusted or does not exist, invalid arguments, or a model that is too large.
    """
    named = {TARGET: target, **arguments}
    for where, each in targets(named):
        if not isinstance(each, str):
            raise ValueError("the name of a class in it is not a string")
        if missing := missing_package(each):
            raise ValueError(f"{each} is needed, and {missing}")
        if (where, each) not in vouched and not _is_ours(each) and not is_defined_in(each, trust):
            raise ValueError(f"{each} is not a model of holotrain; to trust its package, pass trust={each.partition('.')[0]!r}")
    if weights is not None and _is_ours(target):  # others may need the values of tensors
        with torch.device("meta"), limited():
            parameters = sum(parameter.numel() for parameter in instantiate(named).parameters())
        if parameters > 2 * sum(tensor.numel() for tensor in weights.values()) + SPARE:
            raise ValueError("it has more parameters than its weights")
    with limited():
        model = instantiate(named)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{target} is not a torch.nn.Module; calling it gives {type(model).__name__}")
    return model


def _is_ours(target: str) -> bool:
    from holotrain import models

    package, _, name = target.rpartition(".")
    found = getattr(models, name, None)
    return package == models.__name__ and name in models.__all__ and isinstance(found, type) and issubclass(found, nn.Module)
