"""Planners of tiny models, without a configuration."""

import torch
from small_models import IMAGE

from holotrain.models import RevViT
from holotrain.models.block_schedules import sequences
from holotrain.planning import Planner
from holotrain.planning.fake_tensors import fake_parameters
from holotrain.planning.planner import Size
from holotrain.planning.training_step import TrainingStep


def made(make, fake):
    """What ``make`` returns on the CPU, or inside of ``fake_tensors()`` the same without memory."""
    with torch.device("meta" if fake else "cpu"):
        model = make()
    return fake_parameters(model, torch.device("cpu")) if fake else model


def planner(
    make=RevViT, sizes=IMAGE, batch=4, backward="reversible", device="cpu", half=False, batches=1, change=None, **options
):
    """``half``: autocast to bf16. ``batches``: number of accumulated batches. ``change``: applied to the model."""

    def make_model(backward, depth):
        blocks = {"backward": backward} if "dim" in sizes else {}
        model = make(**sizes | blocks | ({} if depth is None else {"depth": depth}))
        if change is not None:
            change(model)
        return model

    def make_step(model, size):
        place = next(model.parameters()).device
        if "vocab" in sizes:
            given = (torch.zeros(size, sizes["context"], dtype=torch.int64, device=place),) * 2
        else:
            given = (torch.zeros(size, 1, 8, 8, device=place),)
        return TrainingStep(
            model,
            lambda: model(*given).square().mean(),
            torch.optim.AdamW(model.parameters()),
            autocast=lambda: torch.autocast(place.type, torch.bfloat16, enabled=half),
            batches=batches,
            held={"batch": given},
            sequences=sequences(model),
        )

    depth = Size("depth", sizes["depth"]) if "depth" in sizes else None
    return Planner(make_model, make_step, device, Size("batch", batch), depth, backward=backward, **options)
