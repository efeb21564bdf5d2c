"""Models by the names used in configurations and exported files."""

from typing import Any

from torch import nn

from holotrain.models.error_diffusion import ImageErrorDiffusion
from holotrain.models.gpt import GPT, RevGPT
from holotrain.models.mvit import MViT, RevMViT
from holotrain.models.roberta import RevRoBERTa, RoBERTa
from holotrain.models.swin import RevSwin, Swin
from holotrain.models.vit import RevViT, ViT

MODELS: dict[str, type[nn.Module]] = {
    "vit": ViT,
    "rev_vit": RevViT,
    "swin": Swin,
    "rev_swin": RevSwin,
    "mvit": MViT,
    "rev_mvit": RevMViT,
    "roberta": RoBERTa,
    "rev_roberta": RevRoBERTa,
    "gpt": GPT,
    "rev_gpt": RevGPT,
    "error_diffusion": ImageErrorDiffusion,
}


def build(kind: str, arguments: dict[str, Any]) -> nn.Module:
    """A newly initialised model of that kind.

    Raises:
        ValueError: an unknown kind, or invalid arguments.
    """
    if kind not in MODELS:
        raise ValueError(f"{kind!r} is not a kind of model; there are {', '.join(MODELS)}")
    return MODELS[kind](**arguments)
