"""Makes a model by the full name of its class, if its weights fit into the memory of this machine and are those of its file."""

from collections.abc import Collection, Generator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from holotrain.numeric import in_words
from holotrain.planning.planner import free_memory
from holotrain.targets import TARGET, instantiate, is_defined_in, missing_package, targets

SPARE = 1000
"""Parameters, and numbers in them, that a class may make and replace while it is built, beside as many as it keeps."""

MOST_TENSORS = 20_000
"""Parameters that a model may have, counted as tensors: many times those of any model, and few enough to be counted soon."""

COUNTED = 2000
"""Parameters that are counted on the meta device, where they take no memory, to tell the whole size."""


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
def bounded(weights: Mapping[str, Tensor] | None = None, any_machine: bool = False) -> Generator[None]:
    """Within it, the making of a module ends as soon as it has more than ``MOST_TENSORS`` parameters, or its parameters and
    buffers exceed the free memory of this machine. A tensor in several places counts once.

    Args:
        weights: those that the module is to hold; it is not to have more parameters than them either.
        any_machine: it may need more memory than this machine has.

    Raises:
        ValueError: it has more, or needs more memory.
    """
    memory, taken, tensors, numbers = None if any_machine else free_memory("cpu"), 0, 0, 0
    seen = WeakTensorKeyDictionary()
    of_file = 0 if weights is None else sum(tensor.numel() for tensor in weights.values())

    def require_memory(more: str) -> None:
        if memory is not None and taken > memory:
            raise ValueError(f"its weights take {in_words(taken)}{more}, and this machine has {in_words(memory)} left")

    def measure(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal taken, tensors, numbers
        if tensor is None or tensor in seen:
            return
        seen[tensor] = None
        taken += tensor.nbytes
        if isinstance(tensor, nn.Parameter):
            tensors, numbers = tensors + 1, numbers + tensor.numel()
        if weights is not None and (tensors > 2 * len(weights) + SPARE or numbers > 2 * of_file + SPARE):
            raise ValueError(f"it has more parameters than the {len(weights)} tensors of its weights")
        if tensors > MOST_TENSORS:
            raise ValueError(f"it has more than {MOST_TENSORS} tensors of parameters; give it fewer blocks")
        if tensors > COUNTED or not tensor.is_meta:
            require_memory(" or more")

    with ExitStack() as stack:
        stack.enter_context(allocated())
        for register in (register_module_parameter_registration_hook, register_module_buffer_registration_hook):
            stack.callback(register(measure).remove)
        yield
        require_memory("")


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
        weights: those that it is to hold; what is larger is not built.

    Raises:
        ValueError: a class that is not trusted or does not exist, invalid arguments, or a model that is too large for this
            machine.
    """
    named = {TARGET: target, **arguments}
    for where, each in targets(named):
        if not isinstance(each, str):
            raise ValueError("the name of a class in it is not a string")
        if missing := missing_package(each):
            raise ValueError(f"{each} is needed, and {missing}")
        if (where, each) not in vouched and not _is_ours(each) and not is_defined_in(each, trust):
            raise ValueError(f"{each} is not a model of holotrain; to trust its package, pass trust={each.partition('.')[0]!r}")
    if _is_ours(target):  # others may need the values of tensors
        with torch.device("meta"), bounded(weights):
            instantiate(named)
    with bounded(weights):
        model = instantiate(named)
    if not isinstance(model, nn.Module):
        raise ValueError(f"{target} is not a torch.nn.Module; calling it gives {type(model).__name__}")
    return model


def _is_ours(target: str) -> bool:
    from holotrain import models

    package, _, name = target.rpartition(".")
    found = getattr(models, name, None)
    return package == models.__name__ and name in models.__all__ and isinstance(found, type) and issubclass(found, nn.Module)
