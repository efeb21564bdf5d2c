"""The size of a model, before it is built: its weights must fit into the memory of this machine, and be those of its file."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook

from holotrain.planning.budget import free_memory
from holotrain.sizes import in_words

SPARE = 1000
"""Parameters, and numbers in them, that a class may make and replace while it is built, beside as many as it keeps."""

COUNTED = 2000
"""Parameters that are counted on the meta device, where they take no memory, to tell the whole size."""


@contextmanager
def allocated() -> Iterator[None]:
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
def bounded(weights: Mapping[str, Tensor] | None = None) -> Iterator[None]:
    """Within it, the making of a module ends as soon as its parameters and buffers exceed the free memory of this machine.

    Args:
        weights: those that the module is to hold; it is not to have more parameters than them either.

    Raises:
        ValueError: it has more, or needs more memory.
    """
    memory, taken, tensors, numbers = free_memory("cpu"), 0, 0, 0
    of_file = 0 if weights is None else sum(tensor.numel() for tensor in weights.values())

    def require_memory(more: str) -> None:
        if memory is not None and taken > memory:
            raise ValueError(f"its weights take {in_words(taken)}{more}, and this machine has {in_words(memory)} left")

    def measure(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal taken
        if tensor is not None:
            taken += tensor.nbytes
            if tensors > COUNTED or not tensor.is_meta:
                require_memory(" or more")

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal tensors, numbers
        tensors, numbers = tensors + 1, numbers + (0 if tensor is None else tensor.numel())
        if weights is not None and (tensors > 2 * len(weights) + SPARE or numbers > 2 * of_file + SPARE):
            raise ValueError(f"it has more parameters than the {len(weights)} tensors of its weights")

    with ExitStack() as stack:
        stack.enter_context(allocated())
        for register, hook in (
            (register_module_parameter_registration_hook, count),
            (register_module_parameter_registration_hook, measure),
            (register_module_buffer_registration_hook, measure),
        ):
            stack.callback(register(hook).remove)
        yield
        require_memory("")
