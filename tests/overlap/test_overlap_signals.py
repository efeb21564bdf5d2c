"""The product that signals its groups: order of tiles, numbers in Triton's interpreter, and on a GPU the real thing."""

import gc
import importlib.util
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from holotrain.overlap import Columns, EmulatedCollectives, row_parallel_linear, signals
from holotrain.overlap.groups import spans
from holotrain.overlap.links import Link
from holotrain.overlap.sending import Sender
from holotrain.overlap.waves import TILE_COLUMNS


@pytest.mark.parametrize(("sizes", "ranks"), [([300], 1), ([130, 1, 150], 1), ([100, 33], 4)])
def test_tiles_cover_every_element_once_in_the_order_of_groups(sizes, ranks):
    cut, columns, rows = list(spans(sizes)), 200, sum(sizes)
    seen = torch.zeros(ranks * rows, columns, dtype=torch.int)
    group_of = torch.full((ranks * rows,), -1)
    tiles = signals.tiles_of(cut, ranks, rows, columns)
    for read, written, height, column, group in tiles:
        seen[written : written + height, column : column + TILE_COLUMNS] += 1
        group_of[written : written + height] = group
        rank, at = divmod(read, rows)
        assert cut[group].start <= at and at + height <= cut[group].stop  # rows of one rank and one group
        assert written == ranks * cut[group].start + rank * sizes[group] + at - cut[group].start
    assert (seen == 1).all()
    assert [tile[4] for tile in tiles] == sorted(tile[4] for tile in tiles)
    assert group_of.tolist() == [group for group, size in enumerate(sizes) for _ in range(ranks * size)]


def test_orders_on_the_device_are_made_once_and_few_are_kept():
    """As for texts, whose batches differ in length from step to step."""
    made = signals.order_of((40, 60), 2, 200, torch.device("cpu"))
    assert made.table.tolist() == [list(tile) for tile in signals.tiles_of(list(spans([40, 60])), 2, 100, 200)]
    assert made.finished == [4, 4]
    assert signals.order_of((40, 60), 2, 200, torch.device("cpu")) is made
    kept = weakref.ref(made)
    del made
    for rows in range(1, signals.KEPT + 1):
        signals.order_of((rows,), 1, 8, torch.device("cpu"))
    gc.collect()
    assert kept() is None


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
@pytest.mark.parametrize("shapes", [40, pytest.param(500, marks=pytest.mark.slow)])
def test_the_kernel_computes_and_counts_in_the_interpreter(shapes):
    """Random sizes from one row and no features on, and operands that are transposed, sliced, offset, strided or repeated."""
    here = Path(__file__)
    paths = os.pathsep.join([str(here.parents[2]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    command = [sys.executable, str(here.with_name("interpreted_product.py")), str(shapes)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["shapes"] == shapes and len(found["layouts"]) == 7
    assert found["wrong"] == []


def test_where_signals_are_not_to_be_had_groups_are_products_of_their_own():
    x, weight = torch.randn(9, 4), torch.randn(6, 4)
    assert not signals.supported(x)
    y = row_parallel_linear(x, weight, group=EmulatedCollectives(Link(1e12, 0.0), 2), groups=2, signals=True)
    torch.testing.assert_close(y, x @ weight.t())


class OneRank:
    """Of one process: nothing to add. Doubles what it is given, so that what was never sent shows."""

    ranks, rank, name = 1, 0, "one rank"

    def all_reduce(self, tensor):
        self.stream = torch.cuda.current_stream()
        tensor.mul_(2)
        return Behind(self.stream.record_event())

    def reduce_scatter(self, share, parts):
        torch.mul(parts[0], 2, out=share)
        return Behind(torch.cuda.current_stream().record_event())


class Behind:
    def __init__(self, event) -> None:
        self.event = event

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self.event)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("form", ["sum", "columns", "shares"])
@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize(("rows", "inner", "columns"), [(1000, 520, 776), (4096, 4096, 4096)])
def test_a_group_is_sent_when_it_is_whole(form, groups, rows, inner, columns):
    x = torch.randn(rows, inner, device="cuda", dtype=torch.bfloat16)
    matrix = torch.randn(inner, columns, device="cuda", dtype=torch.bfloat16)
    bias = torch.randn(columns, device="cuda", dtype=torch.bfloat16)
    assert signals.supported(x)
    link = OneRank()
    sender = Sender(link, Columns(groups) if form == "columns" else groups, signals=True)
    due = 2 * (x @ matrix) + bias if form == "columns" else 2 * torch.addmm(bias, x, matrix)  # there it is added to the sum
    for _ in range(20):  # a group that is sent too early is a matter of chance
        out = torch.full((rows, columns), float("nan"), device="cuda", dtype=torch.bfloat16)
        works = sender.shares(x[None], matrix, bias, out) if form == "shares" else sender.sum(x, matrix, bias, out)
        for work in works:
            work.wait()
        torch.testing.assert_close(out, due, rtol=2e-2, atol=0.5)
    if form != "shares":
        assert link.stream != torch.cuda.current_stream()
