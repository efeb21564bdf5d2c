"""All options of a synthesis, with their checks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from holotrain.synthesis.binding import HALVES, TRANSFORMS

BLOCK_LENGTH = 1024
"""Default of the modes with a hologram: short enough for a CPU cache, long enough for keys of the usual widths."""


@dataclass(frozen=True)
class SynthesisOptions:
    """How gradients are turned into updates.

    Args:
        mode: ``"associative"``: each layer's gradient, bound with the layer's mean input, is added to the layer's hologram and
            read back through the current input. ``"shared"``: rows of many layers share a hologram. ``"bind"``: Algorithm 1;
            the gradient of the whole model, bound with the model's output, replaces the gradient.
        representation: the output that ``bind`` binds with. ``"summed"`` over the batch, and folded to 4096 entries if it is
            longer; or ``"flattened"`` as published: all of it, padded with zeros to the length of the gradient (folded to it if
            it is longer).
        transform: ``"fft"`` or ``"hadamard"``.
        block_length: entries that are transformed together, a power of two for ``"hadamard"``; 0: a whole layer (with
            ``bind`` the whole model) at a time, padded to a power of two unless ``representation`` is flattened and the
            transform ``"fft"``. None: 1024, with ``bind`` 0.
        subsample: part of the entries of each parameter, in (0, 1], that takes part, chosen at random once. The others keep
            their gradient.
        decay: decay of the hologram in each step, in [0, 1), or a function of the step number.
        decay_warmup: steps during which the decay rises linearly from 0.
        ema: decay, in [0, 1), of a running mean of gradients that replaces the gradient; 0: none.
        key_ema: decay, in [0, 1), of a running mean of the keys; 0: no mean. None: 0.9 with ``associative``, else 0.
        superpose: rows (blocks of weights) that share a row of the hologram in ``shared``; the state is smaller by this factor.
        feedback: factor of the part of a gradient that a shared hologram cannot hold, which goes into the update directly.
        match_norm: scale the update of each layer to the norm of its gradient.
        mix: share of the gradient itself in the update, in [0, 1].
        cosine_floor: least cosine, in [0, 1), of a layer's update and its gradient; as much of the gradient is added as this
            needs. Above 0 the update of every covered layer is a descent direction. None: no bound.
        dtype: precision of the hologram, with ``bind`` of the bound vector: ``"fp32"`` (fp64 if the parameters are), ``"bf16"``
            or ``"fp16"``.
        split: ``"cpu"``: a thread computes on the CPU, where the hologram is, while the GPU goes on; each update is applied one
            step late. All options refer to the gradient that the update was made of. ``"none"``: no split.
        cuda_graph: capture the synthesis once and replay it (CUDA only). Gradients stay in the same memory.
        seed: of the random choices: signs of the Hadamard transform, subsample, the keys of rows in ``shared``.

    Raises:
        ValueError: a value out of range, or options that exclude each other.
    """

    mode: str = "associative"
    representation: str = "summed"
    transform: str = "fft"
    block_length: int | None = None
    subsample: float = 1.0
    decay: float | Callable[[int], float] = 0.9
    decay_warmup: int = 0
    ema: float = 0.0
    key_ema: float | None = None
    superpose: int = 8
    feedback: float = 1.0
    match_norm: bool = False
    mix: float = 0.0
    cosine_floor: float | None = None
    dtype: str = "fp32"
    split: str = "none"
    cuda_graph: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        values = vars(self)
        for name, allowed in CHOICES.items():
            _require(name, values[name], values[name] in allowed, " or ".join(allowed))
        for name in ("ema", "key_ema", "cosine_floor", "decay"):
            _require(name, values[name], values[name] is None or callable(values[name]) or 0 <= values[name] < 1, "in [0, 1)")
        for name, least in {"decay_warmup": 0, "feedback": 0, "block_length": 0, "superpose": 1}.items():
            _require(name, values[name], values[name] is None or values[name] >= least, f"at least {least}")
        _require("subsample", self.subsample, 0 < self.subsample <= 1, "in (0, 1]")
        _require("mix", self.mix, 0 <= self.mix <= 1, "in [0, 1]")
        _require("seed", self.seed, 0 <= self.seed < 2**63, "in [0, 2**63)")
        if self.block_length and self.transform == "hadamard" and self.block_length & (self.block_length - 1):
            raise ValueError(f"block_length={self.block_length}: the Hadamard transform needs a power of two")
        for name in UNUSED[self.mode]:
            if values[name] != type(self).__dataclass_fields__[name].default:
                raise ValueError(f"{name} has no effect with mode={self.mode!r}; leave it out")
        if self.mode == "associative" and self.key_ema is None:
            object.__setattr__(self, "key_ema", 0.9)
        if self.mode == "shared" and self.entries_a_block == 0:
            raise ValueError("block_length=0: layers of different lengths cannot share a hologram; give a block length")
        if self.mode == "bind" and self.dtype != "fp32" and self.subsample < 1:
            raise ValueError(f"dtype={self.dtype!r}: with mode='bind' it is that of the whole gradient; use subsample=1")
        if self.split == "cpu" and self.cuda_graph:
            raise ValueError("split='cpu' computes on the CPU, which cuda_graph cannot capture; use one of them")

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
        decay: float = self.decay(step) if callable(self.decay) else self.decay  # ty: ignore[invalid-assignment]
        _require(f"decay, at step {step},", decay, 0 <= decay < 1, "in [0, 1)")
        return decay * min(1.0, step / self.decay_warmup) if self.decay_warmup else decay

    @property
    def reshapes(self) -> bool:
        """Whether the update still changes after the read-out, by its inner products with the gradient."""
        return self.match_norm or self.mix > 0 or self.cosine_floor is not None


CHOICES = {
    "mode": ("associative", "bind", "shared"),
    "representation": ("summed", "flattened"),
    "transform": tuple(TRANSFORMS),
    "dtype": ("fp32", *HALVES),
    "split": ("none", "cpu"),
}

UNUSED = {
    "associative": ("superpose", "feedback", "representation"),
    "shared": ("representation",),
    "bind": ("superpose", "feedback", "decay", "decay_warmup", "key_ema"),
}
"""Options that have no effect in a mode."""


def _require(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value!r}: it must be {wanted}")
