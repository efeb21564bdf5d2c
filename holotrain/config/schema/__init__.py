"""The options of each command, and the checks across groups.

The groups in ``OPEN`` and ``NAMED`` name any class or function, whose signature says what they take. The other options are
fields of dataclasses, which check them in ``__post_init__``; the string below a field is its help text. Nothing here imports
torch, so that ``--help`` is fast.
"""

from holotrain.config.schema.commands import (
    COMMANDS,
    WORD_COMMANDS,
    ExportConfig,
    FitConfig,
    GenerateConfig,
    InitConfig,
    PlanConfig,
    PredictConfig,
    ReportConfig,
    TestConfig,
    ValidateConfig,
)
from holotrain.config.schema.run import NAMED, OPEN, RunConfig

__all__ = [
    "COMMANDS",
    "GROUPS",
    "NAMED",
    "OPEN",
    "WORD_COMMANDS",
    "ExportConfig",
    "FitConfig",
    "GenerateConfig",
    "InitConfig",
    "PlanConfig",
    "PredictConfig",
    "ReportConfig",
    "RunConfig",
    "TestConfig",
    "ValidateConfig",
]

GROUPS = (*OPEN, *NAMED, "backward")
