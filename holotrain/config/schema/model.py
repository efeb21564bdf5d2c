"""What is trained, and how its backward comes by activations."""

from dataclasses import dataclass

from omegaconf import MISSING

from holotrain.config.checks import at_least, one_of, within


@dataclass
class ModelConfig:
    kind: str = MISSING


@dataclass
class ViTConfig(ModelConfig):
    kind: str = MISSING
    """vit (plain) or rev_vit (reversible)"""

    dim: int = MISSING
    """width of a token"""

    depth: int = MISSING
    """number of blocks"""

    heads: int = MISSING
    """attention heads; they divide dim"""

    mlp_ratio: float = 4.0
    """width of the MLP's hidden layer over dim"""

    patch_size: int | None = None
    """pixels along a patch; null: 16 from 112 pixels up, 4 from 24 up, else 2"""

    dropout: float = 0.0
    """on the embedding, the attention's output and in the MLP"""

    attention_dropout: float = 0.0
    """on the attention weights"""

    drop_path: float = 0.0
    """stochastic depth of the last block, rising linearly from 0 at the first"""

    def __post_init__(self) -> None:
        one_of("model.kind", self.kind, MODELS)
        for name in ("dim", "depth", "heads"):
            at_least(f"model.{name}", getattr(self, name), 1)
        at_least("model.mlp_ratio", self.mlp_ratio, 0.01)
        if self.patch_size is not None:
            at_least("model.patch_size", self.patch_size, 1)
        for name in ("dropout", "attention_dropout", "drop_path"):
            within(f"model.{name}", getattr(self, name), 0, 1)


MODELS = {"vit": ViTConfig, "rev_vit": ViTConfig}

SCHEDULES = {"vit": ("autograd", "checkpoint"), "rev_vit": ("autograd", "checkpoint", "reversible")}
"""The backward schedules that each kind of model can have."""


@dataclass
class BackwardConfig:
    kind: str = MISSING
    """autograd stores every activation, checkpoint what lies between blocks, reversible nothing between blocks"""

    def __post_init__(self) -> None:
        one_of("backward.kind", self.kind, SCHEDULES["rev_vit"])
