"""Products whose results are communicated in groups: a group is under way while the next one is computed.

Each group is a product of its own; or, with ``signals=True``, one product computes all of them, and each finished group signals
a second stream (FlashOverlap). Its kernel (:mod:`holotrain.overlap.kernel`) computes output tiles in the order of their groups,
on all SMs but those that a collective needs, and counts the finished tiles of each group in memory. The second stream waits for
a count, which takes no SM, and launches the collective on the contiguous rows of that group. The product is never interrupted,
and groups can have any number of rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import torch
from torch import Tensor
from torch.utils._triton import has_triton_package

from holotrain.overlap.groups import Collectives, Grouping, Holding, Work, require_grouping
from holotrain.overlap.predictor import SMS_LOST, TILE_COLUMNS, TILE_ROWS


def product(x: Tensor, matrix: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """[R, K] x [K, N] (+ [N]) to [R, N]."""
    return torch.mm(x, matrix, out=out) if bias is None else torch.addmm(bias, x, matrix, out=out)


def products(x: Tensor, matrix: Tensor, bias: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """[P, R, K] x [K, N] (+ [N]) to [P, R, N]. x and out may be slices of larger tensors along R; they are not copied."""
    matrices = matrix.expand(len(x), -1, -1)
    return torch.bmm(x, matrices, out=out) if bias is None else torch.baddbmm(bias, x, matrices, out=out)


@dataclass(frozen=True)
class Overlap:
    """How a layer communicates: its collectives, its groups, and whether one product signals its groups where possible.

    Raises:
        TypeError: groups are neither a number, nor columns, nor a callable.
        ValueError: less than one group.
    """

    collectives: Collectives
    groups: Grouping
    signals: bool = False

    def __post_init__(self) -> None:
        require_grouping(self.groups)

    def signals_of(self, x: Tensor, matrix: Tensor) -> bool:
        """Whether one kernel computes a product, and signals its groups."""
        return self.signals and matrix.dim() == 2 and supported(x)

    def send(
        self, x: Tensor, matrix: Tensor, bias: Tensor | None, cut: Sequence[slice], send: Callable[[int, Tensor], Work]
    ) -> list[Work]:
        """Computes x [P, L, K] times matrix [K, N] or [P, K, N] (+ bias [N]) in groups of the rows ``cut`` of L.

        ``send`` gets the number of each finished group and its result [P, rows, N], contiguous. It launches the collective.
        """
        if self.signals_of(x, matrix) and cut:
            ranks, rows, _ = x.shape
            groups = [[slice(r * rows + each.start, r * rows + each.stop) for r in range(ranks)] for each in cut]

            def launch(group: int, finished: Tensor) -> Work:
                return send(group, finished.unflatten(0, (ranks, -1)))

            return send_signalled(x.flatten(0, 1), matrix, bias, groups, launch)
        works = []
        for group, rows in enumerate(cut):
            parts = products(x[:, rows], matrix, bias)
            works.append(Holding(send(group, parts), parts))
        return works


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


def send_signalled(
    x: Tensor,
    matrix: Tensor,
    bias: Tensor | None,
    groups: Sequence[Pieces],
    send: Callable[[int, Tensor], Work],
    out: Tensor | None = None,
) -> list[Work]:
    """Computes x [R, K] times matrix [K, N] (+ bias [N]); ``send`` gets the number of each finished group and its rows [.., N],
    contiguous, and launches the collective.

    Args:
        groups: the rows of x of each group, in pieces that need not follow each other. So nothing has to be copied together.
        out: [R, N], for the result, group after group.
    """
    from holotrain.overlap.kernel import launch

    if out is None:
        out = x.new_empty(len(x), matrix.shape[1])
    with torch.cuda.device(x.device):
        current, aside = torch.cuda.current_stream(), _stream_of(x.device)
        counts = torch.zeros(len(groups), dtype=torch.int32, device=x.device)
        places = tuple(tuple((piece.start, piece.stop) for piece in group) for group in groups)
        tiles, finished = order_of(places, matrix.shape[1], x.device, current.cuda_stream)
        aside.wait_stream(current)  # for the zeros: old counts in that memory would look like signals
        programs = torch.cuda.get_device_properties(x.device).multi_processor_count - SMS_LOST
        # Launched before anything waits for it: if streams share a hardware queue, the wait would block it.
        launch(x, matrix, bias, out, tiles, counts, programs)
        works = []
        with torch.cuda.stream(aside):
            for group, (rows, due) in enumerate(zip(out.split([*map(rows_in, groups)]), finished, strict=True)):
                status = _wait_for_count()(aside.cuda_stream, counts.data_ptr() + 4 * group, due, GREATER_OR_EQUAL)
                if status != 0:
                    raise RuntimeError(f"cuStreamWaitValue32 failed with CUDA driver error {status}")
                works.append(Holding(send(group, rows), (out, counts, tiles)))
    return works


Pieces = Sequence[slice]


def rows_in(pieces: Pieces) -> int:
    return sum(piece.stop - piece.start for piece in pieces)


def tiles_of(groups: Iterable[Pieces], columns: int) -> Tensor:
    """The tiles of an output in the order of their groups: [tiles, 5] of int32.

    A row is (first row read, first row written, rows, first column, group). The pieces of a group are written one after
    another. Tiles of one column follow each other, because they share their part of the matrix.
    """
    tiles, written = [torch.empty(0, 5, dtype=torch.int64, device="cpu")], 0
    first_columns = torch.arange(0, columns, TILE_COLUMNS, device="cpu")
    for group, pieces in enumerate(groups):
        rows = []
        for piece in pieces:
            read = torch.arange(piece.start, piece.stop, TILE_ROWS, device="cpu")
            rows.append(torch.stack((read, read - piece.start + written, (piece.stop - read).clamp(max=TILE_ROWS)), 1))
            written += piece.stop - piece.start
        of_group = torch.cat(rows).repeat(len(first_columns), 1)
        column = first_columns.repeat_interleave(len(of_group) // max(len(first_columns), 1))
        tiles.append(torch.cat((of_group, column[:, None], torch.full_like(column, group)[:, None]), 1))
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
    places: tuple[tuple[tuple[int, int], ...], ...], columns: int, device: torch.device, stream: int = 0
) -> tuple[Tensor, list[int]]:
    """On the device :func:`tiles_of` groups; and how many of the tiles each group has.

    Args:
        places: the first and last row of each piece of each group.
        stream: the current one. Each has tables of its own, so that no other can read one that has not arrived, or is released.
    """
    tiles = tiles_of([[slice(*place) for place in group] for group in places], columns)
    finished = torch.bincount(tiles[:, 4], minlength=len(places)).tolist()
    if device.type == "cuda":  # from pageable memory the host would wait for the copy, at every new shape
        tiles = tiles.pin_memory().to(device, non_blocking=True)
    return tiles, finished
