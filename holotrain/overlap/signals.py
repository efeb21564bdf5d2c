"""One product whose groups are sent while it runs (FlashOverlap): each finished group signals a second stream.

The product's kernel (:mod:`holotrain.overlap.kernel`) computes output tiles in the order of their groups, on all SMs but those
that a collective needs, and counts the finished tiles of each group in memory. The second stream waits for a count, which takes
no SM, and launches the collective on the contiguous rows of that group. The product is never interrupted, and groups can have
any number of rows.

It is written for CUDA and checked in Triton's interpreter. It has not run on a GPU yet, so it is off by default
(``signals=True`` turns it on).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache, partial

import torch
from torch import Tensor
from torch.utils._triton import has_triton_package

from holotrain.overlap.collectives import Holding, Work
from holotrain.overlap.groups import spans
from holotrain.overlap.predictor import SMS_LOST, TILE_COLUMNS, TILE_ROWS

GREATER_OR_EQUAL = 0  # CU_STREAM_WAIT_VALUE_GEQ


def supported(x: Tensor) -> bool:
    """Whether a product of x can signal: CUDA compute capability 8.0 or newer, bf16 or fp16, Triton, no graph capture."""
    return (
        x.is_cuda
        and x.dtype in (torch.bfloat16, torch.float16)
        and has_triton_package()
        and torch.cuda.get_device_capability(x.device) >= (8, 0)
        and _wait_for_count() is not None
        and not torch.cuda.is_current_stream_capturing()
    )


def send(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    cut: Sequence[slice],
    send: Callable[[int, Tensor], Work],
    out: Tensor | None = None,
) -> list[Work]:
    """Like :meth:`~holotrain.overlap.overlapped_product.Overlap.send`.

    Args:
        out: [P * L, N], for the result; rows of a group from all ranks lie side by side.
    """
    from holotrain.overlap.kernel import launch

    ranks, rows, _ = x.shape
    if out is None:
        out = x.new_empty(ranks * rows, matrix.shape[1])
    with torch.cuda.device(x.device):
        current, aside = torch.cuda.current_stream(), _stream_of(x.device)
        counts = torch.zeros(len(cut), dtype=torch.int32, device=x.device)
        sizes = tuple(each.stop - each.start for each in cut)
        tiles, finished = order_of(sizes, ranks, matrix.shape[1], x.device, current.cuda_stream)
        aside.wait_stream(current)  # for the zeros: old counts in that memory would look like signals
        programs = torch.cuda.get_device_properties(x.device).multi_processor_count - SMS_LOST
        # Launched before anything waits for it: if streams share a hardware queue, the wait would block it.
        launch(x.flatten(0, 1), matrix, bias, out, tiles, counts, programs)
        works = []
        with torch.cuda.stream(aside):
            for group, due in enumerate(finished):
                status = _wait_for_count()(aside.cuda_stream, counts.data_ptr() + 4 * group, due, GREATER_OR_EQUAL)
                if status != 0:
                    raise RuntimeError(f"cuStreamWaitValue32 failed with CUDA driver error {status}")
                parts = out[ranks * cut[group].start : ranks * cut[group].stop].unflatten(0, (ranks, -1))
                works.append(Holding(send(group, parts), (out, counts, tiles)))
    return works


def tiles_of(cut: Iterable[slice], ranks: int, rows: int, columns: int) -> Tensor:
    """The tiles of an output in the order of their groups: [tiles, 5] of int32.

    A row is (first row read, first row written, rows, first column, group). In the input the rows of rank r begin at
    ``r * rows``; in the output the rows of a group are contiguous over all ranks. Tiles of one column follow each other,
    because they share their part of the matrix.
    """
    steps, tiles = partial(torch.arange, device="cpu"), []
    for group, span in enumerate(cut):
        size = span.stop - span.start
        corners = torch.cartesian_prod(steps(0, columns, TILE_COLUMNS), steps(ranks), steps(0, size, TILE_ROWS))
        column, rank, start = corners.unbind(1)
        read, written = rank * rows + span.start + start, ranks * span.start + rank * size + start
        tiles.append(torch.stack((read, written, (size - start).clamp(max=TILE_ROWS), column, torch.full_like(rank, group)), 1))
    return torch.cat(tiles).int()


@cache
def _wait_for_count():
    """The driver's cuStreamWaitValue32; None: there is no CUDA. It maps (stream, address, value, flags) to a status."""
    try:
        function = ctypes.CDLL("libcuda.so.1").cuStreamWaitValue32_v2
    except (OSError, AttributeError):
        return None
    function.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint]
    function.restype = ctypes.c_int
    return function


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=-1)  # first at what SMs are free


@lru_cache  # its 128 are those of a model's layers, forwards and backwards, where the shapes of its batches stay
def order_of(
    sizes: tuple[int, ...], ranks: int, columns: int, device: torch.device, stream: int = 0
) -> tuple[Tensor, list[int]]:
    """On the device :func:`tiles_of` groups of ``sizes`` rows of each rank; and how many of the tiles each group has.

    Args:
        stream: the current one. Each has tables of its own, so that no other can read one that has not arrived, or is released.
    """
    tiles = tiles_of(spans(sizes), ranks, sum(sizes), columns)
    finished = torch.bincount(tiles[:, 4]).tolist()
    if device.type == "cuda":  # from pageable memory the host would wait for the copy, at every new shape
        tiles = tiles.pin_memory().to(device, non_blocking=True)
    return tiles, finished
