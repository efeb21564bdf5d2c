"""Lightning's remarks that tell a user of holotrain nothing, kept off the screen; warnings that do tell something stay."""

import logging
import os
import warnings

REMARKS = (
    ".*does not have many workers.*",  # small data in memory need none
    ".*smaller than the logging interval.*",
    ".*exists and is not empty.*",  # a resumed run continues in its folder
    ".*dirpath has changed.*",  # a run that continues in a folder of its own
    ".*LeafSpec.*",  # Lightning's use of a deprecated part of torch
    ".*Found .* module.* in eval mode.*",
    ".*accumulate the metric across devices.*",  # sums over tokens are reduced before they are divided
    ".*overrides the configure_model callback.*",  # which shares nothing out where weights are averaged
    ".*custom batch sampler.*",  # ours are in order where they must be
)


def quieten() -> None:
    """Silences them for this process."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao's use of a deprecated part of torch
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # a profiler's remarks on machines without a GPU, and on its own stages
    for remark in REMARKS:
        warnings.filterwarnings("ignore", message=remark)
