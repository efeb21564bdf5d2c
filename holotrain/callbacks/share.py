"""Which share of the data a process of a Trainer reads."""

import lightning.pytorch as pl


def share_of(trainer: pl.Trainer) -> tuple[int, int]:
    """Its number, and of how many: tensor parallel processes share theirs, so these are not the processes."""
    sampling = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": 0, "num_replicas": 1}
    return sampling["rank"], sampling["num_replicas"]
