"""Reversible models against their formulas: streams, fusion, pools. Beside sizes, gradients and published weights."""

import pytest
import torch
from small_models import FAMILIES, example
from torch import nn

from holotrain import models


def scattered(model):
    """Norms, biases and relative positions as training leaves them, so that none of them is without effect."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return model.double().eval()


def coupled(x, blocks, exchange=False):
    """Both streams, which start as x, after some blocks."""
    y1 = y2 = x
    for block in blocks.blocks:
        y1 = y1 + block.f(y2)
        y2 = y2 + block.g(y1)
        y1, y2 = (y2, y1) if exchange else (y1, y2)
    return y1, y2


def fused(y1, y2, norm):
    """Concatenated, normalised over 2C channels, and averaged over tokens."""
    both = torch.cat((y1, y2), -1).flatten(1, -2)
    return nn.functional.layer_norm(both, both.shape[-1:], norm.weight, norm.bias, norm.eps).mean(1)


def vit(model, x):
    return fused(*coupled(model.embedding(x), model.blocks), model.fusion.norm)


def swin(model, x):
    x, (first, last) = model.embedding(x), model.stages
    y1, y2 = coupled(x, first.blocks)
    x = last.merging(torch.cat((y1, y2), -1) @ first.fusion.project.weight.T + first.fusion.project.bias)
    return fused(*coupled(x, last.blocks), last.fusion.norm)


def mvit(model, x):
    x = model.embedding(x)
    for stage in model.stages:
        x = sum(coupled(stage.transition(x), stage.blocks)) / 2
    return model.norm(x).mean(dim=(1, 2))


def roberta(model, x):
    return model.norm(sum(coupled(model.embedding(x), model.blocks, exchange=True)) / 2)


@pytest.mark.parametrize(("formula", "name"), [(vit, "RevViT"), (swin, "RevSwin"), (mvit, "RevMViT"), (roberta, "RevRoBERTa")])
def test_streams_start_as_one_and_end_as_published(formula, name):
    model = scattered(getattr(models, name)(**FAMILIES[name.removeprefix("Rev")]))
    x = example(name, dtype=torch.float64)
    states, words = formula(model, x), [model.embedding.word.weight] if name == "RevRoBERTa" else []
    torch.testing.assert_close(model(x), model.head(states, *words))


def as_published(model, images):
    """The output of a published Rev-MViT, from its weights: products and softmax written out, and one head after the other."""
    weights = model.state_dict()

    def linear(x, name):
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    def norm(x, name):
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def pool(x, name, stride):  # (B, S, S, D): the nine neighbours of every stride-th token, those outside zero
        kernel, (_, size, _, _) = weights[f"{name}.conv.weight"], x.shape
        x = nn.functional.pad(x, (0, 0, 1, 1, 1, 1))
        shifted = ((kernel[:, 0, i, j], x[:, i : i + size : stride, j : j + size : stride]) for i in range(3) for j in range(3))
        return norm(sum(factor * neighbours for factor, neighbours in shifted), f"{name}.norm")

    def attention(x, name, heads, stride_q, stride_kv):
        normed, name, found = norm(x, f"{name}.norm"), f"{name}.attention", []
        of_heads = (part.chunk(heads, -1) for part in linear(normed, f"{name}.qkv").chunk(3, -1))
        for q, k, v in zip(*of_heads, strict=True):
            q = pool(q, f"{name}.pool_q", stride_q) if stride_q > 1 else q
            k, v = pool(k, f"{name}.pool_k", stride_kv).flatten(1, 2), pool(v, f"{name}.pool_v", stride_kv).flatten(1, 2)
            scores = q.flatten(1, 2) @ k.mT / q.shape[-1] ** 0.5
            found.append((scores.softmax(-1) @ v).view_as(q))
        return linear(torch.cat(found, -1), f"{name}.project")

    def perceptron(x, widen, narrow):
        return linear(nn.functional.gelu(linear(x, widen)), narrow)

    def mlp(x, name):
        return perceptron(norm(x, f"{name}.norm"), f"{name}.widen", f"{name}.narrow")

    project = weights["embedding.project.weight"], weights["embedding.project.bias"]
    x = nn.functional.conv2d(images, *project, stride=4, padding=3).permute(0, 2, 3, 1) + weights["embedding.position"]
    heads, stride_kv = 1, 4
    for number, stage in enumerate(model.stages):
        if number > 0:
            name = f"stages.{number}.transition"
            heads, stride_kv = 2 * heads, max(stride_kv // 2, 1)
            x = x + perceptron(x, f"{name}.fusion.0", f"{name}.fusion.2")
            pooled = [pool(part, f"{name}.f.attention.pool_q", 2) for part in x.chunk(heads, -1)]
            x = torch.cat(pooled, -1) + attention(x, f"{name}.f", heads, 2, stride_kv)
            x = x + mlp(x, f"{name}.g")
        y1 = y2 = x
        for block in range(len(stage.blocks.blocks)):
            name = f"stages.{number}.blocks.blocks.{block}"
            y1 = y1 + attention(y2, f"{name}.f", heads, 1, stride_kv)
            y2 = y2 + mlp(y1, f"{name}.g")
        x = torch.cat((y1, y2), -1)
    return linear(norm(x, "norm").mean((1, 2)), "head")


def test_outputs_of_the_published_design_are_those_of_its_formulas():
    sizes = {"image_size": 64, "classes": 5, "dim": 8, "depths": (1, 2, 3, 2), "kv_stride": 4}
    model = scattered(models.RevMViT(**sizes, design="rev_mvit"))
    images = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        ours, expected = model(images), as_published(model, images)
    assert ((ours - expected).abs().max() / expected.abs().max()).item() <= 1e-10
