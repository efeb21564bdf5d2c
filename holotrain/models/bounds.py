"""The size of a model, before it is built: its weights must fit into the memory of this machine, and be those of its file."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import Tensor, nn
from torch.nn.modules.module import register_module_buffer_registration_hook, register_module_parameter_registration_hook
from torch.utils.weak import WeakTensorKeyDictionary

from holotrain.planning.planner import free_memory
from holotrain.sizes import in_words

SPARE = 1000
"""Parameters, and numbers in them, that a class may make and replace while it is built, beside as many as it keeps."""

MOST_TENSORS = 20_000
"""Parameters that a model may have, counted as tensors: many times those of any model, and few enough to be counted soon."""

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
def bounded(weights: Mapping[str, Tensor] | None = None, any_machine: bool = False) -> Iterator[None]:
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
