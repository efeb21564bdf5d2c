"""Arguments that no model can be made from, each refused by name; and the published numbers of parameters and multiply-adds."""

from unittest.mock import ANY

import pytest
import timm
import torch
from covering import long, slow
from pytest import approx
from small_models import TEXT, sizes_of
from torch.utils.flop_counter import FlopCounterMode

from holotrain import models
from holotrain.error_diffusion import ImageErrorDiffusion
from holotrain.models import GPT, MViT, RevSwin, RevViT, Swin, ViT

REFUSED = {
    ViT: [
        ({"mlp_ratio": 0}, "mlp_ratio must be at least 0.01, not 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), not 1.0"),
        ({"backward": "reversible"}, "takes backward autograd, checkpoint"),
        ({"pool": "max"}, "pool must be mean or class, not 'max'"),
        ({"dim": 100, "heads": 3}, "100 is not a multiple of 3"),
        ({"layer_scale": -1}, "layer_scale must be at least 0, not -1"),
    ],
    Swin: [
        ({"heads": (3, 5, 12, 24)}, "192 is not a multiple of 5"),
        ({"depths": (2, 2)}, r"one number for each stage, not \[2, 2\] and \[3, 6, 12, 24\]"),
    ],
    MViT: [
        ({"image_size": 48}, "multiple of 32 for 4 stages, not 48"),
        ({"kv_stride": 3}, "56x56 tokens cannot be pooled evenly by a kv stride of 3"),
    ],
    GPT: [
        ({**TEXT, "dim": 6}, "even width of a head .dim / heads., not 3"),
        ({**TEXT, "positions": "none"}, "positions must be rotary or learned"),
    ],
    RevViT: [({"store": 13}, "blocks up to 12")],
    RevSwin: [({"fusion": "average"}, "fusion must be linear or mlp, not 'average'")],
    ImageErrorDiffusion: [({"image_size": 8, "width": 0}, "width must be at least 1, not 0")],
}


@pytest.mark.parametrize(
    ("model", "arguments", "words"), [(model, *case) for model, cases in REFUSED.items() for case in cases]
)
def test_impossible_arguments_are_refused(model, arguments, words):
    with pytest.raises(ValueError, match=words), torch.device("meta"):
        model(**arguments)


def test_an_image_of_another_size_is_refused():
    with pytest.raises(ValueError, match="224x224 pixels, not 32x32"), torch.device("meta"):
        ViT()(torch.empty(1, 3, 32, 32))


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
        long("RevViT", "base", approx(87e6, abs=0.87e6), approx(17.6e9, rel=0.02), None),
        slow("RevMViT", "paper_base", approx(39e6, rel=0.03), approx(8.7e9, rel=0.03), None),
        slow("ViT", "base", ANY, ANY, "vit_base_patch16_224"),
        # Liu et al. (ICCV 2021), table 1; the large one's as timm and its authors give them for 224 pixels.
        slow("Swin", "tiny", approx(28.3e6, rel=0.01), approx(4.5e9, rel=0.02), "swin_tiny_patch4_window7_224"),
        long("Swin", "large", approx(196.5e6, rel=0.01), approx(34.5e9, rel=0.02), "swin_large_patch4_window7_224"),
        # Li et al. (CVPR 2022), table 1: millions of parameters, in whole ones.
        ("MViT", "tiny", approx(24e6, abs=0.74e6), approx(4.7e9, rel=0.02), "mvitv2_tiny"),
        long("RevMViT", "base", approx(52e6, abs=1.02e6), approx(10.2e9, rel=0.02), "mvitv2_base"),
        # Radford et al. (2019) and the released weights; Liu et al. (2019).
        slow("RevGPT", "small", approx(124.4e6, rel=0.01), ANY, None),
        ("RevRoBERTa", "base", approx(125e6, rel=0.01), ANY, None),
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
