"""One of two gloo processes: runs command lines as torchrun or srun would start them, and records the results.

    python two_ranks.py RANK WORK RESULTS

Not a test by itself: test_command_line_processes.py starts it twice. WORK is JSON: a name, a port and a command line each;
the one called "orders" has none, the one called "killed" is rank 0's last.
"""

import hashlib
import json
import os
import signal
import sys
import time
import warnings
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from small_models import IMAGE
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.tensor import DTensor

from holotrain.callbacks import ExactResume
from holotrain.cli import main
from holotrain.config import build_callbacks
from holotrain.models.vit import RevViT
from holotrain.parallel.strategies import DataParallel
from holotrain.tasks import ImageClassifier
from holotrain.tasks.optimizers import adamw

RANK = int(sys.argv[1])


class Witness(ExactResume):
    """Records the results of every training in this process, in place of ExactResume, and ends two of them."""

    job = ""
    seen: dict[str, dict] = {}

    def setup(self, trainer, module, stage) -> None:
        self.noted = self.seen.setdefault(str(trainer.default_root_dir), {})

    def on_train_start(self, trainer, module) -> None:
        super().on_train_start(trainer, module)
        if "_tp_" in self.job:  # as on GPUs by default; some parameters are DTensors, others are not
            trainer.optimizers[0].param_groups[0]["foreach"] = True

    def on_train_batch_start(self, trainer, module, batch, index) -> None:
        if (self.job, RANK, trainer.global_step) == ("signalled", 1, 2):
            os.kill(os.getpid(), signal.SIGTERM)
        if (self.job, RANK, trainer.global_step) == ("killed", 0, 4):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_train_end(self, trainer, module) -> None:
        if any(parameter.is_meta for parameter in module.parameters()):  # each stage of a pipeline has others
            return
        own = [whole for parameter in module.parameters() if (whole := alike(parameter)) is not None]
        self.noted["alike"] = [len(own), hashlib.sha256(b"".join(own)).hexdigest()]

    def on_exception(self, trainer, module, exception) -> None:
        self.noted["ended"] = [type(exception).__name__, trainer.global_step]


def alike(parameter: torch.Tensor) -> bytes | None:
    """The bytes of a parameter that must be equal in all processes."""
    if isinstance(parameter, DTensor):
        if not all(placement.is_replicate() for placement in parameter.placements):
            return None
        parameter = parameter.to_local()
    return parameter.detach().numpy().tobytes()


class Order(pl.Callback):
    """Records the order in which the first block has its gradients and gradients are sent, in each backward."""

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
    warnings.simplefilter("ignore")  # it has no validation data
    seen = Order()
    images, labels = torch.rand(16, 1, 8, 8), torch.randint(5, (16,))
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=DataParallel("none", bucket_cap_mb=1e-3),
        plugins=[TorchElasticEnvironment()],
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


def through(name: str) -> None:
    """Waits for the other process, which may still use the connections of this one."""
    Path(f"through_{name}_{RANK}").touch()
    while not Path(f"through_{name}_{1 - RANK}").exists():
        time.sleep(0.02)


def variables(name: str, port: int) -> dict[str, str]:
    """Environment variables from the launcher."""
    if name != "images_ddp_reversible":
        mine = {"RANK": str(RANK), "LOCAL_RANK": str(RANK)}
        return mine | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    mine = {"SLURM_PROCID": str(RANK), "SLURM_LOCALID": str(RANK), "SLURM_JOB_NAME": "holotrain"}
    return mine | {
        "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2", "SLURM_STEP_NODELIST": "localhost",
        "SLURM_JOB_ID": str(70000 + port - 15000),  # the port is derived from it
    }  # fmt: skip


if __name__ == "__main__":
    torch.set_num_threads(1)
    build_callbacks.ExactResume = Witness
    work, results = json.loads(sys.argv[2]), Path(sys.argv[3])
    found_here = {"statuses": {}, "seen": Witness.seen}
    told: set[str] = set()
    for Witness.job, port, words in work:
        for name in told:
            del os.environ[name]
        os.environ |= (given := variables(Witness.job, port))
        told = set(given)
        if words:
            found_here["statuses"][Witness.job] = main(words)
        else:
            found_here["orders"] = {backward: order(backward) for backward in ("reversible", "pareprop")}
            through(Witness.job)
            dist.destroy_process_group()
        results.write_text(json.dumps(found_here))
