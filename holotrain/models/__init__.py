"""Transformers, plain and reversible, and a network trained by error diffusion. They take plain arguments and do not depend
on configuration or training.

Families, each plain and reversible, with the published sizes:
vit, swin, mvit, gpt, roberta

Without a backward pass: error_diffusion

Of other libraries: foreign

Parts of the models: layers

What can be done with a model:
generation      generate text with a causal model
sampling        how the next token is drawn
pretrained      load published weights
checkpoint_files  read a checkpoint: a file, or a folder of several processes
adapters        fine-tune a part: bottleneck adapters, freezing
int8            quantise weights to a quarter of the memory
saved           save a model in a folder and load it (registry finds its class)
programs        export image models with torch.export and to ONNX
compiling       torch.compile, block by block
schedules       set the backward schedule of each block
division        which layers tensor parallelism splits
divided         the part of a model that one tensor parallel rank has, for plans
"""

from holotrain.models.adapters import add_adapters, freeze
from holotrain.models.compiling import compile_blocks
from holotrain.models.error_diffusion import ImageErrorDiffusion
from holotrain.models.foreign import HuggingFace, Timm
from holotrain.models.generation import generate
from holotrain.models.gpt import GPT, GPT_SIZES, RevGPT
from holotrain.models.int8 import quantise
from holotrain.models.mvit import MVIT_SIZES, MViT, RevMViT
from holotrain.models.pretrained import load_pretrained, read_weights
from holotrain.models.roberta import ROBERTA_SIZES, RevRoBERTa, RoBERTa
from holotrain.models.sampling import Sampling
from holotrain.models.swin import SWIN_SIZES, RevSwin, Swin
from holotrain.models.vit import VIT_SIZES, RevViT, ViT

__all__ = [
    "GPT",
    "GPT_SIZES",
    "MVIT_SIZES",
    "ROBERTA_SIZES",
    "SWIN_SIZES",
    "VIT_SIZES",
    "HuggingFace",
    "ImageErrorDiffusion",
    "MViT",
    "RevGPT",
    "RevMViT",
    "RevRoBERTa",
    "RevSwin",
    "RevViT",
    "RoBERTa",
    "Sampling",
    "Swin",
    "Timm",
    "ViT",
    "add_adapters",
    "compile_blocks",
    "freeze",
    "generate",
    "load_pretrained",
    "quantise",
    "read_weights",
]
