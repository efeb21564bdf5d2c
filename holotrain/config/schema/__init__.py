"""Dataclasses with every option: its type, default and help text. Hydra checks configurations against them.

A group with several classes (task, data, model, synthesis) selects its class by ``kind``. Each group checks its own options in
``__post_init__``. The groups in ``OPEN`` name any class or function, whose signature says what they take. RunConfig (``run``)
checks options across groups, and each command (``commands``) checks its own. The string below a field is its help text. Nothing
here imports torch, so that ``--help`` is fast.
"""

from holotrain.config.schema.backward import BackwardConfig
from holotrain.config.schema.commands import (
    COMMANDS,
    FOLDER_COMMANDS,
    ExportConfig,
    FitConfig,
    GenerateConfig,
    PlanConfig,
    PredictConfig,
    ReportConfig,
    TestConfig,
    ValidateConfig,
)
from holotrain.config.schema.data import DATA
from holotrain.config.schema.model import MODELS
from holotrain.config.schema.run import OPEN, RunConfig
from holotrain.config.schema.running import CallbacksConfig, LoggerConfig
from holotrain.config.schema.synthesis import SYNTHESES
from holotrain.config.schema.task import TASKS

__all__ = [
    "COMMANDS",
    "FOLDER_COMMANDS",
    "GROUPS",
    "KINDS",
    "OPEN",
    "PLAIN",
    "ExportConfig",
    "FitConfig",
    "GenerateConfig",
    "PlanConfig",
    "PredictConfig",
    "ReportConfig",
    "RunConfig",
    "TestConfig",
    "ValidateConfig",
]

KINDS: dict[str, dict[str, type]] = {
    "task": TASKS,
    "data": DATA,
    "model": MODELS,
    "synthesis": SYNTHESES,
}
"""The classes of each group that has several, by kind."""

PLAIN = {"backward": BackwardConfig, "callbacks": CallbacksConfig, "logger": LoggerConfig}
"""The class of each of the other groups."""

GROUPS = (*KINDS, *PLAIN, *OPEN)
