"""Rows cut into groups, a sequence into shares, and what is refused."""

from dataclasses import replace

import pytest
import torch
from compared import assert_equal
from torch import nn

from holotrain.overlap import Columns, OverlappedRowwise
from holotrain.overlap.groups import Job, group_sizes, require_grouping
from holotrain.overlap.linear import SequenceShards


def job(rows: int, collective: str = "all_reduce") -> Job:
    return Job(rows, 4, 6, collective, 2, torch.float32, torch.device("cpu"))


@pytest.mark.parametrize(("rows", "groups", "sizes"), [(8, 2, [4, 4]), (7, 3, [3, 2, 2]), (2, 5, [1, 1]), (0, 3, [])])
def test_groups_are_as_equal_as_can_be(rows, groups, sizes):
    assert group_sizes(groups, job(rows), None) == (sizes, False)


@pytest.mark.parametrize("columns", [Columns(2), Columns([3, 3]), lambda job, collectives: Columns((3, 3))])
def test_groups_of_columns_are_of_sums_alone(columns):
    assert group_sizes(columns, job(7), None) == group_sizes(columns, job(7, "reduce_scatter"), None) == ([3, 3], True)
    assert (
        group_sizes(columns, job(7, "all_gather"), None) == group_sizes(columns, job(7, "all_to_all"), None) == ([4, 3], False)
    )


@pytest.mark.parametrize(
    ("groups", "words"),
    [(lambda job, of, sizes=sizes: sizes, "were chosen for 7 rows") for sizes in ([3, 3], [8, -1], [0, 7], [])]
    + [(Columns(sizes), "were chosen for 6 columns") for sizes in ([3, 4], [7, -1], [6, 0])]
    + [(groups, "groups must be an integer, Columns") for groups in (True, 2.0)]
    + [(0, "1 or more, not 0"), (Columns(0), "1 or more, not 0")],
)
def test_groups_that_cannot_be_are_refused(groups, words):
    with pytest.raises((TypeError, ValueError), match=words):
        require_grouping(groups)
        group_sizes(groups, job(7), None)


def test_a_message_is_the_tensor_of_all_ranks():
    assert job(5).message(3) == 3 * 6 * 4
    assert job(5, "reduce_scatter").message(3) == 2 * 3 * 6 * 4
    assert job(5, "all_gather").message(3) == 2 * 3 * 4 * 4
    assert job(5, "all_to_all").message(3) == 3 * 6 * 4
    assert replace(job(5, "all_to_all"), before=True).message(3) == 3 * 4 * 4


@pytest.mark.parametrize("collective", ["all_reduce", "reduce_scatter"])
def test_columns_send_as_much_as_rows(collective):
    of = job(5, collective)
    assert of.turned.message(of.outputs) == of.message(of.rows)
    assert of.turned.turned == of


@pytest.mark.parametrize("length", [1, 4, 5, 6, 7])
@pytest.mark.parametrize("dim", [0, 1, 2])
def test_shares_are_those_of_chunk(length, dim):
    shape = [2, 3, 2, 5]
    shape[dim] = length
    x = torch.randn(shape)
    ranks = 4
    shares = SequenceShards(dim, length, ranks)
    rows = shares.side_by_side(x)
    chunks = x.chunk(ranks, dim)
    for rank in range(ranks):
        share = shares.share_of_rows(rows[rank], rank, like=x)
        mine = chunks[rank] if rank < len(chunks) else x.narrow(dim, 0, 0)
        assert_equal(share, mine)
        assert_equal(shares.rows_of_share(mine), rows[rank])
    assert_equal(shares.end_to_end(rows, like=x), x)


def test_a_sequence_that_comes_first_is_not_copied():
    x = torch.randn(6, 5)
    assert SequenceShards(0, 6, 3).side_by_side(x).data_ptr() == x.data_ptr()


def test_a_style_takes_linear_layers_alone():
    with pytest.raises(TypeError, match="OverlappedRowwise applies to nn.Linear only, not to LayerNorm"):
        OverlappedRowwise()._apply(nn.LayerNorm(3), None)
