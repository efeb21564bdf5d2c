"""Attention whose rows are ordered by head, and files of versions that stacked queries, keys and values."""

import json

import pytest
import torch
from compared import assert_close, assert_equal
from earlier_layout import stacked_state_dict
from safetensors.torch import load_file, save_file
from small_models import IMAGE, TEXT
from torch.nn import functional as F

from holotrain.models import RevGPT, RevViT, load_pretrained, read_weights
from holotrain.models.adapters import add_adapters, add_peft
from holotrain.models.int8 import quantise
from holotrain.models.layers.attention import Attention
from holotrain.models.saved import load, save

HEADS = 4


def test_each_head_has_its_rows_together():
    """The same as the stacked layout, written out, with the rows of an earlier file."""
    attention, x = Attention(24, HEADS).double(), torch.randn(2, 5, 24).double()
    weight, bias = torch.randn(72, 24).double(), torch.randn(72).double()
    project = attention.project.state_dict(prefix="project.")
    attention.load_state_dict({"qkv.weight": weight, "qkv.bias": bias} | project)
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in F.linear(x, weight, bias).chunk(3, -1))
    assert_close(attention(x), attention.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
    assert_equal(attention.query_key_value.weight[:6], weight[:6])
    assert_equal(attention.query_key_value.weight[6:12], weight[24:30])


@pytest.mark.parametrize("adapted", [None, "bottleneck", "lora"])
def test_earlier_state_dicts_load(adapted):
    models = []
    for seed in range(2):
        torch.manual_seed(seed)
        models.append(RevGPT(**TEXT))
        if adapted == "bottleneck":
            add_adapters(models[-1], 3)
        elif adapted == "lora":
            peft = pytest.importorskip("peft")
            add_peft(models[-1], peft.LoraConfig(r=2, target_modules=["qkv"], init_lora_weights=False))  # by its earlier name
    trained, other = models
    earlier = stacked_state_dict(trained.state_dict(), TEXT["heads"])
    assert sum(".qkv." in name for name in earlier) == (8 if adapted == "lora" else 4)
    other.load_state_dict(earlier)
    assert_equal(other.state_dict(), trained.state_dict())
    assert any(".qkv." in name for name in earlier)  # the given one is not changed


def test_earlier_weights_begin_a_training(tmp_path):
    """From a safetensors file, under the names of a checkpoint."""
    trained, other = RevViT(**IMAGE), RevViT(**IMAGE)
    earlier = stacked_state_dict(trained.state_dict(prefix="model."), IMAGE["heads"])
    save_file({name: x.contiguous() for name, x in earlier.items()}, tmp_path / "model.safetensors")
    loaded = load_pretrained(other, read_weights(tmp_path))
    assert (loaded.missing, loaded.unexpected, loaded.head) == ((), (), ())
    assert_equal(other.state_dict(), trained.state_dict())


@pytest.mark.parametrize("int8", [False, True])
def test_earlier_exports_load(tmp_path, int8):
    model = RevViT(**IMAGE).eval()
    if int8:
        quantise(model)
    save(tmp_path, "holotrain.models.RevViT", IMAGE, model)
    kept = stacked_state_dict(load_file(tmp_path / "model.safetensors"), IMAGE["heads"])
    save_file({name: x.contiguous() for name, x in kept.items()}, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if key != "crc32"}))
    x = torch.randn(3, 1, 8, 8)
    assert_equal(load(tmp_path)(x), model(x))
