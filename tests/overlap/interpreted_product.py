"""Checks the signaling product on random shapes and strides in Triton's interpreter.

Not a test by itself: test_overlap_signals.py starts it with TRITON_INTERPRET=1, set before Triton is imported, and with the
number of shapes. What lies between and around the entries of an operand is NaN, so an entry that is read or written at
a wrong place shows.
"""

import random
import sys

import torch
from torch import Tensor

from holotrain.overlap.groups import spans
from holotrain.overlap.kernel import launch
from holotrain.overlap.signals import tiles_of

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
    """Of a random product."""
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


for number in range(int(sys.argv[1])):
    torch.manual_seed(number)
    check(random.Random(number))
