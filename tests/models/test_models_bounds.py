"""What has too many tensors, or more numbers than the file of its weights, is not built."""

import json

import pytest
from small_models import IMAGE
from torch import nn

from holotrain.models import building
from holotrain.models.building import build, limited
from holotrain.models.saved import load, save


def test_the_making_of_a_module_ends_at_too_many_tensors(monkeypatch):
    monkeypatch.setattr(building, "MOST_TENSORS", 100)
    made = nn.ModuleList()
    with limited():
        made.extend(nn.Linear(2, 2, bias=False) for _ in range(100))
    refusal = pytest.raises(ValueError, match="^it has more than 100 tensors of parameters; give it fewer blocks$")
    with refusal, limited():
        for _ in range(10**6):
            made.append(nn.Linear(2, 2, bias=False))
    assert len(made) == 200
    made.append(nn.Linear(2, 2))  # without a limit


@pytest.mark.parametrize("larger", [{"depth": 99}, {"dim": 2048}, {"classes": 10**8}, {"mlp_ratio": 1e6}])
def test_a_description_of_more_than_its_weights_is_refused_in_a_line(tmp_path, larger):
    save(tmp_path, "holotrain.models.ViT", IMAGE, build("holotrain.models.ViT", IMAGE))
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"arguments": IMAGE | larger}))
    with pytest.raises(ValueError, match=r"config.json describes no model that can be built: it has more (parameters|than)"):
        load(tmp_path)
