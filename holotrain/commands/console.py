"""What the commands print and log: names as they are, and no warnings that do not matter."""

import logging
import os
import sys
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.table import Table

from holotrain.numeric import in_words

plain = partial(Console, highlight=False, markup=False, emoji=False, force_jupyter=False)
"""A console that prints names of files and of options as they are, also those with ``[red]`` or ``:star:`` in them; to the
standard output also in a notebook."""

# Paths must not be wrapped when the output goes to a file.
console = plain(width=None if (sys.stdout and sys.stdout.isatty()) or "COLUMNS" in os.environ else 160)

log = logging.getLogger("holotrain")
"""What it gets stands in the folder of a run of the command line, in ``log.txt``."""

REMARKS = (
    ".*does not have many workers.*",  # small data sets in memory need none
    ".*smaller than the logging interval.*",
    ".*exists and is not empty.*",  # a resumed run uses its folder again
    ".*dirpath has changed.*",  # a continued run has a new folder
    ".*LeafSpec.*",  # Lightning uses a deprecated part of torch
    ".*Found .* module.* in eval mode.*",
    ".*accumulate the metric across devices.*",  # sums over tokens are reduced before the division
    ".*overrides the configure_model callback.*",  # it shards nothing when weights are averaged
    ".*custom batch sampler.*",  # ours keep the order where it matters
    r".*torch\.distributed\.\w+_tensor` is deprecated.*",  # torch's own FSDP2 and tensor parallelism call them
)

LEVELS = {
    "lightning.pytorch": logging.WARNING,
    "lightning.fabric": logging.WARNING,
    "torch.utils._pytree": logging.ERROR,  # torchao uses a deprecated part of torch
    "torch.distributed.tensor._redistribute": logging.ERROR,
    "hydra_plugins.hydra_optuna_sweeper": logging.CRITICAL,  # a failed job has said why it failed
    "optuna.storages": logging.WARNING,  # it would print the random name of its study
}


def quieten() -> None:
    """Silences these warnings in this process, and shows others without a line of source."""
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"  # ty: ignore[invalid-assignment]
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's messages about missing GPUs and its own stages
    for remark in REMARKS:
        warnings.filterwarnings("ignore", message=remark)


@contextmanager
def quietly() -> Generator[None]:
    """Silences these warnings inside, and leaves those of the program around as they were."""
    levels, formatted = {name: logging.getLogger(name).level for name in LEVELS}, warnings.formatwarning
    with warnings.catch_warnings():
        quieten()
        try:
            yield
        finally:
            warnings.formatwarning = formatted
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)


def show(title: str, rows: Mapping[str, object], stderr: bool = False) -> None:
    """Prints the entries that have a value as a table, and logs them."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False, box=None, padding=(0, 2))
    table.add_column()
    table.add_column(overflow="fold")
    lines = [title]
    for name, value in rows.items():
        if value is not None:
            table.add_row(name, short(name, value))
            lines.append(f"{name}: {short(name, value)}")
    (plain(stderr=True) if stderr else console).print(table)
    log.info("\n  ".join(lines))


def short(name: str, value: object) -> str:
    """A value for the eye: four digits of a number, bytes with their unit."""
    if name.endswith("_bytes") and isinstance(value, int):
        return in_words(value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)
