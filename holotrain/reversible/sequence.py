"""A sequence of reversible blocks and its backward schedules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook  # private: nothing public tells it
from torch.utils._pytree import tree_leaves

from holotrain.numeric import counted
from holotrain.reversible.backward_option import Shorthand
from holotrain.reversible.checks import RebuildChecks
from holotrain.reversible.context import backward_id, has_no_data, in_trace
from holotrain.reversible.coupling import Coupling, ReversibleBlock
from holotrain.reversible.grid import FixedPointGrid, Grid
from holotrain.reversible.schedule import Pass, checkpointed
from holotrain.reversible.settings import generators_among, generators_unmoved
from holotrain.reversible.tokenwise import require_tile
from holotrain.schedules import SCHEDULES, Schedule

Keywords = dict | Sequence[dict] | None
"""Keyword arguments of f or g: the same for every block, or one dict for each."""


class ReversibleSequence(nn.Module):
    """A sequence of reversible blocks that stores or recomputes activations. All schedules give the same results.

    Args:
        blocks: the blocks, first to last.
        backward: one of :data:`~holotrain.schedules.SCHEDULES`, or a list with one for each block, where a rebuilt block may
            add what it keeps: ``"reversible+attention"``.
        store: blocks that store their activations under any schedule: the number of last blocks, or their indices.
        exact: rounds the input streams and the outputs of f and g to a fixed-point grid, so that streams are rebuilt bit for
            bit at any depth. True chooses the grid from the streams, again where they outgrow it, and saves it in the
            ``state_dict``. A number k chooses multiples of 2^-k, with magnitudes below 2^(24-k) (fp64: 2^(53-k)).
        keep: results that are stored and not recomputed: ``"attention"`` (the output of scaled_dot_product_attention),
            ``"matmul"`` (also the outputs of all matrix products) or names of operators such as ``"aten.mm.default"``. Of
            blocks that are rebuilt.
        on_mismatch: what follows if a stream is rebuilt wrongly, for which every backward looks. ``"store"``: a warning, and
            from the next step on blocks keep their inputs (checkpointing); ``"error"``: a RuntimeError.

    ``backward``, ``store`` and ``keep`` are plain attributes: they can be changed between calls and are not in the
    ``state_dict``. Together they make ``schedules``, the schedule of each block.

    Raises:
        ValueError: an unknown ``backward``, ``keep``, ``exact``, ``on_mismatch`` or ``tile``, a wrong number of schedules, or
            no such block to store. At the call: f or g changes shape or dtype, or a block cannot be recomputed correctly.
        TypeError: a block is not a ReversibleBlock.

    Without gradients (``torch.no_grad``, ``torch.inference_mode``) the blocks just run. Under autocast half precision streams
    are converted to fp32 and only f and g run in half precision, because streams that are rounded at every addition cannot be
    rebuilt.
    """

    backward, store, keep = Shorthand(), Shorthand(), Shorthand()
    schedules: list[Schedule]

    def __init__(
        self,
        blocks: Iterable[nn.Module],
        backward: str | Sequence[str] = "reversible",
        store: int | Collection[int] = 0,
        exact: bool | int = False,
        keep: str | Collection[str] = (),
        on_mismatch: str = "store",
        tile: int | None = None,
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        for block in self.blocks:
            _require_block(block)
        self._shorthands = {"backward": backward, "store": store}
        self.keep = keep
        self.tile = tile
        self._exact = exact
        if not isinstance(exact, int) or not 0 <= exact <= 52:
            raise ValueError(f"exact must be False, True or a number of bits up to 52, not {exact!r}")
        self.grid = None if exact is False else FixedPointGrid(None if exact is True else exact)
        self.checks = RebuildChecks(f"{type(self).__name__} of {counted(len(self.blocks), 'block')}", on_mismatch)

    def forward(self, x1: Tensor, x2: Tensor, f_kwargs: Keywords = None, g_kwargs: Keywords = None) -> tuple[Tensor, Tensor]:
        """Runs the blocks.

        Args:
            x1, x2: the two streams, with the same shape, floating dtype and device.
            f_kwargs, g_kwargs: keyword arguments of every f and every g, or a list with those of each block. They are passed on
                as they are; tensors among them may require grad.

        Returns:
            y1, y2: with the shape of x1 and x2.
        """
        if x1.shape != x2.shape or x1.dtype != x2.dtype or x1.device != x2.device or not x1.is_floating_point():
            raise ValueError(
                "the two streams must have the same shape, floating dtype and device, not "
                f"{tuple(x1.shape)} {x1.dtype} on {x1.device} and {tuple(x2.shape)} {x2.dtype} on {x2.device}"
            )
        if len(self.schedules) != len(self.blocks):  # blocks were added or removed
            self.backward = self.backward
        x1, x2 = _widened(x1), _widened(x2)
        keywords = list(zip(self._each(f_kwargs), self._each(g_kwargs), strict=True))
        grid = None
        if self.grid is not None:
            if not (self.grid.known or has_no_data(x1)):
                self._choose_grid(self.grid, x1, x2, keywords)
            if self.grid.known or has_no_data(x1):
                grid = self.grid.in_call(x1)
                x1, x2 = grid.entered(x1), grid.entered(x2)
        schedules = self.schedules if torch.is_grad_enabled() else [SCHEDULES["autograd"]] * len(self.blocks)
        through, kinds = self._by_schedule, {schedule.kind for schedule in schedules}
        if torch.compiler.is_compiling() and "rebuilt" in kinds:
            through = self._outside_the_graph
        elif torch.compiler.is_compiling() or kinds <= {"stored"}:
            through = self._stored_or_compiled
        x1, x2 = through(schedules, x1, x2, keywords, grid)
        if self.grid is not None and grid is not None and torch.is_grad_enabled() and backward_id() == -1:
            self.grid.follow(grid)
        return x1, x2

    def _each(self, keywords: Keywords) -> Sequence[dict]:
        depth = len(self.blocks)
        if keywords is None or isinstance(keywords, dict):
            return [keywords or {}] * depth
        if not isinstance(keywords, Sequence):
            raise TypeError(f"f_kwargs and g_kwargs are a dict, or a list of one dict for each block, not {keywords!r}")
        if len(keywords) != depth:
            raise ValueError(f"keyword arguments for {counted(len(keywords), 'block')} of {depth}")
        return keywords

    def _stored_or_compiled(
        self, schedules: list[Schedule], x1: Tensor, x2: Tensor, keywords: list, grid: Grid | None
    ) -> tuple[Tensor, Tensor]:
        """Stores everything, or has the compiler checkpoint, in a model that is compiled as a whole."""
        for number, (schedule, block, (f_kwargs, g_kwargs)) in enumerate(zip(schedules, self.blocks, keywords, strict=True)):
            coupling = cast(ReversibleBlock, block).coupling(grid)
            update = coupling.update if schedule.kind == "stored" else partial(_checkpointed, coupling)
            with in_trace("forward", number):
                x1, x2 = block(x1, x2, f_kwargs, g_kwargs, update=update)
        return x1, x2

    def _by_schedule(
        self, schedules: list[Schedule], x1: Tensor, x2: Tensor, keywords: list, grid: Grid | None
    ) -> tuple[Tensor, Tensor]:
        self.checks.begin()
        schedules = self.checks.in_force(schedules, self.blocks)
        current, hooked = Pass(x1.device, grid, self.checks, self.tile), _has_any_global_hook()
        for number, (schedule, block, (f_kwargs, g_kwargs)) in enumerate(zip(schedules, self.blocks, keywords, strict=True)):
            if hooked or block._forward_pre_hooks or block._forward_hooks:
                current.call.present = None  # a hook may draw random numbers
            update = current.of_block(number, schedule, block, (x1, x2)).update
            with in_trace("forward", number):
                x1, x2 = block(x1, x2, f_kwargs, g_kwargs, update=update)
        current.end(x1, x2)
        return x1, x2

    _outside_the_graph = torch.compiler.disable(
        _by_schedule,
        reason="blocks that are rebuilt run outside the compiled graph: compile without fullgraph=True, or each block with "
        'block.compile(), or set backward="checkpoint"',
    )

    def _choose_grid(self, grid: FixedPointGrid, x1: Tensor, x2: Tensor, keywords: list) -> None:
        """Runs the blocks once, without a graph, to see how large the streams become."""
        if not x1.numel():
            return  # a later batch will tell
        streams = x1, x2
        attributes = [value for part in self.modules() for value in vars(part).values()]
        generators = generators_among([*tree_leaves(keywords), *attributes])
        with torch.no_grad(), generators_unmoved(x1.device, generators):
            largest = torch.stack(streams).abs().amax()
            for block, kwargs in zip(self.blocks, keywords, strict=True):
                buffers = {name: buffer.clone() for name, buffer in block.named_buffers()}
                streams = torch.func.functional_call(block, buffers, (*streams, *kwargs))
                largest = torch.maximum(largest, torch.stack(streams).abs().amax())
        grid.choose(largest.item(), x1.dtype)

    @property
    def tile(self) -> int | None:
        """Tokens of a tile."""
        return self._tile

    @tile.setter
    def tile(self, tile: int | None) -> None:
        require_tile(tile)
        self._tile = tile

    @property
    def exact(self) -> bool | int:
        """As it was made; a grid cannot be added or taken away later."""
        return self._exact

    def again(self, depth: int, backward: str) -> nn.Module:
        """A sequence ``depth`` times the first block, which takes the same arguments."""
        return type(self)([self.blocks[0]] * depth, backward=[backward] * depth, tile=self.tile)

    def part(self, start: int, stop: int) -> ReversibleSequence:
        """A sequence of some of the blocks, which it shares, with their schedules. It has no grid."""
        part = ReversibleSequence(self.blocks[start:stop], tile=self.tile)
        part.schedules = self.schedules[start:stop]
        return part

    def inverse(self, y1: Tensor, y2: Tensor, f_kwargs: Keywords = None, g_kwargs: Keywords = None) -> tuple[Tensor, Tensor]:
        """Computes (x1, x2) from (y1, y2), up to rounding, or exactly if ``exact``; f and g must be deterministic."""
        grid = None if self.grid is None else self.grid.in_call(y1, again=True)
        each = zip(self.blocks, self._each(f_kwargs), self._each(g_kwargs), strict=True)
        for block, *keywords in reversed(list(each)):
            y1, y2 = cast(ReversibleBlock, block).inverse(y1, y2, *keywords, grid=grid)
        return y1, y2

    def _load_from_state_dict(self, state_dict, prefix, *rest) -> None:  # ty: ignore[incompatible-method-override]
        if self.grid is None:
            state_dict.pop(prefix + "grid.step", None)  # a checkpoint of an exact sequence
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def extra_repr(self) -> str:
        options = self._shorthands | {"tile": self.tile}
        return ", ".join(f"{name}={value!r}" for name, value in options.items() if value or name == "backward")


class AveragedStreams(ReversibleSequence):
    """Reversible blocks with one stream as input and output: both streams start as the input, and their mean is the output.

    Takes the arguments of :class:`ReversibleSequence`.
    """

    def forward(  # ty: ignore[incompatible-method-override]: one stream
        self, x: Tensor, f_kwargs: Keywords = None, g_kwargs: Keywords = None, **keywords: Any
    ) -> Tensor:
        """
        Args:
            keywords: for every f, in place of ``f_kwargs``.
        """
        return self.join(super().forward(*self.split(x), keywords or f_kwargs, g_kwargs))

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The streams that the first block reads."""
        return x, x

    def join(self, streams: tuple[Tensor, ...]) -> Tensor:
        """What is returned for the streams of the last block."""
        y1, y2 = streams
        return (y1 + y2) / 2


def checks_in(model: nn.Module) -> list[RebuildChecks]:
    """The checks of all reversible sequences in a model."""
    return [module.checks for module in model.modules() if isinstance(module, ReversibleSequence)]


def _require_block(block: nn.Module) -> None:
    plain = getattr(block, "_orig_mod", block)
    if not isinstance(plain, ReversibleBlock):
        raise TypeError(f"the blocks of a ReversibleSequence must be ReversibleBlocks, not {type(block).__name__}")
    if type(plain).forward is not ReversibleBlock.forward:
        raise TypeError(
            f"{type(plain).__name__} overrides forward, which the recomputation would ignore; put the change into f or g"
        )


def _checkpointed(coupling: Coupling, name: str, branch: nn.Module, target: Tensor, source: Tensor, keywords: dict) -> Tensor:
    return coupling.couple(target, source, checkpointed(branch, source, forward=partial(branch, **keywords)))


def _widened(stream: Tensor) -> Tensor:
    if stream.dtype in (torch.bfloat16, torch.float16) and torch.is_autocast_enabled(stream.device.type):
        return stream.float()
    return stream
