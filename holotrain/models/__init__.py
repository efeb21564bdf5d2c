"""Transformers, plain and reversible. They take plain arguments and know nothing of configuration or training.

vit        ViT, RevViT and their published sizes
mvit       MViT, RevMViT and their published sizes
branches   pre-norm attention and MLP: the two branches of every block
pooling_attention  attention among pooled tokens, with relative positions: what MViT has in its place
residual   the sequence of blocks of a plain transformer (the reversible one is holotrain.reversible's)
patches    images to tokens
stages     options that count blocks, in a model of several runs of them
compiling  torch.compile, block by block
"""

from holotrain.models.compiling import compile_blocks
from holotrain.models.mvit import MVIT_SIZES, MViT, RevMViT
from holotrain.models.vit import VIT_SIZES, RevViT, ViT

__all__ = ["MVIT_SIZES", "VIT_SIZES", "MViT", "RevMViT", "RevViT", "ViT", "compile_blocks"]
