"""Makes a model by the full name of its class."""

from collections.abc import Collection, Generator
from contextlib import contextmanager
from typing import Any

from torch import nn

from holotrain.targets import TARGET, instantiate, is_defined_in, missing_package, targets


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
        if (where, each) not in vouched and not _is_ours(each) and not is_defined_in(each, trust):
            raise ValueError(f"{each} is not a model of holotrain; to trust its package, pass trust={each.partition('.')[0]!r}")
    with allocated():
        model = instantiate(named)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{target} is not a torch.nn.Module; calling it gives {type(model).__name__}")
    return model


def _is_ours(target: str) -> bool:
    from holotrain import models

    package, _, name = target.rpartition(".")
    found = getattr(models, name, None)
    return package == models.__name__ and name in models.__all__ and isinstance(found, type) and issubclass(found, nn.Module)
