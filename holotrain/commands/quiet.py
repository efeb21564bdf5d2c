"""Silences warnings of Lightning that do not matter to a user of holotrain. Other warnings stay, each as one line."""

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

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
}


def quieten() -> None:
    """Silences these warnings in this process, and shows others without a line of source."""
    warnings.formatwarning = lambda message, *_: f"warning: {message}\n"
    for name, level in LEVELS.items():
        logging.getLogger(name).setLevel(level)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's messages about missing GPUs and its own stages
    for remark in REMARKS:
        warnings.filterwarnings("ignore", message=remark)


@contextmanager
def quietly() -> Iterator[None]:
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
