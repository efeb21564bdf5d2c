"""What a step makes of gradients, against an independent computation in float64 NumPy, and what each option adds."""

import cmath
import math

import numpy as np
import pytest
import torch
from compared import assert_close, assert_equal
from torch import nn

from holotrain.synthesis import HolographicSynthesis
from holotrain.synthesis.updates import MOST

F64 = torch.float64


def network(dtype=F64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.LayerNorm(40), nn.Linear(40, 3)).to(dtype)


def batches(count: int, dtype=F64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [(torch.randn(6, 5, generator=generator, dtype=F64) + 0.5).to(dtype) for _ in range(count)]


def flat(model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def differentiate(model, x) -> torch.Tensor:
    model.zero_grad()
    model(x).square().sum().backward()
    return flat(model)


def by_layer(vector) -> list[torch.Tensor]:
    """The entries of each layer of the network."""
    return vector.split([sum(p.numel() for p in module.parameters()) for module in network() if list(module.parameters())])


def stepped(synthesis, model, x, scale=1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """A step on ``scale`` times the gradient: that gradient and its update."""
    gradient = scale * differentiate(model, x)
    for parameter in model.parameters():
        parameter.grad *= scale
    assert synthesis.step()
    return gradient, flat(model)


def figures_of(gradient, update) -> torch.Tensor:
    """Cosine and norm, as a synthesis measures them."""
    return torch.stack((torch.cosine_similarity(update, gradient, 0), update.norm()))


def updates(count=4, learn=True, **options):
    """The updates of some steps, with the gradients that they were made of; the weights move between steps."""
    model = network()
    synthesis = HolographicSynthesis(model, **options)
    result = []
    for x in batches(count):
        result.append(stepped(synthesis, model, x))
        if learn:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.01 * parameter.grad
    return model, synthesis, result


class Reference:
    """Layer by layer, block by block, in NumPy."""

    def __init__(self, block: int, decay: float = 0.9, transform: str = "fft", key_ema: float = 0.9) -> None:
        self.block, self.decay, self.key_ema = block, decay, key_ema
        self.memory: dict = {}
        self.inputs: dict = {}
        signs = torch.randint(0, 2, (block,), generator=torch.Generator().manual_seed(0)).numpy() * 2 - 1
        hadamard = np.array([[1.0]])
        while len(hadamard) < block:
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        hadamard = hadamard / math.sqrt(len(hadamard))
        self.forward = np.fft.rfft if transform == "fft" else lambda v, n: hadamard @ (signs * np.pad(v, (0, n - len(v))))
        self.inverse = np.fft.irfft if transform == "fft" else lambda s, n: signs * (hadamard @ s)

    def key(self, name: str, inputs: np.ndarray) -> np.ndarray:
        mean = self.inputs[name] = self.key_ema * self.inputs.get(name, 0) + (1 - self.key_ema) * inputs.mean(0)
        mean = np.pad(mean, (0, -len(mean) % self.block)).reshape(-1, self.block).sum(0)
        spectrum = self.forward(mean, self.block)
        size = np.abs(spectrum)
        present = size > 1e-7 * size.max()
        return np.where(present, spectrum / np.where(present, size, 1), 1)

    def update(self, name: str, gradient: np.ndarray, inputs: np.ndarray) -> np.ndarray:
        key, result = self.key(name, inputs), []
        for start in range(0, len(gradient), self.block):
            part = gradient[start : start + self.block]
            spectrum = self.forward(part, self.block)
            memory = self.memory.get((name, start), 0) * self.decay + spectrum * np.conj(key)
            self.memory[name, start] = memory
            result.append(self.inverse(memory * key, self.block)[: len(part)])
        return np.concatenate(result)


@pytest.mark.parametrize(
    ("options", "block"),
    [
        ({"block_length": 16}, 16),
        ({"block_length": 4}, 4),  # keys are longer, and folded
        ({"block_length": 64}, 64),
        ({"block_length": 16, "transform": "hadamard"}, 16),
        ({"block_length": 4, "key_ema": 0.5}, 4),
        ({"block_length": 16, "dtype": "fp16"}, 16),
        ({"block_length": 16, "dtype": "bf16"}, 16),
    ],
)
def test_associative_equals_the_reference(options, block):
    """A hologram in half precision has the error of its rounding, and a quarter of the bytes of one in float64."""
    error = {"fp16": 2**-10, "bf16": 2**-7}.get(options.get("dtype"), 1e-10)
    model = network()
    inputs = {}
    for name, module in model.named_children():
        module.register_forward_hook(lambda module, args, out, name=name: inputs.update({name: args[0].detach().numpy()}))
    synthesis = HolographicSynthesis(model, **options)
    reference = Reference(block, **{name: value for name, value in options.items() if name not in ("block_length", "dtype")})
    for x in batches(5):
        differentiate(model, x)
        expected = []
        for name, module in model.named_children():
            if list(module.parameters()):
                gradient = torch.cat([p.grad.flatten() for p in module.parameters()]).numpy()
                expected.append(reference.update(name, gradient, inputs[name]))
        synthesis.step()
        expected = np.concatenate(expected)
        assert np.abs(flat(model).numpy() - expected).max() <= error * np.abs(expected).max()
    memory = next(tensor for name, tensor in synthesis.state_dict()["tensors"].items() if name.endswith("memory"))
    assert memory.element_size() == (16 if "dtype" not in options else 2) // (2 if "transform" in options else 1)


def decayed(gradients, *decays):
    """Momentum: the sum of gradients, of which each step keeps its decay."""
    velocity = 0
    for gradient, decay in zip(gradients, decays, strict=True):
        velocity = decay * velocity + gradient
    return velocity


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"decay": 0.8}, lambda *g: decayed(g, 0.8, 0.8, 0.8)),
        ({"decay": 0.8, "block_length": 0}, lambda *g: decayed(g, 0.8, 0.8, 0.8)),
        ({"decay": 0.8, "transform": "hadamard", "block_length": 0}, lambda *g: decayed(g, 0.8, 0.8, 0.8)),
        ({"decay": lambda step: 0.4 * step}, lambda *g: decayed(g, 0, 0.4, 0.8)),
        ({"decay": 0.8, "decay_warmup": 4}, lambda *g: decayed(g, 0, 0.2, 0.4)),
        ({"decay": 0.5, "mix": 0.25}, lambda *g: 0.75 * decayed(g, 0.5, 0.5, 0.5) + 0.25 * g[-1]),
        ({"decay": 0.0, "ema": 0.75}, lambda *g: 0.25 * decayed(g, 0.75, 0.75, 0.75) / (1 - 0.75**3)),
        ({"decay": 0.0, "mode": "shared", "block_length": 16, "superpose": 4}, lambda *g: g[-1]),
    ],
)
def test_with_one_key_an_update_is_what_its_options_say_of_gradients(options, expected):
    """The network has layers of different lengths, and parameters of less than a run."""
    model, x = network(), batches(1)[0]
    synthesis, gradients = HolographicSynthesis(model, **options), []
    for scale in (1.0, -0.5, 2.0):
        gradient, update = stepped(synthesis, model, x, scale)
        gradients.append(gradient)
    if options.get("block_length") == 0:  # layers of 240, 80 and 123 entries
        assert {name.partition(".")[0] for name in synthesis.state_dict()["tensors"]} == {"256", "128", "keys"}
    wanted = expected(*gradients)
    assert_close(update, wanted, rtol=1e-9, atol=1e-9 * wanted.abs().max().item())


def algorithm_1(gradient: list[float], representation: list[float]) -> list[float]:
    """The published formulas, entry by entry: G = rfft(g), A = rfft(a), Z = G / |G| conj(A / |A|), z = irfft(Z)."""
    n = len(gradient)
    padded = [0.0] * n
    for position, entry in enumerate(representation):  # a longer one is folded
        padded[position % n] += entry
    roots = [cmath.exp(-2j * cmath.pi * turn / n) for turn in range(n)]
    phasors = []
    for k in range(n):
        g, a = (sum(x * roots[k * t % n] for t, x in enumerate(vector)) for vector in (gradient, padded))
        phasors.append(g / abs(g) * (a / abs(a)).conjugate())
    return [sum(z * roots[-k * t % n] for k, z in enumerate(phasors)).real / n for t in range(n)]


@pytest.mark.parametrize(
    ("covered", "options", "error"),
    [
        ("", {}, 1e-9),  # 443 entries
        ("3.bias", {}, 1e-9),  # 3, fewer than the output has
        ("3.", {"dtype": "fp16"}, 2**-11),
        ("3.", {"split": "cpu", "dtype": "fp16"}, 2**-11),
    ],
)
def test_bind_with_the_flattened_output_is_algorithm_1_as_published(covered, options, error):
    """Twice, with two batches each, and with a split a step late."""
    model = network()
    synthesis = HolographicSynthesis(
        model, "bind", representation="flattened", covers=lambda name, _: name.startswith(covered), **options
    )
    expected, found = [], []
    for pair in zip(*[iter(batches(4))] * 2, strict=True):
        model.zero_grad()
        outputs = [model(x) for x in pair]
        sum(y.square().sum() for y in outputs).backward()
        chosen = [p for name, p in model.named_parameters() if name.startswith(covered)]
        gradient = torch.cat([p.grad.flatten() for p in chosen]).tolist()
        expected.append(algorithm_1(gradient, torch.cat([y.flatten() for y in outputs]).tolist()))
        synthesis.step()
        found.append(torch.cat([p.grad.flatten() for p in chosen]))
    if "split" in options:
        expected = [[0.0] * len(gradient), *expected[:-1]]
    for update, values in zip(found, expected, strict=True):
        worst = (update - torch.tensor(values, dtype=F64)).abs().max() / (max(map(abs, values)) or 1)
        assert worst <= error and (worst > 1e-6) == ("dtype" in options and any(values))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mode": "shared", "cosine_floor": 0.2, "ema": 0.5, "block_length": 32},
        {"transform": "hadamard", "subsample": 0.5, "dtype": "fp16", "block_length": 16},
        {"mode": "bind", "mix": 0.1, "dtype": "bf16"},
    ],
)
def test_with_a_split_the_same_updates_come_a_step_late(options):
    at_once = [update for _, update in updates(4, learn=False, **options)[2]]
    model, synthesis, late = updates(4, learn=False, split="cpu", **options)
    assert_equal([update for _, update in late], [torch.zeros_like(at_once[0]), *at_once[:-1]])
    synthesis.measuring = True
    gradient, update = stepped(synthesis, model, batches(1)[0])
    assert_equal(update, at_once[-1])
    assert_close(synthesis.measured, figures_of(gradient, update))


@pytest.mark.parametrize("superpose", [2, 8])
def test_read_out_of_a_shared_hologram_is_an_orthogonal_projection(superpose):
    """On the rows themselves, margins included: twice is as once, and it is symmetric."""
    model = nn.Linear(64, 64, bias=False).double()
    synthesis = HolographicSynthesis(model, "shared", decay=0.0, feedback=0.0, block_length=64, superpose=superpose)
    x = torch.randn(3, 64, dtype=F64, generator=torch.Generator().manual_seed(2))

    def projected(gradient):
        model(x)
        model.weight.grad = gradient.clone()
        synthesis.step()
        return model.weight.grad

    a, b = torch.randn(2, 64, 64, dtype=F64, generator=torch.Generator().manual_seed(3))
    once = projected(a)
    assert_close(projected(once), once, atol=1e-12)
    assert_close((once * b).sum(), (a * projected(b)).sum())
    assert 0.5 / superpose < (once.norm() / a.norm()) ** 2 < 2 / superpose


def test_the_norm_of_each_layer_is_that_of_its_gradient():
    for gradient, update in updates(match_norm=True)[2]:
        for ours, given in zip(by_layer(update), by_layer(gradient), strict=True):
            assert_close(ours.norm(), given.norm())


@pytest.mark.parametrize(("mode", "floor"), [("bind", 0.3), ("associative", 0.9), ("shared", 0.9)])
def test_the_floor_guarantees_descent_layer_by_layer_and_adds_no_more_than_it_needs(mode, floor):
    cosines = []
    for gradient, update in updates(6, mode=mode, cosine_floor=floor, block_length=0 if mode == "bind" else 32)[2]:
        parts = [(update, gradient)] if mode == "bind" else zip(by_layer(update), by_layer(gradient), strict=True)
        cosines += [torch.cosine_similarity(ours, given, 0).item() for ours, given in parts]
    assert min(cosines) == pytest.approx(floor, abs=1e-9)


def test_measured_figures_are_those_of_what_was_written():
    model = network()
    for options in ({}, {"match_norm": True}, {"mix": 0.5, "cosine_floor": 0.9}, {"mode": "shared"}):
        synthesis = HolographicSynthesis(model, block_length=32, **options)
        stepped(synthesis, model, batches(1)[0])
        assert synthesis.options.reshapes or synthesis.measured is None
        synthesis.measuring = True
        for x in batches(3):
            expected = figures_of(*stepped(synthesis, model, x))
            assert_close(synthesis.measured, expected)
        synthesis.remove()


def test_a_subsample_leaves_the_other_entries_their_gradient():
    torch.manual_seed(0)
    model = nn.Linear(64, 64).double()
    synthesis = HolographicSynthesis(model, subsample=0.25, block_length=256, key_ema=0)
    x = torch.randn(4, 64, dtype=F64)
    stepped(synthesis, model, x)
    gradient, update = stepped(synthesis, model, 2 * x)
    changed = (update != gradient).view(-1, 64)
    assert changed.any(1).sum().item() == changed.all(1).sum().item() == 16  # a quarter of 64 runs; none of the bias's one
    assert sum(tensor.nbytes for tensor in synthesis.state_tensors) == pytest.approx(model.weight.nbytes / 4, rel=0.02)


@pytest.mark.parametrize("mode", ["associative", "shared"])
def test_blocks_of_any_length_are_made_of_a_subsample(mode, monkeypatch):
    monkeypatch.setitem(MOST, "cpu", 512)
    _, synthesis, result = updates(2, mode=mode, block_length=100, subsample=0.5)
    assert synthesis.steps == 2 and all(update.isfinite().all() for _, update in result)


def test_chunks_make_no_difference(monkeypatch):
    """And what is kept stays in its memory."""
    for options in ({}, {"mode": "shared", "superpose": 2}):
        options |= {"block_length": 16, "cosine_floor": 0.1, "ema": 0.5}
        whole = updates(4, **options)[2]
        with monkeypatch.context() as patch:
            patch.setitem(MOST, "cpu", 64)
            model, synthesis, parts = updates(4, **options)
            places = [tensor.data_ptr() for tensor in synthesis.state_tensors]
            stepped(synthesis, model, batches(1)[0])
        assert [tensor.data_ptr() for tensor in synthesis.state_tensors] == places
        assert_close([update for _, update in parts], [update for _, update in whole], rtol=1e-12)
