"""Builds the callback of a synthesis configuration."""

from collections.abc import Callable
from fnmatch import fnmatch
from functools import partial
from typing import Any

from torch import nn

from holotrain.callbacks import SynthesisCallback
from holotrain.checks import described_by
from holotrain.config.schema.synthesis import BindConfig
from holotrain.errors import UserError
from holotrain.synthesis import HolographicSynthesis

OWN = ("kind", "cover", "exclude", "decay", "decay_warmup")
"""Fields that are converted for the callback."""


def built_synthesis(config: BindConfig, task: nn.Module) -> HolographicSynthesis:
    """The synthesis for a task, which need not be on its device yet."""
    return HolographicSynthesis(task, config.kind, **_off_device(_options(config, task)))


def build_synthesis(config: BindConfig, task: nn.Module) -> SynthesisCallback:
    """The callback that rewrites the task's gradients.

    Raises:
        UserError: an option is out of range, or a pattern matches no parameter.
    """
    options = _options(config, task)
    with described_by("synthesis"):
        HolographicSynthesis(
            task, config.kind, **_off_device(options)
        ).remove()  # raises on mistakes before the training starts
        return SynthesisCallback(config.kind, **options)


def check_synthesis_continues(config: BindConfig, task: nn.Module, states: dict[str, Any]) -> None:
    """
    Args:
        states: states of the callbacks in a checkpoint.

    Raises:
        UserError: their holograms belong to other parameters or options.
    """
    with described_by("synthesis"):
        synthesis = built_synthesis(config, task)
        try:
            for name, state in states.items():
                if name.startswith(SynthesisCallback.__name__):
                    synthesis.load_state_dict(state)
        finally:
            synthesis.remove()


def _options(config: BindConfig, task: nn.Module) -> dict[str, Any]:
    names = [name for name, _ in task.named_parameters()]
    for option in ("cover", "exclude"):
        for pattern in getattr(config, option):
            if not any(fnmatch(name, pattern) for name in names):
                raise UserError(f"synthesis.{option}: {pattern!r} matches no parameter; names look like {names[0]}")
    covers = partial(_covered, config.cover, config.exclude)
    if not any(covers(name, None) for name in names):
        raise UserError("synthesis.exclude: excludes all parameters; exclude fewer, or use synthesis=none")
    options = {name: value for name, value in vars(config).items() if name not in OWN} | {"covers": covers}
    if hasattr(config, "decay"):
        options["decay"] = rising(config.decay, config.decay_warmup) if config.decay_warmup else config.decay
    return options


def rising(decay: float, steps: int) -> Callable[[int], float]:
    """A linear warm-up of the decay, from 0 to ``decay`` over ``steps`` steps."""
    return lambda step: decay * min(1.0, step / steps)


def _off_device(options: dict[str, Any]) -> dict[str, Any]:
    """The options for a model that is not on its device yet."""
    return {name: value for name, value in options.items() if name not in ("cuda_graph", "offload")}


def _covered(cover: list[str], exclude: list[str], name: str, parameter: nn.Parameter | None) -> bool:
    return any(fnmatch(name, pattern) for pattern in cover) and not any(fnmatch(name, pattern) for pattern in exclude)
