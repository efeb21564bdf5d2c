"""Kaneko's program as loops over single cells: outputs |o| in (0, 1) and signed weights."""

import math

from torch import Tensor

from holotrain.error_diffusion import ErrorDiffusionNetwork


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
    """Signed weights of every layer, of one output's magnitudes."""
    return [signed(incoming), *map(signed, hidden), signed_out(outgoing)]


def signed_thresholds(thresholds: Tensor, last: Tensor, signs: tuple[int, ...]) -> list[list[list[float]]]:
    """The same of weights from constant cells with these signs: (layers, constants, 2, targets) and (constants,)."""
    found = [
        [
            [s * q * layer[c][half][o] for c, s in enumerate(signs)]
            for half, q in enumerate((1, -1))
            for o in range(len(layer[0][0]))
        ]
        for layer in thresholds.tolist()
    ]
    return [*found, [[s * magnitude for s, magnitude in zip(signs, last.tolist(), strict=True)]]]


def signed(magnitudes: Tensor) -> list[list[float]]:
    """Magnitudes by the signs of source and target, (2, 2, sources, targets) -> signed weights [(q, o)][(p, i)]."""
    p_q_i_o, signs = magnitudes.tolist(), (1, -1)
    _, _, sources, targets = magnitudes.shape
    return [
        [signs[p] * signs[q] * p_q_i_o[p][q][i][o] for p in (0, 1) for i in range(sources)]
        for q in (0, 1)
        for o in range(targets)
    ]


def signed_out(magnitudes: Tensor) -> list[list[float]]:
    """The same for the single excitatory output cell, (2, sources)."""
    excitatory, inhibitory = magnitudes.tolist()
    return [[*excitatory, *(-weight for weight in inhibitory)]]
