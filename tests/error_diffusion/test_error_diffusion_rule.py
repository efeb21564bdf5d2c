"""The rule against Kaneko's formula in plain loops, and what it promises, also of memory and of two processes.

As a script, this is one of the two processes.
"""

import copy
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from compared import assert_equal
from covering import pairwise
from gloo_pair import find_as_one_of_them, found_by_processes
from torch import Tensor
from tracked_memory import TrackedMemory

from holotrain.error_diffusion import ErrorDiffusionNetwork
from holotrain.error_diffusion.cells import alignment, sign_violations
from holotrain.error_diffusion.rules import BACKPROPAGATION, RULES, WORKSPACE, contract


class PlainNetwork:
    """Kaneko's program as loops over single cells, whose outputs |o| are in (0, 1).

    The network of output ``d`` of an ErrorDiffusionNetwork: ``weights[layer][k][m]`` goes from m to k and is signed.

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


def half_squares(network, x, targets):
    return 0.5 * (network(x) - targets).square().sum(1).mean()


def gradients(network, x, targets):
    """Of the weights, which then have none."""
    half_squares(network, x, targets).backward()
    found = [parameter.grad.clone() for parameter in network.parameters()]
    network.zero_grad()
    return found


PUBLISHED = {
    "kaneko": {"constants": (0.8, 0.8), "constant_signs": (1, -1), "output_rate": 1.0},
    "article": {"constants": (1.0,), "constant_signs": (1,), "output_rate": 1.0 / 0.8},
}
"""Constant cells by their outputs, without signs, and the output layer's rate over that of the others."""
AS_PUBLISHED = {"constants": None, "initialization": None, "output_rate": None}


def example(outputs=3, depth=3, batch=6, inputs=5, width=4, rule="kaneko", dtype=torch.float64, **options):
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)  # 0.8 is another number in float32
    network = ErrorDiffusionNetwork(inputs, outputs, width, depth, rule, **options)
    torch.set_default_dtype(torch.float32)
    return network, torch.rand(batch, inputs, dtype=dtype), torch.randint(2, (batch, outputs)).to(dtype)


@pytest.mark.parametrize(
    ("rule", "outputs", "depth", "variant"),
    pairwise([*RULES], [1, 10], [1, 2, 5], ["positive inputs", "signed inputs", "constant cells"]),
)
def test_an_update_is_that_of_plain_loops(depth, outputs, rule, variant):
    published = variant == "constant cells"
    given = PUBLISHED[rule] if published else {}
    network, x, targets = example(outputs, depth, rule=rule, **({"constants": None, "output_rate": None} if published else {}))
    x = 2 * x - 1 if variant == "signed inputs" else x
    plain = [PlainNetwork(network, d, 0.4, **given) for d in range(outputs)]
    expected = [[net.updates(x[b].tolist(), targets[b, d].item(), rule) for b in range(len(x))] for d, net in enumerate(plain)]
    answers = torch.tensor([[net.outputs(sample)[-1][0] for net in plain] for sample in x.tolist()], dtype=torch.float64)
    torch.testing.assert_close(network(x), answers, rtol=0, atol=1e-12)
    half_squares(network, x, targets).backward()
    hidden = network.hidden.grad if depth > 1 else network.hidden
    for d in range(outputs):
        updates = signed_layers(-network.incoming.grad[d], -hidden[d], -network.outgoing.grad[d])
        if published:
            cells = signed_thresholds(-network.thresholds.grad[d], -network.last.grad[d], given["constant_signs"])
            updates = [[row + added for row, added in zip(*pair, strict=True)] for pair in zip(updates, cells, strict=True)]
        for layer, found in enumerate(updates):
            summed = sum(torch.tensor(sample[layer], dtype=torch.float64) for sample in expected[d])
            assert summed.abs().max() > 1e-9
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), summed / len(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("rule", "batch"), [("kaneko", 1), ("article", 8)])
def test_a_training_as_published_is_that_of_plain_loops(rule, batch):
    """Parity of four bits, as in Kaneko's program: alpha is 0.8 at every step; his batches are single patterns."""
    from holotrain.tasks.schedules import constant  # needs Lightning, which other tests here do not

    network, _, _ = example(outputs=1, depth=1 if rule == "kaneko" else 3, inputs=4, rule=rule, **AS_PUBLISHED)
    plain = PlainNetwork(network, 0, 0.4, **PUBLISHED[rule])
    optimizer = torch.optim.SGD(network.parameters(), lr=0.8)
    schedule = constant(optimizer, steps=64)
    patterns = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=torch.float64)] * 4)
    parity = patterns.sum(1, keepdim=True) % 2
    for step in range(64 // batch):
        seen = [(step * batch + i) % 16 for i in range(batch)]
        optimizer.zero_grad()
        half_squares(network, patterns[seen], parity[seen]).backward()
        optimizer.step()
        schedule.step()
        plain.learn(patterns[seen].tolist(), parity[seen, 0].tolist(), rule, alpha=0.8)
    answers = torch.tensor([plain.outputs(pattern)[-1] for pattern in patterns.tolist()], dtype=torch.float64)
    assert answers.std() > 0.05
    torch.testing.assert_close(network(patterns), answers, rtol=0, atol=1e-10)


@pytest.mark.parametrize(
    ("rule", "mean", "deviation"), [("kaneko", 0.5, 12**-0.5), ("article", (2 / math.pi) ** 0.5, (1 - 2 / math.pi) ** 0.5)]
)
def test_weights_start_as_published(rule, mean, deviation):
    network, _, _ = example(outputs=2, inputs=40, width=40, rule=rule, **AS_PUBLISHED)
    weights = torch.cat([parameter.flatten() for parameter in (network.incoming, network.hidden, network.outgoing)])
    assert weights.min() >= 0 and abs(weights.mean() - mean) < 0.01 and abs(weights.std() - deviation) < 0.01
    assert network.thresholds.min() >= 0 and 0.9 < network.thresholds.max() < 1 and abs(network.thresholds.mean() - 0.5) < 0.05


def test_the_articles_rule_breaks_signs_and_clamping_restores_them():
    network, x, targets = example(rule="article", width=8, batch=64)
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    for _ in range(50):
        optimizer.zero_grad()
        half_squares(network, x, targets).backward()
        optimizer.step()
    assert sign_violations(network) > 0.01
    kept = [parameter.detach().clone() for parameter in network.parameters()]
    network.clamp_signs()
    assert sign_violations(network) == 0
    for parameter, before in zip(network.parameters(), kept, strict=True):
        assert_equal(parameter, before.clamp(min=0))


def test_backpropagation_differentiates_the_same_network():
    network, x, targets = example(outputs=2, depth=2)
    diffused = network(x)
    with network.ruled_by(BACKPROPAGATION):
        assert_equal(network(x), diffused)
        assert torch.autograd.gradcheck(lambda *weights: network(x), tuple(network.parameters()))
    assert network.rule == "kaneko"
    with torch.no_grad():
        assert_equal(network(x), diffused)


def test_alignment_is_the_cosine_of_the_two_gradients():
    network, x, targets = example()

    by_rule = torch.cat([gradient.flatten() for gradient in gradients(network, x, targets)])
    with network.ruled_by(BACKPROPAGATION):
        true = torch.cat([gradient.flatten() for gradient in gradients(network, x, targets)])
    found = alignment(network, x, (network(x).detach() - targets) / len(x))
    torch.testing.assert_close(found, by_rule @ true / by_rule.norm() / true.norm())
    assert 0.05 < found < 0.999


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"depth": 0}, "at least 1"),
        ({"u0": 0.0}, "u0 must be at least 1e-06, not 0.0"),
        ({"rule": "hebb"}, "kaneko, article or backpropagation, not 'hebb'"),
        ({"initialization": "zeros"}, "scaled, uniform or normal, not 'zeros'"),
        ({"output_rate": -1}, "output_rate must be at least 0, not -1"),
        ({"rule": BACKPROPAGATION, "output_rate": 2.0}, "output_rate=2.0: rule=backpropagation has the gradients as they are"),
    ],
)
def test_impossible_networks_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        ErrorDiffusionNetwork(4, 1, **arguments)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("rule", RULES)
def test_updates_on_a_gpu_are_those_of_the_cpu(rule):
    network, x, targets = example(outputs=3, depth=40, batch=64, width=32, rule=rule)
    expected = gradients(network, x, targets)
    network.cuda()
    half_squares(network, x.cuda(), targets.cuda()).backward()
    for parameter, grad in zip(network.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad.cpu(), grad, rtol=1e-10, atol=1e-12)


def beside_the_result(layers: int, batch: int, outputs: int = 1, cells: int = 64) -> int:
    given = torch.nn.Module()
    given.register_buffer("activities", torch.rand(layers, outputs, batch, cells))
    given.register_buffer("error", torch.randn(outputs, batch, 1))
    with TrackedMemory(given) as memory:
        updates = contract(given.activities, given.error)
    return memory.peak - updates.nbytes


@pytest.mark.parametrize(
    ("layers", "batch", "outputs"), [(256, 32, 1), (256, 1024, 1), (1024, 32, 1), (16, 4096, 1), (8, 64, 10), (4, 4096, 10)]
)
def test_the_contraction_takes_one_workspace_whatever_the_batch_and_the_depth(layers, batch, outputs):
    assert 0.9 * WORKSPACE["cpu"] < beside_the_result(layers, batch, outputs) <= WORKSPACE["cpu"]


def off_by(rank: int) -> dict[str, float]:
    """Maximum difference between the weights of two processes and of one, after three steps, by rule and depth."""
    from torch.nn.parallel import DistributedDataParallel

    found = {}
    for rule, depth in product(("kaneko", "article", BACKPROPAGATION), (1, 4)):
        torch.manual_seed(0)
        alone = ErrorDiffusionNetwork(6, 3, 4, depth, rule).double()
        shared = copy.deepcopy(alone)
        x, targets = torch.rand(3, 8, 6).double(), torch.rand(3, 8, 3).double()
        half = slice(4 * rank, 4 * rank + 4)
        for network, part in ((alone, slice(None)), (DistributedDataParallel(shared), half)):
            optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
            for step in range(3):
                optimizer.zero_grad()
                half_squares(network, x[step, part], targets[step, part]).backward()
                optimizer.step()
        pairs = zip(alone.parameters(), shared.parameters(), strict=True)
        found[f"{rule}, {depth}"] = max((one - other).abs().max().item() for one, other in pairs if one.numel())
    return found


def test_two_processes_learn_what_one_does(tmp_path):
    found = found_by_processes(Path(__file__), tmp_path)
    assert len(found) == 6
    assert all(difference < 1e-14 for difference in found.values()), found


if __name__ == "__main__":
    find_as_one_of_them(off_by)
