"""Fine-tuning a part: bottleneck adapters (Houlsby et al., "Parameter-Efficient Transfer Learning for NLP", 2019), those of
peft, such as LoRA (Hu et al., 2021), and freezing.

Shapes: B batch, C channels, W width of the bottleneck.
"""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from holotrain.models.layers.blocks import ResidualBlock
from holotrain.models.quantised import dequantise
from holotrain.reversible import ReversibleBlock
from holotrain.targets import first_line, needed

PEFT = ("peft", "these adapters need peft", "peft")


class Adapted(nn.Module):
    """A branch of a block, and a bottleneck on its output: ``y = branch(x)``, then ``y + up(gelu(down(y)))``.

    ``up`` starts at zero, so that the outputs do not change at first. (B, ..., C) -> (B, ..., C).

    Args:
        branch: f or g of a block; its parameters are under ``branch.``.
        dim, width: C and W.
    """

    def __init__(self, branch: nn.Module, dim: int, width: int) -> None:
        super().__init__()
        self.branch: Any = branch
        self.down = nn.Linear(dim, width)
        self.up = nn.Linear(width, dim)
        nn.init.trunc_normal_(self.down.weight, std=0.02)
        for parameter in (self.down.bias, *self.up.parameters()):
            nn.init.zeros_(parameter)

    @property
    def norm(self) -> nn.Module:
        """The branch's norm, for blocks that apply it elsewhere."""
        return self.branch.norm

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        return self._adapted(self.branch(x, **context))

    def update(self, x: Tensor, **context: Any) -> Tensor:
        """The branch without its norm, for blocks that apply it elsewhere."""
        return self._adapted(self.branch.update(x, **context))

    def _adapted(self, y: Tensor) -> Tensor:
        return y + self.up(F.gelu(self.down(y)))


def add_adapters(model: nn.Module, width: int) -> None:
    """Adds an adapter to f and g of every block, plain or reversible, in place.

    This renames the parameters of the branches to ``f.branch.*`` and ``g.branch.*``, so load pretrained weights first.

    Args:
        width: W; the paper uses 8 to 256.

    Raises:
        ValueError: the width is below 1, or the model has no blocks or has adapters already.
    """
    if width < 1:
        raise ValueError(f"the width of adapters must be at least 1, not {width}")
    if adapter_width(model) is not None:
        raise ValueError(f"this {type(model).__name__} already has adapters")
    blocks = [module for module in model.modules() if isinstance(module, ResidualBlock | ReversibleBlock)]
    if not blocks:
        raise ValueError(f"a {type(model).__name__} has no blocks for adapters")
    for block in blocks:
        branches: list[Any] = [block.f, block.g]
        block.f, block.g = (Adapted(each, len(each.norm.weight), width).to(each.norm.weight) for each in branches)


def adapter_width(model: nn.Module) -> int | None:
    """W of the model's adapters; None if it has none."""
    return next((module.down.out_features for module in model.modules() if isinstance(module, Adapted)), None)


def add_peft(model: nn.Module, config: Any) -> None:
    """Adds the layers of a configuration of peft, such as ``peft.LoraConfig``, in place. They and the head are trained.

    Raises:
        ValueError: peft is not installed, the configuration is none of peft's, or the model has no layer that it names.
    """
    peft = needed(*PEFT)
    if not isinstance(config, peft.PeftConfig):
        raise ValueError(f"adapters: a {type(config).__name__} is no configuration of peft, such as peft.LoraConfig")
    try:
        peft.inject_adapter_in_model(config, model)
    except (ValueError, TypeError) as error:
        raise ValueError(f"adapters: {first_line(error)}") from error
    head = getattr(model, "head", None)
    if head is not None:
        head.requires_grad_()


def has_peft(model: nn.Module) -> bool:
    """Whether a layer of peft stands beside one of the model."""
    return any(hasattr(module, "base_layer") for module in model.modules())


def merge_peft(model: nn.Module) -> None:
    """Adds what peft's layers have learned to the layers that they stand beside, and takes them away, in place. If they
    are quantised, they become usual ones."""
    if not has_peft(model):
        return
    needed(*PEFT)
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, BaseTunerLayer):
                dequantise(child)
                child.merge()
                setattr(module, name, child.get_base_layer())


def freeze(model: nn.Module, trained: str = "all") -> None:
    """Makes a part of the parameters trainable, and freezes the others.

    Args:
        trained: ``"all"``; ``"head"``, the classifier; ``"adapters"``, the adapters, the norms and the head, as in the paper.

    Raises:
        ValueError: another ``trained``, or the model has no such part.
    """
    if trained not in ("all", "head", "adapters"):
        raise ValueError(f"trained must be all, head or adapters, not {trained!r}")
    head = getattr(model, "head", None)
    if trained == "head" and head is None:
        raise ValueError(f"a {type(model).__name__} has no separate head to train: its head is tied to the embedding")
    if trained == "adapters" and adapter_width(model) is None:
        raise ValueError(f"this {type(model).__name__} has no adapters to train; add them first")
    model.requires_grad_(trained == "all")
    if head is not None:
        head.requires_grad_()
    if trained == "adapters":
        for module in model.modules():
            if isinstance(module, nn.LayerNorm):
                module.requires_grad_()
            elif isinstance(module, Adapted):
                module.down.requires_grad_()
                module.up.requires_grad_()
