"""Whether a sweeper that optimises, such as Optuna's, maximises or minimises what the jobs return."""

from omegaconf import DictConfig, OmegaConf

MODES = {"max": "maximize", "min": "minimize"}
"""Directions of Optuna, by the mode of a ModelCheckpoint."""


def recommended(task: str, monitor: str | None, mode: str | None) -> str:
    """``maximize`` or ``minimize``; the resolver ``direction`` of ``conf/sweep``.

    Args:
        task: the chosen option of the group.
        monitor: the metric that selects the best checkpoint; None: the first of the task.
        mode: ``max`` or ``min``; None: that of the metric.
    """
    if mode is not None:
        return MODES.get(mode, "minimize")  # the run refuses other modes
    if monitor is None:
        return "minimize" if task.endswith("_lm") else "maximize"
    return "maximize" if "accuracy" in monitor else "minimize"


def direction(hydra: DictConfig) -> str | None:
    """The direction of the sweeper in Hydra's configuration; None: it has none, or several."""
    found = OmegaConf.select(hydra, "sweeper.direction")
    return found if found is None or isinstance(found, str) else getattr(found, "name", None)
