"""Measures the memory of a real step, as PyTorch's allocators report it, to compare it with a plan."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from holotrain.planning.rehearsal import TrainingStep


def measured_peak(step: TrainingStep, device: torch.device) -> int:
    """Returns the peak bytes of one step on real tensors; on a CPU as PyTorch's allocator reports them to the profiler."""
    if device.type == "cuda":
        _begin(step)
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        _run(step)
        return torch.cuda.max_memory_allocated(device)

    def whole() -> None:
        _begin(step)  # inside, because the profiler does not see that earlier allocations are freed
        _run(step)

    return sum(_storages(step).values()) + peak_of(whole, device)


def peak_of(work: Callable[[], object], device: torch.device) -> int:
    """Returns the bytes at the peak of what ``work`` allocates, without what was allocated before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    gc.collect()  # what is freed within counts, also what was allocated before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def _begin(step: TrainingStep) -> None:
    step.begin()
    step.update()


def _run(step: TrainingStep) -> None:
    step.differentiate()
    step.update()


def _storages(step: TrainingStep) -> dict[int, int]:
    """The bytes of what was allocated before the step, by storage."""
    tensors = [*step.model.parameters(), *step.model.buffers()]
    tensors += [tensor for held in step.held.values() for tensor in held]
    return {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
