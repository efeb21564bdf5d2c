"""Gradients of every family with every schedule, against those of plain autograd."""

from functools import cache

import pytest
import torch
from compared import assert_equal
from covering import chosen
from small_models import FAMILIES, ODD_WINDOWS, example, text_batch

from holotrain import models
from holotrain.models.layers.blocks import ResidualBlock
from holotrain.schedules import OF_REVERSIBLE

VIT = {"classes": 7, "dim": 24, "depth": 5, "heads": 3, "attention_dropout": 0.1, "drop_path": 0.2}
PIXELS = {"image_size": 8, "patch_size": 2, "channels": 1} | VIT
COLORS = {"image_size": 32, "patch_size": 4, "channels": 3} | VIT
POOLED = {"image_size": 32, "channels": 3, "classes": 7, "dim": 8, "heads": 2}
TEXT = {"vocab": 50, "context": 12, "dim": 16, "heads": 2, "attention_dropout": 0.1}

MODELS = {
    **{f"vit {pool}": ("RevViT", PIXELS | {"pool": pool}, 1, (0, 4)) for pool in ("mean", "class")},
    "vit, colors": ("RevViT", COLORS, 1, (0, 4)),
    "vit, scales": ("RevViT", PIXELS | {"layer_scale": 0.3}, 1, (0, 4)),
    "swin, mlp": ("RevSwin", ODD_WINDOWS | {"fusion": "mlp"}, 3, (0, 4)),
    "swin": ("RevSwin", ODD_WINDOWS | {"attention_dropout": 0.2, "drop_path": 0.3}, 3, (0, 4)),
    # Reversible blocks: 1, 1, 4, 1 and 2, 2, 3 and 1, 1, 4.
    "mvit, 4 stages": ("RevMViT", POOLED | {"depths": (1, 2, 5, 2), "drop_path": 0.3}, 2, (0, 3)),
    "mvit, 3 stages": ("RevMViT", POOLED | {"depths": (2, 3, 4), "drop_path": 0.3}, 2, (0, 3)),
    "rev_mvit": ("RevMViT", POOLED | {"depths": (1, 2, 5), "design": "rev_mvit", "drop_path": 0.3}, 2, (0, 3)),
    **{
        f"{name}, {depth}": (model, TEXT | {"depth": depth} | options, 1, (0, 2))
        for depth in (3, 4)
        for name, (model, options) in {
            "gpt": ("RevGPT", {"drop_path": 0.2}),
            "gpt-learned": ("RevGPT", {"positions": "learned", "drop_path": 0.2}),
            "roberta, packed": ("RevRoBERTa", {}),
            "roberta-classes": ("RevRoBERTa", {"classes": 5, "drop_path": 0.2}),
        }.items()
    },
}
"""Class, arguments, and two ways to say which blocks are stored: how many of the last, and which."""

ENGINES = {
    **{name: lambda last, some, name=name: {"backward": name} for name in OF_REVERSIBLE[1:]},
    "the last stored": lambda last, some: {"backward": "reversible", "store": last},
    "some stored": lambda last, some: {"backward": "pareprop", "store": some},
    "attention kept": lambda last, some: {"backward": "reversible", "keep": ("attention",)},
    "both": lambda last, some: {"backward": "pareprop", "store": some, "keep": ("attention",)},
}


def loss_of(model, arguments):
    """With padding and targets for text."""
    if "image_size" in arguments:
        images = torch.randn(6, arguments["channels"], *2 * [arguments["image_size"]], dtype=torch.float64)
        return model(images).logsumexp(-1).sum()
    tokens, mask, targets = text_batch()
    if isinstance(model, models.GPT):
        return model(tokens, tokens.roll(-1, 1))
    return model(tokens, mask, torch.arange(4) if arguments.get("classes") else targets)


def gradients(name, **engine):
    model_class, arguments, _, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(models, model_class)(**arguments, dropout=0.1, **engine).double()
    loss_of(model, arguments).backward()
    return {key: p.grad for key, p in model.named_parameters() if p.grad is not None}


reference = cache(lambda name, exact: gradients(name, backward="autograd", exact=exact))


MATRIX = [(name, engine, False) for name in MODELS for engine in ENGINES]
MATRIX += [(name, engine, True) for name in MODELS for engine in (ENGINES if name == "swin" else ["reversible"])]


def quick(number: int, case: tuple) -> bool:
    """Every model with an engine, every engine with several models, and a third of the models on a grid."""
    name, engine, exact = case
    model = [*MODELS].index(name)
    return engine == "reversible" and model % 3 == 0 if exact else [*ENGINES].index(engine) == model % 7


@pytest.mark.parametrize(("name", "engine", "exact"), chosen(MATRIX, quick))
def test_gradients_of_every_schedule_are_equal(name, engine, exact):
    """In float64, with dropout and, but for packed sequences, drop-path."""
    options, expected = ENGINES[engine](*MODELS[name][2:]), reference(name, exact)
    found = gradients(name, exact=exact, **options)
    assert found.keys() == expected.keys()
    largest = max(grad.abs().max() for grad in expected.values())
    assert largest > 0
    for key, grad in found.items():
        assert name != "swin" or expected[key].any(), key
        assert ((grad - expected[key]).abs().max() / largest).item() <= 1e-10, key
    if name.startswith(("gpt", "roberta")) and (engine == "checkpoint" or exact):
        assert_equal(found, expected)


@pytest.mark.parametrize(
    ("family", "options"), [*((family, {}) for family in FAMILIES), ("MViT", {"design": "rev_mvit"})], ids=str
)
def test_plain_checkpointing_changes_nothing(family, options):
    """But that each block runs again."""
    grads, counts = [], []
    for backward in ("autograd", "checkpoint"):
        torch.manual_seed(0)
        options = options | {"dropout": 0.2, "drop_path": 0.3, "backward": backward}
        model, runs = getattr(models, family)(**FAMILIES[family] | options), []
        for block in filter(lambda part: isinstance(part, ResidualBlock), model.modules()):
            block.f.norm.register_forward_hook(lambda *given, runs=runs: runs.append(given))
        model(example(family, 4)).logsumexp(-1).sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
        counts.append(len(runs))
    assert_equal(*grads)
    assert counts[1] == 2 * counts[0] > 0
