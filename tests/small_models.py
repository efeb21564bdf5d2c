"""Arguments of a model of each family that takes milliseconds, and what it reads."""

import json
from pathlib import Path

import torch
from torch import Tensor

PIXELS = {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 5}
WINDOWS = PIXELS | {"dim": 8, "depths": (2, 1), "heads": (1, 2), "window": 2}
# On maps of 6 and 3 tokens: shifted windows, windows that do not fill the map, a window as large as the map.
ODD_WINDOWS = WINDOWS | {"image_size": 12, "depths": (3, 2), "window": 4}
IMAGE = PIXELS | {"dim": 16, "depth": 2, "heads": 2}
POOLED = {"image_size": 8, "channels": 1, "classes": 5, "dim": 8, "depths": (2, 2), "heads": 1, "kv_stride": 2}
TEXT = {"vocab": 40, "context": 12, "dim": 16, "depth": 2, "heads": 2}

CELLS = {"image_size": 8, "channels": 1, "classes": 5, "width": 4, "depth": 3}

FAMILIES = {"ViT": IMAGE, "Swin": WINDOWS, "MViT": POOLED, "GPT": TEXT, "RoBERTa": TEXT}
"""Arguments of the smallest model of each family of transformers; the reversible one takes the same."""

TRANSFORMERS = [f"{prefix}{family}" for family in FAMILIES for prefix in ("", "Rev")]


def sizes_of(family: str) -> dict:
    """The arguments of each size of a family, such as ``ViT``, as ``model=vit_tiny`` has them."""
    models = json.loads((Path(__file__).parents[1] / "conf" / "_options.json").read_text(encoding="utf-8"))
    named = [(*name.split("_", 1), arguments) for name, arguments in models["sizes"].items()]
    return {size: arguments for name, size, arguments in named if name == family}


def example(name: str, batch: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a model of FAMILIES, plain or reversible, or of CELLS reads: images (batch, 1, 8, 8), or tokens (batch, 12).

    Always the same.
    """
    generator = torch.Generator().manual_seed(1)
    if name.removeprefix("Rev") in ("GPT", "RoBERTa"):
        return torch.randint(40, (batch, 12), generator=generator)
    return torch.randn(batch, 1, 8, 8, generator=generator).to(dtype)


def text_batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens below 50, a mask with padding, and targets of some of the tokens, (4, 12) each. Always the same."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(50, (4, 12), generator=generator)
    mask = torch.arange(12) < torch.tensor([12, 7, 3, 9])[:, None]
    return tokens, mask, tokens.where((torch.rand(4, 12, generator=generator) < 0.4) & mask, -100)
