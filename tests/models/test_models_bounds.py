"""What is too large for this machine, or for the file of its weights, is not built."""

import json

import pytest
import torch
from small_models import IMAGE
from torch import nn

from holotrain.models import building
from holotrain.models.building import bounded, build
from holotrain.models.saved import load, save


class Made(nn.Module):
    """As many layers as are wanted, which are counted."""

    count = 0

    def __init__(self, layers: int) -> None:
        super().__init__()
        for number in range(layers):
            Made.count = number
            self.add_module(str(number), nn.Linear(10, 10, bias=False))


def test_the_making_of_a_module_ends_when_the_memory_is_full(monkeypatch):
    monkeypatch.setattr(building, "free_memory", lambda device: 40_000)
    with bounded():
        Made(100)
    with (
        pytest.raises(ValueError, match="^its weights take 39.45 KiB or more, and this machine has 39.06 KiB left$"),
        bounded(),
    ):
        Made(200)
    assert Made.count == 100
    Made(200)  # without a bound


def test_the_meta_device_tells_the_whole_size(monkeypatch):
    monkeypatch.setattr(building, "free_memory", lambda device: 40_000)
    with pytest.raises(ValueError, match="^its weights take 78.12 KiB, and"), bounded(), torch.device("meta"):
        Made(200)
    with pytest.raises(ValueError, match="^its weights take .* or more, and"), bounded(), torch.device("meta"):
        Made(10**6)
    assert Made.count < 3000


@pytest.mark.parametrize(("free", "any_machine"), [(None, False), (100, True)])
def test_where_the_memory_is_not_known_parameters_are_counted(monkeypatch, free, any_machine):
    """Or where a larger machine is planned for."""
    monkeypatch.setattr(building, "free_memory", lambda device: free)
    monkeypatch.setattr(building, "MOST_TENSORS", 100)
    with bounded(any_machine=any_machine):
        Made(100)
    refusal = pytest.raises(ValueError, match="^it has more than 100 tensors of parameters; give it fewer blocks$")
    with refusal, bounded(any_machine=any_machine):
        Made(10**6)
    assert Made.count == 100


def test_a_tied_tensor_counts_once(monkeypatch):
    monkeypatch.setattr(building, "free_memory", lambda device: 400)
    with bounded():
        here, there = nn.Linear(10, 10, bias=False), nn.Module()
        there.weight = here.weight


def test_a_module_may_have_no_more_parameters_than_its_file():
    weights = Made(100).state_dict()
    with bounded(weights):
        Made(100)
    with pytest.raises(ValueError, match="more parameters than the 100 tensors of its weights"), bounded(weights):
        Made(10**6)
    assert Made.count < 2000


ENLARGED = [{"depth": 9999}, {"dim": 2048}, {"image_size": 2**20}, {"classes": 10**8}, {"depth": 10**7}, {"mlp_ratio": 1e6}]


@pytest.mark.parametrize("changes", [*({"arguments": IMAGE | larger} for larger in ENLARGED), {"adapters": 10**6}])
def test_a_description_of_more_than_its_weights_is_refused_in_a_line(tmp_path, changes):
    save(tmp_path, "holotrain.models.ViT", IMAGE, build("holotrain.models.ViT", IMAGE))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ValueError, match=r"config.json describes no model that can be built: it has more parameters"):
        load(tmp_path)
