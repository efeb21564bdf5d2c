"""Planners of tiny models, without a configuration."""

import torch
from small_models import IMAGE

from holotrain.models import RevViT
from holotrain.models.block_schedules import sequences
from holotrain.planning import Planner, TrainingStep
from holotrain.planning.fake_tensors import fake_parameters
from holotrain.planning.planner import Size


def made(make, fake):
    """What ``make`` returns on the CPU, or inside of ``fake_tensors()`` the same without memory."""
    with torch.device("meta" if fake else "cpu"):
        model = make()
    return fake_parameters(model, torch.device("cpu")) if fake else model


def planner(make=RevViT, sizes=IMAGE, batch=4, backward="reversible", device="cpu", half=False, **options):
    """``half``: autocast to bf16."""

    def make_model(backward, depth):
        blocks = {"backward": backward} if "dim" in sizes else {}
        return make(**sizes | blocks | ({} if depth is None else {"depth": depth}))

    def make_step(model, size):
        place = next(model.parameters()).device
        images = torch.zeros(size, 1, 8, 8, device=place)
        return TrainingStep(
            model,
            lambda: model(images).square().mean(),
            torch.optim.AdamW(model.parameters()),
            autocast=lambda: torch.autocast(place.type, torch.bfloat16, enabled=half),
            held={"batch": [images]},
            sequences=sequences(model),
        )

    depth = Size("depth", sizes["depth"]) if "depth" in sizes else None
    return Planner(make_model, make_step, device, Size("batch", batch), depth, backward=backward, **options)
