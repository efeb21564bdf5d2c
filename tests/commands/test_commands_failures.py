"""What allocators say when memory runs out."""

import pytest
import torch

from holotrain.commands.failures import OutOfMemory, as_out_of_memory


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="mat1 and mat2"), as_out_of_memory():
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")


def test_the_cpu_allocators_own_words():
    with pytest.raises(OutOfMemory, match="MiB"), as_out_of_memory():
        torch.empty(2**60, dtype=torch.uint8)
