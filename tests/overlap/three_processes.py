"""One of three gloo processes: linear layers with an all-to-all compared with one process that has everything, in fp64.

    python three_processes.py RANK STORE RESULTS

Not a test by itself: test_overlap_exchange.py starts it three times and reads what rank 0 wrote.
"""

from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from gloo_pair import find_as_one_of_them
from torch.nn.functional import linear
from two_processes import Log, everywhere, leaf, order_of, random, share, uneven, worst

from holotrain.overlap import Columns, Tuner, all_to_all_linear, linear_all_to_all

RANKS, INPUTS, OUTPUTS = 3, 6, 9
SPLITS = {
    "even": [[2, 2, 2]] * RANKS,
    "uneven": [[1, 4, 2], [3, 0, 1], [0, 5, 2]],
    "even from one rank": [[2, 2, 2], [1, 4, 2], [3, 0, 1]],
    "to one rank": [[4, 0, 0], [1, 0, 0], [3, 0, 0]],
    "nothing": [[0, 0, 0]] * RANKS,
}
"""Rows that each rank (first index) sends to each rank."""

KINDS = {"linear, all-to-all": linear_all_to_all, "all-to-all, linear": all_to_all_linear}


GROUPS = {"1": 1, "2": 2, "7": 7, "chosen": uneven, "columns": Columns(2)}


def exchanged(tensors: list[torch.Tensor], splits: list[list[int]]) -> list[torch.Tensor]:
    """What each rank has after an all-to-all."""
    parts = [tensor.split(sizes) for tensor, sizes in zip(tensors, splits, strict=True)]
    return [torch.cat([sent[rank] for sent in parts]) for rank in range(RANKS)]


def rows_error(kind: str, splits: list[list[int]], middle: tuple[int, ...], groups, rank: int, told: bool = True) -> float:
    xs = [leaf(random(sum(sizes), *middle, INPUTS, seed=i)) for i, sizes in enumerate(splits)]
    weights = [leaf(random(OUTPUTS, INPUTS, seed=10 + i)) for i in range(RANKS)]
    biases = [leaf(random(OUTPUTS, seed=20 + i)) for i in range(RANKS)]
    own = [leaf(tensors[rank].detach()) for tensors in (xs, weights, biases)]
    first = exchanged(xs, splits) if kind == "all-to-all, linear" else xs
    results = [linear(x, weight, bias) for x, weight, bias in zip(first, weights, biases, strict=True)]
    if kind == "linear, all-to-all":
        results = exchanged(results, splits)
    grads = [random(*result.shape, seed=30 + i) for i, result in enumerate(results)]
    torch.autograd.backward(results, grads)
    sizes = {"input_split_sizes": splits[rank], "output_split_sizes": [sent[rank] for sent in splits]} if told else {}
    y = KINDS[kind](*own, group=dist.group.WORLD, groups=groups, **sizes)
    y.backward(grads[rank])
    pairs = [(y, results[rank])]
    pairs += [(mine.grad, whole[rank].grad) for mine, whole in zip(own, (xs, weights, biases), strict=True)]
    return everywhere(worst(pairs))


def sequence_error(kind: str, shape: tuple[int, ...], dim: int, groups, rank: int) -> float:
    x, weight, bias = leaf(random(*shape, INPUTS)), leaf(random(OUTPUTS, INPUTS, seed=1)), leaf(random(OUTPUTS, seed=2))
    whole = linear(x, weight, bias)
    grad = random(*whole.shape, seed=3)
    whole.backward(grad)
    before, after = (dim, -1) if kind == "linear, all-to-all" else (-1, dim)
    own = [leaf(tensor.detach()) for tensor in (share(x, before, rank), weight, bias)]
    length = {"length": shape[dim]} if kind == "linear, all-to-all" else {}
    y = KINDS[kind](*own, group=dist.group.WORLD, groups=groups, sequence_dim=dim, **length)
    y.backward(share(grad, after, rank))
    for tensor in own[1:]:
        dist.all_reduce(tensor.grad)  # each rank multiplied its own part of the sequence
    pairs = [(y, share(whole, after, rank)), (own[0].grad, share(x.grad, before, rank))]
    pairs += [(own[1].grad, weight.grad), (own[2].grad, bias.grad)]
    return everywhere(worst(pairs))


SEQUENCES = [((6,), 0), ((7,), 0), ((2, 4), 1), ((5, 2), 0), ((2, 6, 2), 1), ((1,), 0)]


def tuned(rank: int) -> dict[str, object]:
    """Ranks with different numbers of rows choose alike."""
    with TemporaryDirectory() as folder:
        tuner = Tuner(Path(folder))
        error = max(rows_error(kind, SPLITS["uneven"], (), tuner, rank) for kind in KINDS)
        met = sorted({(job.collective, job.rows, job.covered, job.before) for job, _ in tuner.tuned})
    return {"error": error, "met": met}


def order(kind: str) -> dict[str, list[str]]:
    return order_of(lambda: KINDS[kind](*(leaf(random(n, INPUTS)) for n in (9, OUTPUTS)), group=dist.group.WORLD, groups=3))


def in_part(kind: str) -> dict[str, list[str]]:
    """What runs in the backward if one gradient alone is needed."""
    orders = {}
    for needed in ("x", "weight", "bias"):
        tensors = {"x": random(3, INPUTS), "weight": random(OUTPUTS, INPUTS), "bias": random(OUTPUTS)}
        tensors[needed].requires_grad_()
        y = KINDS[kind](**tensors, group=dist.group.WORLD, groups=1)
        with Log() as log:
            y.backward(torch.ones_like(y))
        orders[needed] = log.order if tensors[needed].grad.shape == tensors[needed].shape else []
    return orders


def find(rank: int) -> dict:
    return {
        "rows": {
            f"{kind}, {name}, {middle}, groups {label}": rows_error(kind, splits, middle, groups, rank)
            for kind in KINDS
            for name, splits in SPLITS.items()
            for middle in ((), (2,))
            for label, groups in GROUPS.items()
        },
        "untold": {kind: rows_error(kind, SPLITS["even"], (), 2, rank, told=False) for kind in KINDS},
        "sequence": {
            f"{kind}, {shape} along {dim}, groups {label}": sequence_error(kind, shape, dim, groups, rank)
            for kind in KINDS
            for shape, dim in SEQUENCES
            for label, groups in GROUPS.items()
        },
        "tuned": tuned(rank),
        "orders": {kind: order(kind) for kind in KINDS},
        "in part": {kind: in_part(kind) for kind in KINDS},
    }


if __name__ == "__main__":
    find_as_one_of_them(find)
