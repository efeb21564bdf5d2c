"""A run's options and final metrics, where its logger compares runs by them."""

from lightning.pytorch.loggers import Logger, TensorBoardLogger
from omegaconf import OmegaConf
from torch.utils.tensorboard.summary import hparams

from holotrain.config.schema import RunConfig


def log_options(logger: Logger, config: RunConfig, metrics: dict[str, float]) -> None:
    """Tells a logger the run's options; TensorBoard's HParams also which of the run's scalars are its results."""
    options = dict(_flat(OmegaConf.to_container(OmegaConf.structured(config))))
    if not isinstance(logger, TensorBoardLogger):
        logger.log_hyperparams(options)
        return
    # Lightning's log_hyperparams would write every metric as one more point of its curve.
    plain = {name: value if isinstance(value, bool | int | float | str) else str(value) for name, value in options.items()}
    results = {name: value for name, value in metrics.items() if not name.startswith("train/")}
    for summary in hparams(plain, results):
        logger.experiment._get_file_writer().add_summary(summary)


def _flat(node: dict, prefix: str = ""):
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
