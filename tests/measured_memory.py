"""The peak of a training step on real tensors, for tests and for the benches."""

import gc
from collections.abc import Callable
from itertools import chain

import torch

from holotrain.planning import TrainingStep


def measured_peak(step: TrainingStep, device: torch.device) -> int:
    """Returns the peak bytes of one step on real tensors; on a CPU as PyTorch's allocator reports them to the profiler."""

    def begin() -> None:
        step.begin()
        step.update()

    def one_step() -> None:
        step.differentiate()
        step.update()

    if device.type == "cuda":
        begin()
        return torch.cuda.memory_allocated(device) + peak_of(one_step, device)
    tensors = [*step.model.parameters(), *step.model.buffers(), *chain.from_iterable(step.held.values())]
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    # With the first update, because the profiler does not see that earlier allocations are freed.
    return sum(storages.values()) + peak_of(lambda: (begin(), one_step()), device)


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
