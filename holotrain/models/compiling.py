"""torch.compile, block by block."""

from typing import Any

from torch import nn

from holotrain.models.layers.residual import PostNormBlock, ResidualBlock
from holotrain.models.mvit import Transition
from holotrain.reversible import ReversibleBlock


def compile_blocks(model: nn.Module, **options: Any) -> None:
    """Compiles the two branches of every block, in place.

    Blocks of the same kind share compiled code, so this takes a fraction of the time of compiling the whole model. It works
    with every backward schedule and does not change the names in the state_dict.

    Args:
        options: of ``torch.compile``, such as ``mode="max-autotune-no-cudagraphs"``. A mode with CUDA graphs would overwrite
            what a recomputation has saved; use :class:`~holotrain.reversible.GraphedStep`.
    """
    for module in model.modules():
        if isinstance(module, PostNormBlock):  # which calls parts of its branches
            module.compile(**options)
        elif isinstance(module, ReversibleBlock | ResidualBlock | Transition):
            module.f.compile(**options)
            module.g.compile(**options)
