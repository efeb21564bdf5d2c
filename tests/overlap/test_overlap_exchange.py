"""Linear layers with an all-to-all on two to four gloo processes against one, in fp64. As a script, this is one of them."""

from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from emulated_collectives import EmulatedCollectives
from gloo_pair import find_as_one_of_them, found_by_processes
from torch.nn.functional import linear

from holotrain.overlap import all_to_all_linear, linear_all_to_all
from holotrain.overlap.groups import Columns
from holotrain.overlap.predictor import Link
from holotrain.overlap.tuner import Tuner

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from layer_cases import INPUTS, leaf, random, share, uneven, worst

UNEVEN = [[1, 4, 2, 0], [3, 0, 1, 2], [0, 5, 2, 1], [2, 1, 0, 3]]


def splits_of(ranks: int) -> dict[str, list[list[int]]]:
    """Rows that each rank (first index) sends to each rank."""
    uneven = [row[:ranks] for row in UNEVEN[:ranks]]
    return {
        "even": [[2] * ranks] * ranks,
        "uneven": uneven,
        "even from one rank": [[2] * ranks, *uneven[:-1]],
        "to one rank": [[rows] + [0] * (ranks - 1) for rows in (4, 1, 3, 2)[:ranks]],
        "nothing": [[0] * ranks] * ranks,
    }


SEQUENCES = [((6,), 0), ((7,), 0), ((2, 4), 1), ((5, 2), 0), ((2, 6, 2), 1), ((1,), 0)]
KINDS = {"linear, all-to-all": linear_all_to_all, "all-to-all, linear": all_to_all_linear}
GROUPINGS = (1, 2, 7, uneven, Columns(2))


def exchanged(tensors: list[torch.Tensor], splits: list[list[int]]) -> list[torch.Tensor]:
    """What each rank has after an all-to-all."""
    parts = [tensor.split(sizes) for tensor, sizes in zip(tensors, splits, strict=True)]
    return [torch.cat([sent[rank] for sent in parts]) for rank in range(len(tensors))]


def rows_error(kind: str, splits: list[list[int]], middle: tuple[int, ...], groups, told: bool = True) -> float:
    rank, outputs = dist.get_rank(), 3 * dist.get_world_size()
    xs = [leaf(random(sum(sizes), *middle, INPUTS, seed=i)) for i, sizes in enumerate(splits)]
    weights = [leaf(random(outputs, INPUTS, seed=10 + i)) for i in range(len(splits))]
    biases = [leaf(random(outputs, seed=20 + i)) for i in range(len(splits))]
    own = [leaf(tensors[rank]) for tensors in (xs, weights, biases)]
    first = exchanged(xs, splits) if kind == "all-to-all, linear" else xs
    results = [linear(x, weight, bias) for x, weight, bias in zip(first, weights, biases, strict=True)]
    if kind == "linear, all-to-all":
        results = exchanged(results, splits)
    grads = [random(*result.shape, seed=30 + i) for i, result in enumerate(results)]
    torch.autograd.backward(results, grads)
    sizes = {"input_split_sizes": splits[rank], "output_split_sizes": [sent[rank] for sent in splits]} if told else {}
    y = KINDS[kind](*own, group=dist.group.WORLD, groups=groups, **sizes)
    y.backward(grads[rank])
    return worst(
        [(y, results[rank]), *((mine.grad, of[rank].grad) for mine, of in zip(own, (xs, weights, biases), strict=True))]
    )


def sequence_error(kind: str, shape: tuple[int, ...], dim: int, groups) -> float:
    inputs, outputs = 2 * dist.get_world_size(), 3 * dist.get_world_size()
    x, weight, bias = leaf(random(*shape, inputs)), leaf(random(outputs, inputs, seed=1)), leaf(random(outputs, seed=2))
    whole = linear(x, weight, bias)
    grad = random(*whole.shape, seed=3)
    whole.backward(grad)
    before, after = (dim, -1) if kind == "linear, all-to-all" else (-1, dim)
    own = [leaf(tensor) for tensor in (share(x, before), weight, bias)]
    length = {"length": shape[dim]} if kind == "linear, all-to-all" else {}
    y = KINDS[kind](*own, group=dist.group.WORLD, groups=groups, sequence_dim=dim, **length)
    y.backward(share(grad, after))
    for tensor in own[1:]:
        dist.all_reduce(tensor.grad)  # each rank multiplied its own part of the sequence
    of_parameters = [(own[1].grad, weight.grad), (own[2].grad, bias.grad)]
    return worst([(y, share(whole, after)), (own[0].grad, share(x.grad, before)), *of_parameters])


def find(rank: int) -> dict:
    all_splits = splits_of(dist.get_world_size())
    with TemporaryDirectory() as folder:
        tuner = Tuner(Path(folder))
        tuned = {kind: rows_error(kind, all_splits["uneven"], (), tuner) for kind in KINDS}
    errors = {
        "rows": {
            f"{kind}, {name}, {middle}, groups {groups}": rows_error(kind, splits, middle, groups)
            for kind in KINDS
            for name, splits in all_splits.items()
            for middle in ((), (2,))
            for groups in GROUPINGS
        },
        "without split sizes": {kind: rows_error(kind, all_splits["even"], (), 2, told=False) for kind in KINDS},
        "sequence": {
            f"{kind}, {shape} along {dim}, groups {groups}": sequence_error(kind, shape, dim, groups)
            for kind in KINDS
            for shape, dim in SEQUENCES
            for groups in GROUPINGS
        },
        "tuned": tuned,
    }
    return {"errors": errors}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return found_by_processes(Path(__file__), tmp_path_factory.mktemp("exchange"), 3)


@pytest.mark.slow
def test_four_processes_do_too(tmp_path):
    for part in found_by_processes(Path(__file__), tmp_path, 4)["errors"].values():
        assert part and {name: error for name, error in part.items() if not error <= 1e-12} == {}


@pytest.mark.parametrize(("part", "count"), [("rows", 100), ("without split sizes", 2), ("sequence", 60), ("tuned", 2)])
def test_outputs_and_gradients_equal_those_of_one_process(found, part, count):
    errors = found["errors"][part]
    assert len(errors) == count
    assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}


@pytest.mark.parametrize("run", KINDS.values())
@pytest.mark.parametrize(
    ("rows", "features", "options", "reason"),
    [
        (7, 6, {}, "7 rows cannot be split into"),
        (6, 6, {"input_split_sizes": [3, 3], "output_split_sizes": [3, 3]}, "cannot be split into .3, 3. for 3 ranks"),
        (6, 6, {"input_split_sizes": [1, 2, 2], "output_split_sizes": [1, 2, 2]}, "6 rows cannot be split"),
        (6, 6, {"input_split_sizes": [1, 2, 3]}, "must be given together"),
        (6, 6, {"sequence_dim": 0, "input_split_sizes": [2] * 3, "output_split_sizes": [2] * 3}, "split sizes are for rows"),
        (6, 4, {"sequence_dim": 0}, "4 features cannot be shared by 3 ranks"),
        (6, 6, {"sequence_dim": 1}, "other than the last of its 2, not 1"),
        (6, 6, {"groups": 0, "input_split_sizes": [2] * 3, "output_split_sizes": [2] * 3}, "groups must be 1 or more, not 0"),
    ],
)
def test_what_cannot_be_divided_is_refused(run, rows, features, options, reason):
    x, weight = torch.randn(rows, features), torch.randn(features, features)
    with pytest.raises(ValueError, match=reason):
        run(x, weight, group=EmulatedCollectives(Link(1e12, 0.0), 3), **options)


if __name__ == "__main__":
    find_as_one_of_them(find)
