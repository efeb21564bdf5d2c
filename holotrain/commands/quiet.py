"""Silences warnings of Lightning that do not matter to a user of holotrain. Other warnings stay."""

import logging
import os
import warnings

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


def quieten() -> None:
    """Silences these warnings in this process."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # torchao uses a deprecated part of torch
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler's messages about missing GPUs and its own stages
    for remark in REMARKS:
        warnings.filterwarnings("ignore", message=remark)
