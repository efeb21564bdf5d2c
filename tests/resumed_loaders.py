"""The batches of some epochs of a loader, and whether another loader continues where it stopped."""

import json

import torch
from torch.utils._pytree import tree_leaves


def begin(loader, epoch) -> None:
    """As Lightning does before an epoch."""
    getattr(loader, "batch_sampler", loader).set_epoch(epoch)


def stream(loader, epochs=(0, 1)) -> list:
    """All batches of some epochs."""
    batches = []
    for epoch in epochs:
        begin(loader, epoch)
        batches += loader
    return batches


def same(left, right) -> bool:
    """Whether all tensors are equal bit for bit."""
    left, right = tree_leaves(left), tree_leaves(right)
    return len(left) == len(right) and all(map(torch.equal, left, right))


def assert_resumes(loader, workers, positions, epochs=(0, 1)) -> None:
    """Stopped in the first of some epochs and resumed, it gives the batches of one without workers that was not stopped.

    Args:
        loader: function of the number of workers that returns a new one.
        positions: batches before the stop.
    """
    reference = stream(loader(0), epochs)
    for position in positions:
        first, second = loader(workers), loader(workers)
        begin(first, epochs[0])
        iterator = iter(first)
        head = [next(iterator) for _ in range(position)]
        state = first.state_dict()
        assert (state["epoch"], state["batches"]) == (epochs[0], position)
        second.load_state_dict(json.loads(json.dumps(state)))  # plain containers
        assert second.state_dict() == state
        assert same(head + stream(second, epochs), reference)
