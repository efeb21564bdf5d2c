"""Kaneko's program as loops over single cells: outputs |o| in (0, 1) and signed weights."""

import math

import torch
from torch import Tensor

from holotrain.error_diffusion import ErrorDiffusionNetwork

SIGNS = torch.tensor([1, -1])
"""Of the cells of a pair."""


class PlainNetwork:
    """The network of output ``d`` of an ErrorDiffusionNetwork: ``weights[layer][k][m]`` goes from m to k and is signed.

    The constant cells are the last sources m of every layer: their outputs are ``constants``, their signs ``constant_signs``.
    """

    def __init__(
        self,
        network: ErrorDiffusionNetwork,
        d: int,
        u0: float,
        constants: tuple[float, ...] = (),
        constant_signs: tuple[int, ...] = (),
        output_rate: float = 1.0,
    ) -> None:
        self.u0, self.constants, self.output_rate = u0, constants, output_rate
        inputs, width = network.incoming.shape[3:]
        sources = [_signs(inputs), *(_signs(width) for _ in range(1 + network.hidden.shape[1]))]
        self.signs = [*([*signs, *constant_signs] for signs in sources), [1]]
        self.weights = signed_layers(network.incoming[d], network.hidden[d], network.outgoing[d])
        if constants:
            for layer, magnitudes in enumerate(signed_thresholds(network.thresholds[d], network.last[d], constant_signs)):
                for row, added in zip(self.weights[layer], magnitudes, strict=True):
                    row.extend(added)

    def outputs(self, x: list[float]) -> list[list[float]]:
        """Outputs of every layer of cells, starting with the inputs. Each input drives two cells."""
        found = [[*x, *x]]
        for weights in self.weights:
            totals = [sum(w * o for w, o in zip(row, [*found[-1], *self.constants], strict=True)) for row in weights]
            found.append([1 / (1 + math.exp(-2 * u / self.u0)) for u in totals])
        return found

    def learn(self, samples: list[list[float]], targets: list[float], rule: str, alpha: float) -> None:
        """Adds alpha times the mean of the updates of a batch."""
        changes = [self.updates(x, target, rule) for x, target in zip(samples, targets, strict=True)]
        for layer, weights in enumerate(self.weights):
            for k, row in enumerate(weights):
                for m in range(len(row)):
                    row[m] += alpha * sum(change[layer][k][m] for change in changes) / len(changes)

    def updates(self, x: list[float], target: float, rule: str) -> list[list[list[float]]]:
        """The update of every signed weight, with alpha = 1."""
        outputs = self.outputs(x)
        error = target - outputs[-1][0]
        d_plus, d_minus = max(error, 0.0), max(-error, 0.0)
        changes = []
        for layer, weights in enumerate(self.weights):
            sources, targets = self.signs[layer], self.signs[layer + 1]
            rate = self.output_rate if layer == len(self.weights) - 1 else 1.0
            changes.append([])
            for k in range(len(weights)):
                slope = rate * outputs[layer + 1][k] * (1 - outputs[layer + 1][k])
                row = []
                for o_m, s_m in zip([*outputs[layer], *self.constants], sources, strict=True):
                    excites = s_m > 0 if o_m >= 0 else s_m < 0  # for a negative input the two cells swap roles
                    if rule == "kaneko":
                        row.append(abs(o_m) * slope * (d_plus if excites else d_minus) * s_m * targets[k])
                    else:
                        row.append(o_m * slope * targets[k] * (d_plus - d_minus))
                changes[-1].append(row)
        return changes


def _signs(pairs: int) -> list[int]:
    return [1] * pairs + [-1] * pairs


def signed_layers(incoming: Tensor, hidden: Tensor, outgoing: Tensor) -> list[list[list[float]]]:
    """Signed weights [target][source] of every layer, of one output's magnitudes, whose first dimensions are the signs."""
    both = SIGNS[:, None] * SIGNS  # of source and target
    between = [(layer * both[..., None, None]).permute(1, 3, 0, 2).flatten(2).flatten(0, 1) for layer in (incoming, *hidden)]
    return [layer.tolist() for layer in (*between, (outgoing * SIGNS[:, None]).reshape(1, -1))]


def signed_thresholds(thresholds: Tensor, last: Tensor, signs: tuple[int, ...]) -> list[list[list[float]]]:
    """The same of weights from constant cells with these signs: (layers, constants, 2, targets) and (constants,)."""
    constants = torch.tensor(signs)
    hidden = thresholds * constants[:, None, None] * SIGNS[:, None]
    return [*hidden.permute(0, 2, 3, 1).flatten(1, 2).tolist(), [(last * constants).tolist()]]
