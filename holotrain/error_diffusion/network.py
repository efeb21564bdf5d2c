"""A network of excitatory and inhibitory cells that learns by error diffusion."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from holotrain.error_diffusion.diffusion import Diffusion
from holotrain.error_diffusion.layers import propagate, record
from holotrain.error_diffusion.rules import BACKPROPAGATION, PUBLISHED, RULES
from holotrain.ranges import require_at_least, require_one_of


class ErrorDiffusionNetwork(nn.Module):
    """Layers of pairs of cells, with a separate network for each output (Kaneko's ED method).

        network = ErrorDiffusionNetwork(inputs=64, outputs=10, width=32, depth=17)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.3)
        (0.5 * (network(x) - targets).square().sum(1).mean()).backward()  # writes minus the updates
        optimizer.step()

    Args:
        inputs: I, numbers per sample; each drives an excitatory and an inhibitory cell.
        outputs: D; the output cells are excitatory.
        width: W, pairs of cells in a hidden layer.
        depth: L, number of hidden layers, at least 1.
        rule: ``"kaneko"``, whose updates never make a magnitude smaller (weight decay does, but not below 0), ``"article"``, or
            ``"backpropagation"``: the same network, differentiated by autograd.
        u0: the output of a cell is sigmoid(2 u / u0).
        constants: signed activities of the constant cells, whose weights to every cell are its threshold; () has none, because
            a pair at rest, whose outputs are 1/2 and -1/2, does the same.
        initialization: ``"scaled"``: magnitudes are uniform between 0 and 1 / sqrt(sources); ``"uniform"``: between 0 and 1;
            ``"normal"``: absolute values of normal numbers, and thresholds as in ``"uniform"``.
        output_rate: what multiplies the learning rate of the weights to the outputs.

    With None, ``constants``, ``initialization`` and ``output_rate`` are as published with the rule
    (:data:`~holotrain.error_diffusion.rules.PUBLISHED`).

    Shapes: (B, I), or more dimensions, which are flattened -> (B, D), each in (0, 1). Under autocast the layers use its dtype.

    Attributes:
        incoming: (D, 2, 2, I, W) magnitudes, by the signs of source and target, then source and target.
        hidden: (D, L - 1, 2, 2, W, W), the same between hidden layers.
        outgoing: (D, 2, W), from the last hidden layer, by the sign of the source.
        thresholds: (D, L, S, 2, W), from the S constant cells to hidden cells, by the sign of the target; None if S is 0.
        last: (D, S), from the constant cells to the outputs; None if S is 0.
        signs: (2,), +1 and -1: the signs of the cells of a pair. A weight is its magnitude times the signs of its two cells.

    Raises:
        ValueError: sizes below 1, ``u0`` below 1e-6, or an unknown rule; at the call, inputs that do not have I numbers per
            sample, or that require a gradient (there is none).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        width: int = 32,
        depth: int = 1,
        rule: str = "kaneko",
        u0: float = 0.4,
        constants: Sequence[float] | None = (),
        initialization: str | None = "scaled",
        output_rate: float | None = 1.0,
    ) -> None:
        super().__init__()
        require_at_least(1, inputs=inputs, outputs=outputs, width=width, depth=depth)
        require_at_least(1e-6, u0=u0)
        require_one_of((*RULES, BACKPROPAGATION), rule=rule)
        published = PUBLISHED[rule]
        constants = published.constants if constants is None else constants
        initialization = published.initialization if initialization is None else initialization
        require_one_of(INITIALIZATIONS, initialization=initialization)
        self.output_rate = published.output_rate if output_rate is None else output_rate
        require_at_least(0, output_rate=self.output_rate)
        if rule == BACKPROPAGATION and self.output_rate != 1:
            raise ValueError(f"output_rate={self.output_rate}: rule={rule} has the gradients as they are; leave it out")
        self.rule = rule
        self.gain = 2 / u0
        drawn = INITIALIZATIONS[initialization]
        self.register_buffer("signs", torch.tensor([1.0, -1.0]), persistent=False)
        # Memory order is that of the matrices that layers multiply by: layer, output, all sources, all targets.
        self.incoming = nn.Parameter(drawn(outputs, 2, inputs, 2, width, sources=2 * inputs).transpose(2, 3))
        hidden = drawn(depth - 1, outputs, 2, width, 2, width, sources=2 * width).permute(1, 0, 2, 4, 3, 5)
        self.hidden = nn.Parameter(hidden, requires_grad=depth > 1)
        self.outgoing = nn.Parameter(drawn(outputs, 2, width, sources=2 * width))
        self.register_buffer("constants", torch.tensor(constants, dtype=torch.get_default_dtype()), persistent=False)
        self.thresholds = self.last = None
        if constants:
            drawn = _scaled if initialization == "scaled" else _uniform
            self.thresholds = nn.Parameter(drawn(depth, outputs, len(constants), 2, width, sources=2 * width).transpose(0, 1))
            self.last = nn.Parameter(drawn(outputs, len(constants), sources=2 * width))

    def forward(self, x: Tensor) -> Tensor:
        arguments, outside = self._prepared(x)
        with outside:
            if self.rule == BACKPROPAGATION or not torch.is_grad_enabled():
                return propagate(*arguments, self.gain)
            if x.requires_grad:
                raise ValueError("error diffusion has no gradient for its inputs; detach them, or use rule='backpropagation'")
            return Diffusion.apply(*arguments, self.gain, self.rule, self.output_rate)

    @torch.no_grad()
    def activities(self, x: Tensor) -> Tensor:
        """Signed activities of all hidden layers, (L, D, B, C): a cell's sign times its output, excitatory cells first."""
        arguments, outside = self._prepared(x)
        with outside:
            return record(*arguments, self.gain)[0]

    @torch.no_grad()
    def clamp_signs(self) -> None:
        """Sets magnitudes below 0 to 0, so that no weight has a wrong sign. Call it after an optimizer step."""
        for parameter in self.parameters():
            parameter.clamp_(min=0)

    @contextmanager
    def ruled_by(self, rule: str) -> Iterator[None]:
        """Uses another rule inside the context."""
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
        """The arguments of the layers, in autocast's dtype if it is on, and a context that turns autocast off."""
        inputs = self.incoming.shape[3]
        if x.ndim < 2 or x[:1].numel() != inputs * len(x[:1]):
            raise ValueError(
                f"inputs must be (batch, {inputs}), or more dimensions with {inputs} numbers per sample, not {tuple(x.shape)}"
            )
        dtype, outside = _autocast(x.device.type, self.outgoing.dtype)
        return [tensor.to(dtype) for tensor in (x.flatten(1), *self._matrices(), self._offset())], outside

    def _matrices(self) -> tuple[Tensor, ...]:
        """Magnitudes and constants in the shapes of ``layers``."""
        incoming = self.incoming.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        hidden = self.hidden.permute(1, 0, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)
        outgoing = self.outgoing.flatten(1, 2).unsqueeze(-1)
        if self.thresholds is None:
            thresholds, last = (
                outgoing.new_empty(1 + len(hidden), len(outgoing), 0, outgoing.shape[1]),
                outgoing[:, :0].detach(),
            )
        else:
            thresholds, last = self.thresholds.transpose(0, 1).flatten(3), self.last.unsqueeze(-1)
        return incoming, hidden, outgoing, thresholds, last, self.constants

    def _offset(self) -> Tensor:
        """(C,): 0 for excitatory cells, 1 for inhibitory cells."""
        return (self.signs < 0).repeat_interleave(self.outgoing.shape[-1])


def _autocast(device: str, dtype: torch.dtype) -> tuple[torch.dtype, AbstractContextManager]:
    """Autocast's dtype, or ``dtype`` if autocast is off, and a context that turns it off."""
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return dtype, nullcontext()
    return torch.get_autocast_dtype(device), torch.autocast(device, enabled=False)


def _scaled(*shape: int, sources: int) -> Tensor:
    return torch.rand(shape) / math.sqrt(sources)


def _uniform(*shape: int, sources: int) -> Tensor:
    return torch.rand(shape)


def _normal(*shape: int, sources: int) -> Tensor:
    return torch.randn(shape).abs()


INITIALIZATIONS = {"scaled": _scaled, "uniform": _uniform, "normal": _normal}
"""How magnitudes of a shape are drawn for targets with a number of sources."""
