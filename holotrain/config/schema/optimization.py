"""How weights change: the optimizer and the schedule of its learning rate."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from holotrain.checks import at_least, within
from holotrain.errors import UserError


@dataclass
class OptimizerConfig:
    kind: str = MISSING

    lr: float = MISSING
    """the highest learning rate"""

    weight_decay: float = MISSING
    """of weight matrices and kernels; norms, biases and positions never decay"""

    def __post_init__(self) -> None:
        at_least("optimizer.lr", self.lr, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)


def _adam(betas: list[float], eps: float) -> None:
    if len(betas) != 2:
        raise UserError(f"optimizer.betas: two numbers are needed, not {len(betas)}")
    for beta in betas:
        within("optimizer.betas", beta, 0, 1)
    at_least("optimizer.eps", eps, 0)


@dataclass
class AdamWConfig(OptimizerConfig):
    kind: str = "adamw"

    lr: float = 1e-3

    weight_decay: float = 0.05

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """decay of the running mean of gradients and of their squares"""

    eps: float = 1e-8
    """added to the denominator"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _adam(self.betas, self.eps)


@dataclass
class SGDConfig(OptimizerConfig):
    kind: str = "sgd"

    lr: float = 0.1

    weight_decay: float = 1e-4

    momentum: float = 0.9
    """share of the last update that is kept"""

    nesterov: bool = False
    """look ahead along the momentum"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within("optimizer.momentum", self.momentum, 0, 1)
        if self.nesterov and self.momentum == 0:
            raise UserError("optimizer.nesterov: it needs a momentum above 0")


@dataclass
class MuonConfig(OptimizerConfig):
    kind: str = "muon"

    lr: float = 1.6e-2

    weight_decay: float = 0.1

    others: float = 0.5
    """learning rate of AdamW, which all but the weight matrices in blocks have, over lr"""

    momentum: float = 0.95
    """share of the last update that is kept, of weight matrices in blocks"""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """of AdamW"""

    eps: float = 1e-8
    """of AdamW"""

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("optimizer.others", self.others, 0)
        within("optimizer.momentum", self.momentum, 0, 1)
        _adam(self.betas, self.eps)


OPTIMIZERS = {"adamw": AdamWConfig, "sgd": SGDConfig, "muon": MuonConfig}


@dataclass
class SchedulerConfig:
    kind: str = MISSING

    warmup: float = 0.0
    """part of the training over which the rate first rises linearly"""

    def __post_init__(self) -> None:
        within("scheduler.warmup", self.warmup, 0, 1)


@dataclass
class CosineConfig(SchedulerConfig):
    kind: str = "cosine"

    final: float = 0.0
    """the last learning rate over the highest"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within("scheduler.final", self.final, 0, 1, closed=True)


@dataclass
class MultiStepConfig(SchedulerConfig):
    kind: str = "multistep"

    milestones: list[float] = field(default_factory=lambda: [0.6, 0.8])
    """parts of the training after which the rate falls"""

    gamma: float = 0.1
    """what it is multiplied by"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for milestone in self.milestones:
            within("scheduler.milestones", milestone, 0, 1)
        at_least("scheduler.gamma", self.gamma, 0)


@dataclass
class ConstantConfig(SchedulerConfig):
    kind: str = "constant"


SCHEDULERS = {"cosine": CosineConfig, "multistep": MultiStepConfig, "constant": ConstantConfig}
