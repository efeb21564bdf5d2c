"""Holographic weight synthesis: what gradients are turned into before the optimizer's step."""

from dataclasses import dataclass, field

from omegaconf import MISSING

from holotrain.checks import at_least, one_of, within


@dataclass
class SynthesisConfig:
    kind: str = MISSING


@dataclass
class NoSynthesisConfig(SynthesisConfig):
    kind: str = "none"


@dataclass
class BindConfig(SynthesisConfig):
    """Algorithm 1 as published, and what all kinds share."""

    kind: str = "bind"

    transform: str = "fft"
    """fft or hadamard"""

    block_length: int | None = None
    """entries that are transformed together; 0: whole layers (bind: the whole model); null: 1024 (bind: 0)"""

    subsample: float = 1.0
    """part of each parameter's entries that takes part; the others keep their gradient"""

    ema: float = 0.0
    """share of the past in a running mean of gradients that takes the gradient's place"""

    match_norm: bool = False
    """give each layer's update the norm of its gradient"""

    mix: float = 0.0
    """share of the gradient itself in the update"""

    cosine_floor: float | None = None
    """least cosine of a layer's update to its gradient; as much gradient is added as that needs"""

    cover: list[str] = field(default_factory=lambda: ["*"])
    """patterns of the names of parameters to work on"""

    exclude: list[str] = field(default_factory=list)
    """patterns of the names of parameters to leave alone"""

    cuda_graph: bool = False
    """capture the synthesis once and replay it (GPU only)"""

    seed: int = 0
    """of signs, subsample and keys that are drawn once"""

    def __post_init__(self) -> None:
        one_of("synthesis.transform", self.transform, ("fft", "hadamard"))
        within("synthesis.seed", self.seed, 0, 2**63)


@dataclass
class AssociativeConfig(BindConfig):
    kind: str = "associative"

    decay: float = 0.9
    """share of the hologram that remains, a step"""

    decay_warmup: int = 0
    """optimizer steps over which the decay first rises from 0"""

    phase_only: bool = False
    """let the gradient's bins count by their phase alone"""

    dtype: str = "fp32"
    """of the hologram: fp32, bf16 or fp16"""

    offload: bool = False
    """keep the hologram in the host's memory (GPU only)"""

    compile: bool = False
    """fuse the arithmetic on spectra with torch.compile (associative alone)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("synthesis.dtype", self.dtype, ("fp32", "bf16", "fp16"))
        within("synthesis.decay", self.decay, 0, 1)
        at_least("synthesis.decay_warmup", self.decay_warmup, 0)


@dataclass
class SharedConfig(AssociativeConfig):
    kind: str = "shared"

    superpose: int = 8
    """rows that share a hologram: its state is so many times smaller than momentum's"""

    feedback: float = 1.0
    """what a shared hologram cannot hold of a gradient goes into the update at once, times this"""


SYNTHESES = {"none": NoSynthesisConfig, "associative": AssociativeConfig, "bind": BindConfig, "shared": SharedConfig}
