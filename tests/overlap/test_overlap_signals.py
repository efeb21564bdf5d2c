"""The product that signals its groups: numbers in Triton's interpreter, and on a GPU the real thing.

As a script, with TRITON_INTERPRET=1 set before Triton is imported, this checks a number of random products in the interpreter.
"""

import random
import sys
from pathlib import Path

import pytest
import torch
from covering import long
from emulated_collectives import EmulatedCollectives
from interpreted import needs_triton, run_interpreted
from torch import Tensor

from holotrain.overlap import row_parallel_linear, signals
from holotrain.overlap.functions import AllReduce, ReduceScatter
from holotrain.overlap.groups import Columns, spans
from holotrain.overlap.predictor import Link
from holotrain.overlap.signals import Overlap, tiles_of

SIZES = (1, 2, 3, 7, 16, 31, 33, 64, 65, 100, 127, 128, 129, 150, 191)
DTYPES = (torch.float32, torch.float16)  # the interpreter multiplies the bits of bf16 as if they were integers
LAYOUTS = ("contiguous", "transposed", "sliced", "every other row", "every other column", "offset", "one row repeated")


def laid_out(values: Tensor, layout: str) -> Tensor:
    """The values [R, K] in memory of that layout, with NaN in the gaps."""
    rows, columns = values.shape
    if layout == "one row repeated":
        return values[:1].expand(rows, columns)
    room, at = {
        "contiguous": ((rows, columns), slice(None)),
        "transposed": ((columns, rows), slice(None)),
        "sliced": ((rows + 2, columns + 5), (slice(1, rows + 1), slice(3, columns + 3))),
        "every other row": ((2 * rows, columns), slice(None, None, 2)),
        "every other column": ((rows, 2 * columns), (slice(None), slice(None, None, 2))),
        "offset": ((1 + rows * columns,), slice(1, None)),
    }[layout]
    memory = torch.full(room, float("nan"), dtype=values.dtype)
    place = memory[at].t() if layout == "transposed" else memory[at].view(rows, columns) if layout == "offset" else memory[at]
    return place.copy_(values)


def check(draw: random.Random) -> None:
    """Of a random product. What lies between and around the entries of an operand is NaN, so that an entry that is read or
    written at a wrong place shows."""
    from holotrain.overlap.kernel import launch  # which needs Triton

    dtype, ranks = draw.choice(DTYPES), draw.choice((1, 1, 1, 2, 3))
    sizes = [draw.choice((0, *SIZES)) for _ in range(ranks * draw.choice((1, 1, 2, 3)))]
    pieces = spans(sizes)  # rank by rank, and of each rank group by group
    groups = [pieces[group :: len(pieces) // ranks] for group in range(len(pieces) // ranks)]
    rows, inner, columns = sum(sizes), draw.choice((0, *SIZES)), draw.choice(SIZES)
    layouts = [draw.choice(LAYOUTS) for _ in range(2)]
    x = laid_out(torch.randn(rows, inner).to(dtype), layouts[0])
    matrix = laid_out(torch.randn(inner, columns).to(dtype), layouts[1])
    of_bias = draw.choice((None, "contiguous", "every other column", "offset"))
    bias = None if of_bias is None else laid_out(torch.randn(1, columns).to(dtype), of_bias)[0]
    around = torch.full((rows + 2, columns), float("nan"), dtype=dtype)
    out, tiles = around[1:-1], tiles_of(groups, columns)
    counts = torch.zeros(len(groups), dtype=torch.int32)
    launch(x, matrix, bias, out, tiles, counts, programs=draw.choice((1, 3, 200)))

    def of_groups(result: Tensor) -> Tensor:
        """Rows of a group from all ranks, one after the other."""
        return torch.cat([result[piece] for group in groups for piece in group])

    summand = 0 if bias is None else bias.double()
    true, like = of_groups(x.double() @ matrix.double() + summand), of_groups(torch.matmul(x, matrix).double() + summand)
    size = of_groups(x.double().abs() @ matrix.double().abs() + (0 if bias is None else summand.abs()))
    bound = torch.finfo(dtype).eps * true.abs() + (inner + 2) * torch.finfo(torch.float32).eps * size + 1e-7  # below: subnormal
    drawn = dtype, ranks, sizes, inner, columns, layouts, of_bias
    assert ((out.double() - true).abs() <= bound).all(), drawn
    assert ((out.double() - like).abs() <= 2 * bound + torch.finfo(dtype).eps * size).all(), drawn
    assert (around[0].isnan() & around[-1].isnan()).all(), drawn  # nothing is written outside of the output
    assert counts.equal(tiles[:, 4].bincount(minlength=len(groups)).int()), drawn


@needs_triton
@pytest.mark.parametrize("shapes", [8, long(500)])
def test_the_kernel_computes_and_counts_in_the_interpreter(shapes):
    """Random sizes from one row and no features on, and operands that are transposed, sliced, offset, strided or repeated."""
    run_interpreted(Path(__file__), shapes, timeout=300)


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
    overlap = Overlap(link, Columns(groups) if form == "columns" else groups, signals=True)
    due = 2 * (x @ matrix) + bias if form == "columns" else 2 * torch.addmm(bias, x, matrix)  # there it is added to the sum
    for _ in range(20):  # a group that is sent too early is a matter of chance
        way, rows_of_ranks = (ReduceScatter(overlap), x[None]) if form == "shares" else (AllReduce(overlap), x)
        out, works = way.send(rows_of_ranks, matrix, bias)
        for work in works:
            work.wait()
        torch.testing.assert_close(out, due, rtol=2e-2, atol=0.5)
    if form != "shares":
        assert link.stream != torch.cuda.current_stream()


if __name__ == "__main__":
    for number in range(int(sys.argv[1])):
        torch.manual_seed(number)
        check(random.Random(number))
