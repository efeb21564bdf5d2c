"""A network of excitatory and inhibitory cells that learns by error diffusion, and diagnostics of it.

**Forward**, in signed activities. A target of sign s has the output sigmoid(2 u / u0), where u = s v and v is the sum of the
sources' signed activities times magnitudes. The activities already contain the signs of the sources. Since sigmoid(-v) =
1 - sigmoid(v), the signed activity is sigmoid(2 v / u0) for an excitatory cell and sigmoid(2 v / u0) - 1 for an inhibitory one,
so weights need no sign.

**Backward**: minus the update as the gradient of each weight. An optimizer that subtracts learning rate times gradient then
adds the update. Everything that works on gradients works here: accumulation, clipping, schedules, scaled losses (the rules are
positively homogeneous in the error), all-reduce under DDP.

Shapes: magnitudes are matrices from all source cells to all target cells: incoming (D, 2 I, C), hidden (L - 1, D, C, C),
outgoing (D, C, 1). S constant cells reach every layer: ``constants`` (S,) are their signed activities, thresholds (L, D, S, C)
and last (D, S, 1) their magnitudes. ``offset`` (C,) is 0 for excitatory and 1 for inhibitory cells; ``gain`` is 2 / u0.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from holotrain.error_diffusion.rules import BACKPROPAGATION, PUBLISHED, RULES, contract, slope
from holotrain.numeric import require_at_least, require_one_of


def input_cells(x: Tensor, outputs: int) -> Tensor:
    """Every input drives an excitatory and an inhibitory cell: (B, I) -> signed activities (D, B, 2 I)."""
    return torch.cat([x, -x], dim=1).expand(outputs, -1, -1)


def propagate(
    x: Tensor, incoming: Tensor, hidden: Tensor, outgoing: Tensor, thresholds: Tensor, last: Tensor, constants: Tensor,
    offset: Tensor, gain: float,
) -> Tensor:  # fmt: skip
    """The outputs (B, D) of inputs (B, I), with plain autograd."""
    first, *rest, final = _at_rest(thresholds, last, constants)
    activities = torch.sigmoid(_drive(first, input_cells(x, len(incoming)), incoming, gain)) - offset
    for threshold, magnitudes in zip(rest, hidden, strict=True):
        activities = torch.sigmoid(_drive(threshold, activities, magnitudes, gain)) - offset
    return torch.sigmoid(_drive(final, activities, outgoing, gain))[..., 0].T


def record(
    x: Tensor, incoming: Tensor, hidden: Tensor, outgoing: Tensor, thresholds: Tensor, last: Tensor, constants: Tensor,
    offset: Tensor, gain: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same, and the signed activities of all hidden layers, (L, D, B, C), in one tensor."""
    outputs, batch = len(incoming), len(x)
    activities = x.new_empty(len(thresholds), outputs, batch, len(offset))
    first, *rest, final = _at_rest(thresholds, last, constants)
    _drive(first, input_cells(x, outputs), incoming, gain, out=activities[0]).sigmoid_().sub_(offset)
    # A thousand small layers are bound by kernel launches: three per layer, without allocations.
    for threshold, sources, magnitudes, targets in zip(rest, activities[:-1], hidden, activities[1:], strict=True):
        _drive(threshold, sources, magnitudes, gain, out=targets).sigmoid_().sub_(offset)
    return activities, torch.sigmoid_(_drive(final, activities[-1], outgoing, gain))[..., 0].T


def _at_rest(thresholds: Tensor, last: Tensor, constants: Tensor) -> list[Tensor]:
    """What constant cells add to the sums of each layer, (D, 1, C), and the outputs, (D, 1, 1); scalars if there are none."""
    if not len(constants):
        return [last.new_zeros(())] * (len(thresholds) + 1)
    return [*(constants @ thresholds).unsqueeze(-2), (constants @ last).unsqueeze(-2)]


def _drive(threshold: Tensor, activities: Tensor, magnitudes: Tensor, gain: float, out: Tensor | None = None) -> Tensor:
    """gain x (threshold + activities @ magnitudes). A scalar threshold is ignored, which saves a copy."""
    return torch.baddbmm(threshold, activities, magnitudes, beta=gain * bool(threshold.ndim), alpha=gain, out=out)


class Diffusion(Function):
    """Inputs (B, I) and magnitudes, as in ``layers`` -> outputs (B, D).

    The incoming gradient, (B, D), is minus the error: output minus target for half the squared error. It goes to every layer
    unchanged. The inputs get no gradient, because there is no backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, incoming: Tensor, hidden: Tensor, outgoing: Tensor, thresholds: Tensor, last: Tensor,
        constants: Tensor, offset: Tensor, gain: float, rule: str, output_rate: float,
    ) -> Tensor:  # fmt: skip
        activities, outputs = record(x, incoming, hidden, outgoing, thresholds, last, constants, offset, gain)
        ctx.save_for_backward(x, activities, outputs, constants)
        ctx.rule, ctx.output_rate = rule, output_rate
        return outputs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, activities, outputs, constants = ctx.saved_tensors
        learns = RULES[ctx.rule]
        error = -grad.T.unsqueeze(-1)
        needs_incoming, needs_hidden, needs_outgoing, needs_thresholds, needs_last = ctx.needs_input_grad[1:6]
        incoming = hidden = outgoing = thresholds = last = None
        slopes = slope(outputs).T.unsqueeze(-1) * -ctx.output_rate
        steady = learns(constants.expand(*error.shape[:2], -1), error).mT
        if needs_incoming:
            incoming = learns(input_cells(x, len(error)), error).mT.bmm(slope(activities[0])).neg_()
        if needs_hidden:
            hidden = contract(activities, error, ctx.rule).neg_()
        if needs_outgoing:
            outgoing = learns(activities[-1], error).mT.bmm(slopes)
        if needs_thresholds:
            thresholds = torch.stack([steady.bmm(slope(layer)) for layer in activities]).neg_()
        if needs_last:
            last = steady.bmm(slopes)
        return None, incoming, hidden, outgoing, thresholds, last, *(None,) * 5


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

    signs: Tensor
    constants: Tensor
    thresholds: nn.Parameter | None
    last: nn.Parameter | None

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
        options: dict[str, Any] = {"constants": constants, "initialization": initialization, "output_rate": output_rate}
        chosen = PUBLISHED[rule]._replace(**{name: value for name, value in options.items() if value is not None})
        constants, initialization, self.output_rate = chosen
        require_one_of(INITIALIZATIONS, initialization=initialization)
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
    def ruled_by(self, rule: str) -> Generator[None]:
        """Uses another rule inside the context."""
        previous, self.rule = self.rule, rule
        try:
            yield
        finally:
            self.rule = previous

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
        device, dtype, outside = x.device.type, self.outgoing.dtype, nullcontext()
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            dtype, outside = torch.get_autocast_dtype(device), torch.autocast(device, enabled=False)
        offset = (self.signs < 0).repeat_interleave(self.outgoing.shape[-1])
        return [tensor.to(dtype) for tensor in (x.flatten(1), *self._matrices(), offset)], outside

    def _matrices(self) -> tuple[Tensor, ...]:
        """Magnitudes and constants in the shapes of ``layers``."""
        incoming = self.incoming.transpose(2, 3).flatten(3, 4).flatten(1, 2)
        hidden = self.hidden.permute(1, 0, 2, 4, 3, 5).flatten(4, 5).flatten(2, 3)
        outgoing = self.outgoing.flatten(1, 2).unsqueeze(-1)
        if self.thresholds is None or self.last is None:
            thresholds, last = (
                outgoing.new_empty(1 + len(hidden), len(outgoing), 0, outgoing.shape[1]),
                outgoing[:, :0].detach(),
            )
        else:
            thresholds, last = self.thresholds.transpose(0, 1).flatten(3), self.last.unsqueeze(-1)
        return incoming, hidden, outgoing, thresholds, last, self.constants


def _scaled(*shape: int, sources: int) -> Tensor:
    return torch.rand(shape) / math.sqrt(sources)


def _uniform(*shape: int, sources: int) -> Tensor:
    return torch.rand(shape)


def _normal(*shape: int, sources: int) -> Tensor:
    return torch.randn(shape).abs()


INITIALIZATIONS = {"scaled": _scaled, "uniform": _uniform, "normal": _normal}
"""How magnitudes of a shape are drawn for targets with a number of sources."""


FLAT = 1e-3
"""Slopes |o| (1 - |o|), at most 1/4, below which the weights of a cell hardly change."""


def sign_violations(network: ErrorDiffusionNetwork) -> Tensor:
    """The share of weights with the wrong sign, that is, with a magnitude below 0. A scalar."""
    parameters = list(network.parameters())
    wrong = torch.stack([(parameter.detach() < 0).sum() for parameter in parameters]).sum()
    return wrong / sum(parameter.numel() for parameter in parameters)


def dead_cells(network: ErrorDiffusionNetwork, x: Tensor) -> Tensor:
    """The share of hidden cells that are saturated for every sample of x, (B, I), and learn nothing from it. A scalar."""
    return (slope(network.activities(x)).amax(dim=2) < FLAT).float().mean()


def alignment(network: ErrorDiffusionNetwork, x: Tensor, grad: Tensor) -> Tensor:
    """The cosine of the network's update and that of gradient descent, over all weights. A scalar.

    Args:
        x: (B, I).
        grad: (B, D), the gradient of the loss with respect to the outputs.
    """
    by_rule = _gradient(network, x, grad)
    with network.ruled_by(BACKPROPAGATION):
        return torch.cosine_similarity(by_rule, _gradient(network, x, grad), dim=0)


def _gradient(network: ErrorDiffusionNetwork, x: Tensor, grad: Tensor) -> Tensor:
    learning = tuple(parameter for parameter in network.parameters() if parameter.requires_grad)
    with torch.enable_grad():
        outputs = network(x)
        gradients = torch.autograd.grad(outputs, learning, grad.to(outputs.dtype))
    return torch.cat([gradient.flatten() for gradient in gradients])


class ImageErrorDiffusion(ErrorDiffusionNetwork):
    """Every pixel is an input. There is one output for each class; two classes share one output, which is that of the second.

    Args:
        image_size: height and width of an image in pixels
        channels: color channels of an image
        classes: number of classes, at least 2
        width: pairs of one excitatory and one inhibitory cell per hidden layer
        depth: number of hidden layers
        rule: learning rule: kaneko (magnitudes only grow), article (they may also shrink) or backpropagation (the true
            gradient)
        u0: scale of the activation function sigmoid(2 u / u0)
        constants: activities of constant cells, whose weights are thresholds; null: as published with the rule (kaneko: 0.8 and
            -0.8, article: 1)
        initialization: of the weights: scaled to the number of sources, uniform in [0, 1), or normal (absolute values); null:
            as published (kaneko: uniform, article: normal)
        output_rate: factor of the learning rate of the output layer; null: as published (kaneko: 1, article: 1.25)

    Shapes: images (B, channels, image_size, image_size) -> (B, classes), or (B, 1), each in (0, 1).

    Raises:
        ValueError: as :class:`ErrorDiffusionNetwork` does.
    """

    def __init__(
        self,
        image_size: int,
        channels: int = 1,
        classes: int = 10,
        width: int = 32,
        depth: int = 1,
        rule: Literal["kaneko", "article", "backpropagation"] = "kaneko",
        u0: float = 0.4,
        constants: Sequence[float] | None = (),
        initialization: Literal["scaled", "uniform", "normal"] | None = "scaled",
        output_rate: float | None = 1.0,
    ) -> None:
        outputs = 1 if classes == 2 else classes
        super().__init__(channels * image_size**2, outputs, width, depth, rule, u0, constants, initialization, output_rate)
