"""Which shard of the data a process of a Trainer reads."""

import lightning.pytorch as pl


def shard_of(trainer: pl.Trainer) -> tuple[int, int]:
    """Index and number of shards. Processes that share a model, by layers or in stages, read the same shard."""
    sampling = getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {"rank": 0, "num_replicas": 1}
    return sampling["rank"], sampling["num_replicas"]
