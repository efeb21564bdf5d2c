"""Overrides for a run of about a second, and a run that is killed."""

import logging
import os
import signal
import sys
from contextlib import chdir, redirect_stderr
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from forked import Forked, composed_once

SMALL = [
    "model.dim=16", "model.depth=2", "model.heads=2", "trainer.accelerator=cpu", "trainer.max_epochs=2",
    "trainer.limit_train_batches=3", "trainer.limit_val_batches=1", "trainer.limit_test_batches=1",
    "trainer.log_every_n_steps=1",
]  # fmt: skip


def run_in(folder: Path, *words: str) -> None:
    """Runs a command in this process, in a folder."""
    from holotrain.cli import main

    said, log = StringIO(), logging.getLogger()
    handlers = [*log.handlers]
    here = chdir(folder), patch.dict(os.environ), patch.object(sys, "argv", ["holotrain"])
    with here[0], here[1], here[2], redirect_stderr(said), composed_once():
        status = main(words)
    log.handlers[:] = handlers  # Hydra's write to a file in the folder, which may go
    assert status == 0, said.getvalue()


def fit_in(folder: Path, *words: str) -> None:
    run_in(folder, "fit", *words)


KILLED = """
import os, signal, sys
from holotrain.checkpoints.exact_resume import ExactResume
def kill(self, trainer, module, outputs, batch, index):
    if trainer.current_epoch == 1 and index == 4:
        os.kill(os.getpid(), signal.SIGKILL)
ExactResume.on_train_batch_end = kill
from holotrain.cli import main
main(["fit", *sys.argv[1:]])
"""


def fit_and_kill(folder: Path, *words: str) -> None:
    """Runs ``fit`` in a process of its own, killed in the middle of its second epoch."""
    process = Forked(KILLED, *words, folder=folder, errors=folder / "errors_of_the_killed")
    assert process.wait() == -signal.SIGKILL, (folder / "errors_of_the_killed").read_text()
