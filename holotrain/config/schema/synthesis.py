"""Options of holographic weight synthesis, which rewrites gradients before the optimizer step."""

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
    """Algorithm 1 as published, and the options that all kinds share."""

    kind: str = "bind"

    transform: str = "fft"
    """transform used for binding: fft or hadamard"""

    block_length: int | None = None
    """entries per transform; 0: a whole layer (bind: the whole model); null: 1024 (bind: 0)"""

    subsample: float = 1.0
    """fraction of each parameter's entries to synthesize; the others keep their gradient"""

    ema: float = 0.0
    """decay of a running mean that replaces the gradient; 0: use the gradient"""

    match_norm: bool = False
    """rescale each layer's update to the norm of its gradient"""

    mix: float = 0.0
    """fraction of the plain gradient in the update, 0 to 1"""

    cosine_floor: float | None = None
    """minimum cosine between a layer's update and its gradient, reached by adding gradient; null: none"""

    cover: list[str] = field(default_factory=lambda: ["*"])
    """name patterns of the parameters to synthesize"""

    exclude: list[str] = field(default_factory=list)
    """name patterns of parameters to leave out"""

    cuda_graph: bool = False
    """run the synthesis as a CUDA graph (GPU only)"""

    seed: int = 0
    """random seed of the signs, the subsample and the keys"""

    def __post_init__(self) -> None:
        one_of("synthesis.transform", self.transform, ("fft", "hadamard"))
        within("synthesis.seed", self.seed, 0, 2**63)


@dataclass
class AssociativeConfig(BindConfig):
    kind: str = "associative"

    decay: float = 0.9
    """fraction of the hologram that is kept in each step"""

    decay_warmup: int = 0
    """optimizer steps during which the decay rises linearly from 0"""

    phase_only: bool = False
    """use only the phase of the gradient's spectrum"""

    dtype: str = "fp32"
    """data type of the hologram: fp32, bf16 or fp16"""

    offload: bool = False
    """keep the hologram in host memory (GPU only)"""

    compile: bool = False
    """compile the arithmetic on spectra with torch.compile (associative only)"""

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("synthesis.dtype", self.dtype, ("fp32", "bf16", "fp16"))
        within("synthesis.decay", self.decay, 0, 1)
        at_least("synthesis.decay_warmup", self.decay_warmup, 0)


@dataclass
class SharedConfig(AssociativeConfig):
    kind: str = "shared"

    superpose: int = 8
    """rows that share a hologram; its memory is that of momentum divided by this"""

    feedback: float = 1.0
    """factor of the part of the gradient that the shared hologram cannot hold and that is added to the update"""


SYNTHESES = {"none": NoSynthesisConfig, "associative": AssociativeConfig, "bind": BindConfig, "shared": SharedConfig}
