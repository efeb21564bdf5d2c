"""Transformers, plain and reversible, and a network that learns by error diffusion. They take plain arguments and know
nothing of configuration or training.

The families, each with its published sizes, plain and reversible:
vit, swin, mvit, gpt, roberta

What learns without a backward pass: error_diffusion

What they are made of: layers

What is done with them:
generation      text from a causal model, its tokens drawn by sampling
pretrained      published weights under our names
adapters        fine-tuning of a part: bottleneck adapters, freezing
int8            weights in a quarter of the memory
saved           a model in a folder and back (its class found by registry)
programs        image models as torch.export's programs and as ONNX
compiling       torch.compile, block by block
division        which layers tensor parallelism shares out
divided         a model as one of its ranks has it, for plans
"""

from holotrain.models.adapters import add_adapters, freeze
from holotrain.models.compiling import compile_blocks
from holotrain.models.error_diffusion import ImageErrorDiffusion
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
    "ViT",
    "add_adapters",
    "compile_blocks",
    "freeze",
    "generate",
    "load_pretrained",
    "quantise",
    "read_weights",
]
