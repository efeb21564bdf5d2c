"""The Triton kernel of a product that signals its finished groups. Imported only if Triton is installed."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from holotrain.overlap.predictor import TILE_COLUMNS, TILE_ROWS


@triton.jit
def _product(
    x,
    matrix,
    bias,
    out,
    tiles,
    counts,
    tile_count,
    columns,
    inner,
    x_row_stride,
    x_inner_stride,
    matrix_inner_stride,
    matrix_column_stride,
    HAS_BIAS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
):
    for tile in range(tl.program_id(0), tile_count, tl.num_programs(0)):
        entry = tiles + 5 * tile
        offsets = tl.arange(0, TILE_ROWS)
        here = offsets < tl.load(entry + 2)
        read = (tl.load(entry) + offsets).to(tl.int64)
        written = (tl.load(entry + 1) + offsets).to(tl.int64)
        # The division says that the first column is a multiple of the tile's width. Triton takes the alignment of rows from the
        # real addresses and strides, so wide reads and writes come where these allow them, and nowhere else.
        column = (tl.load(entry + 3) // TILE_COLUMNS * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)).to(tl.int64)
        within = column < columns
        total = tl.zeros((TILE_ROWS, TILE_COLUMNS), dtype=tl.float32)  # ty: ignore[invalid-argument-type]
        for start in range(0, inner, TILE_INNER):
            k = (start + tl.arange(0, TILE_INNER)).to(tl.int64)
            left = tl.load(
                x + read[:, None] * x_row_stride + k[None, :] * x_inner_stride,
                mask=here[:, None] & (k < inner)[None, :],
                other=0.0,
            )
            right = tl.load(
                matrix + k[:, None] * matrix_inner_stride + column[None, :] * matrix_column_stride,
                mask=(k < inner)[:, None] & within[None, :],
                other=0.0,
            )
            total = tl.dot(left, right, total)
        if HAS_BIAS:
            total += tl.load(bias + column, mask=within, other=0.0).to(tl.float32)[None, :]
        where = out + written[:, None] * columns + column[None, :]
        tl.store(where, total.to(out.dtype.element_ty), mask=here[:, None] & within[None, :])
        tl.debug_barrier()  # all threads have stored before the count below is released
        tl.atomic_add(counts + tl.load(entry + 4), 1, sem="release", scope="sys")


def launch(x: Tensor, matrix: Tensor, bias: Tensor | None, out: Tensor, tiles: Tensor, counts: Tensor, programs: int) -> None:
    """Computes ``x matrix + bias`` tile by tile, and adds one to the count of the group after each tile.

    Args:
        x: [R, K], any strides.
        matrix: [K, N], any strides.
        bias: [N] or None, any stride.
        out: [R, N], contiguous; its rows may be in another order than those of x.
        tiles: [tiles, 5] of int32, as :func:`~holotrain.overlap.signals.tiles_of` lists them.
        counts: [groups] of int32, zeros.
        programs: number of programs that share the tiles, one on each SM.
    """
    inner, columns = matrix.shape
    kernel: Any = _product  # its annotations are those of the device
    kernel[(min(programs, len(tiles)),)](
        x,
        matrix,
        out if bias is None else bias.contiguous(),  # not read without a bias
        out,
        tiles,
        counts,
        len(tiles),
        columns,
        inner,
        *x.stride(),
        *matrix.stride(),
        HAS_BIAS=bias is not None,
        TILE_ROWS=TILE_ROWS,
        TILE_COLUMNS=TILE_COLUMNS,
        TILE_INNER=64,
        num_warps=8,
        num_stages=3,
    )
