"""Gradients as rows of one length: where the entries of each parameter are, and copies to rows and back.

The rows of all layers, one layer after the other, are split into ``slots`` equal shares; a row of the hologram belongs to one
row of each share. A part is a range of hologram rows with their gradient rows. Parts that are processed one at a time share one
piece of memory, which keeps it in a CPU's cache.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor, nn

from holotrain.synthesis.binding import Stretches
from holotrain.synthesis.keys import Layer, local, pairs

Numbered = list[tuple[int, Layer]]

RUN = 64
"""Number of neighbouring entries that a subsample takes or leaves together."""

Chosen = dict[nn.Parameter, tuple[int, Tensor | None]]
"""How many entries of each parameter take part, and which runs; None: all entries."""


@dataclass
class Span:
    """Consecutive entries of one parameter, and where they are.

    Args:
        start, stop: range of the parameter's entries (of the chosen ones, if there is a subsample).
        runs: which runs of the parameter's entries they are; None: the entries from start to stop.
        view: flat view of a part's memory.
    """

    parameter: nn.Parameter
    layer: int
    start: int
    stop: int
    runs: Tensor | None
    view: Tensor

    @property
    def grad(self) -> Tensor:
        """The entries of the (contiguous) gradient: a view, or a copy if runs are chosen."""
        return self._flat[self.start : self.stop] if self.runs is None else self._in_runs(self.runs)[self.runs].flatten()

    def put(self, runs: Tensor) -> None:
        """Overwrites the chosen runs of the gradient with what is in the view."""
        all_runs = self._in_runs(runs)
        all_runs[runs] = self.view.view(len(runs), -1).to(all_runs.dtype)

    @property
    def _flat(self) -> Tensor:
        assert self.parameter.grad is not None
        return local(self.parameter.grad).view(-1)

    def _in_runs(self, runs: Tensor) -> Tensor:
        run = (self.stop - self.start) // len(runs)
        flat = self._flat
        return flat[: len(flat) // run * run].view(-1, run)


@dataclass
class Part:
    """Rows that are processed at once.

    Args:
        rows: range of rows of the hologram.
        memory: (slots, rows, length).
        layer: (slots, rows), the layer of each row; 0 for padding rows.
        stretches: the same for the first slot, as ranges of rows.
        spans: where the gradients are in the memory.
        margins: the rest of the memory.
    """

    rows: slice
    memory: Tensor
    layer: Tensor
    stretches: Stretches
    spans: list[Span]
    margins: list[Tensor]

    def gather(self) -> None:
        """Copies the gradients into the memory, and zeros where there is none."""
        present = [span for span in self.spans if span.parameter.grad is not None]
        if present:
            torch._foreach_copy_([span.view for span in present], [span.grad for span in present])
        self.clear_unwritten()

    def clear_unwritten(self) -> None:
        """Sets the memory to zero where there is no gradient; updates at these places are not used."""
        unwritten = [*self.margins, *(span.view for span in self.spans if span.parameter.grad is None)]
        if unwritten:
            torch._foreach_zero_(unwritten)

    def scatter(self, factors: tuple[Tensor, Tensor] | None = None) -> None:
        """Writes ``a * memory + b * gradient`` to the gradients; the factors a and b are by layer, None means 1 and 0."""
        present = [span for span in self.spans if span.parameter.grad is not None]
        if factors is not None:
            a, b = factors
            self.memory.mul_(a[self.layer].unsqueeze(-1))
            for span, grad in ((span, span.grad) for span in present):
                span.view.add_(b[span.layer] * grad)
        whole = [span for span in present if span.runs is None]
        if whole:
            torch._foreach_copy_([span.grad for span in whole], [span.view for span in whole])
        for span in present:
            if span.runs is not None:
                span.put(span.runs)


class Rows:
    """The gradients of layers; each layer starts at the beginning of a row.

    Args:
        numbered: the layers with their numbers.
        chosen: which entries of a parameter take part.
        run: number of entries in a run.
        length: of a row.
        slots: number of equal shares of the rows.
        most: the most entries in a part, if a row is not longer.
        together: give every part its own memory.
        like: a tensor with the dtype and device of the rows.

    Attributes:
        count: rows of the hologram.
        parts: all rows, in parts.
    """

    def __init__(
        self, numbered: Numbered, chosen: Chosen, run: int, length: int, slots: int, most: int, together: bool, like: Tensor
    ) -> None:
        self.length, self.slots = length, slots
        extents: list[tuple[int, int, int, nn.Parameter, Tensor | None]] = []
        counts, owners = [], []
        for number, layer in numbered:
            at = begin = sum(counts) * length
            for parameter in layer.parameters.values():
                size, runs = chosen[parameter]
                if size:
                    extents.append((at, at + size, number, parameter, None if runs is None else runs.to(like.device)))
                at += size
            counts.append(-(-(at - begin) // length))
            owners += [number] * counts[-1]
        filling = -len(owners) % slots
        self.count = (len(owners) + filling) // slots
        self._numbers = torch.tensor([number for number, _ in numbered], device=like.device)
        self._counts = torch.tensor([*counts, filling], device=like.device)
        layer = torch.tensor(owners + [0] * filling, device=like.device).view(slots, -1)
        size = min(self.count, max(1, most // (slots * length)))
        memory = like.new_zeros(slots, self.count if together else size, length)
        self.parts = []
        for start in range(0, self.count, size):
            rows = slice(start, min(start + size, self.count))
            mine = memory[:, rows] if together else memory[:, : rows.stop - rows.start]
            self.parts.append(Part(rows, mine, layer[:, rows], _stretches(owners[rows]), [], []))
            for slot in range(slots):
                first = (slot * self.count + rows.start) * length
                self._place(self.parts[-1], mine[slot].view(-1), first, extents, run)

    def _place(self, part: Part, memory: Tensor, first: int, extents: Iterable[tuple], run: int) -> None:
        """Finds the spans of a part and the margins between them, in flat memory for the entries from ``first`` on."""
        done = 0
        for start, stop, number, parameter, runs in extents:
            low, high = max(start, first), min(stop, first + len(memory))
            if low >= high:
                continue
            if low - first > done:
                part.margins.append(memory[done : low - first])
            done = high - first
            mine = None if runs is None else runs[(low - start) // run : (high - start) // run]
            part.spans.append(Span(parameter, number, low - start, high - start, mine, memory[low - first : done]))
        if done < len(memory):
            part.margins.append(memory[done:])

    def by_layer(self, of_rows: Tensor, layers: int) -> Tensor:
        """(figures, slots, rows) -> (figures, layers): sums over the rows of each layer, in a fixed order."""
        flat = of_rows.flatten(1).T.contiguous()
        sums = torch.segment_reduce(flat, "sum", lengths=self._counts, axis=0, unsafe=True)  # ty: ignore[missing-attribute]
        result = of_rows.new_zeros(len(of_rows), layers)
        result[:, self._numbers] = sums[:-1].T
        return result


def _stretches(owners: list[int]) -> Stretches:
    result, start = [], 0
    for owner, rows in groupby(owners):
        stop = start + len(list(rows))
        result.append((owner, slice(start, stop)))
        start = stop
    return result


def choose(layers: Iterable[Layer], subsample: float, run: int, generator: torch.Generator) -> Chosen:
    """Chooses a random part of the runs of each parameter, in order; None for all entries."""
    chosen: Chosen = {}
    for _, parameter in pairs(layers):
        size, runs = local(parameter).numel(), None
        if subsample < 1:
            runs = torch.randperm(size // run, generator=generator)[: round(subsample * (size // run))].sort().values
            size = len(runs) * run
        chosen[parameter] = size, runs
    return chosen
