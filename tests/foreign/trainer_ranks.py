"""Trains with Trainers of transformers and TRL, as one of two processes that accelerate joins."""

import os
from pathlib import Path

from gloo_pair import find_as_one_of_them
from torch.distributed.fsdp import FSDPModule


def sharded() -> dict:
    """Options of a Trainer that shards by FSDP2. On CPUs accelerate would take DDP, so it is told of GPUs."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    os.environ |= {"ACCELERATE_TORCH_DEVICE": "cpu"}
    PartialState._prepare_backend = lambda *_: ("gloo", DistributedType.MULTI_GPU)
    return {"fsdp": True, "fsdp_config": {"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}}


def figures(rank: int) -> dict:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}  # which accelerate reads
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    from test_foreign_trainers import WAYS, figures_of, loaded

    from holotrain.reversible import recompute

    folder, found, is_sharded = Path(os.environ["PRETRAINED"]), {}, os.environ["SHARDED"] == "True"
    options = {"eval_strategy": "no"} | (sharded() if is_sharded else {})
    for kind in ("Trainer", "SFT"):
        for way in ("plain", *WAYS):
            model = loaded(folder) if way == "plain" else recompute(loaded(folder), **WAYS[way])
            found[f"{kind} {way}"] = figures_of(kind, model, folder, **options)
            assert isinstance(model, FSDPModule) == is_sharded
    return found


if __name__ == "__main__":
    find_as_one_of_them(figures)
