"""Makes a stack of pre-norm blocks of another model reversible, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from holotrain.reversible.block import ReversibleBlock
from holotrain.reversible.sequence import ReversibleSequence


class TwoStream(nn.Module):
    """A reversible sequence with one input and one output: both streams start as the input, the output is their mean.

    Keyword arguments are passed to every f. Shapes: (...) -> the same.
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
    """Replaces a stack of residual blocks by a reversible sequence with the same branches.

        convert(
            vit,  # timm
            "blocks",
            lambda block: (
                nn.Sequential(block.norm1, block.attn, block.ls1, block.drop_path1),
                nn.Sequential(block.norm2, block.mlp, block.ls2, block.drop_path2),
            ),
            backward="pareprop",
        )

    The layers and their weights stay. A block adds up its branches differently, so a pretrained model needs fine-tuning.

    Args:
        model: changed in place.
        stack: dotted name of the ``nn.Sequential`` or ``nn.ModuleList`` of blocks.
        branches: returns the two residual branches of a block (attention and MLP, each with its norm) as modules that take one
            tensor.
        options: options of :class:`ReversibleSequence`.

    Returns:
        the sequence; its schedule can be changed later.

    Raises:
        ValueError: the model has no stack of this name.
    """
    parent_name, _, name = stack.rpartition(".")
    modules = dict(model.named_modules())
    blocks = modules.get(stack)
    if not isinstance(blocks, nn.Sequential | nn.ModuleList):
        stacks = [name for name, part in modules.items() if name and isinstance(part, nn.Sequential | nn.ModuleList)]
        raise ValueError(f"{stack!r} is not a stack of blocks; the model has {', '.join(stacks) or 'none'}")
    sequence = ReversibleSequence([ReversibleBlock(*branches(block)) for block in blocks], **options)
    stream = TwoStream(sequence)
    # A model that loops over a ModuleList still does, over one element.
    setattr(modules[parent_name], name, nn.ModuleList([stream]) if isinstance(blocks, nn.ModuleList) else stream)
    return sequence
