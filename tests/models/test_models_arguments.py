"""Arguments that no model can be made from, each refused by name; and sizes of patches that follow the image."""

import inspect

import pytest
import torch
from small_models import TEXT
from torch import nn

from holotrain.error_diffusion import ImageErrorDiffusion
from holotrain.models import GPT, MViT, RevMViT, RevSwin, RevViT, Swin, ViT
from holotrain.models.layers.blocks import Reversible

REFUSED = {
    ViT: [
        ({"depth": 0}, "depth must be at least 1, not 0"),
        ({"mlp_ratio": 0}, "mlp_ratio must be at least 0.01, not 0"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), not 1.0"),
        ({"drop_path": 1.0}, r"drop_path must be in \[0, 1\), not 1.0"),
        ({"backward": "reversible"}, "takes backward autograd, checkpoint"),
        ({"pool": "max"}, "pool must be mean or class, not 'max'"),
        ({"dim": 100, "heads": 3}, "100 is not a multiple of 3"),
        ({"image_size": 30, "patch_size": 16}, "30 is not a multiple of 16"),
        ({"layer_scale": -1}, "layer_scale must be at least 0, not -1"),
    ],
    Swin: [
        ({"heads": (3, 5, 12, 24)}, "192 is not a multiple of 5"),
        ({"depths": (2, 2)}, r"one number for each stage, not \[2, 2\] and \[3, 6, 12, 24\]"),
        ({"depths": (2, 0, 2, 2)}, "depths must be at least 1, not 0"),
        ({"window": 0}, "window must be at least 1, not 0"),
    ],
    MViT: [
        ({"image_size": 48}, "multiple of 32 for 4 stages, not 48"),
        ({"kv_stride": 3}, "56x56 tokens cannot be pooled evenly by a kv stride of 3"),
        ({"design": "mvit"}, "design must be mvitv2 or rev_mvit, not 'mvit'"),
    ],
    GPT: [
        ({**TEXT, "dim": 6}, "even width of a head .dim / heads., not 3"),
        ({**TEXT, "positions": "none"}, "positions must be rotary or learned"),
        ({**TEXT, "gelu": "fast"}, "gelu must be none or tanh, not 'fast'"),
    ],
    RevViT: [({"backward": "forward"}, "backward must be one of autograd"), ({"store": 13}, "blocks up to 12")],
    RevSwin: [
        ({"store": 13}, "blocks up to 12"),
        ({"fusion": "average"}, "fusion must be linear or mlp, not 'average'"),
        ({"exact": -1}, "exact must be False, True or a number"),
    ],
    RevMViT: [({"store": 14}, "blocks up to 13"), ({"keep": "dropout"}, "keep takes attention, matmul or")],
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


@pytest.mark.parametrize(
    ("model", "sizes"), [(ViT, {8: 4, 10: 2, 28: 4, 32: 4, 112: 16, 224: 16}), (Swin, {32: 2, 64: 4, 224: 4})]
)
def test_patches_suit_the_image(model, sizes):
    for image, patch in sizes.items():
        with torch.device("meta"):
            assert model(image_size=image).embedding.project.kernel_size == (patch, patch)


def test_reversible_classes_of_others_have_signatures_too():
    class Derived(RevViT):
        def __init__(self, width: int) -> None:
            super().__init__(dim=width)

    class Direct(Reversible, ViT):
        def __init__(self, width: int) -> None:
            super().__init__(dim=width)

    class Plain(nn.Module):
        def __init__(self, width: int, backward: str) -> None:
            super().__init__()

    class Undescribed(Reversible, Plain):
        """Of a class whose arguments have no description."""

    assert all(list(inspect.signature(kind).parameters) == ["width"] for kind in (Derived, Direct))
    assert Derived.__doc__ is None and Direct.__doc__ is None
    assert list(inspect.signature(Undescribed).parameters) == ["width", "backward", "store", "exact", "keep", "tile"]


def test_a_reversible_model_of_others_keeps_what_its_plain_one_does_with_subclasses():
    class Plain(nn.Module):
        tags = []

        def __init_subclass__(cls, tag=None):
            super().__init_subclass__()
            Plain.tags.append(tag)

        def __init__(self, *, width=3):
            super().__init__()

    class Rev(Reversible, Plain, tag="rev"):
        pass

    class Mixin(Reversible):
        pass

    class Mixed(Mixin, Plain):
        pass

    assert Plain.tags == ["rev", None]
    assert all("width" in inspect.signature(kind).parameters for kind in (Rev, Mixed))
