"""Overlapped linear layers on two gloo processes against plain ones, in fp64. As a script, this is one of the processes."""

import copy
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

from layer_cases import INPUTS, Log, leaf, order_of, random, share, uneven, uneven_columns, worst
from small_models import TEXT, example
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from holotrain.overlap.styles import OverlappedColwise, OverlappedRowwise
from holotrain.reversible import ReversibleBlock, ReversibleSequence

OUTPUTS = 10
RUNS = {"row": row_parallel_linear, "column": column_parallel_linear}
SHAPES = [(8, INPUTS), (7, INPUTS), (1, INPUTS), (3, 5, INPUTS), (2, 3, 2, INPUTS)]
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
    """Every other one with a bias."""
    cases = [
        (kind, shape, groups, dim)
        for kind in RUNS
        for shape in SHAPES
        for dim in (None, *range(len(shape) - 1))  # replicated, and shared out along each dimension
        for groups in GROUPINGS
    ]
    return {str(case): linear_error(*case[:3], bool((number + number // 6) % 2), case[3]) for number, case in enumerate(cases)}


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


FORMS = {"rows": 3, "columns": Columns(3)}
LAYOUTS = {
    "replicated": {},
    "sequence": {"input": Shard(1), "output": Shard(1)},
    "sequence, counted from the end": {"input": Shard(-2), "output": Shard(-2)},
    "gathered input": {"input": Shard(0), "output": Replicate()},
    "features at either end": {"input": Shard(-1), "output": Shard(-1)},
}
PLAIN = ColwiseParallel, RowwiseParallel
OVERLAPPED = OverlappedColwise, OverlappedRowwise


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(INPUTS, 10), nn.Tanh(), nn.Linear(10, INPUTS)).double()


def parallel(net: nn.Module, layouts: dict, styles=OVERLAPPED, mesh: DeviceMesh | None = None, **options) -> nn.Module:
    column, row = styles
    plan = {
        "0": column(input_layouts=layouts.get("input"), **options),
        "2": row(output_layouts=layouts.get("output"), use_local_output=layouts.get("local", True), **options),
    }
    return parallelize_module(net, mesh or init_device_mesh("cpu", (2,)), plan)


def squared(outputs: tuple[Tensor, ...]) -> Tensor:
    return sum(output.square().sum() for output in outputs)


def parameter_gradients(net: nn.Module, reference: nn.Module) -> list[tuple[Tensor, Tensor]]:
    return [(p.grad, q.grad) for p, q in zip(net.parameters(), reference.parameters(), strict=True)]


def styled() -> dict[str, float]:
    """Parameters, output and parameter_gradients against torch's styles."""
    found = {}
    for name, layouts in LAYOUTS.items():
        for groups in (1, 3):
            ours, torchs = parallel(mlp(), layouts, groups=groups), parallel(mlp(), layouts, PLAIN)
            x = random(4, 6, INPUTS, seed=1)
            x = share(x, layouts["input"].dim) if "input" in layouts else x
            inputs = leaf(x), leaf(x)
            outputs = ours(inputs[0]), torchs(inputs[1])
            for output in outputs:
                (output * random(*output.shape, seed=2)).sum().backward()
            assert all(p.placements == q.placements for p, q in zip(ours.parameters(), torchs.parameters(), strict=True))
            torchs.load_state_dict(ours.state_dict())
            found[f"{name}, groups {groups}"] = worst([outputs, [x.grad for x in inputs], *parameter_gradients(ours, torchs)])
    return found


def mixed() -> dict[str, float]:
    """DTensors of odd length as input and output, against one process."""
    found, mesh = {}, init_device_mesh("cpu", (2,))
    for place in (Shard(1), Shard(0), Shard(2), Replicate()):
        reference, x = mlp(), leaf(random(3, 5, INPUTS, seed=1))
        out = reference(x)
        squared([out]).backward()
        net = parallel(mlp(), {"output": place, "local": False})
        distributed = distribute_tensor(x.detach(), mesh, [place]).requires_grad_()
        y = net(distributed)
        squared([y]).backward()
        assert y.placements == (place,)
        found[str(place)] = worst([(y, out), (distributed.grad, x.grad), *parameter_gradients(net, reference)])
    copied = copy.deepcopy(net)  # as for an average of weights
    return found | {"copied": worst([(copied(distributed), out)])}


def stack(backward: str) -> ReversibleSequence:
    return ReversibleSequence([ReversibleBlock(mlp(2 * i), mlp(2 * i + 1)) for i in range(3)], backward)


def reversible() -> dict[str, float]:
    """Three blocks with replicated or sequence-sharded tokens between them, against autograd in one process."""
    found = {}
    reference, x = stack("autograd"), random(3, 6, INPUTS, seed=1)
    squared(reference(x, x.tanh())).backward()
    for backward in ("reversible", "pareprop"):
        for name, mine in (("replicated", x), ("sequence", share(x, 1))):
            net = stack(backward)
            for block in net.blocks:
                for branch in (block.f, block.g):
                    parallel(branch, LAYOUTS[name], groups=3)
            squared(net(leaf(mine), mine.tanh())).backward()
            found[f"{backward}, {name}"] = worst(parameter_gradients(net, reference))
    return found


def modelled() -> dict:
    """A model whose layers two processes share, against one: the error, and how often a forward sends."""
    from holotrain.models import RevGPT  # which need Lightning, as other tests here do not
    from holotrain.parallel.strategies import overlapped, tensor_parallel

    torch.manual_seed(0)
    model = RevGPT(**TEXT).double()
    reference, tokens, log = copy.deepcopy(model), example("RevGPT"), Log()
    tensor_parallel(model, init_device_mesh("cpu", (2,)), overlapped(3))
    with log:
        y = model(tokens)
    due = reference(tokens)
    squared([y]).backward()
    squared([due]).backward()
    return {"error": worst([(y, due), *parameter_gradients(model, reference)]), "sent": log.order.count("all-reduce")}


STYLED = {"styles": styled, "mixed": mixed, "reversible": reversible}


def find(rank: int) -> dict:
    orders = {
        f"{kind}, {dim}, {form}": order_of(run, groups=groups, sequence_dim=dim)
        for kind, run in RUNS.items()
        for dim in (None, 0)
        for form, groups in FORMS.items()
    }
    errors = {"linear": linear_errors()} | {name: case() for name, case in STYLED.items()}
    return {"errors": errors, "orders": orders, "tuned": tuned(), "model": modelled()}


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return found_by_processes(Path(__file__), tmp_path_factory.mktemp("overlap"))


COUNTS = {"linear": 2 * (2 + 2 + 2 + 3 + 4) * 6, "styles": 10, "mixed": 5, "reversible": 4}


@pytest.mark.parametrize("part", COUNTS)
def test_outputs_and_gradients_equal_those_without_overlap(found, part):
    errors = found["errors"][part]
    assert len(errors) == COUNTS[part]
    assert {name: error for name, error in errors.items() if not error <= 1e-12} == {}


@pytest.mark.parametrize("form", FORMS)
def test_communication_overlaps_with_computation(found, form):
    """A group is on its way before the next is computed, all are before the gradient of the weight is, and none is copied."""
    row, row_shares, column, column_shares = (found["orders"][f"{kind}, {dim}, {form}"] for kind in RUNS for dim in (None, 0))
    waits = ["wait"] * 3
    assert row["forward"] == ["product", "all-reduce"] * 3 + waits
    assert row_shares["forward"] == ["product", "reduce-scatter"] * 3 + waits
    assert column["backward"] == [*["product", "all-reduce"] * 3, "product", *waits]
    # The input is gathered again for the weight's gradient.
    assert column_shares["backward"] == ["all-gather", *["product", "reduce-scatter"] * 3, "wait", "product", *waits]
    # All groups are asked for before the first is multiplied.
    assert column_shares["forward"] == ["all-gather"] * 3 + ["wait", "product"] * 3
    assert row_shares["backward"] == ["all-gather"] * 3 + ["wait", "product"] * 3 + ["product"]


def test_the_layers_of_a_model_overlap_by_themselves(found):
    assert found["model"]["error"] <= 1e-12
    assert found["model"]["sent"] == 3 * 2 * TEXT["depth"]  # three groups of each branch


def test_ranks_choose_alike(found):
    (first, again), others = found["tuned"]["chosen"]
    assert first == again and others == [first, again]
    assert found["tuned"]["files"] == [1, 0]  # rank 0 alone keeps it
    assert found["tuned"]["error"] <= 1e-12


if __name__ == "__main__":
    find_as_one_of_them(find)
