"""Transformers, plain and reversible. They take plain arguments and know nothing of configuration or training.

The families, each with its published sizes, plain and reversible:
vit, gpt, roberta

What they are made of:
branches        attention and MLP: the two branches of every block
attention       multi-head self-attention, with rotary (positions) and kv_cache (generation)
residual        the sequence of blocks of a plain transformer (the reversible one is holotrain.reversible's)
streams         reversible blocks between one stream and one stream
stages          several sequences in one model
patches         images to tokens
text            tokens to embeddings, and the blocks of GPT and RoBERTa
text_heads      what reads an encoded text
cross_entropy   the loss over a long vocabulary, in pieces
compiling       torch.compile, block by block
"""

from holotrain.models.compiling import compile_blocks
from holotrain.models.gpt import GPT, GPT_SIZES, RevGPT
from holotrain.models.roberta import ROBERTA_SIZES, RevRoBERTa, RoBERTa
from holotrain.models.vit import VIT_SIZES, RevViT, ViT

__all__ = [
    "GPT",
    "GPT_SIZES",
    "ROBERTA_SIZES",
    "VIT_SIZES",
    "RevGPT",
    "RevRoBERTa",
    "RevViT",
    "RoBERTa",
    "ViT",
    "compile_blocks",
]
