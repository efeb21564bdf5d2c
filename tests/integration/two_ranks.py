"""One of two gloo processes: runs command lines as torchrun would start them, and records the results.

    python two_ranks.py RANK WORK RESULTS

Not a test by itself: test_command_line_processes.py starts it twice. WORK is JSON: a name and a command line each.
"""

import hashlib
import json
import os
import sys
import time
from pathlib import Path

import torch
from gloo_pair import free_port
from torch.distributed.tensor import DTensor

from holotrain.checkpoints.exact_resume import ExactResume
from holotrain.cli import main
from holotrain.config import build

RANK = int(sys.argv[1])


class Witness(ExactResume):
    """Records the results of every training in this process, in place of ExactResume."""

    job = ""
    seen: dict[str, dict] = {}

    def setup(self, trainer, module, stage) -> None:
        self.noted = self.seen.setdefault(str(trainer.default_root_dir), {})

    def on_train_start(self, trainer, module) -> None:
        super().on_train_start(trainer, module)
        if "_tp_" in self.job:  # as on GPUs by default; some parameters are DTensors, others are not
            trainer.optimizers[0].param_groups[0]["foreach"] = True

    def on_train_end(self, trainer, module) -> None:
        if any(parameter.is_meta for parameter in module.parameters()):  # each stage of a pipeline has others
            return
        own = [whole for parameter in module.parameters() if (whole := alike(parameter)) is not None]
        self.noted["alike"] = [len(own), hashlib.sha256(b"".join(own)).hexdigest()]


def alike(parameter: torch.Tensor) -> bytes | None:
    """The bytes of a parameter that must be equal in all processes."""
    if isinstance(parameter, DTensor):
        if not all(placement.is_replicate() for placement in parameter.placements):
            return None
        parameter = parameter.to_local()
    return parameter.detach().numpy().tobytes()


def port_of(name: str) -> str:
    """A free port, which rank 0 chooses when the command line begins."""
    chosen = Path(f"port_{name}")
    if RANK == 0:
        Path("port").write_text(str(free_port()))
        Path("port").rename(chosen)
    while not chosen.exists():
        time.sleep(0.01)
    return chosen.read_text()


def variables(name: str) -> dict[str, str]:
    """Environment variables from the launcher."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port_of(name)}
    return place | {"RANK": str(RANK), "LOCAL_RANK": str(RANK), "WORLD_SIZE": "2"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    build.ExactResume = Witness
    work, results = json.loads(sys.argv[2]), Path(sys.argv[3])
    found_here = {"statuses": {}, "seen": Witness.seen}
    told: set[str] = set()
    for Witness.job, words in work:
        for name in told:
            del os.environ[name]
        os.environ |= (given := variables(Witness.job))
        told = set(given)
        found_here["statuses"][Witness.job] = main(words)
        results.write_text(json.dumps(found_here))
