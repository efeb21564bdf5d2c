"""``holotrain test``: evaluates a checkpoint on the test set."""

from holotrain.commands.evaluation import measure_checkpoint
from holotrain.commands.run import Run
from holotrain.config.commands import TestConfig


def run(config: TestConfig, run: Run) -> int:
    """Writes the metrics into summary.json, and to the loggers at the step of the checkpoint."""
    return measure_checkpoint("test", config, run)
