"""Overlapped linear layers on two gloo processes against plain ones, in fp64. As a script, this is one of the processes."""

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
import torch.distributed as dist
from gloo_pair import find_as_one_of_them, found_by_processes
from torch.nn.functional import linear

from holotrain.overlap import column_parallel_linear, row_parallel_linear
from holotrain.overlap.groups import Columns
from holotrain.overlap.tuner import Tuner

if not dist.is_available():
    pytest.skip("torch was built without distributed", allow_module_level=True)

from layer_cases import INPUTS, leaf, order_of, random, share, uneven, uneven_columns, worst
from styled_cases import STYLED

OUTPUTS = 10
RUNS = {"row": row_parallel_linear, "column": column_parallel_linear}
SHAPES = {"even": (8, INPUTS), "odd": (7, INPUTS), "one row": (1, INPUTS), "batches": (3, 5, INPUTS), "four": (2, 3, 2, INPUTS)}
GROUPINGS = (1, 3, 8, uneven, Columns(3), uneven_columns)


def linear_error(kind: str, shape: tuple[int, ...], groups, bias: bool, sequence_dim: int | None) -> float:
    x, weight, b = leaf(random(*shape)), leaf(random(OUTPUTS, INPUTS, seed=1)), leaf(random(OUTPUTS, seed=2))
    y = linear(x, weight, b if bias else None)
    grad = random(*y.shape, seed=3)
    y.backward(grad)
    # The dimension of each tensor that is shared out; None: none.
    last = len(shape) - 1
    x_dim, y_dim, w_dim, b_dim = (last, sequence_dim, 1, None) if kind == "row" else (sequence_dim, last, 0, 0)

    def mine(tensor, dim):
        return tensor if dim is None else share(tensor, dim)

    ours_x, ours_w, ours_b = leaf(mine(x, x_dim)), leaf(mine(weight, w_dim)), leaf(mine(b, b_dim))
    length = {"length": shape[sequence_dim]} if kind == "column" and sequence_dim is not None else {}
    how = {"group": dist.group.WORLD, "groups": groups, "sequence_dim": sequence_dim} | length
    ours = RUNS[kind](ours_x, ours_w, ours_b if bias else None, **how)
    ours.backward(mine(grad, y_dim))
    pairs = [(ours, mine(y, y_dim)), (ours_x.grad, mine(x.grad, x_dim)), (ours_w.grad, mine(weight.grad, w_dim))]
    return worst([*pairs, (ours_b.grad, mine(b.grad, b_dim))] if bias else pairs)


def linear_errors() -> dict[str, float]:
    return {
        f"{kind}, {name}, sequence {dim}, groups {groups}, bias {bias}": linear_error(kind, shape, groups, bias, dim)
        for kind in RUNS
        for name, shape in SHAPES.items()
        for dim in (None, *range(len(shape) - 1))  # replicated, and shared out along each dimension
        for groups in GROUPINGS
        for bias in (False, True)
    }


def tuned() -> dict[str, object]:
    """Each rank has its own folder and rank 1 loses its content: the choice of rank 0 is used."""
    chosen = []
    with TemporaryDirectory() as folder:
        for _ in range(2):
            tuner = Tuner(Path(folder))
            x, weight = random(12, INPUTS), random(OUTPUTS, INPUTS)
            y = row_parallel_linear(x, weight, group=dist.group.WORLD, groups=tuner)
            error = worst([(y, 2 * linear(x, weight))])
            chosen.append([kept.sizes for kept in tuner.tuned.values()])
            files = len(os.listdir(folder))
    everyone: list = [None, None]
    dist.all_gather_object(everyone, [chosen, files])
    return {"error": error, "chosen": [choice for choice, _ in everyone], "files": [files for _, files in everyone]}


def autocast(kind: str) -> dict[str, object]:
    run = RUNS[kind]
    x, weight, bias = (leaf(random(*shape).float()) for shape in ((7, INPUTS), (OUTPUTS, INPUTS), (OUTPUTS,)))
    with torch.autocast("cpu", torch.bfloat16):
        y = run(x, weight, bias, group=dist.group.WORLD)
        plain = linear(x, weight, bias)
        double = run(x.double(), weight.double(), group=dist.group.WORLD)
    y.sum().backward()
    expected = 2 * linear(x, weight) + bias if kind == "row" else plain
    dtypes = [str(tensor.dtype) for tensor in (y, x.grad, weight.grad, bias.grad, double)]
    return {"dtypes": dtypes, "error": ((y - expected).abs().max() / expected.abs().max()).item()}


FORMS = {"rows": 3, "columns": Columns(3)}


def find(rank: int) -> dict:
    orders = {
        f"{kind}, {dim}, {form}": order_of(run, groups=groups, sequence_dim=dim)
        for kind, run in RUNS.items()
        for dim in (None, 0)
        for form, groups in FORMS.items()
    }
    errors = {"linear": linear_errors()} | {name: case() for name, case in STYLED.items()}
    return {"errors": errors, "orders": orders, "tuned": tuned(), "autocast": {kind: autocast(kind) for kind in RUNS}}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return found_by_processes(Path(__file__), tmp_path_factory.mktemp("overlap"))


COUNTS = {"linear": 2 * (2 + 2 + 2 + 3 + 4) * 6 * 2, "styles": 10, "mixed": 5, "reversible": 4, "tuned": 2, "wrapped": 2}


@pytest.mark.parametrize("part", COUNTS)
def test_outputs_and_gradients_equal_those_without_overlap(found, part):
    errors = found["errors"][part]
    assert len(errors) == COUNTS[part]
    assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}


@pytest.mark.parametrize("form", FORMS)
def test_communication_overlaps_with_computation(found, form):
    """A group is on its way before the next is computed, and all are before the gradient of the weight is."""
    row, row_shares, column, column_shares = (found["orders"][f"{kind}, {dim}, {form}"] for kind in RUNS for dim in (None, 0))
    assert row["forward"] == ["product", "all-reduce"] * 3
    assert row_shares["forward"] == ["product", "reduce-scatter"] * 3
    assert column["backward"] == [*["product", "all-reduce"] * 3, "product"]
    # The input is gathered again for the weight's gradient.
    assert column_shares["backward"] == ["all-gather", *["product", "reduce-scatter"] * 3, "product"]
    # All groups are asked for before the first is multiplied.
    assert column_shares["forward"] == ["all-gather"] * 3 + ["product"] * 3
    assert row_shares["backward"] == ["all-gather"] * 3 + ["product"] * 4


def test_what_needs_no_gradient_is_neither_computed_nor_sent(found):
    row, row_shares, column, column_shares = (
        [found["orders"][f"{kind}, {dim}, rows"][needed] for needed in ("x", "weight", "bias")]
        for kind in RUNS
        for dim in (None, 0)
    )
    gathered = ["all-gather"] * 3
    assert row == [["product"], ["product"], []]
    assert row_shares == [[*gathered, *["product"] * 3], [*gathered, "product"], gathered]
    assert column == [["product", "all-reduce"] * 3, ["product"], []]
    assert column_shares == [["product", "reduce-scatter"] * 3, ["all-gather", "product"], []]


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.slow
def test_autocast(found, kind):
    half, single, double = "torch.bfloat16", "torch.float32", "torch.float64"
    assert found["autocast"][kind]["dtypes"] == [half, single, single, single, double]
    assert found["autocast"][kind]["error"] <= 1e-2


def test_ranks_choose_alike(found):
    (first, again), others = found["tuned"]["chosen"]
    assert first == again and others == [first, again]
    assert found["tuned"]["files"] == [1, 0]  # rank 0 alone keeps it
    assert found["tuned"]["error"] <= 1e-12


if __name__ == "__main__":
    find_as_one_of_them(find)
