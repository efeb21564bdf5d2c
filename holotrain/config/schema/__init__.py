"""Every option there is, typed and explained: dataclasses that Hydra checks configurations against.

A polymorphic group (task, data, model, synthesis, optimizer, scheduler) names its class by ``kind``; the cross-checks of one
group stand in its ``__post_init__``, those between groups in RunConfig's (``run``), those of a command in its own
(``commands``). Nothing here imports torch: ``--help`` is quick.
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
from holotrain.config.schema.optimization import OPTIMIZERS, SCHEDULERS
from holotrain.config.schema.run import RunConfig
from holotrain.config.schema.running import CallbacksConfig, LoggerConfig, TrainerConfig
from holotrain.config.schema.synthesis import SYNTHESES
from holotrain.config.schema.task import TASKS

__all__ = [
    "COMMANDS",
    "FOLDER_COMMANDS",
    "KINDS",
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
    "optimizer": OPTIMIZERS,
    "scheduler": SCHEDULERS,
    "synthesis": SYNTHESES,
}
"""The classes of each polymorphic group by kind."""

PLAIN = {"backward": BackwardConfig, "callbacks": CallbacksConfig, "trainer": TrainerConfig, "logger": LoggerConfig}
"""The class of each of the other groups."""
