"""Builds the loggers of a run."""

from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from holotrain.checks import described_by
from holotrain.config.chosen import Chosen
from holotrain.config.schema import NAMED
from holotrain.config.signatures import signature
from holotrain.errors import UserError

EXTRAS = {"WandbLogger": "wandb", "MLFlowLogger": "mlflow"}
"""The extra that installs the package of a logger."""


def build_loggers(config: dict[str, Chosen], folder: Path, sweep: str | None = None) -> list[Logger]:
    """
    Args:
        config: the group ``logger``.
        folder: that of the run.
        sweep: name of the sweep that the run is a job of.

    Raises:
        UserError: a logger's package is not installed, or it refuses a value.
    """
    return [_made(name, chosen, folder, sweep) for name, chosen in config.items()]


def _made(name: str, chosen: Chosen, folder: Path, sweep: str | None) -> Logger:
    with described_by(f"logger.{name}", NAMED["logger"].options(chosen.target)):
        try:
            logger = NAMED["logger"].make(chosen, _known(name, chosen, folder, sweep))
        except ValueError as error:
            if isinstance(error.__cause__, ModuleNotFoundError) and chosen.name in EXTRAS:
                extra = EXTRAS[chosen.name]
                raise UserError(f"logger.{name}: the package is not installed; pip install 'holotrain[{extra}]'") from error
            raise
    if not isinstance(logger, Logger):
        raise UserError(f"logger.{name}: {chosen.target} is not a logger of Lightning but a {type(logger).__name__}")
    return logger


def _known(name: str, chosen: Chosen, folder: Path, sweep: str | None) -> dict[str, Any]:
    """What the program knows of a logger's parameters."""
    parameters = signature(chosen.target).options
    run = folder.name if sweep is None else f"{sweep}/{folder.name}"
    known = {"save_dir": folder, "run_name": run, "group": sweep}
    known["name"] = run if "project" in parameters else name  # of a run in a project, or of a subfolder
    if "tracking_uri" in parameters and chosen.arguments.get("tracking_uri") is None:
        store = (folder / "mlflow").resolve()
        store.mkdir(parents=True, exist_ok=True)
        known["tracking_uri"] = f"sqlite:///{store / 'mlflow.db'}"  # MLflow 3 refuses a folder of files
        known["artifact_location"] = (store / "artifacts").as_uri()
    return known
