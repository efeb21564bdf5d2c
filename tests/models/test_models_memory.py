"""Memory of activations, of every family: it grows with depth in the plain twin, and not in the reversible model."""

import pytest
import torch
from tracked_memory import bytes_of_a_step

from holotrain.models import GPT, MViT, RevGPT, RevMViT, RevRoBERTa, RevSwin, RevViT, RoBERTa, Swin, ViT

PIXELS = {"image_size": 16, "channels": 1, "classes": 3}
TEXT = {"vocab": 30, "context": 32, "dim": 16, "heads": 2}
FAMILIES = {
    "vit": (ViT, RevViT, lambda depth: PIXELS | {"patch_size": 2, "dim": 16, "depth": depth, "heads": 2}),
    "swin": (
        Swin,
        RevSwin,
        lambda depth: PIXELS | {"patch_size": 2, "dim": 8, "depths": (depth, 1), "heads": (1, 2), "window": 4},
    ),
    "mvit, first stage": (MViT, RevMViT, lambda depth: PIXELS | {"image_size": 32, "dim": 8, "depths": (depth, 1)}),
    "mvit, second stage": (MViT, RevMViT, lambda depth: PIXELS | {"image_size": 32, "dim": 8, "depths": (1, depth + 1)}),
    "gpt": (GPT, RevGPT, lambda depth: TEXT | {"depth": depth}),
    "roberta": (RoBERTa, RevRoBERTa, lambda depth: TEXT | {"depth": depth}),
    "roberta, classes": (RoBERTa, RevRoBERTa, lambda depth: TEXT | {"depth": depth, "classes": 3}),
}


def inputs_of(model_class, arguments):
    if "image_size" in arguments:
        return (torch.randn(16, 1, arguments["image_size"], arguments["image_size"]),)
    tokens = torch.randint(30, (16, 32))
    return (tokens,) if "GPT" in model_class.__name__ else (tokens, torch.arange(32) < torch.randint(8, 33, (16, 1)))


def growth(model_class, arguments_of, **options):
    """Bytes that a step needs more with 12 blocks than with 4: at its peak, and between forward and backward."""
    found = []
    for depth in (4, 12):
        torch.manual_seed(0)
        arguments = arguments_of(depth)
        model = model_class(**arguments, **options)
        found.append(bytes_of_a_step(model, *inputs_of(model_class, arguments)))
    return [more - less for less, more in zip(*found, strict=True)]


@pytest.mark.parametrize("family", FAMILIES)
def test_activations_do_not_grow_with_depth(family):
    plain, reversible, arguments_of = FAMILIES[family]
    grown = growth(plain, arguments_of, drop_path=0.1)
    assert min(grown) > 8 * 16 * 4 * 64 * 8  # 8 blocks, 16 samples: some maps of tokens each
    for backward in ("reversible", "pareprop"):
        for more, less in zip(growth(reversible, arguments_of, backward=backward, drop_path=0.1), grown, strict=True):
            assert more <= 0.02 * less


def test_checkpointing_grows_by_what_lies_between_blocks():
    """As the measure of memory must find it: 8 maps of 8 x 8 x 8 numbers more, of 16 images."""
    assert growth(Swin, FAMILIES["swin"][2], backward="checkpoint")[0] == 8 * 16 * 8 * 8 * 8 * 4


@pytest.mark.parametrize("model_class", [MViT, RevMViT])
def test_the_blocks_between_stages_are_recomputed_too(model_class):
    arguments = PIXELS | {"image_size": 32, "dim": 8, "depths": (1, 1, 1)}
    kept = {
        backward: bytes_of_a_step(model_class(**arguments, backward=backward), *inputs_of(model_class, arguments))[1]
        for backward in ("autograd", "checkpoint")
    }
    assert kept["checkpoint"] <= 0.2 * kept["autograd"]
