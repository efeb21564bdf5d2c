"""Published numbers of parameters and multiply-adds, and what tells a reversible model from its plain twin."""

from unittest.mock import ANY

import pytest
import timm
import torch
from covering import slow
from pytest import approx
from small_models import sizes_of
from torch.utils.flop_counter import FlopCounterMode

from holotrain import models

PIXELS, TOKENS = torch.empty(1, 3, 224, 224, device="meta"), torch.zeros(1, 512, dtype=torch.long, device="meta")


def of_size(name, size):
    with torch.device("meta"):
        return getattr(models, name)(**sizes_of(name.removeprefix("Rev"))[size])


def parameter_count(model):
    return sum(p.numel() for p in model.parameters())


def multiply_adds(model):
    """The products within attention are counted too, as in the published figures."""
    with FlopCounterMode(display=False) as counter:
        model(PIXELS if any(isinstance(module, torch.nn.Conv2d) for module in model.modules()) else TOKENS)
    return counter.get_total_flops() / 2


@pytest.mark.parametrize(
    ("name", "size", "parameters", "macs", "timms"),
    [
        # Mangalam et al. (CVPR 2022), tables 1 and 2. Parameters are in whole millions, so a small model's can only be held to
        # half a million.
        ("RevViT", "small", approx(22e6, abs=0.5e6), approx(4.6e9, rel=0.02), None),
        slow("RevViT", "base", approx(87e6, abs=0.87e6), approx(17.6e9, rel=0.02), None),
        ("RevMViT", "paper_base", approx(39e6, rel=0.03), approx(8.7e9, rel=0.03), None),
        ("ViT", "small", ANY, ANY, "vit_small_patch16_224"),
        *(slow("ViT", size, ANY, ANY, f"vit_{size}_patch16_224") for size in ("base", "large")),
        # Liu et al. (ICCV 2021), table 1; the large one's as timm and its authors give them for 224 pixels.
        ("Swin", "tiny", approx(28.3e6, rel=0.01), approx(4.5e9, rel=0.02), "swin_tiny_patch4_window7_224"),
        slow("Swin", "small", approx(49.6e6, rel=0.01), approx(8.7e9, rel=0.02), "swin_small_patch4_window7_224"),
        slow("Swin", "base", approx(87.8e6, rel=0.01), approx(15.4e9, rel=0.02), "swin_base_patch4_window7_224"),
        slow("Swin", "large", approx(196.5e6, rel=0.01), approx(34.5e9, rel=0.02), "swin_large_patch4_window7_224"),
        # Li et al. (CVPR 2022), table 1: millions of parameters, in whole ones.
        ("MViT", "tiny", approx(24e6, abs=0.74e6), approx(4.7e9, rel=0.02), "mvitv2_tiny"),
        ("RevMViT", "tiny", approx(24e6, abs=0.74e6), approx(4.7e9, rel=0.02), "mvitv2_tiny"),
        slow("MViT", "small", approx(35e6, abs=0.85e6), approx(7.0e9, rel=0.02), "mvitv2_small"),
        slow("RevMViT", "small", approx(35e6, abs=0.85e6), approx(7.0e9, rel=0.02), "mvitv2_small"),
        slow("MViT", "base", approx(52e6, abs=1.02e6), approx(10.2e9, rel=0.02), "mvitv2_base"),
        slow("RevMViT", "base", approx(52e6, abs=1.02e6), approx(10.2e9, rel=0.02), "mvitv2_base"),
        # Radford et al. (2019) and the released weights; Liu et al. (2019).
        ("RevGPT", "small", approx(124.4e6, rel=0.01), ANY, None),
        slow("RevGPT", "medium", approx(354.8e6, rel=0.01), ANY, None),
        ("RevRoBERTa", "base", approx(125e6, rel=0.01), ANY, None),
        slow("RevRoBERTa", "large", approx(355e6, rel=0.01), ANY, None),
    ],
)
def test_sizes_are_the_published_ones_and_timms(name, size, parameters, macs, timms):
    model = of_size(name, size)
    assert parameter_count(model) == parameters
    assert multiply_adds(model) == macs
    if timms is not None:
        options = {"class_token": False, "global_pool": "avg"} if name == "ViT" else {}
        with torch.device("meta"):
            reference = timm.create_model(timms, **options)
        assert (parameter_count(model), multiply_adds(model)) == (parameter_count(reference), multiply_adds(reference))
    if size == "paper_base":  # blocks 1, 3 and 14 are transitions
        assert [len(stage.blocks.blocks) for stage in model.stages] == [1, 1, 10, 1]


def test_a_fusion_of_two_layers_adds_one_of_twice_the_width():
    """As in the launch scripts of PaReprop's authors: 2C (2C + 1) parameters more where streams of width C are fused."""
    sizes = sizes_of("Swin")["tiny"]
    with torch.device("meta"):
        linear, mlp = (parameter_count(models.RevSwin(**sizes, fusion=fusion)) for fusion in ("linear", "mlp"))
    assert mlp - linear == sum(2 * width * (2 * width + 1) for width in (96, 192, 384))
