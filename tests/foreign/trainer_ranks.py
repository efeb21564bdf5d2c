"""Trains with Trainers of transformers and TRL, as one of two processes that accelerate joins."""

import os
from pathlib import Path

from gloo_pair import find_as_one_of_them


def figures(rank: int) -> dict:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}  # which accelerate reads
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    from test_foreign_trainers import figures_of, loaded

    from holotrain.reversible import recompute

    folder, found = Path(os.environ["PRETRAINED"]), {}
    for kind in ("Trainer", "SFT"):
        models = loaded(folder), recompute(loaded(folder))
        found[kind] = [figures_of(kind, model, folder, eval_strategy="no") for model in models]
    return found


if __name__ == "__main__":
    find_as_one_of_them(figures)
