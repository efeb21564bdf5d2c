"""What is advised where memory ran out is a configuration that can be had."""

import pytest
import torch

from holotrain import compose
from holotrain.commands.memory_limits import OutOfMemory, as_out_of_memory, rules


@pytest.mark.parametrize(
    "overrides, first, count",
    [
        (["backward=autograd"], "backward=reversible", 3),
        (["backward=auto"], "backward=reversible", 3),
        (["model=vit_small", "backward=auto"], "backward=checkpoint", 4),
        (["backward=reversible", "backward.store=2"], "backward.store=0", 3),
        (["backward=pareprop", "backward.keep=[attention]"], "backward.keep=[]", 3),
        (["backward=reversible"], "trainer.precision=bf16-mixed", 2),
        (["backward=reversible", "trainer.precision=bf16-mixed"], "data.batch_size=16 trainer.accumulate_grad_batches=2", 1),
        (
            ["trainer.precision=bf16-mixed", "optimizer.in_backward=true", "trainer.gradient_clip_val=null"],
            "data.batch_size=16 (half",
            1,
        ),
        (["backward=reversible", "trainer.precision=bf16-mixed", "data.batch_size=1"], None, 0),
        (["model=vit_small", "backward=autograd"], "backward=checkpoint", 4),
        (["model=vit_small", "backward=checkpoint"], "model=rev_...", 3),
        (["task=masked_lm", "trainer.precision=bf16-mixed"], "data.max_tokens=4096 trainer.accumulate_grad_batches=2", 1),
    ],
)
def test_rules(overrides, first, count):
    given = rules(compose("fit", overrides))
    assert len(given) == count
    if given:
        assert given[0].startswith(first)
    for line in given:
        words = line.partition(" (")[0].split()
        if "..." not in line:
            followed = dict(word.split("=", 1) for word in [*overrides, *words])
            assert rules(compose("fit", [f"{option}={value}" for option, value in followed.items()])) != given


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
