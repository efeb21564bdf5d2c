"""Options of the optimizers and learning rate schedules."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from holotrain.checks import at_least, within
from holotrain.errors import UserError


@dataclass
class OptimizerConfig:
    kind: str = MISSING

    lr: float = MISSING
    """peak learning rate"""

    weight_decay: float = MISSING
    """weight decay of matrices and kernels; norms, biases and position embeddings have none"""

    def __post_init__(self) -> None:
        at_least("optimizer.lr", self.lr, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)


def _adam(betas: list[float], eps: float) -> None:
    if len(betas) != 2:
        raise UserError(f"optimizer.betas: give two numbers, not {len(betas)}")
    for beta in betas:
        within("optimizer.betas", beta, 0, 1)
    at_least("optimizer.eps", eps, 0)


@dataclass
class AdamWConfig(OptimizerConfig):
    kind: str = "adamw"

    lr: float = 1e-3

    weight_decay: float = 0.05

    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    """decay rates of the running averages of the gradient and its square"""

    eps: float = 1e-8
    """term added to the denominator"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _adam(self.betas, self.eps)


@dataclass
class SGDConfig(OptimizerConfig):
    kind: str = "sgd"

    lr: float = 0.1

    weight_decay: float = 1e-4

    momentum: float = 0.9
    """momentum factor"""

    nesterov: bool = False
    """use Nesterov momentum"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within("optimizer.momentum", self.momentum, 0, 1)
        if self.nesterov and self.momentum == 0:
            raise UserError("optimizer.nesterov: needs optimizer.momentum above 0")


@dataclass
class MuonConfig(OptimizerConfig):
    kind: str = "muon"

    lr: float = 1.6e-2

    weight_decay: float = 0.1

    others: float = 0.5
    """AdamW's learning rate divided by lr; AdamW updates all but the weight matrices in blocks"""

    momentum: float = 0.95
    """momentum factor of Muon"""

    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    """decay rates of AdamW's running averages"""

    eps: float = 1e-8
    """term added to AdamW's denominator"""

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
    """fraction of the training during which the learning rate rises linearly from 0"""

    def __post_init__(self) -> None:
        within("scheduler.warmup", self.warmup, 0, 1)


@dataclass
class CosineConfig(SchedulerConfig):
    kind: str = "cosine"

    final: float = 0.0
    """final learning rate divided by the peak"""

    def __post_init__(self) -> None:
        super().__post_init__()
        within("scheduler.final", self.final, 0, 1, closed=True)


@dataclass
class MultiStepConfig(SchedulerConfig):
    kind: str = "multistep"

    milestones: list[float] = field(default_factory=lambda: [0.6, 0.8])
    """fractions of the training at which the learning rate is multiplied by gamma"""

    gamma: float = 0.1
    """factor of the learning rate at each milestone"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for milestone in self.milestones:
            within("scheduler.milestones", milestone, 0, 1)
        at_least("scheduler.gamma", self.gamma, 0)


@dataclass
class ConstantConfig(SchedulerConfig):
    kind: str = "constant"


SCHEDULERS = {"cosine": CosineConfig, "multistep": MultiStepConfig, "constant": ConstantConfig}
