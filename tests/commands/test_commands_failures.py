"""What allocators say when memory runs out."""

import pytest
import torch

from holotrain.commands.failures import OutOfMemory, as_out_of_memory


@pytest.mark.parametrize(
    "error, asked_for",
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has ..."), "20.00 MiB"),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
                      "allocate 2097152 bytes. Error code 12 (Cannot allocate memory)"), "2.0 MiB"),
        (MemoryError("Unable to allocate 1.50 GiB for an array with shape (3,)"), "1.50 GiB"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), ""),
        (MemoryError(), ""),
    ],
)  # fmt: skip
def test_what_allocators_say(error, asked_for):
    with pytest.raises(OutOfMemory) as refusal, as_out_of_memory():
        raise error
    assert str(refusal.value) == asked_for


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="mat1 and mat2"), as_out_of_memory():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_the_cpu_allocators_own_words():
    with pytest.raises(OutOfMemory, match="MiB"), as_out_of_memory():
        torch.empty(2**60, dtype=torch.uint8)
