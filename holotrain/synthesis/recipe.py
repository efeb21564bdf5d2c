"""All options of a synthesis, with their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from holotrain.synthesis.transforms import TRANSFORMS

MODES = ("associative", "bind", "shared")
BLOCK_LENGTH = 1024
"""Default of the modes with a hologram: short enough for a CPU cache, long enough for keys of the usual widths."""


@dataclass(frozen=True)
class Recipe:
    """How gradients are turned into updates.

    Args:
        mode: ``"associative"``: each layer's gradient, bound with the layer's mean input, is added to the layer's hologram and
            read back through the current input. ``"shared"``: rows of many layers share a hologram. ``"bind"``: Algorithm 1
            as published; the gradient of the whole model, bound with the model's output (folded to 4096 entries if it is
            longer), replaces the gradient.
        transform: ``"fft"`` or ``"hadamard"``.
        block_length: entries that are transformed together, a power of two for ``"hadamard"``; 0: a whole layer (with
            ``bind`` the whole model) at a time, padded to a power of two. None: 1024, with ``bind`` 0.
        subsample: part of the entries of each parameter, in (0, 1], that takes part, chosen at random once. The others keep
            their gradient.
        decay: decay of the hologram in each step, in [0, 1), or a function of the step number.
        decay_warmup: steps during which the decay rises linearly from 0.
        phase_only: use only the phase of the gradient's spectrum, at the norm of the block (``bind`` always does, at norm 1 as
            published).
        ema: decay, in [0, 1), of a running mean of gradients that replaces the gradient; 0: none.
        superpose: how many rows (blocks of weights) share a row of the hologram in ``shared``; the state is smaller by this
            factor.
        feedback: factor of the part of a gradient that a shared hologram cannot hold, which goes into the update directly.
        match_norm: scale the update of each layer to the norm of its gradient.
        mix: share of the gradient itself in the update, in [0, 1].
        cosine_floor: least cosine, in [0, 1), of a layer's update and its gradient; as much of the gradient is added as this
            needs. Above 0 the update of every covered layer is a descent direction. None: no bound.
        dtype: precision of the hologram: ``"fp32"`` (fp64 if the parameters are), ``"bf16"`` or ``"fp16"``.
        offload: keep the hologram in host memory and copy it asynchronously (CUDA only).
        compile: fuse the arithmetic on spectra with torch.compile; for ``associative``.
        cuda_graph: capture the synthesis once and replay it (CUDA only).
        seed: of the random choices: signs of the Hadamard transform, subsample, the keys of rows in ``shared``.

    Raises:
        ValueError: a value out of range, or options that exclude each other.
    """

    mode: str = "associative"
    transform: str = "fft"
    block_length: int | None = None
    subsample: float = 1.0
    decay: float | Callable[[int], float] = 0.9
    decay_warmup: int = 0
    phase_only: bool = False
    ema: float = 0.0
    superpose: int = 8
    feedback: float = 1.0
    match_norm: bool = False
    mix: float = 0.0
    cosine_floor: float | None = None
    dtype: str = "fp32"
    offload: bool = False
    compile: bool = False
    cuda_graph: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        _require("mode", self.mode, self.mode in MODES, " or ".join(MODES))
        _require("transform", self.transform, self.transform in TRANSFORMS, " or ".join(TRANSFORMS))
        _require("dtype", self.dtype, self.dtype in HALVES or self.dtype == "fp32", "fp32, bf16 or fp16")
        _require("subsample", self.subsample, 0 < self.subsample <= 1, "in (0, 1]")
        _require("ema", self.ema, 0 <= self.ema < 1, "in [0, 1)")
        _require("mix", self.mix, 0 <= self.mix <= 1, "in [0, 1]")
        if not callable(self.decay):
            _require("decay", self.decay, 0 <= self.decay < 1, "in [0, 1)")
        _require("decay_warmup", self.decay_warmup, self.decay_warmup >= 0, "at least 0")
        _require("seed", self.seed, 0 <= self.seed < 2**63, "in [0, 2**63)")
        if self.cosine_floor is not None:
            _require("cosine_floor", self.cosine_floor, 0 <= self.cosine_floor < 1, "in [0, 1)")
        _require("feedback", self.feedback, self.feedback >= 0, "at least 0")
        _require("superpose", self.superpose, self.superpose >= 1, "at least 1")
        if self.block_length is not None:
            _require("block_length", self.block_length, self.block_length >= 0, "at least 0")
            if self.transform == "hadamard" and self.block_length & (self.block_length - 1):
                raise ValueError(f"block_length={self.block_length}: the Hadamard transform needs a power of two")
        for name in UNUSED[self.mode]:
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"{name} has no effect with mode={self.mode!r}; leave it out")
        if self.mode == "shared" and self.entries_a_block == 0:
            raise ValueError("block_length=0: layers of different lengths cannot share a hologram; give a block length")
        if self.offload and self.cuda_graph:
            raise ValueError("offload copies between steps, which cuda_graph cannot capture; use one of them")

    @property
    def entries_a_block(self) -> int:
        """``block_length`` with its default filled in; 0: whole layers."""
        if self.block_length is not None:
            return self.block_length
        return 0 if self.mode == "bind" else BLOCK_LENGTH

    @property
    def slots(self) -> int:
        """Rows that share one row of the hologram."""
        return self.superpose if self.mode == "shared" else 1

    def decay_at(self, step: int) -> float:
        """The decay of this step, counted from 0."""
        decay = self.decay(step) if callable(self.decay) else self.decay
        _require(f"decay, at step {step},", decay, 0 <= decay < 1, "in [0, 1)")
        return decay * min(1.0, step / self.decay_warmup) if self.decay_warmup else decay

    @property
    def reshapes(self) -> bool:
        """Whether the update still changes after the read-out, by its inner products with the gradient."""
        return self.match_norm or self.mix > 0 or self.cosine_floor is not None


UNUSED = {
    "associative": ("superpose", "feedback"),
    "shared": ("compile",),
    "bind": ("superpose", "feedback", "decay", "decay_warmup", "phase_only", "dtype", "offload", "compile"),
}
"""Options that have no effect in a mode."""

HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def _require(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r}: it must be {wanted}")
