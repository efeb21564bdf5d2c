"""SynthesisCallback: holographic weight synthesis for a Lightning Trainer."""

import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from holotrain.callbacks.period import period_of
from holotrain.planning.clock import Clock, clock_of
from holotrain.synthesis import HolographicSynthesis, Recipe
from holotrain.synthesis.layers import Covers


@dataclass
class Measurement:
    """A measured step: start and end marks, and figures that are being copied to the host."""

    step: int
    begin: Any
    end: Any
    figures: Tensor


class SynthesisCallback(pl.Callback):
    """Rewrites gradients before every optimizer step, for any Lightning Trainer with one optimizer.

    It runs after unscaling and before gradient clipping. If gradients contain NaN or infinity, synthesis and optimizer step are
    skipped (gradients are set to None).

    Args:
        mode: ``"associative"``, ``"shared"`` or ``"bind"``.
        module: dotted name of the submodule of the LightningModule to work on; None: all of it. ``bind`` uses the output of
            this submodule as its key.
        covers: selects parameters by name and parameter; None: all that require grad.
        every_n_steps: measure every n optimizer steps; None: the trainer's ``log_every_n_steps``; 0: never.
        options: options of :class:`~holotrain.synthesis.Recipe`.

    Logs ``synthesis/milliseconds`` (on a GPU from CUDA events, without synchronization; of the step before the measured one,
    which costs more), ``synthesis/gradient_cosine`` and ``synthesis/update_norm`` of the update before clipping, over the
    covered entries, and ``synthesis/skipped``, the number of skipped steps.

    The trainer's checkpoints contain its state.

    Raises:
        ValueError: an option is out of range; at the start of training: there are several optimizers, parameters that cannot be
            covered, or a fused optimizer with gradient scaling (it unscales in its step, after this callback).

    Attributes:
        synthesis: the :class:`~holotrain.synthesis.HolographicSynthesis`, during a training.
    """

    def __init__(
        self,
        mode: str = "associative",
        module: str | None = None,
        covers: Covers | None = None,
        every_n_steps: int | None = None,
        **options: Any,
    ) -> None:
        Recipe(mode=mode, **options)  # raises on mistakes now instead of at the start of training
        self.synthesis: HolographicSynthesis | None = None
        self.every_n_steps = every_n_steps
        self._arguments = {"mode": mode, "covers": covers, **options}
        self._module = module
        self._to_load: dict[str, Any] = {}
        self._left: dict[str, Any] = {}
        self._clock: Clock | None = None
        self._times: tuple[Any, Any] | None = None
        self._pending: list[Measurement] = []

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if len(trainer.optimizers) != 1:
            raise ValueError(f"SynthesisCallback needs one optimizer; this training has {len(trainer.optimizers)}")
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None and getattr(trainer.optimizers[0], "_step_supports_amp_scaling", False):
            raise ValueError(
                f"a fused {type(trainer.optimizers[0]).__name__} unscales gradients in its step, after the synthesis; "
                "use fused=False or bf16-mixed"
            )
        remembers = [name for name in ("momentum", "betas") if trainer.optimizers[0].param_groups[0].get(name)]
        if self._arguments["mode"] == "associative" and remembers:
            warnings.warn(
                f"{type(trainer.optimizers[0]).__name__} also averages gradients ({remembers[0]}); associative synthesis "
                "replaces momentum and is meant for SGD with momentum=0",
                stacklevel=2,
            )
        module = pl_module.get_submodule(self._module) if self._module else pl_module
        self.synthesis = HolographicSynthesis(module, **self._arguments)
        self._clock = clock_of(pl_module.device)
        state, self._to_load = self._to_load, {}
        if state:
            try:
                self.synthesis.load_state_dict(state)
            except ValueError:
                self._end()
                raise

    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        synthesis = self.synthesis
        if all(parameter.grad is None for parameter in synthesis.parameters):
            return  # the training step returned no loss
        step = trainer.global_step + 1
        period = period_of(trainer, self.every_n_steps)
        period = period if trainer.loggers else 0
        synthesis.measuring = period > 0 and step % period == 0
        if period > 0 and (step + 1) % period == 0:  # with a period of 1, this is the measured step
            begin = self._clock.mark()
            synthesis.step()
            self._times = begin, self._clock.mark()
        else:
            synthesis.step()
        if synthesis.measuring and synthesis.measured is not None and self._times is not None:
            figures = synthesis.measured.to("cpu", non_blocking=True)
            self._pending.append(Measurement(step, *self._times, figures))
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
        return self._generate_state_key(mode=self._arguments["mode"], module=self._module)

    def state_dict(self) -> dict[str, Any]:
        return self._left if self.synthesis is None else self.synthesis.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.synthesis is None:
            self._to_load = self._left = state_dict  # the parameters are not on their device yet
        else:
            self.synthesis.load_state_dict(state_dict)

    def _log(self, trainer: pl.Trainer, wait: bool) -> None:
        while self._pending:
            measured = self._pending[0]
            seconds = self._clock.seconds(measured.begin, measured.end, wait)
            if seconds is None:
                return
            self._pending.pop(0)
            cosine, norm = measured.figures.tolist()
            scalars = {
                "synthesis/milliseconds": seconds * 1e3,
                "synthesis/gradient_cosine": cosine,
                "synthesis/update_norm": norm,
                "synthesis/skipped": self.synthesis.skipped,
            }
            for logger in trainer.loggers:
                logger.log_metrics(scalars, step=measured.step)
