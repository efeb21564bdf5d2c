"""Transformers, plain and reversible. They take plain arguments and know nothing of configuration or training.

vit         ViT, RevViT and their published sizes
swin        Swin, RevSwin and their published sizes
branches    pre-norm attention and MLP: the two branches of every block
windows     attention within shifted windows: the other branch of a Swin block
residual    the sequence of blocks of a plain transformer (the reversible one is holotrain.reversible's)
stages      options that count blocks, in models of several such sequences
patches     images to tokens, and fewer tokens of more channels
fusion      two streams to one
compiling   torch.compile, block by block
pretrained  published weights under our names
"""

from holotrain.models.compiling import compile_blocks
from holotrain.models.swin import SWIN_SIZES, RevSwin, Swin
from holotrain.models.vit import VIT_SIZES, RevViT, ViT

__all__ = ["SWIN_SIZES", "VIT_SIZES", "RevSwin", "RevViT", "Swin", "ViT", "compile_blocks"]
