"""What is trained."""

from dataclasses import dataclass

from omegaconf import MISSING

from holotrain.checks import at_least, one_of, within
from holotrain.errors import UserError

TRAINED = ("all", "head", "adapters")


@dataclass
class ModelConfig:
    kind: str = MISSING
    """its family; rev_ ones are reversible, the others their plain twins"""

    def __post_init__(self) -> None:
        one_of("model.kind", self.kind, MODELS)


@dataclass
class TransformerConfig(ModelConfig):
    dim: int = MISSING
    """width of a token (of the first stage, where there are several)"""

    mlp_ratio: float = 4.0
    """width of the MLP's hidden layer over dim"""

    dropout: float = 0.0
    """on the embedding, the attention's output and in the MLP"""

    drop_path: float = 0.0
    """stochastic depth of the last block, rising linearly from 0 at the first"""

    pretrained: str | None = None
    """weights to begin with: a local file or folder of timm's, Hugging Face's or our own"""

    trained: str = "all"
    """all, head (the classifier alone) or adapters (they, norms and the head); the rest stays as it is"""

    adapters: int = 0
    """width of an adapter behind each branch of each block; 0: none"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("model.dim", self.dim, 1)
        at_least("model.mlp_ratio", self.mlp_ratio, 0.01)
        at_least("model.adapters", self.adapters, 0)
        one_of("model.trained", self.trained, TRAINED)
        if self.trained == "adapters" and not self.adapters:
            raise UserError("model.trained=adapters: there are none; give model.adapters=64, their width")
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
    """attention heads; they divide dim"""

    attention_dropout: float = 0.0
    """on the attention weights"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("model.depth", self.depth, 1)
        at_least("model.heads", self.heads, 1)


@dataclass
class ViTConfig(SingleStageConfig):
    patch_size: int | None = None
    """pixels along a patch; null: 16 from 112 pixels up, 4 from 24 up, else 2"""

    pool: str = "mean"
    """what the head reads: the mean over tokens, or a learned class token"""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("model.pool", self.pool, ("mean", "class"))
        if self.patch_size is not None:
            at_least("model.patch_size", self.patch_size, 1)


@dataclass
class GPTConfig(SingleStageConfig):
    positions: str = "rotary"
    """rotary, or learned as GPT-2's are"""

    gelu: str = "none"
    """none: GELU itself; tanh: the approximation that GPT-2 was trained with"""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("model.positions", self.positions, ("rotary", "learned"))
        one_of("model.gelu", self.gelu, ("none", "tanh"))


@dataclass
class RoBERTaConfig(SingleStageConfig):
    norm: str = "pre"
    """pre; or post, as published, which cannot be reversible"""

    dropout: float = 0.1

    attention_dropout: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("model.norm", self.norm, ("pre", "post"))


def _of_every_stage(name: str, numbers: list[int]) -> None:
    if not numbers:
        raise UserError(f"model.{name}: a number for each stage is needed")
    for number in numbers:
        at_least(f"model.{name}", number, 1)


@dataclass
class SwinConfig(TransformerConfig):
    depths: list[int] = MISSING
    """blocks of each stage"""

    heads: list[int] = MISSING
    """attention heads of each stage"""

    window: int = 7
    """tokens along a window"""

    patch_size: int | None = None
    """pixels along a patch; null: 4 from 64 pixels up, else 2"""

    attention_dropout: float = 0.0
    """on the attention weights"""

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
    """blocks of each stage"""

    heads: int = 1
    """attention heads of the first stage; they double with dim"""

    kv_stride: int = 4
    """pooling of keys and values in the first stage; halved before every further one"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _of_every_stage("depths", self.depths)
        at_least("model.heads", self.heads, 1)
        at_least("model.kv_stride", self.kv_stride, 1)


@dataclass
class ErrorDiffusionConfig(ModelConfig):
    width: int = 32
    """pairs of cells in a hidden layer: one excitatory, one inhibitory"""

    depth: int = 1
    """hidden layers"""

    rule: str = "kaneko"
    """kaneko: magnitudes only grow; article: they may shrink, and signs break; backpropagation: the true gradient"""

    u0: float = 0.4
    """cells answer with sigmoid(2 u / u0)"""

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
    """Of a model: that of its plain twin."""
    return kind.removeprefix("rev_")
