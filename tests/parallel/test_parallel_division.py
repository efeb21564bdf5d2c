"""Which layers of a model tensor parallelism splits."""

import pytest
from small_models import IMAGE, POOLED, TEXT, WINDOWS

from holotrain.models import MViT, RevGPT, Swin, ViT
from holotrain.parallel.strategies import division


@pytest.mark.parametrize(
    ("make", "sizes", "ranks", "split", "whole"),
    [
        (RevGPT, TEXT, 2, 4, []),
        (RevGPT, TEXT, 4, 2, ["2 heads (not divisible by 4)"]),
        (ViT, IMAGE | {"mlp_ratio": 0.7}, 2, 2, ["MLPs of width 11 (not divisible by 2)"]),
        (Swin, WINDOWS, 2, 3, ["attention in windows, or pooled"]),
        (MViT, POOLED, 2, 4, ["attention in windows, or pooled"]),
    ],
)
def test_layers_that_cannot_be_split_are_whole(make, sizes, ranks, split, whole):
    found = division(make(**sizes), ranks)
    assert (len(found.layers), found.whole) == (split, whole)
