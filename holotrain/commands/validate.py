"""``holotrain validate``: evaluates a checkpoint on the validation set."""

from holotrain.commands.evaluation import measure_checkpoint
from holotrain.commands.run import Run
from holotrain.config.commands import ValidateConfig


def run(config: ValidateConfig, run: Run) -> int:
    """Writes the metrics into summary.json, and to the loggers at the step of the checkpoint."""
    return measure_checkpoint("validate", config, run)
