"""Transformers, plain and reversible. They take plain arguments and know nothing of configuration or training.

vit        ViT, RevViT and their published sizes
branches   pre-norm attention and MLP: the two branches of every block
residual   the sequence of blocks of a plain transformer (the reversible one is holotrain.reversible's)
patches    images to tokens
compiling  torch.compile, block by block
"""

from holotrain.models.compiling import compile_blocks
from holotrain.models.vit import VIT_SIZES, RevViT, ViT

__all__ = ["VIT_SIZES", "RevViT", "ViT", "compile_blocks"]
