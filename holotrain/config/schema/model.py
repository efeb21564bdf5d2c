"""Options of the models."""

from dataclasses import dataclass

from omegaconf import MISSING

from holotrain.checks import at_least, one_of, within
from holotrain.errors import UserError

TRAINED = ("all", "head", "adapters")


@dataclass
class ModelConfig:
    kind: str = MISSING
    """model family; families that start with rev_ are reversible"""

    def __post_init__(self) -> None:
        one_of("model.kind", self.kind, MODELS)


@dataclass
class TransformerConfig(ModelConfig):
    dim: int = MISSING
    """embedding width (Swin, MViT: of the first stage)"""

    mlp_ratio: float = 4.0
    """width of the MLP's hidden layer divided by dim"""

    dropout: float = 0.0
    """dropout of the embedding, the attention output and the MLP"""

    drop_path: float = 0.0
    """stochastic depth rate of the last block; it rises linearly from 0 at the first block"""

    pretrained: str | None = None
    """initial weights: a local file or folder from timm, Hugging Face or holotrain; null: random"""

    trained: str = "all"
    """what to train: all, head (only the classifier) or adapters (with norms and head); the rest is frozen"""

    adapters: int = 0
    """width of the adapter after each branch of each block; 0: no adapters"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("model.dim", self.dim, 1)
        at_least("model.mlp_ratio", self.mlp_ratio, 0.01)
        at_least("model.adapters", self.adapters, 0)
        one_of("model.trained", self.trained, TRAINED)
        if self.trained == "adapters" and not self.adapters:
            raise UserError("model.trained=adapters: the model has no adapters; give their width, such as model.adapters=64")
        for name in ("dropout", "attention_dropout", "drop_path"):
            if hasattr(self, name):
                within(f"model.{name}", getattr(self, name), 0, 1)


BEYOND = ("kind", "pretrained", "trained", "adapters")
"""Fields that the models' constructors do not take."""


@dataclass
class SingleStageConfig(TransformerConfig):
    depth: int = MISSING
    """number of blocks"""

    heads: int = MISSING
    """number of attention heads; must divide dim"""

    attention_dropout: float = 0.0
    """dropout of the attention weights"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("model.depth", self.depth, 1)
        at_least("model.heads", self.heads, 1)


@dataclass
class ViTConfig(SingleStageConfig):
    patch_size: int | None = None
    """height and width of a patch in pixels; null: 16 for images of 112 pixels or more, 4 for 24 or more, else 2"""

    pool: str = "mean"
    """input of the head: mean (over all tokens) or class (a learned class token)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("model.pool", self.pool, ("mean", "class"))
        if self.patch_size is not None:
            at_least("model.patch_size", self.patch_size, 1)


@dataclass
class GPTConfig(SingleStageConfig):
    positions: str = "rotary"
    """position embedding: rotary or learned (as in GPT-2)"""

    gelu: str = "none"
    """approximation of GELU: none (exact) or tanh (as in GPT-2)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("model.positions", self.positions, ("rotary", "learned"))
        one_of("model.gelu", self.gelu, ("none", "tanh"))


@dataclass
class RoBERTaConfig(SingleStageConfig):
    norm: str = "pre"
    """LayerNorm before (pre) or after (post, as published) each branch; post cannot be reversible"""

    dropout: float = 0.1

    attention_dropout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("model.norm", self.norm, ("pre", "post"))


def _of_every_stage(name: str, numbers: list[int]) -> None:
    if not numbers:
        raise UserError(f"model.{name}: give one number per stage")
    for number in numbers:
        at_least(f"model.{name}", number, 1)


@dataclass
class SwinConfig(TransformerConfig):
    depths: list[int] = MISSING
    """number of blocks of each stage"""

    heads: list[int] = MISSING
    """attention heads of each stage"""

    window: int = 7
    """height and width of an attention window, in tokens"""

    patch_size: int | None = None
    """height and width of a patch in pixels; null: 4 for images of 64 pixels or more, else 2"""

    attention_dropout: float = 0.0
    """dropout of the attention weights"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _of_every_stage("depths", self.depths)
        _of_every_stage("heads", self.heads)
        at_least("model.window", self.window, 1)
        if self.patch_size is not None:
            at_least("model.patch_size", self.patch_size, 1)


@dataclass
class MViTConfig(TransformerConfig):
    depths: list[int] = MISSING
    """number of blocks of each stage"""

    heads: int = 1
    """attention heads of the first stage; doubled whenever dim doubles"""

    kv_stride: int = 4
    """pooling stride of keys and values in the first stage; halved in each further stage"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _of_every_stage("depths", self.depths)
        at_least("model.heads", self.heads, 1)
        at_least("model.kv_stride", self.kv_stride, 1)


@dataclass
class ErrorDiffusionConfig(ModelConfig):
    width: int = 32
    """pairs of one excitatory and one inhibitory cell per hidden layer"""

    depth: int = 1
    """number of hidden layers"""

    rule: str = "kaneko"
    """learning rule: kaneko (magnitudes only grow), article (they may also shrink) or backpropagation (the true gradient)"""

    u0: float = 0.4
    """scale of the activation function sigmoid(2 u / u0)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("model.width", self.width, 1)
        at_least("model.depth", self.depth, 1)
        at_least("model.u0", self.u0, 1e-6)
        one_of("model.rule", self.rule, ("kaneko", "article", "backpropagation"))


_FAMILIES = {"vit": ViTConfig, "swin": SwinConfig, "mvit": MViTConfig, "roberta": RoBERTaConfig, "gpt": GPTConfig}
MODELS: dict[str, type[ModelConfig]] = _FAMILIES | {f"rev_{family}": schema for family, schema in _FAMILIES.items()}
MODELS["error_diffusion"] = ErrorDiffusionConfig


def family(kind: str) -> str:
    """The family without the prefix ``rev_``."""
    return kind.removeprefix("rev_")
