"""One of two gloo processes: the command line as torchrun would start it, then a training; rank 0 writes what it saw.

    python two_ranks.py RANK WORK RESULTS

Not a test by itself: test_command_line_processes.py starts it twice. WORK is JSON: a port and a command line each, the
last without one.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from small_models import IMAGE
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from holotrain.cli import main
from holotrain.models.vit import RevViT
from holotrain.parallel.data import ddp
from holotrain.parallel.environment import Joined
from holotrain.ranks.place import found
from holotrain.tasks import ImageClassifier
from holotrain.tasks.optimizers import adamw


class Order(pl.Callback):
    """Notes, in each backward, when the first block has all its gradients, and when gradients are sent."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def on_train_start(self, trainer, module) -> None:
        for parameter in module.model.blocks.blocks[0].parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.events.append("first block"))
        trainer.strategy.model.register_comm_hook(None, self.reduced)

    def reduced(self, state, bucket):
        self.events.append("all-reduce")
        return allreduce_hook(state, bucket)

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        self.events.clear()


def order(backward: str) -> list[str]:
    place = found()
    seen = Order()
    images, labels = torch.rand(16, 1, 8, 8), torch.randint(5, (16,))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=ddp("none", bucket_cap_mb=1e-3),
        plugins=[Joined(place)],
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[seen],
    )
    task = ImageClassifier(RevViT(**IMAGE | {"depth": 4}, backward=backward), classes=5, optimizer=partial(adamw, lr=1e-3))
    trainer.fit(task, torch.utils.data.DataLoader(list(zip(images, labels, strict=True)), batch_size=4))
    return seen.events


if __name__ == "__main__":
    rank, work, results = int(sys.argv[1]), json.loads(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    statuses = []
    for port, words in work:
        os.environ["MASTER_PORT"] = str(port)
        if words:
            statuses.append(main(words))
    assert statuses == [0] * len(statuses), statuses  # of the one that follows too
    orders = {backward: order(backward) for backward in ("reversible", "pareprop")}
    if rank == 0:
        results.write_text(json.dumps({"orders": orders}))
    dist.destroy_process_group()
