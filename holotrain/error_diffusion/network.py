"""A network of excitatory and inhibitory cells that learns by error diffusion."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from holotrain.error_diffusion.diffusion import Diffusion
from holotrain.error_diffusion.layers import propagate, record
from holotrain.error_diffusion.rules import BACKPROPAGATION, RULES


class ErrorDiffusionNetwork(nn.Module):
    """Layers of pairs of cells, a separate network for each output (Kaneko's ED method).

    Without the published program's constant threshold inputs: a pair at rest answers with 1/2 and -1/2, which serves as one.

        network = ErrorDiffusionNetwork(inputs=64, outputs=10, width=32, depth=17)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.3)
        (0.5 * (network(x) - targets).square().sum(1).mean()).backward()  # writes minus the updates
        optimizer.step()

    Args:
        inputs: I, numbers a sample; each drives an excitatory and an inhibitory cell.
        outputs: D; the output cells are excitatory.
        width: W, pairs of cells in a hidden layer.
        depth: L, hidden layers, at least 1.
        rule: ``"kaneko"``, whose updates never make a magnitude smaller (weight decay does, but not below 0), ``"article"``, or
            ``"backpropagation"``: the same network, differentiated by autograd.
        u0: cells answer with sigmoid(2 u / u0).

    Shapes: (B, I), or more dimensions, which are flattened -> (B, D), each in (0, 1). Under autocast layers are in its type.

    Attributes:
        incoming: (D, 2, 2, I, W) magnitudes, by the signs of source and target, then source and target.
        hidden: (D, L - 1, 2, 2, W, W), the same between hidden layers.
        outgoing: (D, 2, W), from the last hidden layer, by the sign of the source.
        signs: (2,), +1 and -1: those of the cells of a pair. A weight is its magnitude times the signs of its two cells.

    Raises:
        ValueError: sizes below 1, another rule; at the call, other than I numbers a sample, or inputs that require a gradient,
            which there is none of.
    """

    def __init__(
        self, inputs: int, outputs: int, width: int = 32, depth: int = 1, rule: str = "kaneko", u0: float = 0.4
    ) -> None:
        super().__init__()
        if min(inputs, outputs, width, depth) < 1 or u0 <= 0:
            raise ValueError(
                f"inputs, outputs, width and depth are at least 1, u0 above 0: not {inputs, outputs, width, depth, u0}"
            )
        if rule not in (*RULES, BACKPROPAGATION):
            raise ValueError(f"rule must be {', '.join(RULES)} or {BACKPROPAGATION}, not {rule!r}")
        self.rule = rule
        self.gain = 2 / u0
        self.register_buffer("signs", torch.tensor([1.0, -1.0]), persistent=False)
        # In memory as the matrices that layers multiply by: a layer, then an output, then all sources by all targets.
        self.incoming = nn.Parameter(_uniform(outputs, 2, inputs, 2, width, sources=2 * inputs).transpose(2, 3))
        hidden = _uniform(depth - 1, outputs, 2, width, 2, width, sources=2 * width).permute(1, 0, 2, 4, 3, 5)
        self.hidden = nn.Parameter(hidden, requires_grad=depth > 1)
        self.outgoing = nn.Parameter(_uniform(outputs, 2, width, sources=2 * width))

    def forward(self, x: Tensor) -> Tensor:
        arguments, outside = self._prepared(x)
        with outside:
            if self.rule == BACKPROPAGATION or not torch.is_grad_enabled():
                return propagate(*arguments, self.gain)
            if x.requires_grad:
                raise ValueError("error diffusion has no gradient for its inputs; detach them, or take rule='backpropagation'")
            return Diffusion.apply(*arguments, self.gain, self.rule)

    @torch.no_grad()
    def activities(self, x: Tensor) -> Tensor:
        """Signed activities of all hidden layers, (L, D, B, C): a cell's sign times its output; excitatory cells first."""
        arguments, outside = self._prepared(x)
        with outside:
            return record(*arguments, self.gain)[0]

    @torch.no_grad()
    def clamp_signs(self) -> None:
        """Sets magnitudes below 0 to 0, after an optimizer step that may have made some: no weight then has a wrong sign."""
        for parameter in self.parameters():
            parameter.clamp_(min=0)

    @contextmanager
    def ruled_by(self, rule: str) -> Iterator[None]:
        """Another rule, for as long as this lasts."""
        kept, self.rule = self.rule, rule
        try:
            yield
        finally:
            self.rule = kept

    def extra_repr(self) -> str:
        outputs, between, *_, width = self.hidden.shape
        inputs = self.incoming.shape[3]
        return (
            f"inputs={inputs}, outputs={outputs}, width={width}, depth={between + 1}, rule={self.rule!r}, u0={2 / self.gain:g}"
        )

    def _prepared(self, x: Tensor) -> tuple[list[Tensor], AbstractContextManager]:
        """What the layers take, in autocast's type where it is on; and a context without it."""
        inputs = self.incoming.shape[3]
        if x.ndim < 2 or x[:1].numel() != inputs * len(x[:1]):
            raise ValueError(
                f"inputs must be (batch, {inputs}), or more dimensions of {inputs} numbers a sample: not {tuple(x.shape)}"
            )
        dtype, outside = _autocast(x.device.type, self.outgoing.dtype)
        return [tensor.to(dtype) for tensor in (x.flatten(1), *self._matrices(), self._offset())], outside

    def _matrices(self) -> tuple[Tensor, Tensor, Tensor]:
        """Magnitudes from all source cells to all target cells: (D, 2 I, C), (L - 1, D, C, C), (D, C, 1)."""
        incoming = self.incoming.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        hidden = self.hidden.permute(1, 0, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)
        return incoming, hidden, self.outgoing.flatten(1, 2).unsqueeze(-1)

    def _offset(self) -> Tensor:
        """(C,): 0 of excitatory cells, 1 of inhibitory ones."""
        return (self.signs < 0).repeat_interleave(self.outgoing.shape[-1])


def _autocast(device: str, dtype: torch.dtype) -> tuple[torch.dtype, AbstractContextManager]:
    """The type that autocast asks for, ``dtype`` where it is off; and a context without it."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return dtype, nullcontext()
    return torch.get_autocast_dtype(device), torch.autocast(device, enabled=False)


def _uniform(*shape: int, sources: int) -> Tensor:
    """Magnitudes between 0 and 1 / sqrt(sources)."""
    return torch.rand(shape) / math.sqrt(sources)
