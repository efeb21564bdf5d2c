"""The hook around the computation: keys as layers saw them, steps that are skipped, state, and leaving no trace."""

import copy

import pytest
import torch
from compared import assert_close, assert_equal
from covering import paired, pairwise
from engine_cases import ENGINES, Branch, sequence
from torch import nn

from holotrain.synthesis import HolographicSynthesis, updates

F64 = torch.float64


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def data(rows: int = 6) -> torch.Tensor:
    return torch.randn(rows, 5, dtype=F64, generator=torch.Generator().manual_seed(1)) + 0.5


def taken(synthesis) -> torch.Tensor:
    return synthesis._keys.sums.clone()


class Stack(nn.Module):
    """A stem, a reversible sequence in some engine, a head."""

    def __init__(self, engine, dropout) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 8).double()
        self.blocks = sequence(4, dropout, Branch, engine)
        self.head = nn.Linear(8, 1).double()

    def forward(self, x):
        x = self.stem(x).unsqueeze(1).expand(-1, 3, -1)
        return self.head(sum(self.blocks(x, x.tanh())))


@pytest.mark.parametrize(("engine", "dropout"), [*paired([None, *ENGINES], [0.0, 0.2]), ("pareprop", 0.0), ("reversible", 0.2)])
def test_a_recomputation_is_no_second_input(engine, dropout):
    torch.manual_seed(3)
    model = Stack(engine and ENGINES[engine], dropout)
    synthesis = HolographicSynthesis(model, block_length=32)
    torch.manual_seed(5)
    with torch.no_grad():
        model(data())
    forward_alone = synthesis._keys.take()
    assert forward_alone.abs().sum(1).gt(0).all()
    torch.manual_seed(5)
    model(data()).sum().backward()
    assert_close(taken(synthesis), forward_alone, rtol=1e-12)


def test_convolutions_embeddings_and_parameters_without_an_input():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.mix, self.head = nn.Embedding(7, 6), nn.Conv1d(6, 4, 3), nn.Linear(4, 2)
            self.unused = nn.Linear(3, 3)

        def forward(self, index):
            return self.head(self.mix(self.words(index).transpose(1, 2)).mean(-1))

    model = Mixed()
    synthesis = HolographicSynthesis(model, block_length=8)
    index = torch.tensor([[0, 3, 5, 1], [2, 2, 6, 0]])
    model(index).sum().backward()
    words = model.words.weight[index].sum((0, 1))
    keys = taken(synthesis)
    assert_close(keys[:2, :6], torch.stack((words, words)))
    assert not keys[3].any()
    synthesis.step()
    assert model.unused.weight.grad is None and model.words.weight.grad is not None


@pytest.mark.parametrize(
    ("options", "bad", "way"),
    pairwise(
        [
            {"ema": 0.5, "key_ema": 0.5, "block_length": 16},
            {"mode": "shared", "ema": 0.5, "cosine_floor": 0.1, "block_length": 32},
            {"mode": "bind"},
            {"transform": "hadamard"},
        ],
        [float("nan"), float("inf"), -float("inf")],
        ["told at once", "told later", "split"],
    ),
)
def test_a_step_with_nan_or_inf_is_skipped_counted_and_said(options, bad, way, monkeypatch):
    """On a GPU the host learns of it later; here on a CPU, whose results are those of a CPU that tells at once."""
    runs = []
    for spoiled in (False, True):
        monkeypatch.setattr(updates, "SYNCHRONOUS", () if spoiled and way == "told later" else ("cpu",))
        model = network()
        synthesis = HolographicSynthesis(model, **options, split="cpu" if way == "split" else "none")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        for step in range(4):
            if spoiled and step == 2:
                before = copy.deepcopy(synthesis.state_dict()["tensors"])
                weights = copy.deepcopy(model.state_dict())
                model.zero_grad()
                model(7 * data()).square().sum().backward()
                model[2].weight.grad[1, 3] = bad
                with pytest.warns(UserWarning, match=r"NaN or infinity after 2 steps: the step is skipped \(1 so far\)"):
                    assert not synthesis.step()
                optimizer.step()
                assert_equal(synthesis.state_dict()["tensors"], before)
                assert_equal(model.state_dict(), weights)
            model.zero_grad()
            model(data()).square().sum().backward()
            assert synthesis.step()
            optimizer.step()
        assert (synthesis.steps, synthesis.skipped) == (4, int(spoiled))
        runs.append(model.state_dict())
    assert_close(*runs, rtol=1e-12 if way == "told later" else 0, atol=0)


def loaded(changes=None, **options):
    """A synthesis with these options, given the state of one without, or a changed one."""
    state = HolographicSynthesis(network()).state_dict()
    HolographicSynthesis(network(), **options).load_state_dict(state | (changes or {}))


SHORT = {name: tensor[..., :2] for name, tensor in HolographicSynthesis(network()).state_dict()["tensors"].items()}
OTHER_DEVICE = lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))  # noqa: E731
REFUSED = [
    *(
        (lambda options=options: HolographicSynthesis(network(), **options), words)
        for options, words in [
            ({"mode": "magic"}, "mode='magic': it must be associative or bind or shared"),
            ({"decay": 1.0}, r"decay=1.0: it must be in \[0, 1\)"),
            ({"subsample": 0}, "subsample=0"),
            ({"transform": "hadamard", "block_length": 48}, "power of two"),
            ({"split": "cpu", "cuda_graph": True}, "use one of them"),
            ({"cuda_graph": True}, "needs a model on a CUDA device"),
            ({"mode": "shared", "block_length": 0}, "cannot share a hologram"),
            ({"subsample": 0.001}, "selects nothing of these parameters"),
            ({"block_length": 4096}, "longer than all 363 covered entries"),
            ({"mode": "bind", "dtype": "bf16", "subsample": 0.5}, "use subsample=1"),
            ({"mode": "associative", "superpose": 2}, "superpose has no effect with mode='associative'"),
        ]
    ),
    (lambda: HolographicSynthesis(network().requires_grad_(False)), "none requires grad"),
    (lambda: HolographicSynthesis(OTHER_DEVICE()), "on meta and .* on cpu|meta device"),
    (lambda: HolographicSynthesis(nn.Linear(2, 2, device="meta")), "on the meta device"),
    (lambda: HolographicSynthesis(nn.Linear(2, 2, dtype=torch.complex64)), "real floating parameters"),
    (lambda: loaded(block_length=32), "block_length is 1024 there, not 32"),
    (lambda: loaded(key_ema=0), "key_ema is True there, not False"),
    (lambda: loaded(covers=lambda name, parameter: "weight" in name), "parameters is"),
    (lambda: HolographicSynthesis(network()).load_state_dict(network().state_dict()), "not the state of a Holographic"),
    *(
        (lambda changes=changes: loaded(changes), "^the state is damaged: ")
        for changes in ({"steps": -(10**12)}, {"skipped": "x"}, {"tensors": 5}, {"tensors": {}}, {"tensors": SHORT})
    ),
]


@pytest.mark.parametrize(("do", "words"), REFUSED, ids=[f"{number} {words[:40]}" for number, (_, words) in enumerate(REFUSED)])
def test_what_cannot_be_is_refused(do, words):
    loaded()
    with pytest.raises(ValueError, match=words):
        do()


def test_a_step_without_gradients_or_output_or_with_sparse_gradients_is_an_error():
    model = network()
    with pytest.raises(RuntimeError, match=r"after backward\(\)"):
        HolographicSynthesis(model).step()
    synthesis = HolographicSynthesis(model, "bind")
    model[2](model[0](data())).sum().backward()
    with pytest.raises(RuntimeError, match="the model was not called"):
        synthesis.step()
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Linear(4, 2))
    synthesis = HolographicSynthesis(model)
    model(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(RuntimeError, match="gradient of 0.weight is sparse"):
        synthesis.step()


# On a GPU and split between devices it gives what it gives on the CPU; here also without a GPU.

PUBLISHED = {"mode": "bind", "representation": "flattened"}


def stepped(device: str, precision: torch.dtype, options: dict, skipped: int = 3) -> list[torch.Tensor]:
    """The last gradients of six steps: gradients stay in the same memory in some steps only, one is missing, one is NaN.

    Args:
        skipped: the step that is skipped for the NaN of step 3.
    """
    model = network().to(device, precision)
    x = torch.randn(6, 5, dtype=F64, generator=torch.Generator().manual_seed(1)) + 0.5
    synthesis = HolographicSynthesis(model, **{"block_length": 32} | options)
    for step in range(6):
        model.zero_grad(set_to_none=step % 3 == 0)
        model(x.to(device, precision) * (1 + step)).square().sum().backward()
        if step == 2:
            model[0].bias.grad = None
        if step == 3:
            model[0].weight.grad[0, 0] = torch.nan
        assert synthesis.step() == (step != skipped)
    assert (synthesis.steps, synthesis.skipped) == (5, 1)
    return [parameter.grad.cpu() for parameter in model.parameters()]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graph": True, "mode": "shared", "cosine_floor": 0.2},
        {"cuda_graph": True, "transform": "hadamard", "dtype": "bf16", "subsample": 0.5},
        {"cuda_graph": True, **PUBLISHED, "dtype": "fp16", "block_length": None},
        {"split": "cpu", "mode": "shared", "dtype": "fp16"},
        {"split": "cpu", **PUBLISHED, "dtype": "fp16"},
    ],
)
def test_on_cuda_graphs_and_splits_give_the_same(options, monkeypatch):
    """As without them, and as on the CPU."""
    monkeypatch.setitem(updates.MOST, "cuda", 256)
    plain = {name: value for name, value in options.items() if name != "cuda_graph"}
    expected = stepped("cpu", torch.float32, plain)
    skipped = 4 if "split" in options else 3
    for chosen in (plain, options):
        assert_close(stepped("cuda", torch.float32, chosen, skipped=skipped), expected, rtol=1e-4, atol=1e-5)
