"""Rows cut into groups, and what is refused."""

import pytest
import torch

from holotrain.overlap.groups import Columns, Job, group_sizes
from holotrain.overlap.signals import Overlap


def job(rows: int, collective: str = "all_reduce") -> Job:
    return Job(rows, 4, 6, collective, 2, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("columns", [Columns(2), Columns([3, 3]), lambda job, collectives: Columns((3, 3))])
def test_groups_of_columns_are_of_sums_alone(columns):
    found = {
        kind: group_sizes(columns, job(7, kind), None) for kind in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all")
    }
    by_columns, by_rows = ([3, 3], True), ([4, 3], False)
    assert [*found.values()] == [by_columns, by_columns, by_rows, by_rows]


@pytest.mark.parametrize(
    ("groups", "words"),
    [(lambda job, of, sizes=sizes: sizes, "were chosen for 7 rows") for sizes in ([3, 3], [8, -1], [0, 7], [])]
    + [(Columns(sizes), "were chosen for 6 columns") for sizes in ([3, 4], [7, -1], [6, 0])]
    + [(groups, "groups must be an integer, Columns") for groups in (True, 2.0)]
    + [(0, "1 or more, not 0"), (Columns(0), "1 or more, not 0")],
)
def test_groups_that_cannot_be_are_refused(groups, words):
    with pytest.raises((TypeError, ValueError), match=words):
        group_sizes(Overlap(None, groups).groups, job(7), None)
