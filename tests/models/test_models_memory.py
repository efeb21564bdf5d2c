"""Memory of activations, of every family: it grows with depth in the plain twin, and not in the reversible model."""

import pytest
import torch
from covering import slow
from tracked_memory import bytes_of_a_step

from holotrain import models

PIXELS = {"image_size": 16, "channels": 1, "classes": 3}
TEXT = {"vocab": 30, "context": 32, "dim": 16, "heads": 2}
PATCHES = PIXELS | {"patch_size": 2, "dim": 16, "heads": 2}
WINDOWS = PATCHES | {"dim": 8, "heads": (1, 2), "window": 4}
POOLED = PIXELS | {"image_size": 32, "dim": 8}
FAMILIES = {
    "vit": ("ViT", lambda depth: PATCHES | {"depth": depth}),
    "swin": ("Swin", lambda depth: WINDOWS | {"depths": (depth, 1)}),
    "mvit, first stage": ("MViT", lambda depth: POOLED | {"depths": (depth, 1)}),
    "mvit, second stage": ("MViT", lambda depth: POOLED | {"depths": (1, depth + 1)}),
    "gpt": ("GPT", lambda depth: TEXT | {"depth": depth}),
    "roberta": ("RoBERTa", lambda depth: TEXT | {"depth": depth}),
    "roberta, classes": ("RoBERTa", lambda depth: TEXT | {"depth": depth, "classes": 3}),
}


def step_of(name, arguments):
    model = getattr(models, name)(**arguments)
    if "image_size" in arguments:
        return bytes_of_a_step(model, torch.randn(16, 1, arguments["image_size"], arguments["image_size"]))
    mask = () if "GPT" in name else (torch.arange(32) < torch.randint(8, 33, (16, 1)),)
    return bytes_of_a_step(model, torch.randint(30, (16, 32)), *mask)


def growth(name, arguments_of, **options):
    """Bytes that a step needs more with 12 blocks than with 4: at its peak, and between forward and backward."""
    found = []
    for depth in (4, 12):
        torch.manual_seed(0)
        found.append(step_of(name, arguments_of(depth) | options))
    return [more - less for less, more in zip(*found, strict=True)]


SLOW = ("mvit, first stage", "roberta, classes")


@pytest.mark.parametrize("family", [slow(name) if name in SLOW else name for name in FAMILIES])
def test_activations_do_not_grow_with_depth(family):
    name, arguments_of = FAMILIES[family]
    grown = growth(name, arguments_of, drop_path=0.1)
    assert min(grown) > 8 * 16 * 4 * 64 * 8  # 8 blocks, 16 samples: some maps of tokens each
    for backward in ("reversible", "pareprop"):
        for more, less in zip(growth(f"Rev{name}", arguments_of, backward=backward, drop_path=0.1), grown, strict=True):
            assert more <= 0.02 * less


def test_checkpointing_grows_by_what_lies_between_blocks():
    """As the measure of memory must find it: 8 maps of 8 x 8 x 8 numbers more, of 16 images."""
    assert growth(*FAMILIES["swin"], backward="checkpoint")[0] == 8 * 16 * 8 * 8 * 8 * 4


@pytest.mark.parametrize("name", ["MViT", "RevMViT"])
def test_the_blocks_between_stages_are_recomputed_too(name):
    arguments = POOLED | {"depths": (1, 1, 1)}
    autograd, checkpoint = (step_of(name, arguments | {"backward": each})[1] for each in ("autograd", "checkpoint"))
    assert checkpoint <= 0.2 * autograd
