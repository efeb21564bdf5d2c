"""A synthesis configuration to its callback."""

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
"""Fields that the callback takes in another form."""


def built_synthesis(config: BindConfig, task: nn.Module) -> HolographicSynthesis:
    """The synthesis itself, at work on a task that need not be on its device."""
    return HolographicSynthesis(task, config.kind, **_off_device(_options(config, task)))


def build_synthesis(config: BindConfig, task: nn.Module) -> SynthesisCallback:
    """The callback that rewrites the task's gradients.

    Raises:
        UserError: an option out of range, or patterns that match no parameter.
    """
    options = _options(config, task)
    with described_by("synthesis"):
        HolographicSynthesis(task, config.kind, **_off_device(options)).remove()  # a mistake is named before anything begins
        return SynthesisCallback(config.kind, **options)


def check_synthesis_continues(config: BindConfig, task: nn.Module, states: dict[str, Any]) -> None:
    """
    Args:
        states: of the callbacks in a checkpoint.

    Raises:
        UserError: the holograms among them are of other parameters, or made with other options.
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
                raise UserError(f"synthesis.{option}: {pattern!r} matches no parameter; they have names such as {names[0]}")
    covers = partial(_covered, config.cover, config.exclude)
    if not any(covers(name, None) for name in names):
        raise UserError("synthesis.exclude: it leaves no parameter to work on")
    options = {name: value for name, value in vars(config).items() if name not in OWN} | {"covers": covers}
    if hasattr(config, "decay"):
        options["decay"] = rising(config.decay, config.decay_warmup) if config.decay_warmup else config.decay
    return options


def rising(decay: float, steps: int) -> Callable[[int], float]:
    """The decay of each step: from 0, linearly, to ``decay`` after so many steps."""
    return lambda step: decay * min(1.0, step / steps)


def _off_device(options: dict[str, Any]) -> dict[str, Any]:
    """The same, for a model that is not on its device yet."""
    return {name: value for name, value in options.items() if name not in ("cuda_graph", "offload")}


def _covered(cover: list[str], exclude: list[str], name: str, parameter: nn.Parameter | None) -> bool:
    return any(fnmatch(name, pattern) for pattern in cover) and not any(fnmatch(name, pattern) for pattern in exclude)
