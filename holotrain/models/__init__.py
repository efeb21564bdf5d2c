"""Transformers, plain and reversible, and a network trained by error diffusion. They take plain arguments and do not depend
on configuration or training.

Families, each plain and reversible, with the published sizes:
vit, swin, mvit, gpt, roberta

Without a backward pass: ImageErrorDiffusion, of :mod:`holotrain.error_diffusion`

Of other libraries: external (the base class, and timm), huggingface (huggingface_files: its files, read as data)

Parts of the models: layers

What can be done with a model:
pretrained        start from weights: of a checkpoint or an export, and of other libraries for their models
authors_weights   the names that the authors of reversible networks of images gave their weights
checkpoint_files  read a checkpoint or weights, a file or a folder of several processes, and find whether it is damaged
saved             make a model by the name of its class, save it in a folder and load it
generation        generate text with a causal model, and how the next token is drawn
adapters          fine-tune a part: peft, freezing
quantised         frozen weights in 8 or 4 bits
block_schedules   set the backward schedule of each block; torch.compile, block by block
"""

from holotrain.error_diffusion import ImageErrorDiffusion
from holotrain.models.external import Timm
from holotrain.models.generation import generate
from holotrain.models.gpt import GPT, RevGPT
from holotrain.models.huggingface import HuggingFace
from holotrain.models.mvit import MViT, RevMViT
from holotrain.models.pretrained import load_pretrained
from holotrain.models.roberta import RevRoBERTa, RoBERTa
from holotrain.models.swin import RevSwin, Swin
from holotrain.models.vit import RevViT, ViT

__all__ = [
    "GPT",
    "HuggingFace",
    "ImageErrorDiffusion",
    "MViT",
    "RevGPT",
    "RevMViT",
    "RevRoBERTa",
    "RevSwin",
    "RevViT",
    "RoBERTa",
    "Swin",
    "Timm",
    "ViT",
    "generate",
    "load_pretrained",
]
