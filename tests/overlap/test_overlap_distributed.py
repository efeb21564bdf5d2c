"""Overlapped linear layers on two gloo processes against plain ones: figures from two_processes.py."""

from pathlib import Path

import pytest
import torch.distributed
from gloo_pair import found_by_processes

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without distributed")


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    return found_by_processes(Path(__file__).with_name("two_processes.py"), tmp_path_factory.mktemp("overlap"))


@pytest.mark.parametrize("kind", ["row", "column"])
@pytest.mark.parametrize("shape", ["even", "odd", "one row", "batches", "four"])
@pytest.mark.parametrize("groups", [*range(1, 9), "uneven", "Columns(sizes=3)", "uneven_columns"])
def test_outputs_and_gradients_equal_those_of_a_plain_linear(found, kind, shape, groups):
    errors = {
        name: error
        for name, error in found["linear"].items()
        if name.startswith(f"{kind}, {shape},") and name.endswith(f"groups {groups}")
    }
    assert len(errors) == {"batches": 3, "four": 4}.get(shape, 2)  # replicated, and shared out along each dimension
    assert max(errors.values()) <= 1e-12, errors


@pytest.mark.parametrize("form", ["orders", "orders by columns"])
@pytest.mark.parametrize("where", ["row, sequence None", "row, sequence 0"])
def test_a_group_is_on_its_way_before_the_next_is_computed(found, where, form):
    sent = "all-reduce" if "None" in where else "reduce-scatter"
    assert found[form][where]["forward"] == ["product", sent] * 3


@pytest.mark.parametrize("form", ["orders", "orders by columns"])
@pytest.mark.parametrize("sent", ["all-reduce", "reduce-scatter"])
def test_a_gradient_is_on_its_way_before_that_of_the_weight_is_computed(found, sent, form):
    where = "column, sequence None" if sent == "all-reduce" else "column, sequence 0"
    again = ["all-gather"] if sent == "reduce-scatter" else []  # of the input, for the weight's gradient
    assert found[form][where]["backward"] == [*again, *["product", sent] * 3, "product"]


@pytest.mark.parametrize(("where", "when"), [("row, sequence 0", "backward"), ("column, sequence 0", "forward")])
def test_all_groups_are_asked_for_before_the_first_is_multiplied(found, where, when):
    assert found["orders"][where][when][:6] == ["all-gather"] * 3 + ["product"] * 3


def test_what_needs_no_gradient_is_neither_computed_nor_sent(found):
    assert len(found["in part"]) == 12
    assert all(found["in part"].values()), found["in part"]


@pytest.mark.parametrize("kind", ["row", "column"])
def test_autocast(found, kind):
    half, single, double = "torch.bfloat16", "torch.float32", "torch.float64"
    assert found["autocast"][kind]["dtypes"] == [half, single, single, single, double]
    assert found["autocast"][kind]["error"] <= 1e-2


def test_styles_shard_and_compute_as_those_of_torch(found):
    assert len(found["styles"]) == 10
    for name, case in found["styles"].items():
        assert case["placements"], name
        assert case["error"] <= 1e-12, (name, case["error"])


def test_distributed_inputs_of_odd_length(found):
    assert len(found["mixed"]) == 5
    assert max(found["mixed"].values()) <= 1e-12, found["mixed"]


@pytest.mark.parametrize("backward", ["reversible", "pareprop"])
def test_within_a_reversible_sequence(found, backward):
    assert set(found["reversible"][backward]) == {"replicated", "sequence"}
    assert max(found["reversible"][backward].values()) <= 1e-12


@pytest.mark.parametrize("case", ["checkpoint", "fsdp"])
def test_within_a_checkpoint_and_under_fully_shard(found, case):
    assert found[case] <= 1e-12


def test_ranks_choose_alike(found):
    (first, again), others = found["tuned"]["chosen"]
    assert first == again and others == [first, again]
    assert found["tuned"]["files"] == [1, 0]  # rank 0 alone keeps it
    assert found["tuned"]["error"] <= 1e-12


@pytest.mark.parametrize("layouts", ["replicated", "sequence"])
def test_shapes_are_measured_where_they_are_met(found, layouts):
    assert found["tuned models"][layouts] <= 1e-12
