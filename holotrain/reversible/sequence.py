"""A sequence of reversible blocks and its backward schedules."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor, nn

from holotrain.reversible.ambient import RandomState, Surroundings, is_imagined
from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.buffers import Buffers
from holotrain.reversible.checkpointing import run_checkpointing
from holotrain.reversible.drift import Witness
from holotrain.reversible.grid import FixedPointGrid, Grid
from holotrain.reversible.half import Call
from holotrain.reversible.kept import Keeper
from holotrain.reversible.keywords import Keywords
from holotrain.reversible.recompute import run_recomputing
from holotrain.reversible.schedules import STORING, Schedule, run_storing, schedules_of
from holotrain.reversible.trial import Overlap


class ReversibleSequence(nn.Module):
    """A sequence of reversible blocks that stores or recomputes activations. All schedules give the same results.

    Args:
        blocks: the blocks, first to last.
        backward: ``"autograd"`` stores everything (the reference), ``"checkpoint"`` stores the two streams between blocks
            (torch.utils.checkpoint), ``"reversible"`` stores nothing between blocks and rebuilds each block's input from its
            output, ``"pareprop"`` does so in parallel with the gradients of the next block (arXiv 2306.09342) and
            changes to ``"reversible"`` if it measures that this is not faster. A list has one schedule per block; a recomputed
            block may add what it keeps: ``"reversible+attention"``.
        store: blocks that store their activations under any schedule: the number of last blocks, or their indices.
        exact: rounds the input streams and the outputs of f and g to a fixed-point grid, so that streams are rebuilt bit for
            bit at any depth. True chooses the grid from the first batch and saves it in the ``state_dict``. A number k chooses
            multiples of 2^-k, with magnitudes below 2^(24-k) (fp64: 2^(53-k)).
        keep: results that are stored and not recomputed: ``"attention"`` (the output of scaled_dot_product_attention) or
            names of operators such as ``"aten.mm.default"``. For ``"reversible"`` and ``"pareprop"``.

    ``backward``, ``store`` and ``keep`` are plain attributes: they can be changed between calls and are not in the
    ``state_dict``.

    Raises:
        ValueError: an unknown ``backward`` or ``keep``, a wrong number of schedules, or a ``store`` without such a block.
            At the call: f or g changes shape or dtype, or a block cannot be recomputed correctly.
        TypeError: a block is not a ReversibleBlock.

    Without gradients (``torch.no_grad``, ``torch.inference_mode``, nothing requires grad) the blocks just run. Under autocast
    half precision streams are converted to fp32 and only f and g run in half precision, because streams that are rounded at
    every addition cannot be rebuilt.
    """

    def __init__(
        self,
        blocks: Iterable[ReversibleBlock],
        backward: str | Sequence[str] = "reversible",
        store: int | Collection[int] = 0,
        exact: bool | int = False,
        keep: Collection[str] = (),
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        for block in self.blocks:
            _require_block(block)
        self.backward = backward
        self.store = store
        self.keep = keep
        self.exact = exact
        self.grid = None if exact is False else FixedPointGrid(None if exact is True else exact)
        self.witnesses: list[Witness] | None = None
        self._overlap = Overlap()

    @property
    def backward(self) -> str | Sequence[str]:
        return self._backward

    @backward.setter
    def backward(self, backward: str | Sequence[str]) -> None:
        self._schedules = schedules_of(backward, len(self.blocks))
        self._backward = backward

    @property
    def store(self) -> int | Collection[int]:
        return self._store

    @store.setter
    def store(self, store: int | Collection[int]) -> None:
        depth = len(self.blocks)
        self._stored = frozenset(range(depth - store, depth) if isinstance(store, int) else store)
        if not self._stored <= set(range(depth)) or (isinstance(store, int) and store < 0):
            raise ValueError(f"store must be a number of blocks up to {depth} or indices below {depth}, not {store!r}")
        self._store = store

    @property
    def keep(self) -> Collection[str]:
        return self._keep

    @keep.setter
    def keep(self, keep: Collection[str]) -> None:
        words = (keep,) if isinstance(keep, str) else tuple(keep)
        if words:
            Keeper(words)  # says so if there is nothing of that name
        self._kept_words = words
        self._keep = keep

    def forward(
        self, x1: Tensor, x2: Tensor, f_kwargs: dict | None = None, g_kwargs: dict | None = None
    ) -> tuple[Tensor, Tensor]:
        """Runs the blocks.

        Args:
            x1, x2: the two streams, with the same shape, floating dtype and device.
            f_kwargs, g_kwargs: keyword arguments of every f and every g; tensors in them (also in lists, tuples and dicts) may
                require grad.

        Returns:
            y1, y2: with the shape of x1 and x2.
        """
        if x1.shape != x2.shape or x1.dtype != x2.dtype or x1.device != x2.device or not x1.is_floating_point():
            raise ValueError(
                "the two streams must have the same shape, floating dtype and device, not "
                f"{tuple(x1.shape)} {x1.dtype} on {x1.device} and {tuple(x2.shape)} {x2.dtype} on {x2.device}"
            )
        x1, x2 = _widened(x1), _widened(x2)
        f_kwargs, g_kwargs = f_kwargs or {}, g_kwargs or {}
        grid = None
        if self.grid is not None:
            if not (self.grid.known or is_imagined(x1)):
                self._choose_grid(x1, x2, f_kwargs, g_kwargs)
            grid = self.grid.in_call(x1.dtype)
            x1, x2 = grid.entered(x1), grid.entered(x2)
        if self.witnesses is not None:
            self.witnesses.clear()
        first = 0
        for schedule, blocks in self._runs():
            run = blocks, x1, x2, f_kwargs, g_kwargs, grid, first
            if schedule.name == "autograd":
                x1, x2 = run_storing(*run)
            elif schedule.name == "checkpoint":
                x1, x2 = run_checkpointing(*run)
            elif torch.compiler.is_compiling():
                x1, x2 = torch.compiler.disable(self._run_recomputing)(schedule, *run)
            else:
                x1, x2 = self._run_recomputing(schedule, *run)
            first += len(blocks)
        if self.grid is not None:
            self.grid.report(x1.dtype)
        return x1, x2

    def _runs(self) -> Iterator[tuple[Schedule, list[ReversibleBlock]]]:
        """Runs of blocks in a row that share a schedule."""
        stored = range(len(self.blocks)) if not torch.is_grad_enabled() else self._stored
        schedules = (STORING if i in stored else schedule for i, schedule in enumerate(self._schedules))
        for schedule, run in groupby(zip(schedules, self.blocks, strict=True), lambda pair: pair[0]):
            yield schedule, [block for _, block in run]

    def _run_recomputing(
        self,
        schedule: Schedule,
        blocks: list[ReversibleBlock],
        x1: Tensor,
        x2: Tensor,
        f_kwargs: dict,
        g_kwargs: dict,
        grid: Grid | None,
        first: int,
    ) -> tuple[Tensor, Tensor]:
        if x1.dtype.itemsize < 4:
            warnings.warn(
                f"streams of {x1.dtype} are rounded at every addition, so rebuilt activations and gradients are inexact (by up "
                "to 0.3 after 96 blocks); keep the streams in fp32 and train under torch.autocast",
                stacklevel=3,
            )
        witness = None
        if self.witnesses is not None:
            self.witnesses.append(witness := Witness())
        words = (*self._kept_words, *schedule.keep)
        call = Call(Surroundings.capture(x1.device), grid, Keeper(words) if words else None)
        overlap = self._overlap if schedule.name == "pareprop" else None
        return run_recomputing(blocks, x1, x2, f_kwargs, g_kwargs, call, overlap, witness, first)

    def _choose_grid(self, x1: Tensor, x2: Tensor, f_kwargs: dict, g_kwargs: dict) -> None:
        """Runs the blocks once, without a trace, to see how large the streams become."""
        streams = [x1, x2]
        f_kwargs, g_kwargs = (
            apart.by_value().put_together(tensors) for apart, tensors in map(Keywords.take_apart, (f_kwargs, g_kwargs))
        )
        with torch.no_grad(), RandomState.capture(x1.device).replayed(), Buffers(self.modules()).replayed():
            largest = torch.stack([x1, x2]).abs().amax()
            for block in self.blocks:
                streams = block(*streams, f_kwargs, g_kwargs)
                largest = torch.maximum(largest, torch.stack(streams).abs().amax())
        self.grid.choose(largest.item(), x1.dtype)

    def inverse(
        self, y1: Tensor, y2: Tensor, f_kwargs: dict | None = None, g_kwargs: dict | None = None
    ) -> tuple[Tensor, Tensor]:
        """Computes (x1, x2) from (y1, y2), up to rounding, or exactly if ``exact``; f and g must be deterministic."""
        grid = None if self.grid is None else self.grid.in_call(y1.dtype)
        for block in reversed(self.blocks):
            y1, y2 = block.inverse(y1, y2, f_kwargs, g_kwargs, grid=grid)
        return y1, y2

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:
        if self.grid is None:
            state_dict.pop(prefix + "grid.step", None)  # a checkpoint of an exact sequence
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        options = {"backward": self.backward, "store": self.store, "keep": self.keep}
        return ", ".join(f"{name}={value!r}" for name, value in options.items() if value or name == "backward")


def _require_block(block: nn.Module) -> None:
    plain = getattr(block, "_orig_mod", block)
    if not isinstance(plain, ReversibleBlock):
        raise TypeError(f"the blocks of a ReversibleSequence must be ReversibleBlocks, not {type(block).__name__}")
    if type(plain).forward is not ReversibleBlock.forward:
        raise TypeError(
            f"{type(plain).__name__} overrides forward, which the recomputation would ignore; put the change into f or g"
        )


def _widened(stream: Tensor) -> Tensor:
    if stream.dtype in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(stream.device.type):
        return stream.float()
    return stream
