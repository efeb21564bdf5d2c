"""Blocks of other libraries as two streams."""

import copy

import pytest
import torch
from compared import assert_close
from torch import nn

from holotrain.reversible import make_reversible, undo

timm = pytest.importorskip("timm")


def branches_of(block):
    return (
        nn.Sequential(block.norm1, block.attn, block.ls1, block.drop_path1),
        nn.Sequential(block.norm2, block.mlp, block.ls2, block.drop_path2),
    )


def vit():
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=4, num_classes=5, drop_path_rate=0.2
    ).double()


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(copy.deepcopy(block) for block in vit().blocks)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_a_list_that_is_looped_over_stays_a_list_and_comes_back():
    model, x = nn.Sequential(Encoder()).eval(), torch.randn(2, 5, 48, dtype=torch.float64)
    before, names = model(x), list(model.state_dict())
    x1 = x2 = x
    for f, g in map(branches_of, model[0].layers):
        x1 = x1 + f(x2)
        x2 = x2 + g(x1)
    make_reversible(model, "0.layers", split=branches_of)
    assert_close(model(x), (x1 + x2) / 2, rtol=1e-12, atol=1e-12)
    assert len(model[0].layers) == 1
    assert undo(model) is model
    assert torch.equal(model(x), before) and list(model.state_dict()) == names
