"""Somebody else's stack of pre-norm blocks, made reversible in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.sequence import ReversibleSequence


class TwoStream(nn.Module):
    """A reversible sequence where one stream goes in and one comes out: both start from it, their mean ends it.

    Keyword arguments are handed to every f. Shapes: (...) -> the same.
    """

    def __init__(self, sequence: ReversibleSequence) -> None:
        super().__init__()
        self.sequence = sequence

    def forward(self, x: Tensor, **f_kwargs: Any) -> Tensor:
        y1, y2 = self.sequence(x, x, f_kwargs=f_kwargs)
        return (y1 + y2) / 2


def convert(
    model: nn.Module, stack: str, branches: Callable[[nn.Module], tuple[nn.Module, nn.Module]], **options: Any
) -> ReversibleSequence:
    """Puts a reversible sequence in the place of a stack of residual blocks, with their own branches.

        convert(
            vit,  # timm
            "blocks",
            lambda block: (
                nn.Sequential(block.norm1, block.attn, block.ls1, block.drop_path1),
                nn.Sequential(block.norm2, block.mlp, block.ls2, block.drop_path2),
            ),
            backward="pareprop",
        )

    The layers and their weights are the model's own; only how a block adds them up is another, so a trained model needs some
    training to be itself again.

    Args:
        model: changed in place.
        stack: dotted name of the ``nn.Sequential`` or ``nn.ModuleList`` of blocks within it.
        branches: gives the two residual branches of a block (attention and MLP, each with its norm) as modules of one argument.
        options: of :class:`ReversibleSequence`.

    Returns:
        the sequence, whose schedule can be changed later.

    Raises:
        ValueError: no stack of that name.
    """
    parent_name, _, name = stack.rpartition(".")
    modules = dict(model.named_modules())
    blocks = modules.get(stack)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList):
        stacks = [name for name, part in modules.items() if name and isinstance(part, nn.Sequential | nn.ModuleList)]
        raise ValueError(f"{stack!r} is no stack of blocks; there are {', '.join(stacks) or 'none'}")
    sequence = ReversibleSequence([ReversibleBlock(*branches(block)) for block in blocks], **options)
    stream = TwoStream(sequence)
    # Whoever loops over a list goes on doing so, over one element.
    setattr(modules[parent_name], name, nn.ModuleList([stream]) if isinstance(blocks, nn.ModuleList) else stream)
    return sequence
