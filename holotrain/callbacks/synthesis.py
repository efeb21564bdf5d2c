"""SynthesisCallback: holographic weight synthesis in a Lightning training."""

import warnings
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
from torch import Tensor
from torch.optim import Optimizer

from holotrain.callbacks.period import period_of
from holotrain.reversible.clock import Clock, clock_of
from holotrain.synthesis import HolographicSynthesis, Recipe
from holotrain.synthesis.layers import Covers


@dataclass
class Measurement:
    """One step that was measured: two instants, and figures on their way to the host."""

    step: int
    begin: Any
    end: Any
    figures: Tensor


class SynthesisCallback(pl.Callback):
    """Rewrites gradients before every optimizer step, for any Lightning Trainer with one optimizer.

    It sees gradients that are fresh, unscaled and not yet clipped. A step whose gradients hold NaN or infinity is skipped, the
    optimizer's included (its gradients are then None).

    Args:
        mode: ``"associative"``, ``"shared"`` or ``"bind"``.
        module: dotted name of the part of the LightningModule to work on; None: all of it. ``bind`` takes this part's output
            for its key.
        covers: which parameters, given name and parameter; None: all that require grad.
        every_n_steps: optimizer steps from one measurement to the next; None: the trainer's ``log_every_n_steps``; 0: none.
        options: those of :class:`~holotrain.synthesis.Recipe`.

    Logs ``synthesis/milliseconds`` (on a GPU from CUDA events, read once it has passed them; of the step before the one whose
    figures are taken, which costs more), ``synthesis/gradient_cosine`` and ``synthesis/update_norm`` of the update before
    clipping, over the entries that are covered, and ``synthesis/skipped``, the count of steps that were.

    Its state travels in the trainer's checkpoints.

    Raises:
        ValueError: options out of range; when training starts: several optimizers, parameters that cannot be covered, a fused
            optimizer together with scaled gradients (it unscales them within its step, after this).

    Attributes:
        synthesis: the :class:`~holotrain.synthesis.HolographicSynthesis` at work, from the start of a training to its end.
    """

    def __init__(
        self,
        mode: str = "associative",
        module: str | None = None,
        covers: Covers | None = None,
        every_n_steps: int | None = None,
        **options: Any,
    ) -> None:
        Recipe(mode=mode, **options)  # a mistake is named here rather than when training starts
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
                f"a fused {type(trainer.optimizers[0]).__name__} unscales gradients within its step, after they were "
                "synthesised; give it fused=False, or train in bf16-mixed"
            )
        remembers = [name for name in ("momentum", "betas") if trainer.optimizers[0].param_groups[0].get(name)]
        if self._arguments["mode"] == "associative" and remembers:
            warnings.warn(
                f"{type(trainer.optimizers[0]).__name__} remembers gradients too ({remembers[0]}); an associative synthesis "
                "takes momentum's place and is meant for SGD with momentum=0",
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
        if period > 0 and (step + 1) % period == 0:  # with a period of 1, of the same step
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
