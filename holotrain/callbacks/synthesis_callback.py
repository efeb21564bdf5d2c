"""SynthesisCallback: holographic weight synthesis for a Lightning Trainer."""

import fnmatch
import warnings
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import lightning.pytorch as pl
from torch import Tensor, nn
from torch.optim import Optimizer

from holotrain.callbacks.monitors import Monitor, log_scalars
from holotrain.clock import Clock
from holotrain.errors import as_user_error
from holotrain.optimizers import InBackward
from holotrain.optimizers.stepping import refuse_in_backward
from holotrain.synthesis import HolographicSynthesis
from holotrain.synthesis.options import SynthesisOptions


class SynthesisCallback(Monitor):
    """Rewrites gradients before every optimizer step, for any Lightning Trainer with one optimizer.

    It runs after unscaling and before gradient clipping. If gradients contain NaN or infinity, synthesis and optimizer step are
    skipped (gradients are set to None).

    Below, null stands for None.

    Args:
        mode: what is kept between steps: a hologram of each layer (associative), one for rows of many layers (shared), or
            nothing (bind). :class:`~holotrain.synthesis.options.SynthesisOptions` describes the modes.
        representation: the output that bind uses as its key: summed over the batch, or flattened as published.
        transform: transform used for binding: fft or hadamard.
        block_length: entries per transform; 0: a whole layer (bind: the whole model); null: 1024 (bind: 0).
        subsample: fraction of each parameter's entries to synthesize; the others keep their gradient.
        decay: fraction of the hologram that is kept in each step.
        decay_warmup: optimizer steps during which the decay rises linearly from 0.
        ema: decay of a running mean that replaces the gradient; 0: use the gradient.
        key_ema: decay of a running mean of the layers' inputs, their keys; 0: no mean; null: 0.9 with associative, else 0.
        superpose: rows that share a hologram (shared only); its memory is that of momentum divided by this.
        feedback: factor of the part of the gradient that the shared hologram cannot hold and that is added to the update.
        match_norm: rescale each layer's update to the norm of its gradient.
        mix: fraction of the plain gradient in the update, 0 to 1.
        cosine_floor: minimum cosine between a layer's update and its gradient, reached by adding gradient; null: none.
        dtype: data type of the hologram (bind: of the bound vector): fp32, bf16 or fp16.
        split: cpu: compute on the CPU while the GPU goes on; updates are applied one step late.
        cuda_graph: run the synthesis as a CUDA graph (GPU only).
        cover: name patterns of the parameters to synthesize.
        exclude: name patterns of parameters to leave out.
        seed: random seed of the signs, the subsample and the keys.
        module: name of the submodule to work on, within which parameters are named; null: the whole task. ``bind`` uses the
            output of this submodule as its key.
        every_n_steps: measure every n optimizer steps; 0: never; null: the trainer's log_every_n_steps.

    Logs ``synthesis/milliseconds`` (on a GPU from CUDA events, without synchronization; of the step before the measured one,
    which costs more), ``synthesis/gradient_cosine`` and ``synthesis/update_norm`` of the update before clipping, over the
    covered entries, and ``synthesis/skipped``, the number of skipped steps.

    The trainer's checkpoints contain its state.

    Raises:
        ValueError: an option is out of range or has no effect in this mode; at the start of training: a pattern matches no
            parameter, there are several optimizers, parameters that cannot be covered, a fused optimizer with gradient scaling
            (it unscales in its step, after this callback), or an optimizer that steps in the backward.

    Attributes:
        synthesis: the :class:`~holotrain.synthesis.HolographicSynthesis`, during a training.
    """

    def __init__(
        self,
        mode: Literal["associative", "shared", "bind"] = "associative",
        *,
        representation: Literal["summed", "flattened"] = "summed",
        transform: Literal["fft", "hadamard"] = "fft",
        block_length: int | None = None,
        subsample: float = 1.0,
        decay: float = 0.9,
        decay_warmup: int = 0,
        ema: float = 0.0,
        key_ema: float | None = None,
        superpose: int = 8,
        feedback: float = 1.0,
        match_norm: bool = False,
        mix: float = 0.0,
        cosine_floor: float | None = None,
        dtype: Literal["fp32", "bf16", "fp16"] = "fp32",
        split: Literal["none", "cpu"] = "none",
        cuda_graph: bool = False,
        cover: Sequence[str] = ("*",),
        exclude: Sequence[str] = (),
        seed: int = 0,
        module: str | None = None,
        every_n_steps: int | None = None,
    ) -> None:
        super().__init__(every_n_steps)
        arguments = locals()
        self.options = SynthesisOptions(**{field.name: arguments[field.name] for field in fields(SynthesisOptions)})
        self.cover, self.exclude, self.module = cover, exclude, module
        self.synthesis: HolographicSynthesis | None = None
        self._to_load: dict[str, Any] = {}
        self._left: dict[str, Any] = {}
        self._clock: Clock
        self._times: tuple[Any, Any] | None = None
        self._pending: list[tuple[int, tuple[Any, Any], Tensor]] = []  # measured steps: marks, figures on their way to the host

    def applied_to(self, pl_module: nn.Module, on_device: bool = True) -> HolographicSynthesis:
        """A synthesis with these options, whose hooks are on the module from now on.

        Args:
            on_device: False: the module is not on its device yet, so ``cuda_graph`` is left out.

        Raises:
            ValueError: there is no such submodule, a pattern matches no parameter, or an option does not suit the parameters.
        """
        try:
            module = pl_module.get_submodule(self.module or "")
        except AttributeError as error:
            raise ValueError(f"module={self.module!r}: {error}") from error
        names = [name for name, _ in module.named_parameters()]
        matching: dict[str, set[str]] = {"cover": set(), "exclude": set()}
        for option, matched in matching.items():
            for pattern in getattr(self, option):
                found = fnmatch.filter(names, pattern)
                if not found:
                    raise ValueError(f"{option}: {pattern!r} matches no parameter; names look like {', '.join(names[:1])}")
                matched.update(found)
        covered = matching["cover"] - matching["exclude"]
        if not covered:
            raise ValueError("cover and exclude leave no parameter; cover more or exclude fewer")
        options = self.options if on_device else replace(self.options, cuda_graph=False)
        return HolographicSynthesis(module, covers=lambda name, _: name in covered, **vars(options))

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(f"SynthesisCallback needs one optimizer; this training has {len(trainer.optimizers)}")
        refuse_in_backward({"a synthesis": InBackward.among(trainer.optimizers) is not None})
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(trainer.optimizers[0], "_step_supports_amp_scaling", False):
            raise ValueError(
                f"a fused {type(trainer.optimizers[0]).__name__} unscales gradients in its step, after the synthesis; "
                "use fused=False or bf16-mixed"
            )
        self.synthesis = self.applied_to(pl_module)
        remembers = [name for name in ("momentum", "betas") if trainer.optimizers[0].param_groups[0].get(name)]
        if self.options.mode == "associative" and remembers:
            warnings.warn(
                f"{type(trainer.optimizers[0]).__name__} also averages gradients ({remembers[0]}); associative synthesis "
                "replaces momentum and is meant for SGD with momentum=0",
                stacklevel=2,
            )
        if clip := trainer.gradient_clip_val:
            warnings.warn(
                f"gradient_clip_val={clip} clips the update after the synthesis, not the gradient before it",
                stacklevel=2,
            )
        self._clock = Clock(pl_module.device)
        state, self._to_load = self._to_load, {}
        if state:
            self.load_state_dict(state)

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        synthesis = self.synthesis
        if synthesis is None or all(parameter.grad is None for parameter in synthesis.parameters):
            return  # the training step returned no loss
        step = trainer.global_step + 1
        synthesis.measuring = bool(trainer.loggers) and self.ends_window(trainer, step)
        if trainer.loggers and self.ends_window(trainer, step + 1):  # with a period of 1, this is the measured step
            begin = self._clock.mark()
            synthesis.step()
            self._times = begin, self._clock.mark()
        else:
            synthesis.step()
        if synthesis.measuring and synthesis.measured is not None and self._times is not None:
            figures = synthesis.measured.to("cpu", non_blocking=True)
            self._pending.append((step, self._times, figures))
        self._log(trainer, wait=False)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._log(trainer, wait=True)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._end()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        if self.synthesis is not None:
            self._left = self.synthesis.state_dict()  # for checkpoints that are saved after the training
            self.synthesis.remove()
            self.synthesis = None

    @property
    def state_key(self) -> str:
        return self._generate_state_key(mode=self.options.mode, module=self.module)

    def state_dict(self) -> dict[str, Any]:
        return self._left if self.synthesis is None else self.synthesis.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.synthesis is None:
            self._to_load = self._left = state_dict  # the parameters are not on their device yet
            return
        with as_user_error("synthesis"):  # a strategy that restores checkpoints after its setup does so after on_fit_start
            self.synthesis.load_state_dict(state_dict)

    def _log(self, trainer: pl.Trainer, wait: bool) -> None:
        while self._pending and self.synthesis is not None:
            step, times, figures = self._pending[0]
            seconds = self._clock.seconds(*times, wait)
            if seconds is None:
                return
            self._pending.pop(0)
            cosine, norm = figures.tolist()
            scalars = {
                "synthesis/milliseconds": seconds * 1e3,
                "synthesis/gradient_cosine": cosine,
                "synthesis/update_norm": norm,
                "synthesis/skipped": self.synthesis.skipped,
            }
            log_scalars(trainer, scalars, step)
