"""Linear layers with an all-to-all on three gloo processes against one process: figures from three_processes.py."""

from pathlib import Path

import pytest
import torch
import torch.distributed
from gloo_pair import found_by_processes

from holotrain.overlap import EmulatedCollectives, Link, all_to_all_linear, linear_all_to_all

KINDS = ["linear, all-to-all", "all-to-all, linear"]


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    if not torch.distributed.is_available():
        pytest.skip("torch was built without distributed")
    return found_by_processes(Path(__file__).with_name("three_processes.py"), tmp_path_factory.mktemp("exchange"), 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("splits", ["even", "uneven", "even from one rank", "to one rank", "nothing"])
@pytest.mark.parametrize("groups", ["1", "2", "7", "chosen", "columns"])
def test_rows_and_their_gradients_go_where_an_all_to_all_sends_them(found, kind, splits, groups):
    errors = [found["rows"][f"{kind}, {splits}, {middle}, groups {groups}"] for middle in ("()", "(2,)")]
    assert max(errors) <= 1e-12, errors


@pytest.mark.parametrize("kind", KINDS)
def test_without_split_sizes_all_ranks_get_as_many_rows(found, kind):
    assert found["untold"][kind] <= 1e-12


@pytest.mark.parametrize("kind", KINDS)
def test_a_share_of_the_sequence_becomes_a_share_of_the_features_and_back(found, kind):
    errors = {name: error for name, error in found["sequence"].items() if name.startswith(kind)}
    assert len(errors) == 30
    assert max(errors.values()) <= 1e-12, errors


def test_ranks_with_different_numbers_of_rows_choose_alike(found):
    assert found["tuned"]["error"] <= 1e-12
    # The most rows of a rank are 9: those that rank 1 gets.
    assert found["tuned"]["met"] == [["all_to_all", 9, *kind] for kind in ([False, False], [False, True], [True, False])]


def test_a_group_travels_while_the_next_is_computed(found):
    first, second = (found["orders"][kind] for kind in KINDS)
    assert first["forward"] == ["product", "all-to-all"] * 3
    assert first["backward"] == [*["all-to-all"] * 3, *["product"] * 4]  # the last is the gradient of the weight
    assert second["forward"] == [*["all-to-all"] * 3, *["product"] * 3]
    assert second["backward"] == [*["product", "all-to-all"] * 3, "product"]


def test_what_needs_no_gradient_is_neither_computed_nor_sent(found):
    first, second = (found["in part"][kind] for kind in KINDS)
    assert first == {"x": ["all-to-all", "product"], "weight": ["all-to-all", "product"], "bias": ["all-to-all"]}
    assert second == {"x": ["product", "all-to-all"], "weight": ["product"], "bias": []}


@pytest.mark.parametrize("run", [linear_all_to_all, all_to_all_linear])
@pytest.mark.parametrize(
    ("rows", "features", "options", "reason"),
    [
        (7, 6, {}, "7 rows cannot be split into"),
        (6, 6, {"input_split_sizes": [3, 3], "output_split_sizes": [3, 3]}, "cannot be split into .3, 3. for 3 ranks"),
        (6, 6, {"input_split_sizes": [1, 2, 2], "output_split_sizes": [1, 2, 2]}, "6 rows cannot be split"),
        (6, 6, {"input_split_sizes": [1, 2, 3]}, "must be given together"),
        (6, 6, {"sequence_dim": 0, "input_split_sizes": [2] * 3, "output_split_sizes": [2] * 3}, "split sizes are for rows"),
        (6, 4, {"sequence_dim": 0}, "4 features cannot be shared by 3 ranks"),
    ],
)
def test_what_cannot_be_divided_is_refused(run, rows, features, options, reason):
    with pytest.raises(ValueError, match=reason):
        run(
            torch.randn(rows, features),
            torch.randn(features, features),
            group=EmulatedCollectives(Link(1e12, 0.0), 3),
            **options,
        )
