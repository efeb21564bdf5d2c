"""Gradients as rows of one length, in one contiguous buffer that stays where it is: transforms then work on all at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from holotrain.synthesis.layers import Layer

RUN = 64
"""Neighbouring entries that a subsample takes or leaves together."""


@dataclass
class Place:
    """Where a parameter's gradient stands.

    Args:
        view: of the buffer: in the parameter's shape, or flat where ``runs`` are chosen.
        runs: which runs of 64 entries take part; None: every entry.
    """

    parameter: nn.Parameter
    layer: int
    view: Tensor
    runs: Tensor | None

    def gather(self, grad: Tensor) -> None:
        """The chosen entries of a gradient into the buffer."""
        count = self.parameter.numel() // RUN * RUN
        self.view.view(-1, RUN).copy_(grad.reshape(-1)[:count].view(-1, RUN)[self.runs])

    def scatter(self, grad: Tensor, share: Tensor | None) -> None:
        """The buffer, and a share of what stood there, into the chosen entries of a (contiguous) gradient."""
        count = self.parameter.numel() // RUN * RUN
        target, new = grad.view(-1)[:count].view(-1, RUN), self.view.view(-1, RUN)
        target[self.runs] = (new if share is None else share * target[self.runs] + new).to(grad.dtype)


class Rows:
    """The gradients of layers, each from the beginning of a row.

    Args:
        numbered: the layers with their numbers.
        length: of a row.
        slots: the number of rows is made a multiple of it.
        subsample: part of each parameter's entries that takes part.
        like: of the buffer's dtype, on its device.

    Attributes:
        buffer: (rows, length); zero past the end of a layer.
        layer: (rows,) the number of each row's layer; rows that fill up belong to layer 0 and stay zero.
    """

    def __init__(
        self,
        numbered: list[tuple[int, Layer]],
        length: int,
        slots: int,
        subsample: float,
        like: Tensor,
        generator: torch.Generator,
    ) -> None:
        device = like.device
        chosen = {
            name: _chosen(parameter, subsample, generator)
            for _, layer in numbered
            for name, parameter in layer.parameters.items()
        }
        sizes = [sum(_size(p, chosen[name]) for name, p in layer.parameters.items()) for _, layer in numbered]
        counts = [-(-size // length) for size in sizes]
        total = sum(counts)
        self.length = length
        self.buffer = like.new_zeros(total + -total % slots, length)
        self._filling = self.buffer[total:]
        self.places: list[Place] = []
        owner, ends, flat, row = [], [], self.buffer.view(-1), 0
        for (number, layer), size, count in zip(numbered, sizes, counts, strict=True):
            at = row * length
            for name, parameter in layer.parameters.items():
                runs, width = chosen[name], _size(parameter, chosen[name])
                if width:
                    view = flat[at : at + width]
                    view = view.view(parameter.shape) if runs is None else view
                    self.places.append(Place(parameter, number, view, None if runs is None else runs.to(device)))
                at += width
            owner += [number] * count
            row += count
            if size % length:
                ends.append((row - 1, size % length))
        owner += [0] * (len(self.buffer) - total)
        self.layer = torch.tensor(owner, device=device)
        self._numbers = torch.tensor([number for number, _ in numbered], device=device)
        self._counts = torch.tensor([*counts, len(self.buffer) - total], device=device)  # the last: rows that fill up
        self._whole = [place for place in self.places if place.runs is None]
        self._sampled = [place for place in self.places if place.runs is not None]
        self.ragged = torch.tensor([row for row, _ in ends], dtype=torch.long, device=device)
        valid = torch.tensor([end for _, end in ends], device=device).unsqueeze(-1)
        self.inside = torch.arange(length, device=device) < valid if ends else None

    def gather(self) -> None:
        """The parameters' gradients into the buffer; zeros where there is none."""
        with_grad = [place for place in self._whole if place.parameter.grad is not None]
        without = [place.view for place in self.places if place.parameter.grad is None]
        if with_grad:
            torch._foreach_copy_([place.view for place in with_grad], [place.parameter.grad for place in with_grad])
        if without:
            torch._foreach_zero_(without)
        for place in self._sampled:
            if place.parameter.grad is not None:
                place.gather(place.parameter.grad)

    def scatter(self, a: Tensor | None, b: Tensor | None) -> None:
        """``a * buffer + b * gradient`` into the gradients, where there are any; a and b by layer, None for 1 and 0."""
        with_grad = [place for place in self._whole if place.parameter.grad is not None]
        grads, views = [place.parameter.grad for place in with_grad], [place.view for place in with_grad]
        shares = None if b is None else b.unbind()
        if a is not None:
            self.buffer.mul_(a[self.layer].unsqueeze(-1))
        if grads and shares is None:
            torch._foreach_copy_(grads, views)
        elif grads:
            torch._foreach_mul_(
                grads, [shares[place.layer].to(grad.dtype) for place, grad in zip(with_grad, grads, strict=True)]
            )
            torch._foreach_add_(grads, views)
        for place in self._sampled:
            if place.parameter.grad is not None:
                place.parameter.grad = place.parameter.grad.contiguous()
                place.scatter(place.parameter.grad, None if shares is None else shares[place.layer])

    def by_layer(self, of_rows: Tensor, layers: int) -> Tensor:
        """(figures, rows) -> (figures, layers): the sums over each layer's rows, in a fixed order."""
        sums = torch.segment_reduce(of_rows.T.contiguous(), "sum", lengths=self._counts, axis=0, unsafe=True)
        result = of_rows.new_zeros(len(of_rows), layers)
        result[:, self._numbers] = sums[: len(self._numbers)].T
        return result

    def clear_margins(self) -> None:
        """Zeros past the ends of the layers: what an update leaves there must not count as a gradient next time."""
        self._filling.zero_()
        if self.inside is not None:
            self.buffer[self.ragged] = self.buffer[self.ragged] * self.inside


def _chosen(parameter: nn.Parameter, subsample: float, generator: torch.Generator) -> Tensor | None:
    if subsample == 1:
        return None
    runs = parameter.numel() // RUN
    return torch.randperm(runs, generator=generator)[: round(subsample * runs)].sort().values


def _size(parameter: nn.Parameter, runs: Tensor | None) -> int:
    return parameter.numel() if runs is None else len(runs) * RUN
